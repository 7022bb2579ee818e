"""What needs no device: classes and declarations, refusals, probes."""
