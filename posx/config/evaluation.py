"""What is measured of a trained run."""

from __future__ import annotations

import dataclasses

from posx.attention import EXECUTORS


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """What is measured after training; lengths, strides and targets in tokens.

    The training length L is measured as well where `lengths` or `sliding_lengths` leave it out: it is what the others
    are compared with. `sliding_lengths` () stands for L, 2L, 4L, 8L, 16L as far as `lengths` go; `stride` 0 for L/4.
    Targets are spread over all held-out documents, the same at every length: they are those of the longest windows that
    a run was ever measured at. `num_targets` and `sliding_targets` 0 score the whole validation stream.
    """

    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    protocols: tuple[str, ...] = ("nonoverlapping", "per_position")
    num_targets: int = 262144
    sliding_targets: int = 65536
    sliding_lengths: tuple[int, ...] = ()
    stride: int = 0
    batch_tokens: int = 16384
    executor: str = "auto"

    def problems(self) -> list[str]:
        """What is wrong with these fields, one line each. What a protocol needs of them, that protocol knows."""
        found = []
        for name in ("lengths", "sliding_lengths"):
            lengths = getattr(self, name)
            if any(length < 2 for length in lengths):
                found.append(f"eval.{name}={lengths}: every length must be at least 2 tokens")
            if list(lengths) != sorted(set(lengths)):
                found.append(f"eval.{name}={lengths} must increase, each length once")
        if not self.lengths:
            found.append("eval.lengths is empty: name at least one length in tokens")
        for name, least in (("num_targets", 0), ("sliding_targets", 0), ("stride", 0), ("batch_tokens", 1)):
            if getattr(self, name) < least:
                found.append(f"eval.{name}={getattr(self, name)} must be at least {least}")
        if not found and 0 < self.num_targets < max(self.lengths):
            found.append(
                f"eval.num_targets={self.num_targets} is less than one window of eval.lengths' longest, "
                f"{max(self.lengths)} tokens: score at least as many targets, or 0 for all"
            )
        if self.executor not in ("auto", *EXECUTORS):
            allowed = ", ".join(("auto", *EXECUTORS))
            found.append(f"eval.executor={self.executor!r} is unknown; allowed: {allowed}")
        return found
