"""posx: position encodings behind one interface, trained short and tested long."""

from typing import TYPE_CHECKING, Any

from posx.attention import attend, causal, full, window
from posx.encodings import ENCODINGS, Chain, Dims, Encoding, Tile, build
from posx.evaluation import evaluate
from posx.machine import compiler

if TYPE_CHECKING:
    from posx.runs.load import load
else:

    def __getattr__(name: str) -> Any:
        """`load` when it is asked for: Flax, Orbax and the data come with it, which nothing else here needs."""
        if name != "load":
            raise AttributeError(f"module 'posx' has no attribute {name!r}")
        from posx.runs.load import load

        return load


__version__ = "0.1.0"

compiler.guard()

__all__ = [
    "ENCODINGS", "Chain", "Dims", "Encoding", "Tile", "attend", "build", "causal", "evaluate", "full", "load", "window",
]  # fmt: skip
