"""`posx report`: a page made from stored rows, which needs no server and no network."""

from posx.lab.report.page import write_report
from posx.lazy import module_getter

__all__ = ["write_report"]

__getattr__ = module_getter(__name__)
