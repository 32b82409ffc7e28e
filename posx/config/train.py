"""How a run is trained."""

from __future__ import annotations

import dataclasses

from posx.attention import EXECUTORS


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run. `length` L in tokens; `batch_size` in windows of L tokens; durations in steps.

    `dispatch_steps`: as many steps run in one call on the device, fewer before a log line or a checkpoint. It changes
    speed alone: the memory of a call is not given back between its steps, and an accelerator does not wait for Python.
    `position_lr_multiplier`: every parameter of an encoding learns at so many times the learning rate; 0 leaves it to
    the encoding (`Encoding.lr_multiplier`).
    """

    length: int = 64
    batch_size: int = 64
    steps: int = 1200
    seed: int = 0
    learning_rate: float = 2e-3
    final_learning_rate: float = 2e-4
    position_lr_multiplier: float = 0.0
    warmup_steps: int = 60
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    accumulation: int = 1
    executor: str = "auto"
    dispatch_steps: int = 16
    log_steps: int = 20
    checkpoint_steps: int = 200
    keep_checkpoints: int = 2

    def problems(self) -> list[str]:
        """What is wrong with these fields, one line each."""
        found = [
            f"train.{name}={getattr(self, name)} must be at least {least}"
            for name, least in (
                ("length", 2), ("batch_size", 1), ("steps", 1), ("accumulation", 1), ("log_steps", 1),
                ("dispatch_steps", 1), ("checkpoint_steps", 1), ("keep_checkpoints", 1), ("warmup_steps", 0),
                ("seed", 0),
            )
            if getattr(self, name) < least
        ]  # fmt: skip
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                found.append(f"train.{name}={getattr(self, name)} must be positive")
        for name in ("final_learning_rate", "position_lr_multiplier", "weight_decay"):
            if getattr(self, name) < 0:
                found.append(f"train.{name}={getattr(self, name)} must not be negative")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"train.{name}={getattr(self, name)} must be in [0, 1)")
        if self.seed >= 2**32:
            found.append(f"train.seed={self.seed} must be below 2**32")
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
        if self.executor not in ("auto", *EXECUTORS):
            allowed = ", ".join(("auto", *EXECUTORS))
            found.append(f"train.executor={self.executor!r} is unknown; allowed: {allowed}")
        return found
