"""Training: optimizer and schedule, the pure step, the loop, checkpoints."""

from posx.lazy import modules_of

__getattr__ = modules_of(__name__)
