"""The learning rate and the weight decay of each parameter of an encoding.

A bias table must move further than a projection, so one learning rate for all would judge encodings by the optimizer.
T5's table starts at 0.1 and hardly reaches a nat in 1,200 steps of AdamW at 2e-3.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from posx.contract import Composite, Dims, Encoding, abstract_params


class Rate(NamedTuple):
    """The learning rate of one parameter as a multiple of the model's, and whether weight decay acts on it."""

    lr_multiplier: float = 1.0
    decays: bool = False


#: The rates of each layer's parameters by name. Parameters without a name here are trained at Rate().
Rates = tuple[tuple[tuple[str, Rate], ...], ...]


@functools.lru_cache(maxsize=1024)
def encoding_rates(encoding: Encoding, dims: Dims, multiplier: float = 0.0) -> tuple[tuple[str, Rate], ...]:
    """Return the rates of a resolved encoding's parameters by name; `multiplier` replaces the class's own unless 0."""
    params = abstract_params(encoding, dims)
    factor = float(multiplier or encoding.about.lr_multiplier)
    rates = {name: Rate(factor, name in encoding.decayed) for name in params}
    if isinstance(encoding, Composite):
        for part_name, part in encoding.named_parts().items():
            rates |= {f"{part_name}.{name}": rate for name, rate in encoding_rates(part, dims, multiplier)}
    return tuple(sorted(rates.items()))


def layer_rates(layers: Iterable[Encoding], dims: Dims, multiplier: float = 0.0) -> Rates:
    return tuple(encoding_rates(encoding, dims, multiplier) for encoding in layers)


def to_json(rates: Rates) -> list[dict[str, Any]]:
    return [{name: rate._asdict() for name, rate in layer} for layer in rates]


def from_json(layers: Any) -> Rates:
    """Return the rates that `to_json` wrote. Raises TypeError, KeyError or such an error for other values."""
    return tuple(
        tuple((name, Rate(float(rate["lr_multiplier"]), bool(rate["decays"]))) for name, rate in layer.items())
        for layer in layers
    )


def multipliers_in_rows(rates: Rates) -> float | list[dict[str, float]] | None:
    """Return the multipliers in the form of a JSON row.

    One number for all, {name: number} for each layer if they differ, or None if nothing is learned.
    """
    multipliers = sorted({rate.lr_multiplier for layer in rates for _, rate in layer})
    if len(multipliers) > 1:
        return [{name: rate.lr_multiplier for name, rate in layer} for layer in rates]
    return multipliers[0] if multipliers else None
