"""A training run: run folder, checkpoints, limits and the training loop."""
