"""Files and folders that survive a kill: written whole, appended line by line, held by one process."""

from posx.lazy import modules_of

__getattr__ = modules_of(__name__)
