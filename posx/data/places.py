"""The files that the settings of the data name: as they are typed, and as absolute paths from whatever directory."""

import dataclasses
from pathlib import Path
from typing import Any

from posx.config.data import DataConfig
from posx.data.corpus import is_path
from posx.errors import DataError

#: Settings that may name a file or folder.
PLACES = ("source", "validation", "tokenizer", "cache_dir")
_TOKENIZERS = ("bytes", "bpe")


def absolute(config: DataConfig) -> DataConfig:
    """Return `config` with every path absolute."""
    found = {
        "source": config.source != "stdlib" and is_path(config.source),
        "validation": bool(config.validation),
        "tokenizer": config.tokenizer not in _TOKENIZERS,
        "cache_dir": bool(config.cache_dir),
    }
    paths: dict[str, Any] = {
        name: str(Path(getattr(config, name)).expanduser().absolute()) for name, path in found.items() if path
    }
    return dataclasses.replace(config, **paths)


def is_gone(place: str) -> bool:
    """Tell whether `place` is an absolute path at which there is no file and no folder."""
    return Path(place).is_absolute() and not Path(place).exists()


def check_there(config: DataConfig, whose: str) -> None:
    """Raise DataError, with the flag to give, if the text of a run, named `whose`, is gone from its place."""
    for name in ("source", "validation"):
        if is_gone(place := getattr(config, name)):
            raise DataError(
                f"the text of {whose} is not at '{place}' any more: say where it is with --config.data.{name}=PATH"
            )
