"""The settings of an evaluation: what the protocols are asked."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from posx.contract.fields import at_least, field_problems

#: The protocols that () stands for, by the kind of targets that a run predicts. These are the next tokens of a text,
#: the answers of a task, or the hidden tokens of a text.
USUAL = {
    "text": ("nonoverlapping", "per_position"), "task": ("answers",), "hidden tokens": ("pseudo_perplexity",),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """The settings of an evaluation. Lengths, strides and targets are in tokens.

    Targets are spread over all held-out documents. They are the same at every length: those of the longest windows of
    the run so far.

    Attributes:
      lengths: window lengths. The training length L is always added, to compare the others with.
      protocols: names of protocols. () stands for `answers` if the run has a task, for `pseudo_perplexity`
        if it predicts masked tokens, else for `nonoverlapping` and `per_position`.
      num_targets: scored tokens; 0 scores the whole validation stream.
      sliding_targets: the same for `sliding`.
      sliding_lengths: window lengths of `sliding`, to which L is added too. () stands for L, 2L, 4L, 8L and 16L, as far
        as `lengths` go.
      num_items: items of a task that each length is measured with.
      attention_items: of these, the ones whose attention weights are read too; 0 for none. For a text it is a number of
        windows of `nonoverlapping`.
      stride: of windows that overlap. 0 stands for L/4, or for half of each window of hf_strided.
      batch_tokens: tokens per call of the model.
      executor: the executor of attention, see `posx.attend`.
      precision: of products of float32 numbers. With "highest" a perplexity does not depend on the kind of device.
    """

    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    protocols: tuple[str, ...] = ()
    num_targets: Annotated[int, at_least(0)] = 262144
    sliding_targets: Annotated[int, at_least(0)] = 65536
    sliding_lengths: tuple[int, ...] = ()
    num_items: Annotated[int, at_least(1)] = 2000
    attention_items: Annotated[int, at_least(0)] = 0
    stride: Annotated[int, at_least(0)] = 0
    batch_tokens: Annotated[int, at_least(1)] = 16384
    executor: Literal["auto", "dense", "blockwise", "kernel", "fused"] = "auto"
    precision: Literal["default", "highest"] = "highest"

    def resolve(self, measures: str) -> EvalConfig:
        """Return the same with its protocols named. measures: a key of `USUAL`."""
        return dataclasses.replace(self, protocols=self.protocols or USUAL[measures])

    def problems(self) -> list[str]:
        """Return the problems of these fields, one line each. Each protocol knows its own."""
        problems = [f"eval.{problem}" for problem in field_problems(self)]
        # One flag may set both: its slip is named once.
        for lengths, name in {tuple(self.sliding_lengths): "sliding_lengths", tuple(self.lengths): "lengths"}.items():
            if any(length < 2 for length in lengths):
                problems.append(f"eval.{name}={lengths}: every length must be at least 2 tokens.")
            if list(lengths) != sorted(set(lengths)):
                problems.append(f"eval.{name}={lengths}: lengths must increase, each length once.")
        if not self.lengths:
            problems.append("eval.lengths is empty. Name at least one length in tokens.")
        return problems
