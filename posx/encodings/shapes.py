"""What the hooks of a value give, checked against the contract by shapes alone: nothing is computed.

`build` does this once for every value and sizes, so that a hook that gives another shape is one line before a run
starts and not a traceback out of a compiled step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Features, Relative, Tile
from posx.encodings.checks import check_decorated, check_fact, facts
from posx.errors import ConfigError, nearest

Struct = jax.ShapeDtypeStruct


def check_value(encoding: Encoding, dims: Dims) -> None:
    """Raises ConfigError where `encoding`, resolved for `dims`, cannot be used as a value or a hook does not fit.

    Encodings in its fields, such as the parts of a chain, come first. Costs a trace of every hook, milliseconds, and is
    remembered.
    """
    check_decorated(type(encoding))
    name = type(encoding).__name__
    for field in dataclasses.fields(encoding):
        value = getattr(encoding, field.name)
        try:
            hash(value)
        except TypeError:
            raise ConfigError(
                f"{name}.{field.name} holds a {type(value).__name__}, but values are compared and hashed: use a "
                "number, a text or a tuple; arrays belong into init"
            ) from None
        if not field.compare:
            raise ConfigError(f"{name}.{field.name} has compare=False: two values that differ in it would pass for one")
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Encoding):
                check_value(part, dims)
    encoding.require_resolved()
    _check_once(encoding, dims)


@functools.lru_cache(maxsize=1024)
def _check_once(encoding: Encoding, dims: Dims) -> None:
    for fact, given in facts(Encoding).items():
        default = None if isinstance(given, property) else given
        check_fact(f"{type(encoding).__name__}.{fact}", fact, getattr(encoding, fact), default)
    Shapes(encoding, dims).check()


class Shapes:
    """Calls every hook that acts with shapes all different from each other, so that no two axes can be mistaken.

    `vectors` is the type of token vectors; all else has the default float type. After `check`, `called` holds what each
    hook was given and what it gave: {hook: (arguments after params, result)}.
    """

    def __init__(self, encoding: Encoding, dims: Dims, vectors: Any = None):
        self.encoding, self.dims = encoding, dims
        self.vectors = vectors or jnp.result_type(float)
        self.called: dict[str, tuple[tuple[Any, ...], Any]] = {}
        self.h, self.g, self.d = dims.num_heads, dims.num_kv_heads or dims.num_heads, dims.head_dim
        taken = {1, self.h, self.g, self.d, dims.model_dim}
        self.q, self.k, self.n = itertools.islice((size for size in itertools.count(3) if size not in taken), 3)
        self.params: Any = {}

    def check(self) -> None:
        """Raises ConfigError for the first hook that does not give what the formula needs."""
        self.params = jax.tree.map(lambda array: self._floats(*array.shape), self._init())
        q_features, k_features = self._features()
        if self.acts("embed"):
            x = self._vectors(self.q, self.dims.model_dim)
            self._expect("embed", self._call("embed", x, self._positions(self.q)), "[t, m]", x.shape)
        mapped_q = self._map("query", self.q, self.h, self.d, q_features)
        mapped_k = self._map("key", self.k, self.g, self.d, k_features)
        if mapped_q != mapped_k:
            hook = "query" if self.acts("query") else "key"
            raise ConfigError(
                f"{self._name}.{hook}: queries are {mapped_q} wide and keys {mapped_k}, but they meet in a product; "
                "give both the same channels"
            )
        width = self._map("value", self.k, self.g, self.d, k_features)
        if self._map("output", self.q, self.h, width, q_features) != self.d:
            raise ConfigError(f"{self._name}.output must give [t, h, d], d = {self.d} as values come in")
        q_pos, k_pos = self._positions(self.q), self._positions(self.k)
        if self.acts("temperature"):
            found = self._call("temperature", q_pos)
            self._expect("temperature", found, "[h, q] or [q]", (self.h, self.q), (self.q,))
        if self.acts("curve"):
            found = self._call("curve", self._floats(self.n))
            self._expect("curve", found, "[h, n]", (self.h, self.n), (1, self.n))
        if self.acts("bias"):
            found = self._call("bias", q_pos, k_pos)
            self._expect("bias", found, "[h, q, k]", (self.h, self.q, self.k), (1, self.q, self.k))
        if self.acts("relative"):
            self._check_relative(width)
        scores = self._floats(self.h, self.q, self.k)
        if self.acts("score"):
            tile = self._tile(mapped_q, q_features, k_features)
            self._expect("score", self._call("score", scores, tile), "[h, q, k]", scores.shape)
        if self.acts("mix"):
            found = self._call("mix", scores, q_pos, k_pos)
            self._expect("mix", found, "[q, h, d]", (self.q, self.h, width))

    def acts(self, hook: str) -> bool:
        return self.encoding.acts_on(hook)

    @property
    def _name(self) -> str:
        return type(self.encoding).__name__

    def _init(self) -> dict[str, Any]:
        params = self._run("init(rng, dims)", lambda: self.encoding.init(jax.random.key(0), self.dims))
        if not isinstance(params, dict) or not all(isinstance(name, str) for name in params):
            raise ConfigError(f"{self._name}.init must give a dict of arrays by name, not {_shown(params)}")
        for name, array in params.items():
            if not _is_float(array):
                raise ConfigError(f"{self._name}.init must give arrays of floats, but {name!r} is {_shown(array)}")
        for name in sorted(self.encoding.shared - params.keys()):
            raise ConfigError(
                f"{self._name}.shared names {name!r}, which init does not give; {nearest(name, list(params))}"
                f"init gives: {', '.join(params) or 'nothing'}"
            )
        return params

    def _features(self) -> tuple[Features, Features]:
        """Features of queries and of keys; the second call goes on from what the first one carried."""
        if not self.acts("features"):
            return {}, {}
        carry, found = None, []
        for length in (self.q, self.k):
            x, pos = self._vectors(length, self.dims.model_dim), self._positions(length)
            given = self._call("features", x, pos, carry)
            if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Mapping)):
                raise ConfigError(f"{self._name}.features must give ({{name: [t, ...]}}, carry), not {_shown(given)}")
            if carry is not None and _shapes(given[1]) != _shapes(carry):
                raise ConfigError(
                    f"{self._name}.features: the carry changes from {_shapes(carry)} to {_shapes(given[1])}, so a "
                    "cache cannot hold it"
                )
            features, carry = given
            for name, array in features.items():
                if not hasattr(array, "shape") or array.shape[:1] != (length,):
                    raise ConfigError(
                        f"{self._name}.features gives {name!r} {_shown(array)} where [t, ...], t = {length}, is wanted"
                    )
            found.append(dict(features))
        return found[0], found[1]

    def _map(self, hook: str, length: int, heads: int, width: int, features: Features) -> int:
        """The width of what `hook` makes of vectors of `width`."""
        if not self.acts(hook):
            return width
        vectors = self._vectors(length, heads, width)
        found = self._call(hook, vectors, self._positions(length), features)
        ends = getattr(found, "shape", (0,))[-1:]
        self._expect(hook, found, "[t, h, d']" if hook == "query" else "[t, g, d']", (length, heads, *ends))
        return ends[0]

    def _check_relative(self, width: int) -> None:
        found = self._call("relative", Struct((self.n,), jnp.int32))
        if not isinstance(found, Relative) or all(part is None for part in found):
            raise ConfigError(f"{self._name}.relative must give Relative(query=..., ...), not {_shown(found)}")
        for name, part in zip(Relative._fields, found, strict=True):
            if part is None:
                continue
            ends = () if name == "bias" else (width if name == "value" else self.d,)
            wanted = "[n, h] or [n, 1]" if name == "bias" else "[n, h, d] or [n, 1, d]"
            self._expect("relative", part, wanted, *((self.n, h, *ends) for h in (self.h, 1)), part=f".{name}")

    def _tile(self, width: int, q_features: Features, k_features: Features) -> Any:
        """A `Tile` of shapes."""
        raw, mapped = ([self._vectors(length, self.h, w) for length in (self.q, self.k)] for w in (self.d, width))
        where = self._positions(self.q), self._positions(self.k), Struct((self.q, self.k), jnp.bool_)
        return Tile._make([*raw, *mapped, q_features, k_features, *where])

    def _floats(self, *shape: int) -> Struct:
        return Struct(shape, jnp.result_type(float))

    def _vectors(self, *shape: int) -> Struct:
        return Struct(shape, self.vectors)

    def _positions(self, length: int) -> Struct:
        return Struct((length,), jnp.int32)

    def _call(self, hook: str, *arguments: Any) -> Any:
        found = self._run(_call_shown(hook, arguments), getattr(self.encoding, hook), self.params, *arguments)
        self.called[hook] = arguments, found
        return found

    def _run(self, shown: str, function: Callable, *arguments: Any) -> Any:
        """The shapes that `function` gives; what it raises becomes one line."""
        try:
            return jax.eval_shape(function, *arguments)
        except ConfigError:
            raise
        except KeyError as error:
            raise ConfigError(
                f"{self._name}.{shown} reads {error}, which is not there; init gives: "
                f"{', '.join(self.params) or 'nothing'}"
            ) from None
        except Exception as error:  # the user's own code
            text = next((line for line in str(error).splitlines() if line.strip()), "")
            raise ConfigError(f"{self._name}.{shown} raises {type(error).__name__}: {text}") from None

    def _expect(self, hook: str, found: Any, wanted: str, *shapes: tuple[int, ...], part: str = "") -> None:
        if not _is_float(found) or found.shape not in shapes:
            sizes = f"h = {self.h}, g = {self.g}, d = {self.d}, q = {self.q}, k = {self.k}, n = {self.n}"
            first = list(shapes[0])
            raise ConfigError(
                f"{self._name}.{hook}{part} gives {_shown(found)} where {wanted} = {first} is wanted ({sizes})"
            )


def _is_float(found: Any) -> bool:
    return hasattr(found, "dtype") and jnp.issubdtype(found.dtype, jnp.floating)


def _shown(found: Any) -> str:
    """A result in a few words: the shape of an array of floats, else its type too."""
    if hasattr(found, "shape"):
        return f"{list(found.shape)}{'' if _is_float(found) else f' of {found.dtype}'}"
    return "None" if found is None else f"a {type(found).__name__}"


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype.name), tree)


def _call_shown(hook: str, arguments: tuple[Any, ...]) -> str:
    shapes = (f"{list(x.shape)}" if hasattr(x, "shape") else "..." for x in arguments)
    return f"{hook}(params, {', '.join(shapes)})"
