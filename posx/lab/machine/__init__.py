"""Processes of one run, compiled programs on disk, and the speed that the machine can reach."""

from posx.lazy import modules_of

__getattr__ = modules_of(__name__)
