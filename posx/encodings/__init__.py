"""The registry: names to classes, specs to values and back. No other file knows names."""

from __future__ import annotations

import dataclasses
import math
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from posx.contract import Chain, Dims, Encoding, Value, walk_values
from posx.contract.fields import snake_case
from posx.contract.shapes import check_usable
from posx.contract.sources import source_digest
from posx.encodings.frequencies import RULES, FrequencyRule
from posx.encodings.grammar import own_class, parse, parse_field, unparse, value_text
from posx.encodings.inheritance import check_change, inherit_fields
from posx.errors import ConfigError, nearest
from posx.lazy import module_getter
from posx.parsing import typed_fields

#: The class of each encoding. Its name is the class in snake case, and its module has that name.
_CLASSES = (
    "Nope", "Sinusoidal", "Learned", "Shaw", "TransformerXL", "T5", "Tupe", "Deberta", "Rope", "Xpos", "Pope", "Fope",
    "Darope", "SelectiveRope", "AccumulatedRope", "RotatedValues", "SelfExtend", "DualChunk", "Mrope", "Axial",
    "KeyOffset", "Canon", "Alibi", "Fox", "Cope", "Dape", "Inkling", "GrapeA", "Gape", "Path", "Kerple", "Bam",
    "Sandwich", "Fire", "DynamicBias", "Nape", "LogLength", "Ssmax", "Llama4Temperature", "AdaptiveTemperature",
    "LearnedSinks",
)  # fmt: skip
_PLACES = {name: f"{__name__}.{snake_case(name)}" for name in _CLASSES}

