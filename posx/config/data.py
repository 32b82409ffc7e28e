"""Which text a run reads, and how it becomes tokens."""

import codecs
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posx.errors import ConfigError

LAYOUTS = ("document", "line", "paragraph", "wikitext")


@dataclass(frozen=True)
class DataConfig:
    """Which text, how it becomes documents, and how documents become tokens."""

    source: str = "stdlib"  # "stdlib" (the embedded corpus), a file or folder, or a hub name
    subset: str = ""  # a hub data set's configuration, for example "wikitext-103-raw-v1"
    train_split: str = "train"  # of a hub data set
    validation_split: str = "validation"  # of a hub data set; empty: documents of the train split by hash
    validation: str = ""  # a path with held-out text; empty: the source's validation files or split, else by hash
    validation_fraction: float = 0.05  # of the documents, where the source has no validation text of its own
    tuning_fraction: float = 0.0  # of the training documents: taken out, and the validation text in place of its own
    text_column: str = "text"  # of parquet, JSON and hub data
    text_encoding: str = "utf-8"  # of text and JSON files
    layout: str = "document"  # a document is a "document" (file or row), "line", "paragraph", or "wikitext" (article)
    tokenizer: str = "bytes"  # "bytes", "bpe" (trained here), or the path of a tokenizer.json
    vocab_size: int = 8192  # of a BPE trained here
    cache_dir: str = ""  # empty: "posx" in $XDG_CACHE_HOME or ~/.cache

    def problems(self) -> list[str]:
        """What is wrong with these fields, one line each."""
        found = []
        if not self.source:
            found.append("data.source is empty; use 'stdlib', a file or folder, or a hub name")
        if self.layout not in LAYOUTS:
            found.append(f"data.layout '{self.layout}' is unknown; use one of {', '.join(LAYOUTS)}")
        if not 0 < self.validation_fraction < 1:
            found.append(f"data.validation_fraction is {self.validation_fraction}; it must lie between 0 and 1")
        if not 0 <= self.tuning_fraction < 1:
            found.append(f"data.tuning_fraction is {self.tuning_fraction}; it must be at least 0 and below 1")
        if self.tokenizer == "bpe" and self.vocab_size < 257:
            found.append(f"data.vocab_size is {self.vocab_size}; a BPE needs 257 or more (256 bytes and eos)")
        if not self.tokenizer:
            found.append("data.tokenizer is empty; use 'bytes', 'bpe' or the path of a tokenizer.json")
        if not is_text_encoding(self.text_encoding):
            found.append(f"data.text_encoding '{self.text_encoding}' is unknown; use a Python codec such as 'utf-8'")
        for name in ("source", "validation", "tokenizer", "cache_dir"):
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
    """Whether Python has a codec of this name that gives text."""
    try:
        codecs.lookup(name)
        b"a".decode(name)
    except UnicodeDecodeError:  # an encoding of more bytes a character
        return True
    except (LookupError, ValueError):
        return False
    return True


def check_config(config: DataConfig) -> None:
    """Raises `ConfigError`, naming every senseless value of `config`, unless there is none."""
    if found := config.problems():
        raise ConfigError("; ".join(found))
