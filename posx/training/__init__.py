"""Training: optimizer and schedule, the pure step, the loop, checkpoints."""
