"""Processes of one run, compiled programs on disk, and the speed that the machine can reach."""

from posx.lazy import module_getter

__getattr__ = module_getter(__name__)
