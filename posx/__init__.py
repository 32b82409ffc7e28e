"""posx: position encodings behind one interface, trained short and tested long.

Importing it sets XLA's flag (`posx.machine.guard`) and nothing else: each name below is imported when it is asked for.
Help and wrong words on the command line then cost no start of JAX, and whoever wants an encoding imports no model.
"""

from typing import TYPE_CHECKING

from posx.lazy import module_getter
from posx.machine.guard import guard

if TYPE_CHECKING:
    from posx.attention import Slots, attend, causal, full, window
    from posx.contract import About, ByDistance, Chain, Dims, Encoding, Tile, as_float
    from posx.encodings import ENCODINGS, FrequencyRule, build
    from posx.encodings.angles import angles
    from posx.evaluation import evaluate
    from posx.lab.results.table import read_results
    from posx.lab.runs.load import load

__version__ = "0.2.0"

guard()

#: The module of each public name.
_PLACES = {
    **dict.fromkeys(("Slots", "attend", "causal", "full", "window"), "posx.attention"),
    **dict.fromkeys(("About", "ByDistance", "Chain", "Dims", "Encoding", "Tile", "as_float"), "posx.contract"),
    **dict.fromkeys(("ENCODINGS", "FrequencyRule", "build"), "posx.encodings"),
    "angles": "posx.encodings.angles",
    "evaluate": "posx.evaluation",
    "load": "posx.lab.runs.load",
    "read_results": "posx.lab.results.table",
}


__getattr__ = module_getter(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "ENCODINGS", "About", "ByDistance", "Chain", "Dims", "Encoding", "FrequencyRule", "Slots", "Tile", "angles",
    "as_float", "attend", "build", "causal", "evaluate", "full", "load", "read_results", "window",
]  # fmt: skip
