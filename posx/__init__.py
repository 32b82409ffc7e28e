"""posx: position encodings behind one interface, trained short and tested long."""

from posx.attention import attend, causal, full, window
from posx.encodings import ENCODINGS, Chain, Dims, Encoding, build

__version__ = "0.1.0"
