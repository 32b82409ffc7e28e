"""Where the runs of a sweep are made: this machine, Ray, or SLURM."""

from posx.lazy import modules_of

__getattr__ = modules_of(__name__)
