"""Perplexity at any length under a stated protocol, for any model given as a function.

`measure` has the public call and `protocols` say which tokens are scored with how much context. `targets` places the
scored tokens over the documents, `scoring` runs the model, and `probe` checks a user's function first. `statistics`
turns sums over blocks of text into intervals and paired ratios. `posx.runs.evaluate` evaluates trained runs.
"""

from posx.errors import UndefinedLength
from posx.evaluation.measure import evaluate
from posx.evaluation.protocols import Nonoverlapping, PerPosition, Sliding
from posx.evaluation.statistics import Ratio, interval, paired_ratio
from posx.lazy import modules_of

__all__ = [
    "Nonoverlapping", "PerPosition", "Ratio", "Sliding", "UndefinedLength", "evaluate", "interval", "paired_ratio",
]  # fmt: skip

__getattr__ = modules_of(__name__)
