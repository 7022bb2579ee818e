"""What a backend can do and does not declare."""
