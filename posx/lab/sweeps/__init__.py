"""Sweeps: many runs from one config. Modules plan them, schedule them on cores, and run each as its own command."""

from posx.lazy import modules_of

__getattr__ = modules_of(__name__)
