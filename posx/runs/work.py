"""How much of an evaluation is done: the windows that the model has read, weighed by what one costs at its length."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from posx.evaluation.protocols import Protocol
from posx.evaluation.scoring import Measured
from posx.model import Model
from posx.progress import Meter
from posx.training.step import flops_per_token


class Work:
    """What is to be measured of `model`, all protocols and lengths of it, and what of that is done."""

    def __init__(self, model: Model):
        self.model = model
        self.passes: dict[tuple[int, str, int], int] = {}
        self.before = self.inside = 0  # done in the passes before this one, and in this one
        self.meter: Meter

    def add(self, protocol: Protocol, measured: Measured, length: int) -> None:
        """One more length, at which the model is defined. A pass that protocols share is counted once."""
        targets = protocol.targets(measured.stream, [length], measured.documents)
        count = len(targets.windows(length, protocol.stride_at(length, [length])))
        self.passes[length, targets.digest, count] = count * self._cost(length)

    def _cost(self, length: int) -> int:
        """Of a window: proportional to the operations of a forward pass over it."""
        return round(length * flops_per_token(self.model, length))

    @contextlib.contextmanager
    def shown(self, title: str) -> Iterator[None]:
        """The bar of all that was added."""
        with Meter(title, sum(self.passes.values())) as self.meter:
            yield

    def report(self, length: int, done: int) -> None:
        """`done` windows of this pass are; before the first its program is compiled."""
        self.inside = done * self._cost(length)
        if done:
            self.meter.update(self.before + self.inside, f"windows of {length} tokens")
        else:
            self.meter.waiting(f"compiling for windows of {length} tokens")

    def finished(self, line: str) -> None:
        """The pass is done; its `line` goes above the bar."""
        self.before, self.inside = self.before + self.inside, 0
        self.meter.print(line)
