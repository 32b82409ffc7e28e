"""The registry: names to classes, and `build`, the only place that knows names."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from posx.encodings.alibi import Alibi
from posx.encodings.base import HOOKS, Dims, Encoding, Features, Params, Relative, Tile
from posx.encodings.chain import Chain
from posx.encodings.deberta import Deberta
from posx.encodings.learned import Learned
from posx.encodings.nope import Nope
from posx.encodings.rope import Rope
from posx.encodings.shaw import Shaw
from posx.encodings.sinusoidal import Sinusoidal
from posx.encodings.t5 import T5
from posx.encodings.transformer_xl import TransformerXL
from posx.encodings.tupe import Tupe
from posx.errors import ConfigError, nearest
from posx.fields import typed_fields

ENCODINGS: dict[str, type[Encoding]] = {
    "nope": Nope,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "shaw": Shaw,
    "transformer_xl": TransformerXL,
    "t5": T5,
    "tupe": Tupe,
    "deberta": Deberta,
    "rope": Rope,
    "alibi": Alibi,
}

Spec = str | Mapping[str, Any] | Sequence[Any] | Encoding


def encoding_class(name: str) -> type[Encoding]:
    """The class behind a registry name, or behind "package.module:Class" for a user's own. Raises ConfigError."""
    if name in ENCODINGS:
        return ENCODINGS[name]
    if ":" not in name:
        raise ConfigError(f"unknown encoding {name!r}; {nearest(name, list(ENCODINGS))}known: {', '.join(ENCODINGS)}")
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # importing runs the user's own code
        raise ConfigError(f"encoding {name!r} cannot be imported: {type(error).__name__}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Encoding) and dataclasses.is_dataclass(found)):
        raise ConfigError(f"encoding {name!r} is not a frozen dataclass that derives from posx.Encoding")
    return found


def encoding_name(encoding: Encoding) -> str:
    """The registry name of a value's class, "a+b" for a chain, "package.module:Class" for a user's own."""
    if isinstance(encoding, Chain):
        return "+".join(encoding_name(part) for part in encoding.parts)
    by_class = {cls: name for name, cls in ENCODINGS.items()}
    cls = type(encoding)
    return by_class.get(cls, f"{cls.__module__}:{cls.__qualname__}")


def build(spec: Spec, dims: Dims) -> Encoding:
    """The resolved encoding that `spec` names: a name, a mapping with `name` and fields, or a list for a Chain.

    Raises ConfigError for an unknown name or field (with the nearest valid one), a value of the wrong type, or sizes
    that do not fit the method. The text "auto" leaves a field to be resolved from `dims`.
    """
    if isinstance(spec, Encoding):
        return spec.resolve(dims)
    if isinstance(spec, str):
        return encoding_class(spec)().resolve(dims)
    if isinstance(spec, Mapping):
        if not isinstance(spec.get("name"), str):
            raise ConfigError(f"encoding {dict(spec)} has no name; known: {', '.join(ENCODINGS)}")
        cls = encoding_class(spec["name"])
        given = {key: value for key, value in spec.items() if key != "name"}
        return cls(**typed_fields(cls, given, f"encoding {spec['name']!r}", "encoding.")).resolve(dims)
    if isinstance(spec, Sequence):
        return Chain(tuple(build(part, dims) for part in spec))
    raise ConfigError(f"an encoding is a name, a mapping or a list, not {type(spec).__name__}")


__all__ = [
    "ENCODINGS", "HOOKS", "Chain", "Dims", "Encoding", "Features", "Params", "Relative", "Tile",
    "build", "encoding_class", "encoding_name",
]  # fmt: skip
