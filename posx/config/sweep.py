"""The settings of a sweep: its axes, and which of them advance together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

#: The encodings of the classic surveys, which a sweep compares unless it says which.
CLASSIC = (
    "nope", "sinusoidal", "learned", "shaw", "transformer_xl", "t5", "tupe", "deberta", "rope", "alibi",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """The runs that a sweep makes. The three lists are short for axes, and `axes` overrides them.

    `axes` maps any setting to its values: {"encoding": ("rope", "rope(base=500000)+alibi"), "train.learning_rate":
    (1e-3, 2e-3), "model.layer_policy": ("encoding", "encoding, nope")}. Encodings, and patterns of them, are texts.
    A sweep makes every combination of the values on its axes. Axes that an entry of `zip` joins with + advance together
    and count as one axis: with ("model.model_dim+model.num_heads",) the first width goes with the first number of
    heads, the second width with the second. The lists may be joined too: "encoding+train.learning_rate".
    """

    encodings: tuple[str, ...] = CLASSIC
    train_lens: tuple[int, ...] = (64,)
    seeds: tuple[int, ...] = (0,)
    zip: tuple[str, ...] = ()
    axes: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


#: The settings that the lists stand for.
LISTS = {"train_lens": "train.length", "encodings": "encoding", "seeds": "train.seed"}


class _Dotted(ConfigDict):
    """A section some of whose names have dots in them, as the names of settings do."""

    def __init__(self, values: Mapping[str, Any] | None = None, type_safe: bool = True, **options: Any):
        super().__init__(values, type_safe, **{"allow_dotted_keys": True, **options})


def sweep_section() -> ConfigDict:
    """Return the section `sweep` with its defaults."""
    section = _Dotted()
    for name, value in vars(SweepConfig()).items():
        section[name] = _Dotted() if name == "axes" else value
    return section
