"""What posx asks of the machine: a right compiler, programs kept on disk, its devices, the speed it could reach."""

from posx.lazy import modules_of

__getattr__ = modules_of(__name__)
