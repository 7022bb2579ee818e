"""The compliance kit: whether a backend, allocator, pool or platform is what it declares. `anyattn verify TARGET`."""
