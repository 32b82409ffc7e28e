"""Sweeps: many runs from one config. Modules plan them, schedule them on cores, and run each as its own command."""

from posx.lazy import module_getter

__getattr__ = module_getter(__name__)