__getattr__ = module_getter(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Catalogue(Mapping[str, type[Encoding]]):
    """Classes by name, each of which is imported and checked when it is first asked for."""

    names = {snake_case(name): name for name in _CLASSES}

    def __getitem__(self, name: str) -> type[Encoding]:
        return getattr(sys.modules[__name__], self.names[name])

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"ENCODINGS({', '.join(self)})"


#: Every encoding by name. To list the names imports no class.
ENCODINGS: Mapping[str, type[Encoding]] = _Catalogue()

#: The name of a combination of encodings in a mapping. A text has + instead.
CHAIN = "chain"

#: The registry of each kind of value, and its noun in messages.
_REGISTRIES: dict[type[Value], tuple[Mapping[str, type[Value]], str]] = {
    Encoding: (ENCODINGS, "encoding"), FrequencyRule: (RULES, "frequency rule"),
}  # fmt: skip

Spec = str | Mapping[str, Any] | Sequence[Any] | Value


def encoding_class(name: str) -> type[Encoding]:
    """Return the class of a registry name, or of a user's "package.module:Class". Raises ConfigError."""
    return Chain if name == CHAIN else _find_class(name, Encoding)


def _find_class(name: str, kind: type[Value]) -> Any:
    """Return the class that is named in a field of `kind`: of the registry, or a user's own."""
    registry, noun = _REGISTRIES[kind]
    if name in registry:
        return registry[name]
    if ":" not in name:
        if name in RULES:
            raise ConfigError(f"{name!r} is a rule for RoPE's frequencies. Write rope(frequencies={name}).")
        raise ConfigError(
            f"{noun} {name!r} is unknown. {nearest(name, list(registry))}The {noun}s are: {', '.join(registry)}."
        )
    cls = own_class(name, kind, "posx", noun)
    source_digest(cls)  # now, before the file can change
    return cls


def encoding_name(encoding: Value) -> str:
    """Return the registry name of a value's class, "a+b" for a chain, "package.module:Class" for a user's class."""
    if isinstance(encoding, Chain):
        return "+".join(map(encoding_name, encoding.parts))
    cls, name = type(encoding), snake_case(type(encoding))
    if _PLACES.get(cls.__name__) == cls.__module__ or RULES.get(name) is cls:
        return name
    return f"{cls.__module__}:{cls.__qualname__}"


def spec_text(spec: Spec) -> str:
    """Return the text of `spec` with the fields that differ from their defaults: rope(base=500000)+alibi.

    Raises ConfigError as `build` does.
    """
    return unparse(_spec(from_spec(spec), every=False))


def field_text(value: Any) -> str:
    """Return the value of a field as it can be typed, or as Python prints it if it has no spelling."""
    if isinstance(value, float) and not math.isfinite(value):  # the default of a user's class
        return str(value)
    return spec_text(value) if isinstance(value, Value) else value_text(value)


def build(spec: Spec, dims: Dims) -> Encoding:
    """Return the resolved encoding that `spec` names.

    Args:
      spec: a text such as "rope(base=500000)+alibi" (see `grammar`), a mapping with `name` and fields, or a list of
        either for a Chain. The text "auto" leaves a field to be resolved from `dims`.
      dims: the sizes of the model.

    Raises:
      ConfigError: a name or field is unknown, a value has the wrong type, or the sizes do not fit the method. Also if a
        hook does not return the shapes that the formula needs (see `posx.contract.shapes`).
    """
    encoding = from_spec(spec)
    resolved = _call_user_code(f"{type(encoding).__name__}.resolve", encoding.resolve, dims)
    if not isinstance(resolved, Encoding):
        raise ConfigError(f"{type(encoding).__name__}.resolve must return the value, not {resolved!r}")
    check_usable(resolved, dims)
    return resolved


def from_spec(spec: Spec, kind: type[Value] = Encoding, over: Value | None = None) -> Any:
    """Return the value of a kind that `spec` names, with its open fields still open.

    Fields that the spec does not name are their defaults, or as in the value `over` (see `inherit_fields`). Raises
    ConfigError as `build`.
    """
    if isinstance(spec, Value):
        return spec
    if isinstance(spec, str):
        spec = parse(spec)
    noun = _REGISTRIES[kind][1]
    if isinstance(spec, Mapping):
        name = _name(spec)
        if spec == {"name": CHAIN}:
            raise ConfigError(f"{CHAIN!r} alone is no encoding. Write the parts of a chain with +, such as rope+alibi")
        cls = encoding_class(name) if kind is Encoding else _find_class(name, kind)
        old = inherit_fields(cls, over, spec.keys()) if over else {}
        return _call_user_code(f"{noun} {name!r}", cls, **_read_fields(cls, noun, spec, old, over))
    if isinstance(spec, Sequence) and kind is Encoding:
        parts = tuple(map(from_spec, spec, [kind] * len(spec), _overs(spec, over)))
        if isinstance(over, Chain) and any(over in walk_values(part) for part in parts):
            raise ConfigError(f"{unparse(spec)}: a part would hold the whole chain {spec_text(over)}. Write it out.")
        return Chain(parts)
    forms = "an encoding is a name, a mapping or a list" if kind is Encoding else f"a {noun} is a name or a mapping"
    raise ConfigError(f"{forms}, not {type(spec).__name__}")


def changed(text: str, trained: Encoding) -> Encoding:
    """Return the encoding that `text` makes of a trained one, with open fields still open.

    A spec changes the fields that it names, as `rope(base=500000)`. A field alone, as `base=500000`, is changed in the
    one value inside `trained` that has it.

    Raises:
      ConfigError: as `build`, or if what the text does not name would change (see `check_change`).
    """
    fields = parse_field(text)
    if fields is None:
        spec = parse(text)
        new = from_spec(spec, over=trained)
        check_change(new, trained, spec)
        return new
    (name,) = fields
    owners = [value for value in walk_values(trained) if name in {field.name for field in dataclasses.fields(value)}]
    if len(owners) != 1:
        known = dict.fromkeys(f.name for value in walk_values(trained) for f in dataclasses.fields(value) if f.init)
        parts = " and ".join(map(encoding_name, owners))
        problem = f"{parts} have this field. Write out the whole spec" if owners else "there is no such field"
        near = "" if owners else nearest(name, list(known))
        raise ConfigError(f"{text} on {spec_text(trained)}: {problem}. {near}The fields are: {', '.join(known)}.")
    (owner,) = owners
    kind = next(kind for kind in _REGISTRIES if isinstance(owner, kind))
    new = from_spec({"name": encoding_name(owner), **fields}, kind, over=owner)

    def replace(value: Value) -> Value:
        return new if value is owner else value.with_inner(replace)

    return replace(trained)  # type: ignore[return-value]


def _overs(spec: Sequence[Any], over: Value | None) -> Sequence[Value | None]:
    """Return the trained value for each part of a chain's spec: its own part if the trained chain has the same names.

    Otherwise it is the whole `over`, from which each part takes over what fits.
    """
    names = [part.get("name") if isinstance(part, Mapping) else None for part in spec]
    return over.parts if isinstance(over, Chain) and names == [*map(encoding_name, over.parts)] else [over] * len(spec)


def _read_fields(
    cls: type, noun: str, spec: Mapping[str, Any], old: Mapping[str, Any], over: Value | None
) -> dict[str, Any]:
    """Return the fields of a spec as values; those that it does not name are as in `old`, which is made of `over`."""
    given = {key: value for key, value in spec.items() if key != "name"}
    kept = {key: value for key, value in old.items() if key not in given}
    typed = kept | typed_fields(cls, given, f"{noun} {spec['name']!r}", "encoding.")
    needed = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING and field.init]
    if missing := [name for name in needed if name not in typed]:
        raise ConfigError(f"{noun} {spec['name']!r} needs {missing[0]}. Write {spec['name']}({missing[0]}=...).")
    hints = typing.get_type_hints(cls)
    return {key: _read_field(value, hints[key], old.get(key, over)) for key, value in typed.items()}


