"""The training loop of every trainer, and the values that pass through it."""
