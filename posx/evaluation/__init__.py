"""Perplexity at any length under a stated protocol, for any model given as a function.

`protocols` says which tokens are scored with how much context and runs the model, `run` does so for a trained run and
keeps its rows, `statistics` turns sums over blocks of text into standard errors and paired intervals.
"""

from posx.errors import UndefinedLength
from posx.evaluation.protocols import Nonoverlapping, PerPosition, Sliding, evaluate
from posx.evaluation.statistics import paired_ratio, standard_error

__all__ = ["Nonoverlapping", "PerPosition", "Sliding", "UndefinedLength", "evaluate", "paired_ratio", "standard_error"]
