"""Files and folders that survive a kill: written whole, appended line by line, held by one process. One place each."""

from posx.lazy import modules_of

__getattr__ = modules_of(__name__)
