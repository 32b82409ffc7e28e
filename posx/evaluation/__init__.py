"""Perplexity at any length under a stated protocol, for any model given as a function.

`evaluate` is the public call; `protocols` says which tokens are scored with how much context, `scoring` runs the
model, `statistics` turns sums over blocks of text into standard errors and paired intervals.
"""

from posx.evaluation.protocols import (
    Nonoverlapping,
    PerPosition,
    Sliding,
    UndefinedLength,
    evaluate,
)
from posx.evaluation.statistics import paired_ratio, standard_error

__all__ = ["Nonoverlapping", "PerPosition", "Sliding", "UndefinedLength", "evaluate", "paired_ratio", "standard_error"]
