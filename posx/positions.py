"""Position policies: pure functions that say which positions a window of tokens gets."""

import numpy as np


def sequential(length: int, start: int = 0) -> np.ndarray:
    """int32 positions start .. start + length - 1, [t]; on the host, so that limits can be checked before tracing."""
    return np.arange(start, start + length, dtype=np.int32)
