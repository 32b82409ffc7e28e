"""The models in training that one process holds, served by `workers`; its posx is that of the checkout.

An older checkout has no such file. It has the same functions in `scripts/benches`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

train = importlib.import_module("benches.train" if importlib.util.find_spec("benches") else "benchmarks.train")


class Training:
    """Contestants by form ("posx" or one of x-transformers') and encoding."""

    def __init__(self, shape: dict[str, Any]):
        self.shape = train.Shape(**shape)
        self.batches = train.text_batches(self.shape)
        self.contestants: dict[tuple[str, str], Any] = {}

    def add(self, form: str, encoding: str) -> dict[str, Any] | None:
        """Add a contestant and run its first steps: all is compiled, allocators have settled. Return facts about it.

        None if x-transformers has no such encoding.
        """
        if form == "posx":
            made = train.posx_contestant(encoding, self.shape, self.batches)
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
        """Return the tokens/s of some steps, after one that is not timed."""
        contestant = self.contestants[form, encoding]
        contestant.run(1)
        return steps * self.shape.tokens / contestant.run(steps)

    def losses(self, form: str, encoding: str) -> list[float]:
        return [float(loss) for loss in self.contestants[form, encoding].losses]
