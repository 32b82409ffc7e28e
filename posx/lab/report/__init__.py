"""`posx report`: a page made from stored rows, which needs no server and no network."""

from posx.lab.report.page import write
from posx.lazy import modules_of

__all__ = ["write"]

__getattr__ = modules_of(__name__)
