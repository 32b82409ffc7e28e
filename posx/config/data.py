"""The settings of the text of a run, and of its tokens."""

import codecs
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from posx.contract.fields import above, at_least, below, problems_of
from posx.errors import ConfigError

#: Settings that may name a file or folder.
PLACES = ("source", "validation", "tokenizer", "cache_dir")


@dataclass(frozen=True)
class DataConfig:
    """The settings of the data: the text, its documents and its tokens.

    source: "stdlib" (the embedded corpus), a file or folder, or a hub name. subset, train_split, validation_split: of a
    hub data set. validation: a path with held-out text, else the source's own validation files or split. If there are
    none, `validation_fraction` of the documents is held out by hash. tuning_fraction: this part of the training
    documents is taken out and takes the place of the validation text, for choices that must not use it.
    text_column: of parquet, JSON and hub data. text_encoding: of text and JSON files. layout: a document is a
    "document" (file or row), a "line", a "paragraph", or an article of "wikitext". tokenizer: "bytes", "bpe" (trained
    here, with `vocab_size` ids), or the path of a tokenizer.json. cache_dir: "" for "posx" in $XDG_CACHE_HOME or
    ~/.cache.
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
    layout: Literal["document", "line", "paragraph", "wikitext"] = "document"
    tokenizer: str = "bytes"
    vocab_size: int = 8192
    cache_dir: str = ""

    def problems(self) -> list[str]:
        """Return the problems of these fields, one line each."""
        found = [f"data.{problem}" for problem in problems_of(self)]
        if not self.source:
            found.append("data.source is empty; use 'stdlib', a file or folder, or a hub name")
        if self.tokenizer == "bpe" and self.vocab_size < 257:
            found.append(f"data.vocab_size is {self.vocab_size}; a BPE needs 257 or more (256 bytes and eos)")
        if not self.tokenizer:
            found.append("data.tokenizer is empty; use 'bytes', 'bpe' or the path of a tokenizer.json")
        if not is_text_encoding(self.text_encoding):
            found.append(f"data.text_encoding '{self.text_encoding}' is unknown; use a Python codec such as 'utf-8'")
        for name in PLACES:
            try:
                Path(getattr(self, name)).expanduser().exists()
            except (OSError, RuntimeError, ValueError) as error:
                found.append(f"data.{name} '{getattr(self, name)[:60]}' can be no path: {str(error)[:60]}")
        return found

    def named(self) -> dict[str, Any]:
        """Return the settings that decide the tokens, by name. `vocab_size` is used by a BPE trained here alone."""
        unused = ("cache_dir", *(["vocab_size"] if self.tokenizer != "bpe" else []))
        return {name: value for name, value in vars(self).items() if name not in unused}


def is_text_encoding(name: str) -> bool:
    """Tell whether Python has a codec of this name that gives text."""
    try:
        codecs.lookup(name)
        b"a".decode(name)
    except UnicodeDecodeError:  # an encoding of more bytes a character
        return True
    except (LookupError, ValueError):
        return False
    return True


def check_config(config: DataConfig) -> None:
    """Raise ConfigError with every problem of `config`, if it has any."""
    if found := config.problems():
        raise ConfigError("; ".join(found))
