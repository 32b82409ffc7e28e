"""posx: position encodings behind one interface, trained short and tested long."""

from posx.attention import attend, causal, full, window
from posx.encodings import ENCODINGS, Chain, Dims, Encoding, Tile, build
from posx.evaluation import evaluate
from posx.runs import load

__version__ = "0.1.0"

__all__ = [
    "ENCODINGS", "Chain", "Dims", "Encoding", "Tile", "attend", "build", "causal", "evaluate", "full", "load", "window",
]  # fmt: skip
