"""Files and folders that survive a kill: written whole, appended line by line, held by one process."""

from posx.lazy import module_getter

__getattr__ = module_getter(__name__)
