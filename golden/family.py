"""A family of vectors: an encoding with its settings, the source of its formula, and the arrays of its cases."""

import dataclasses
from typing import Any

import numpy as np

#: Channels of a head and of a token, and query heads, in most families.
HEAD_DIM, MODEL_DIM, NUM_HEADS = 8, 16, 2
#: Kinds of case with far positions, and all about positions, for encodings that read none.
FAR = ("offset_4096", "offset_2_24", "far")
CONTENT = (*FAR, "both_sides")
#: Kinds of case whose positions have no form along several axes.
TEXT = (*FAR, "left_padding", "padded_step", "packed", "window", "window_sinks")


def value(name, **fields):
    """Return an object of a class with this name that has these attributes, as the references read an encoding."""
    return type(name.replace("_", ""), (), {"name": name, "fields": fields, **fields})()


def spec(given):
    """Return a value as text: rope(base=10000.0, frequencies=yarn(factor=4.0))."""
    if hasattr(given, "fields"):
        return f"{given.name}({', '.join(f'{name}={spec(each)}' for name, each in given.fields.items())})"
    if isinstance(given, tuple):
        return f"({', '.join(map(spec, given))}{',' * (len(given) == 1)})"
    return f"'{given}'" if isinstance(given, str) and not given.isidentifier() else str(given)


@dataclasses.dataclass(frozen=True)
class Family:
    """One encoding with all its settings.

    Attributes:
      encoding: the settings, see `value`.
      formula: the logits s_ij of query i and key j, or the vectors.
      source: the paper and its equation.
      catches: the faults that only this family shows.
      differs: released code that computes something else.
      arrays: shapes of learned arrays by name.
      scale: a power of 2 that multiplies the arrays, so that logits stay small.
      positive: arrays whose numbers are above 0.
      reads: the vectors of a case: x for embeddings, xqkv if the tokens x are read beside queries, keys and values.
      mixes: whether a logit reads the queries or keys of other tokens or heads.
      heads: query heads.
      head_dim: the channels of a head.
      without: kinds of case that this family lacks.
      bidirectional: whether queries see later keys, in all cases without a window.
      axes: the numbers of a position.
    """

    encoding: Any
    formula: str
    source: str
    catches: str
    differs: str = ""
    arrays: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    scale: float = 1.0
    positive: tuple[str, ...] = ()
    reads: str = "qkv"
    mixes: bool = False
    heads: int = NUM_HEADS
    head_dim: int = HEAD_DIM
    without: tuple[str, ...] = ("both_sides",)
    bidirectional: bool = False
    axes: int = 1


def draw(family, rng):
    """Return the learned arrays of a family, which bfloat16 holds exactly: multiples of 1/32, times the scale."""
    arrays = {name: family.scale * grid(rng, *shape) for name, shape in family.arrays.items()}
    return arrays | {name: np.abs(arrays[name]) + 0.25 for name in family.positive}


def grid(rng, *shape):
    """Return normal numbers, rounded to multiples of 1/32 below 4."""
    return np.clip(np.round(rng.standard_normal(shape) * 32), -127, 127) / 32
