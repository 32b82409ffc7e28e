"""Perplexity at any length under a stated protocol, for any model given as a function.

`protocols` are values that say which tokens are scored and with how much context, one file each; `targets` places them
over the documents, `scoring` runs the model, `measured` is the model on its stream, `measure` the public call, and
`statistics` turns sums over blocks of text into intervals and paired ratios. Trained runs: `posx.runs.evaluate`.
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
