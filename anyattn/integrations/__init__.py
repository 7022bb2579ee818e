"""Real engines that drive anyattn."""
