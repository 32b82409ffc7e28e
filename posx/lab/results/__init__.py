"""The table of results: the only reader of stored rows, from which plots, tables, reports and comparisons are made."""

from posx.lazy import modules_of

__getattr__ = modules_of(__name__)
