"""Sweeps: many runs from one config. `plan` says which, `schedule` how many at once on which cores, `processes` runs
them, each as a command of its own: `posx train`, or `posx evaluate` for runs that are there."""

from posx.lazy import modules_of

__getattr__ = modules_of(__name__)
