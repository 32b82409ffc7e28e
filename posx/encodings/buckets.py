"""Exact borders of the logarithmic buckets of T5 and DeBERTa-v2."""

import functools

import numpy as np


@functools.cache
def geometric_series(first: int, last: int, steps: int, up: bool) -> np.ndarray:
    """Return first (last / first)^(j / steps), j = 0 .. steps, in exact integers, rounded up or down.

    Published code takes logarithms of distances. They round differently from library to library, just at the borders.
    """
    found = []
    for j in range(steps + 1):
        power = first ** (steps - j) * last**j - up
        n = round(first * (last / first) ** (j / steps))  # the largest n with n^steps <= power, or one more
        found.append(n - (n**steps > power) + up)
    return np.array(found, np.int64)
