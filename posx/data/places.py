"""Where a text lies: as settings name it, and as it was found, from whatever directory and on whatever day."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posx.config.data import DataConfig
from posx.data.corpus import is_path
from posx.errors import DataError

TOKENIZERS = ("bytes", "bpe")


def found(config: DataConfig) -> dict[str, str]:
    """The settings that name places, with every path absolute: what finds the same files from any directory."""
    paths = {
        "source": config.source != "stdlib" and is_path(config.source),
        "validation": bool(config.validation),
        "tokenizer": config.tokenizer not in TOKENIZERS,
        "cache_dir": bool(config.cache_dir),
    }
    return {name: _absolute(getattr(config, name)) if path else getattr(config, name) for name, path in paths.items()}


def again(asked: DataConfig, places: Mapping[str, str]) -> DataConfig:
    """`asked` with its paths as they were `found` once; where nothing lies there now, but here, as it was asked."""
    kept: dict[str, Any] = {}
    for field in dataclasses.fields(asked):
        place = places.get(field.name, "")
        here = Path(getattr(asked, field.name) if place else "").expanduser().exists() or field.name == "cache_dir"
        if place and not (here and is_gone(place)):
            kept[field.name] = place
    return dataclasses.replace(asked, **kept)


def is_gone(place: str) -> bool:
    """Whether `place` is an absolute path at which nothing lies."""
    return Path(place).is_absolute() and not Path(place).exists()


def check_there(config: DataConfig, whose: str) -> None:
    """Raises DataError with the flag to give where the text of a run, named `whose`, does not lie where it lay."""
    for name in ("source", "validation"):
        place = getattr(config, name)
        if is_gone(place):
            raise DataError(
                f"the text of {whose} is not at '{place}' any more: say where it is with --config.data.{name}=PATH"
            )


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
