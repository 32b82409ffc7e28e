"""The machine: a correct compiler, devices, cores, memory."""

from posx.lazy import module_getter

__getattr__ = module_getter(__name__)
