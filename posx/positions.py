"""The positions of the tokens of a window: made here, on the host, and nowhere else."""

import numpy as np


def sequential(length: int, start: int = 0) -> np.ndarray:
    """Return int32 positions start .. start + length - 1, [t], on the host: limits can be checked before tracing."""
    return np.arange(start, start + length, dtype=np.int32)
