"""The settings of a run's data: where its text is, how it is read, and which tokenizer makes tokens of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from posx.contract.fields import above, at_least, at_most, below, field_problems
from posx.errors import ConfigError
from posx.lab.tasks import Task, parse_task, shortest_text

#: Settings that may name a file or folder.
PLACES = ("source", "validation", "tokenizer", "cache_dir")

#: The start of a source that names a task.
TASK = "task:"

#: The words of `tokenizer` that name no file.
TOKENIZERS = ("bytes", "bpe", "ids")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The settings of the data: the text, its documents and its tokens.

    Attributes:
      source: "stdlib" (the embedded corpus), a file or folder, a hub name, or a task such as "task:unique_copy".
      subset, train_split, validation_split: of a hub data set.
      validation: a path with held-out text. Without it the validation files or split of the source are held out.
      validation_fraction: of the documents, held out by hash if the source has no validation text.
      tuning_fraction: this part of the training documents replaces the validation text, for choices that must not use
        it.
      text_column: of parquet, JSON and hub data. It holds text, token ids or chat messages.
      text_encoding: of text and JSON files.
      template: writes chat messages as text.
      dtype: of the token ids in .bin files.
      layout: a document is a "document" (file or row), a "line", a "paragraph", or an article of "wikitext".
      tokenizer: "bytes", "bpe" (trained here), the path of a tokenizer.json, or "ids" for token ids alone.
      vocab_size: the number of ids of a BPE, 0 for 8192; or of "ids".
      cache_dir: "" for "posx" in $XDG_CACHE_HOME or ~/.cache.
    """

    source: str = "stdlib"
    subset: str = ""
    train_split: str = "train"
    validation_split: str = "validation"
    validation: str = ""
    validation_fraction: Annotated[float, above(0), below(1)] = 0.05
    tuning_fraction: Annotated[float, at_least(0), below(1)] = 0.0
    text_column: str = "text"
    text_encoding: str = "utf-8"
    template: Literal["", "chatml", "llama3", "gemma"] = ""
    dtype: str = ""
    layout: Literal["document", "line", "paragraph", "wikitext"] = "document"
    tokenizer: str = "bytes"
    vocab_size: Annotated[int, at_least(0), at_most(2**31 - 2)] = 0
    cache_dir: str = ""

    def problems(self) -> list[str]:
        """Return the problems of these fields, one line each."""
        problems = [f"data.{problem}" for problem in field_problems(self)]
        if self.is_task:
            return problems + self._task_problems()
        if not self.source:
            problems.append("data.source is empty. Use 'stdlib', a file or folder, or a hub name.")
        if self.tokenizer == "bpe" and self.num_ids < 257:
            problems.append(
                f"data.vocab_size={self.vocab_size}: a BPE needs 257 or more, which are 256 bytes and eos. Raise it."
            )
        if self.tokenizer == "ids" and not self.vocab_size:
            problems.append(
                "data.tokenizer=ids needs the number of ids. Name it, for example --config.data.vocab_size=50257"
            )
        if not self.tokenizer:
            problems.append("data.tokenizer is empty. Use 'bytes', 'bpe', 'ids' or the path of a tokenizer.json.")
        if self.dtype and not _is_integer_type(self.dtype):
            problems.append(f"data.dtype={self.dtype}: .bin files hold whole numbers. Use a type such as 'uint16'.")
        try:
            "".encode(self.text_encoding)
        except (LookupError, ValueError):
            problems.append(
                f"data.text_encoding '{self.text_encoding}' is unknown. Use a Python codec such as 'utf-8'."
            )
        for name in PLACES:
            try:
                Path(getattr(self, name)).expanduser().exists()
            except (OSError, RuntimeError, ValueError) as error:
                problems.append(f"data.{name} '{getattr(self, name)[:60]}' can be no path: {str(error)[:60]}")
        return problems

    def _task_problems(self) -> list[str]:
        try:
            self.resolve()
        except ConfigError as error:
            return [f"data.source={self.source}: {error}"]
        idle = [name for name, value in vars(self).items() if value != getattr(DataConfig, name)]
        return [
            f"data.{name}={getattr(self, name)}: a task has no text. Leave it out."
            for name in idle
            if name not in ("source", "cache_dir")
        ]

    @property
    def is_task(self) -> bool:
        """Whether the source is a task, whose items are made and not read."""
        return self.source.startswith(TASK)

    @property
    def task(self) -> Task:
        """The task that the source names. Raises ConfigError for an unknown name or field."""
        return parse_task(self.source.removeprefix(TASK))

    def resolve(self) -> DataConfig:
        """Return the same with a task in its shortest text, so that spelling is no part of a run's identity."""
        if not self.is_task:
            return self
        return dataclasses.replace(self, source=TASK + shortest_text(self.source.removeprefix(TASK)))

    @property
    def num_ids(self) -> int:
        """The number of ids that `vocab_size` stands for."""
        return self.vocab_size or 8192

    def token_settings(self) -> dict[str, Any]:
        """Return the settings that decide the tokens, by name. `vocab_size` is of a BPE trained here, or of ids."""
        if self.is_task:
            return {"source": self.source}
        settings = {name: value for name, value in vars(self).items() if name not in ("cache_dir", "vocab_size")}
        return settings | ({"vocab_size": self.num_ids} if self.tokenizer in ("bpe", "ids") else {})


def _is_integer_type(name: str) -> bool:
    try:
        return np.dtype(name).kind in "iu"
    except (TypeError, ValueError, SyntaxError):
        return False
