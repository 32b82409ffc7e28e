"""`posx report`: one page out of stored rows, which needs no server and no network."""

from posx.lazy import modules_of
from posx.report.page import write

__all__ = ["write"]

__getattr__ = modules_of(__name__)
