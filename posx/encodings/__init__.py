"""The registry: names to classes, specs to values and back; the only place that knows names."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from posx.encodings.base import HOOKS, Dims, Encoding, Features, Params, Relative, Tile, parts
from posx.encodings.chain import Chain
from posx.encodings.checks import check_decorated
from posx.encodings.grammar import parse, unparse
from posx.encodings.sources import source_digest
from posx.encodings.values import check_value
from posx.errors import ConfigError, nearest
from posx.fields import typed_fields
from posx.lazy import modules_of

#: Every encoding by name, and the file and class that define it.
_DEFINED = {
    "nope": "nope:Nope",
    "sinusoidal": "absolute.sinusoidal:Sinusoidal",
    "learned": "absolute.learned:Learned",
    "shaw": "relative.shaw:Shaw",
    "transformer_xl": "relative.transformer_xl:TransformerXL",
    "t5": "biases.t5:T5",
    "tupe": "biases.tupe:Tupe",
    "deberta": "relative.deberta:Deberta",
    "rope": "rotary.rope:Rope",
    "xpos": "rotary.xpos:Xpos",
    "pope": "rotary.pope:Pope",
    "fope": "rotary.fope:Fope",
    "selective_rope": "rotary.selective_rope:SelectiveRope",
    "key_offset": "rotary.key_offset:KeyOffset",
    "alibi": "biases.alibi:Alibi",
    "fox": "content.fox:Fox",
    "cope": "content.cope:Cope",
    "dape": "content.dape:Dape",
    "inkling": "content.inkling:Inkling",
    "grape_a": "content.grape_a:GrapeA",
    "path": "content.path:Path",
    "kerple": "biases.kerple:Kerple",
    "bam": "biases.bam:Bam",
    "sandwich": "biases.sandwich:Sandwich",
    "fire": "biases.fire:Fire",
    "dynamic_bias": "biases.dynamic_bias:DynamicBias",
    "nape": "biases.nape:Nape",
    "log_length": "temperatures.log_length:LogLength",
    "ssmax": "temperatures.ssmax:Ssmax",
    "llama4_temperature": "temperatures.llama4_temperature:Llama4Temperature",
    "adaptive_temperature": "temperatures.adaptive_temperature:AdaptiveTemperature",
}


def _defined(place: str) -> type[Encoding]:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


ENCODINGS: dict[str, type[Encoding]] = {name: _defined(place) for name, place in _DEFINED.items()}

#: What a combination of encodings is called where it stands as a mapping; in a text it is written with +.
CHAIN = "chain"

Spec = str | Mapping[str, Any] | Sequence[Any] | Encoding


_module = modules_of(__name__)


def __getattr__(name: str) -> Any:
    """Return a registered class by its own name, as for `from posx.encodings import Rope`, or a module of this room."""
    for cls in ENCODINGS.values():
        if cls.__name__ == name:
            return cls
    return _module(name)


def encoding_class(name: str) -> type[Encoding]:
    """The class behind a registry name, or behind "package.module:Class" for a user's own. Raises ConfigError."""
    if name in ENCODINGS:
        return ENCODINGS[name]
    if name == CHAIN:
        return Chain
    if ":" not in name:
        raise ConfigError(f"unknown encoding {name!r}; {nearest(name, list(ENCODINGS))}known: {', '.join(ENCODINGS)}")
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except ConfigError as error:  # of an encoding's class, see `checks`
        raise ConfigError(f"encoding {name!r}: {error}") from None
    except (Exception, SystemExit) as error:  # importing runs the user's own code
        meant = f"; did you mean {module_name[:-3]}:{class_name}?" if module_name.endswith(".py") else ""
        raise ConfigError(f"encoding {name!r} cannot be imported: {type(error).__name__}: {error}{meant}") from None
    if not (isinstance(found, type) and issubclass(found, Encoding)):
        raise ConfigError(f"encoding {name!r} is not a frozen dataclass that derives from posx.Encoding")
    check_decorated(found)
    source_digest(found)  # now, while the file is what was imported
    return found


def encoding_name(encoding: Encoding) -> str:
    """The registry name of a value's class, "a+b" for a chain, "package.module:Class" for a user's own."""
    if isinstance(encoding, Chain):
        return "+".join(encoding_name(part) for part in encoding.parts)
    by_class = {cls: name for name, cls in ENCODINGS.items()}
    cls = type(encoding)
    return by_class.get(cls, f"{cls.__module__}:{cls.__qualname__}")


def spec_text(spec: Spec) -> str:
    """What can be typed for `spec`, with the fields that it sets to other than their defaults: rope(base=500000)+alibi.

    Raises ConfigError as `build` does.
    """
    return unparse(_told(from_spec(spec)))