def spec_of(encoding: Encoding) -> dict[str, Any] | list[Any]:
    """Return the spec that `from_spec` turns into this value: a mapping with every field, or a list for a Chain."""
    return _spec(encoding, every=True)


def code_of(layers: Iterable[Encoding]) -> dict[str, str]:
    """Return {name: digest of its source} of the user's classes in `layers`, also inside chains and fields.

    Encodings of posx have no digest, see `posx.contract.sources`.
    """
    values = [part for encoding in dict.fromkeys(layers) for part in walk_values(encoding)]
    digests = {encoding_name(value): source_digest(type(value)) for value in values}
    return {name: digest for name, digest in sorted(digests.items()) if digest}


def _spec(value: Any, every: bool) -> Any:
    """Return `value` with encodings as specs of every field, or of the fields that differ from their defaults."""
    if isinstance(value, Chain):
        return [_spec(part, every) for part in value.parts]
    if isinstance(value, tuple):
        return tuple(_spec(item, every) for item in value)
    if not isinstance(value, Value):
        return value
    given = {field: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    shown = {f.name: _spec(x, every) for f, x in given.items() if every or (x is not None and x != f.default)}
    return {"name": encoding_name(value), **shown}


def _name(spec: Mapping[str, Any]) -> str:
    if not isinstance(spec.get("name"), str):
        raise ConfigError(f"encoding {dict(spec)} has no name. The encodings are: {', '.join(ENCODINGS)}.")
    return spec["name"]


def _read_field(value: Any, hint: Any, old: Any) -> Any:
    """Return the value of a field of type `hint`. Specs in it become values, over the `old` one if there is one."""
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type) and issubclass(kind, Value)]
    if not kinds:
        return value
    registry = next(kind for kind in _REGISTRIES if issubclass(kinds[0], kind))
    if typing.get_origin(hint) is tuple:
        olds = old if isinstance(old, tuple) and len(old) == len(value) else [None] * len(value)
        return tuple(map(from_spec, value, [registry] * len(value), olds))
    made = from_spec(value, registry, old)
    if isinstance(hint, type) and not isinstance(made, hint):
        raise ConfigError(f"{encoding_name(made)!r} is given, but an encoding of the kind {hint.__name__} is expected.")
    return made


def _call_user_code(name: str, function: Callable, /, *args: Any, **fields: Any) -> Any:
    """Call a user's code. Its exception becomes a ConfigError of one line."""
    try:
        return function(*args, **fields)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{name} raises {type(error).__name__}: {' '.join(str(error).split())}") from None


__all__ = [
    *_CLASSES, "CHAIN", "ENCODINGS", "RULES", "Chain", "Dims", "Encoding", "FrequencyRule", "build", "changed",
    "code_of", "encoding_class", "encoding_name", "from_spec", "spec_of", "spec_text",
]  # fmt: skip
