"""The table of results: the only reader of stored rows, from which plots, tables, reports and comparisons are made."""

from posx.lazy import module_getter

__getattr__ = module_getter(__name__)