def build(spec: Spec, dims: Dims) -> Encoding:
    """The resolved encoding that `spec` names: a text such as "rope(base=500000)+alibi" (see `grammar`), a mapping with
    `name` and fields, or a list of either for a Chain.

    Raises ConfigError for an unknown name or field (with the nearest valid one), a value of the wrong type, sizes
    that do not fit the method, or a hook that does not give what the formula needs (see `shapes`). The text "auto"
    leaves a field to be resolved from `dims`.
    """
    encoding = from_spec(spec)
    resolved = _called(f"{type(encoding).__name__}.resolve", encoding.resolve, dims)
    if not isinstance(resolved, Encoding):
        raise ConfigError(f"{type(encoding).__name__}.resolve must return the value, not {resolved!r}")
    check_value(resolved, dims)
    return resolved


def from_spec(spec: Spec) -> Encoding:
    """The value that `spec` names, its open fields open: nothing is resolved. Raises ConfigError as `build` does."""
    if isinstance(spec, Encoding):
        return spec
    if isinstance(spec, str):
        spec = parse(spec)
    if isinstance(spec, Mapping):
        name = _name(spec)
        if spec == {"name": CHAIN}:
            raise ConfigError(f"{CHAIN!r} alone is no encoding: write the parts of a chain with +, such as rope+alibi")
        return _called(f"encoding {name!r}", encoding_class(name), **given_fields(spec))
    if isinstance(spec, Sequence):
        return Chain(tuple(from_spec(part) for part in spec))
    raise ConfigError(f"an encoding is a name, a mapping or a list, not {type(spec).__name__}")


def given_fields(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a mapping sets, typed, encodings in them as values; those that it leaves open are not among them.

    Raises ConfigError.
    """
    name = _name(spec)
    cls = encoding_class(name)
    given = {key: value for key, value in spec.items() if key != "name"}
    typed = typed_fields(cls, given, f"encoding {name!r}", "encoding.")
    hints = typing.get_type_hints(cls)
    return {key: _nested(value, hints[key]) for key, value in typed.items()}


def spec_of(encoding: Encoding) -> dict[str, Any] | list[Any]:
    """The spec that `from_spec` makes this very value of: a mapping that names every field, a list for a Chain."""
    if isinstance(encoding, Chain):
        return [spec_of(part) for part in encoding.parts]
    values = {field.name: getattr(encoding, field.name) for field in dataclasses.fields(encoding) if field.init}
    return {"name": encoding_name(encoding), **{key: _plain(value) for key, value in values.items()}}


def code_of(layers: Iterable[Encoding]) -> dict[str, str]:
    """{name: digest of its source} of the user's own classes among `layers`, in chains and fields too; see `sources`.

    Encodings of posx are not among them.
    """
    values = [part for encoding in dict.fromkeys(layers) for part in parts(encoding)]
    digests = {encoding_name(value): source_digest(type(value)) for value in values}
    return {name: digest for name, digest in sorted(digests.items()) if digest}


def _told(value: Any) -> Any:
    """`value` as a spec that names only what is not the default."""
    if isinstance(value, Chain):
        return [_told(part) for part in value.parts]
    if isinstance(value, tuple):
        return tuple(map(_told, value))
    if not isinstance(value, Encoding):
        return value
    given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    defaults = {f.name: f.default for f in dataclasses.fields(value)}
    told = {name: _told(inner) for name, inner in given.items() if inner is not None and inner != defaults[name]}
    return {"name": encoding_name(value), **told}


def _name(spec: Mapping[str, Any]) -> str:
    if not isinstance(spec.get("name"), str):
        raise ConfigError(f"encoding {dict(spec)} has no name; known: {', '.join(ENCODINGS)}")
    return spec["name"]


def _nested(value: Any, hint: Any) -> Any:
    """The value of a field of type `hint`, made from its spec where it holds encodings."""
    kinds = (hint, *typing.get_args(hint))
    if not any(isinstance(kind, type) and issubclass(kind, Encoding) for kind in kinds):
        return value
    if typing.get_origin(hint) is tuple:
        return tuple(map(from_spec, value))
    made = from_spec(value)
    if isinstance(hint, type) and not isinstance(made, hint):
        raise ConfigError(f"{encoding_name(made)!r} stands where an encoding of the kind {hint.__name__} is wanted")
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return spec_of(value) if isinstance(value, Encoding) else value


def _called(what: str, function: Callable, *args: Any, **fields: Any) -> Any:
    """What a user's own code on the host returns; what it raises becomes one line."""
    try:
        return function(*args, **fields)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} raises {type(error).__name__}: {' '.join(str(error).split())}") from None


__all__ = [
    "CHAIN", "ENCODINGS", "HOOKS", "Chain", "Dims", "Encoding", "Features", "Params", "Relative", "Tile",
    "build", "code_of", "encoding_class", "encoding_name", "from_spec", "given_fields", "spec_of", "spec_text",
]  # fmt: skip
