"""How the parameters of an encoding are trained: at a multiple of the model's learning rate, with or without decay.

How far a bias table must move, and how far a projection, are not the same, so one learning rate judges encodings by the
optimizer: T5's table, which starts at 0.1, hardly comes to a nat in 1,200 steps of AdamW at 2e-3.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax

from posx.encodings.base import Dims, Encoding
from posx.encodings.chain import Chain


class Rate(NamedTuple):
    """Of one parameter. lr_multiplier: times the model's learning rate; decays: whether weight decay acts on it."""

    lr_multiplier: float = 1.0
    decays: bool = False


#: Of every layer, its encoding's parameters by name; what is not named is trained at Rate().
Rates = tuple[tuple[tuple[str, Rate], ...], ...]


@functools.lru_cache(maxsize=1024)
def rates_of(encoding: Encoding, dims: Dims, multiplier: float = 0.0) -> tuple[tuple[str, Rate], ...]:
    """Those of a resolved encoding's parameters, by name; `multiplier`, unless it is 0, for the class's own."""
    if isinstance(encoding, Chain):
        return tuple(
            (f"{n}.{name}", rate)
            for n, part in enumerate(encoding.parts)
            for name, rate in rates_of(part, dims, multiplier)
        )
    params = jax.eval_shape(lambda: encoding.init(jax.random.key(0), dims))
    factor = float(multiplier or encoding.lr_multiplier)
    return tuple((name, Rate(factor, name in encoding.decayed)) for name in sorted(params))


def told(rates: Rates) -> float | list[dict[str, float]] | None:
    """The multipliers as rows have them: one number for all, {name: number} of every layer where they differ, or None
    where nothing is learned."""
    layers = [{name: rate.lr_multiplier for name, rate in layer} for layer in rates]
    found = {factor for layer in layers for factor in layer.values()}
    return layers if len(found) > 1 else next(iter(found), None)
