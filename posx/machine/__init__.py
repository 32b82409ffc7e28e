"""The machine: a correct compiler, devices, cores, memory."""

from posx.lazy import modules_of

__getattr__ = modules_of(__name__)
