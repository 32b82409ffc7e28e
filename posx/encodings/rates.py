"""How the parameters of an encoding are trained: at a multiple of the model's learning rate, with or without decay.

How far a bias table must move, and how far a projection, are not the same, so one learning rate judges encodings by the
optimizer: T5's table, which starts at 0.1, hardly comes to a nat in 1,200 steps of AdamW at 2e-3.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from posx.encodings.around import Around
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
    rates = {name: Rate(factor, name in encoding.decayed) for name in params}
    if isinstance(encoding, Around):
        rates |= {f"base.{name}": rate for name, rate in rates_of(encoding.base, dims, multiplier)}
    return tuple(sorted(rates.items()))


def rates_of_layers(layers: Iterable[Encoding], dims: Dims, multiplier: float = 0.0) -> Rates:
    return tuple(rates_of(encoding, dims, multiplier) for encoding in layers)


def to_json(rates: Rates) -> list[dict[str, Any]]:
    return [{name: rate._asdict() for name, rate in layer} for layer in rates]


def from_json(layers: Any) -> Rates:
    """The inverse of `to_json`. Raises TypeError or AttributeError for what is no such list."""
    return tuple(tuple((name, Rate(**rate)) for name, rate in layer.items()) for layer in layers)


def special(rates: Rates) -> dict[str, Rate]:
    """{"layer.parameter": rate} of those that are trained otherwise than all were before there were rates."""
    return {f"{n}.{name}": rate for n, layer in enumerate(rates) for name, rate in layer if rate != Rate()}


def multipliers(rates: Rates) -> list[float]:
    """Those that some parameter has, increasing."""
    return sorted({rate.lr_multiplier for layer in rates for _, rate in layer})


def told(rates: Rates) -> float | list[dict[str, float]] | None:
    """The multipliers as rows have them: one number for all, {name: number} of every layer where they differ, or None
    where nothing is learned."""
    found = multipliers(rates)
    if len(found) > 1:
        return [{name: rate.lr_multiplier for name, rate in layer} for layer in rates]
    return found[0] if found else None
