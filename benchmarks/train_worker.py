"""The models in training that one process holds, served by `workers`; of posx, that of the checkout it was started for.

From the checkout it takes `train.posx_contestant`, `train_parts.Shape` and `text_batches`: an older one must have them
as they are here. Its folder may be `scripts/benches`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

FOLDER = "benches" if importlib.util.find_spec("benches") else "benchmarks"
posx_contestant = importlib.import_module(f"{FOLDER}.train").posx_contestant
parts = importlib.import_module(f"{FOLDER}.train_parts")


class Training:
    """Contestants by form ("posx" or one of x-transformers') and encoding."""

    def __init__(self, shape: dict[str, Any]):
        self.shape = parts.Shape(**shape)
        self.batches = parts.text_batches(self.shape)
        self.contestants: dict[tuple[str, str], Any] = {}

    def add(self, form: str, encoding: str) -> dict[str, Any] | None:
        """Facts about a contestant that has run its first steps: all is compiled, allocators have settled. None where
        x-transformers has no such encoding."""
        if form == "posx":
            made = posx_contestant(encoding, self.shape, self.batches)
        else:
            from benchmarks.train_peer import peer_contestant

            made = peer_contestant(encoding, self.shape, self.batches, form)
            if made is None:
                return None
        first = made.run(1)
        made.run(2)
        self.contestants[form, encoding] = made
        return {"parameters": made.parameters, **made.facts, "first_step_seconds": first}

    def turn(self, form: str, encoding: str, steps: int) -> float:
        """Tokens/s of some steps, after one that is not timed."""
        contestant = self.contestants[form, encoding]
        contestant.run(1)
        return steps * self.shape.tokens / contestant.run(steps)

    def losses(self, form: str, encoding: str) -> list[float]:
        return [float(loss) for loss in self.contestants[form, encoding].losses]
