"""The machine: a correct compiler, compiled programs on disk, devices, cores, memory, and the speed it can reach."""

from posx.lazy import modules_of

__getattr__ = modules_of(__name__)
