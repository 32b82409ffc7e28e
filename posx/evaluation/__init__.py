"""Perplexity at any length under a stated protocol, for any model given as a function.

`targets` says which tokens are scored, `protocols` with how much context, `scoring` runs the model, `run` does so for a
trained run and keeps its rows, `statistics` turns sums over blocks of text into intervals and paired ratios.
"""

from posx.errors import UndefinedLength
from posx.evaluation.protocols import Nonoverlapping, PerPosition, Sliding, evaluate
from posx.evaluation.statistics import Ratio, interval, paired_ratio

__all__ = [
    "Nonoverlapping", "PerPosition", "Ratio", "Sliding", "UndefinedLength", "evaluate", "interval", "paired_ratio",
]  # fmt: skip
