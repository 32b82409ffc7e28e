"""How a run is trained."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from posx.contract.fields import above, at_least, below, problems_of


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run. `length` L in tokens; `batch_size` in windows of L tokens; durations in steps.

    `dispatch_steps`: as many steps run in one call on the device, fewer before a log line or a checkpoint. It changes
    speed alone: the memory of a call is not given back between its steps, and an accelerator does not wait for Python.
    `position_lr_multiplier`: every parameter of an encoding learns at so many times the learning rate; 0 leaves it to
    the encoding (`Encoding.lr_multiplier`).
    """

    length: Annotated[int, at_least(2)] = 64
    batch_size: Annotated[int, at_least(1)] = 64
    steps: Annotated[int, at_least(1)] = 1200
    seed: Annotated[int, at_least(0), below(2**32)] = 0
    learning_rate: Annotated[float, above(0)] = 2e-3
    final_learning_rate: Annotated[float, at_least(0)] = 2e-4
    position_lr_multiplier: Annotated[float, at_least(0)] = 0.0
    warmup_steps: Annotated[int, at_least(0)] = 60
    beta1: Annotated[float, at_least(0), below(1)] = 0.9
    beta2: Annotated[float, at_least(0), below(1)] = 0.98
    weight_decay: Annotated[float, at_least(0)] = 0.1
    clip_norm: Annotated[float, above(0)] = 1.0
    accumulation: Annotated[int, at_least(1)] = 1
    executor: Literal["auto", "dense", "blockwise", "fused"] = "auto"
    dispatch_steps: Annotated[int, at_least(1)] = 16
    log_steps: Annotated[int, at_least(1)] = 20
    checkpoint_steps: Annotated[int, at_least(1)] = 200
    keep_checkpoints: Annotated[int, at_least(1)] = 2

    def problems(self) -> list[str]:
        """Return the problems of these fields, one line each."""
        found = [f"train.{problem}" for problem in problems_of(self)]
        if self.final_learning_rate > self.learning_rate:
            found.append(
                f"train.final_learning_rate={self.final_learning_rate} must not be above "
                f"train.learning_rate={self.learning_rate}"
            )
        if not found and self.warmup_steps >= self.steps:
            found.append(f"train.warmup_steps={self.warmup_steps} must be below train.steps={self.steps}")
        if not found and self.batch_size % self.accumulation:
            fits = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            found.append(
                f"train.accumulation={self.accumulation} does not divide train.batch_size={self.batch_size}; {fits}"
            )
        return found
