"""The contract of attention backends, selection among them, and the portable backends."""
