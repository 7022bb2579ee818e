"""What stands behind `anyattn verify`: which checks are run where, by pytest, and what is told of them."""
