"""A task as a source of tokens: items instead of text, drawn when they are needed and never stored."""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from posx.contract.sources import source_digest
from posx.errors import DataError
from posx.lab.config.data import DataConfig
from posx.lab.data.batches import Dataset, Weighted
from posx.lab.data.masking import choose_hidden, draw_numbers
from posx.lab.data.tokenizers import BpeTokenizer, with_model
from posx.lab.tasks import TASKS, Items, Task, draw_rows
from posx.lab.tasks.base import BOS, EOS, SPECIAL
from posx.lab.tasks.check import check_items

#: The items and the tokens of a row whose digest names a task.
_SAMPLE = 8, 64

#: The items that must all be right for training to end early. A model that is right on 99 % of all items is so on these
#: with probability 0.7 %.
STOP_ITEMS = 500


@dataclass(frozen=True)
class TaskDataset(Dataset):
    """The items of a task. `source` names it as data.source does, without defaults: keys of items are made from it."""

    task: Task
    source: str

    @functools.cached_property
    def tokenizer(self) -> BpeTokenizer:  # type: ignore[override]
        """One id for each word of an item, with spaces between words."""
        words = (*SPECIAL, *self.task.alphabet)
        plain = {
            "version": "1.0", "normalizer": None, "decoder": None, "post_processor": None, "truncation": None,
            "padding": None, "pre_tokenizer": {"type": "WhitespaceSplit"},
            "added_tokens": [{
                "id": EOS, "content": SPECIAL[EOS], "special": True, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False,
            }],
            # No token stands for unknown words, so that one is an error.
            "model": {"type": "WordLevel", "vocab": {w: n for n, w in enumerate(words)}, "unk_token": ""},
        }  # fmt: skip
        return BpeTokenizer(with_model(json.dumps(plain), {"begin": BOS, "ends": [EOS]}))

    @functools.cached_property
    def digest(self) -> str:  # type: ignore[override]
        """A name of the items: another if the same key draws others, or a user's class has other code."""
        count, length = _SAMPLE[0], self.task.fitting_length(_SAMPLE[1])
        longest = self.task.longest(length)
        rows, code = self._draw("digest", 0, count, self.task.fewest, longest, length), source_digest(type(self.task))
        parts = self.source.encode(), rows.tokens.tobytes(), rows.scored.tobytes(), code.encode()
        return hashlib.sha256(b"".join(parts)).hexdigest()

    @property
    def held_out_digest(self) -> str:  # type: ignore[override]
        return self.digest

    def summary(self) -> str:
        """Describe the task in one line."""
        words = f"{self.tokenizer.vocab_size} words"
        return f"{self.source}: items drawn as they are needed; {words}; digest {self.digest[:12]}"

    def check_length(self, length: int) -> None:
        """Raise DataError if no item fits `length` tokens, or if the longest fills less than half of them."""
        if self.task.longest(length) < self.task.fewest:
            raise DataError(f"train.length={length}, but {self.source} has {self.task.length_problem(length)}.")
        most = self.task.size(self.task.longest(length)) - 1
        if 2 * most < length:
            raise DataError(
                f"train.length={length}, but {self.source} has no item of more than {most} tokens. Lower train.length, "
                "or give the task more symbols."
            )

    def check_lengths(self, lengths: Sequence[int], train_len: int) -> None:
        """Raise DataError if one of the lengths has no items to be measured with, see `items`."""
        for length in lengths:
            if self.task.longest(length) < self.task.fewest:
                problem = self.task.length_problem(length)
                raise DataError(f"eval.lengths has {length}, but {self.source} has {problem}. Leave the length out.")
            fewest, longest = self.sizes(length, train_len)
            if fewest > longest:
                most = self.task.size(longest) - 1
                raise DataError(
                    f"eval.lengths has {length}, but {self.source} has no item of more than {most} tokens that fits. "
                    "Leave the length out, or give the task more symbols."
                )

    def batch(self, *, seed: int, step: int, batch_size: int, length: int, rows: slice = slice(None)) -> Weighted:
        """Return rows of batch number `step`, a pure function of its arguments.

        Items have all sizes that fit `length` tokens. The targets of an answer weigh alike, and all others nothing.
        """
        drawn = self._draw(f"training {seed}", step, batch_size, self.task.fewest, self.task.longest(length), length)
        weights = drawn.scored[:, 1:] / drawn.scored[:, 1:].mean(dtype=np.float64)
        return Weighted(drawn.tokens[rows], weights[rows].astype(np.float32))

    def items(self, length: int, train_len: int, count: int) -> Items:
        """Return `count` items to measure a length with: of more than `length` - `train_len` tokens, up to `length`.

        If the task hides tokens of its items, these are scored.
        """
        fewest, longest = self.sizes(length, train_len)
        return self._hide(self._draw(f"held out {length}", 0, count, fewest, longest, length))

    def targets(self, train_len: int) -> str:
        """Return the name of the `items` of all lengths. Runs with another L have other ones."""
        return hashlib.sha256(f"{self.held_out_digest} {train_len}".encode()).hexdigest()[:16]

    def stop_items(self, length: int) -> Items:
        """Return STOP_ITEMS items of all sizes that fit `length` tokens, drawn apart from training and from `items`."""
        return self._hide(self._draw("stop", 0, STOP_ITEMS, self.task.fewest, self.task.longest(length), length))

    def sizes(self, length: int, train_len: int) -> tuple[int, int]:
        """Return the fewest and the most symbols of the items that measure a length; fewest > most without any."""
        shorter = self.task.longest(length - train_len) if length > train_len else self.task.fewest - 1
        return max(self.task.fewest, shorter + 1), self.task.longest(length)

    def _hide(self, items: Items) -> Items:
        if self.task.objective != "masked":
            return items
        numbers = draw_numbers(self.source, items.tokens.shape[1] - 1, items.scored[:, 1:].shape)
        return Items(items.tokens, np.pad(choose_hidden(numbers), ((0, 0), (1, 0))))  # type: ignore[arg-type]

    def _draw(self, what: str, step: int, count: int, fewest: int, longest: int, length: int) -> Items:
        seed = hashlib.sha256(f"posx items 1\n{self.source}\n{what}".encode()).digest()
        key = jax.random.fold_in(jax.random.key(int.from_bytes(seed[:4], "big") >> 1), step)
        return Items(*jax.device_get(draw_rows(self.task, jax.random.split(key, count), fewest, longest, length)))


def open_task(config: DataConfig) -> TaskDataset:
    """Return the items of the task that `config` names.

    Raises ConfigError for an unknown name or field, DataError for wrong items of a class of the user's own.
    """
    task = config.task
    if type(task) not in TASKS.values():
        check_items(task)
    return TaskDataset(task, config.resolve().source)
