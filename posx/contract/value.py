"""`Value`: the base of everything that a spec names, encodings and the rules in their fields."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax

from posx.contract.classes import check_decorated
from posx.contract.fields import field_problems, snake_case, type_hints
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Dims:
    """The sizes a value is resolved against, with the letters that stand for them in shapes.

    Attributes:
      model_dim: m, the width of the model in channels.
      num_heads: h, the number of query heads.
      head_dim: d, the width of a head in channels; h times d may differ from m.
      num_layers: the number of layers.
      train_len: the training length in tokens.
      num_kv_heads: g, the number of key/value heads, which divides h; None for one per query head.
    """

    model_dim: int
    num_heads: int
    head_dim: int
    num_layers: int
    train_len: int
    num_kv_heads: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size is not None and size < 1:
                raise ConfigError(f"{field.name}={size}: every size must be at least 1.")
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ConfigError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}. Choose a divisor of it."
            )

    @property
    def kv_heads(self) -> int:
        """The number of key/value heads."""
        return self.num_kv_heads or self.num_heads


@dataclasses.dataclass(frozen=True, init=False)
class Value:
    """A frozen dataclass of hyper-parameters without arrays: comparable, hashable, spelled by a spec.

    A field named as in `Dims` is set from the sizes if it is None. A field may hold another value.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        check_decorated(type(self))  # a dataclass brings its own __init__

    def __post_init__(self) -> None:
        for problem in field_problems(self):
            raise ConfigError(f"{snake_case(type(self))}: {problem}")
        hints = type_hints(type(self))  # type: ignore[arg-type]
        for field in dataclasses.fields(self):
            if isinstance(hint := hints.get(field.name), type) and issubclass(hint, Value):
                require(hint, getattr(self, field.name), f"{type(self).__name__}: {field.name}")

    def resolve(self, dims: Dims) -> Self:
        """Return the value with every open (None) field set. Raises ConfigError if the sizes do not fit the method.

        This default sets fields named as in `Dims` and resolves values in fields. An override calls `super()` first.
        """
        sizes = dataclasses.asdict(dims) | {"num_kv_heads": dims.kv_heads}
        own = {field.name: sizes[field.name] for field in dataclasses.fields(self) if field.name in sizes}
        return self.with_inner(lambda inner: inner.resolve(dims)).fill_open(**own)

    def at_length(self, length: int) -> Self:
        """Return the value to use for windows of `length` tokens; parameters stay the same."""
        return self.with_inner(lambda inner: inner.at_length(length))

    def fill_open(self, **defaults: Any) -> Self:
        """Return the value with `defaults` in those of the named fields that are None."""
        opened = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **opened) if opened else self

    def with_inner(self, change: Callable[[Any], Any]) -> Self:
        """Return the value with `change` applied to the values in its fields."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        fields = jax.tree.map(lambda inner: change(inner) if isinstance(inner, Value) else inner, given)
        return self if fields == given else dataclasses.replace(self, **fields)


def walk_values(value: Value) -> Iterator[Value]:
    """Yield the value and the values in its fields, at any depth."""
    yield value
    for field in dataclasses.fields(value):
        for inner in jax.tree.leaves(getattr(value, field.name)):
            if isinstance(inner, Value):
                yield from walk_values(inner)


def require(kind: type, given: Any, where: str) -> None:
    """Raise ConfigError unless `given` is a value of the kind. A spec needs the model's sizes to become one."""
    if not isinstance(given, kind):
        family = kind.__mro__[kind.__mro__.index(Value) - 1]  # Encoding, of any encoding
        noun = snake_case(family).replace("_", " ")
        raise ConfigError(f"{where}={given!r} is no {noun}'s value. Give posx.build({given!r}, dims) instead.")


@functools.lru_cache(maxsize=1024)
def require_resolved(value: Value) -> None:
    """Raise ConfigError that names the open fields of the value, or of a value in its fields."""
    for part in walk_values(value):
        if unset := [field.name for field in dataclasses.fields(part) if getattr(part, field.name) is None]:
            where = f"{type(part).__name__}.{unset[0]}"
            raise ConfigError(f"{where} is not set. Call resolve(dims) or build(...), or give {unset}.")
