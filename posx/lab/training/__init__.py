"""Training: optimizer and schedule, the pure step, the loop, checkpoints."""

from posx.lazy import module_getter

__getattr__ = module_getter(__name__)
