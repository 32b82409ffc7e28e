"""Which runs a sweep makes."""

from __future__ import annotations

import dataclasses

from posx.encodings import ENCODINGS


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """Which runs a sweep makes; `posx train` ignores it."""

    encodings: tuple[str, ...] = tuple(ENCODINGS)
    train_lens: tuple[int, ...] = (64,)
    seeds: tuple[int, ...] = (0,)
