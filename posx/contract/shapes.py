"""Checks of what an encoding is and what its hooks return, by shapes alone: nothing is computed.

`build` checks a value for the sizes of a model. A hook that returns another shape is then one line, and not a traceback
out of a compiled step. `posx.contract.sizes` does the same for every call of `attend`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from posx.contract.arrays import wide_dtype
from posx.contract.classes import check_decorated, check_fact, facts
from posx.contract.composite import Composite
from posx.contract.encoding import Dims, Encoding, abstract_params, acting, require_resolved
from posx.contract.hooks import HOOKS, ByDistance, Features, Params, Tile
from posx.errors import ConfigError, PosxError, nearest

Struct = jax.ShapeDtypeStruct


class Use(NamedTuple):
    """The sizes and types of one use of an encoding, without batch and tokens, or arrays that have those."""

    q: Any  # [h, d]
    k: Any  # [g, d], or as `key` returned it
    v: Any  # [g, d]
    pos: Any  # the positions' type
    x: Any  # [m], the input of `features`; None if they are given
    q_features: Features  # {name: [...]}
    k_features: Features
    keys_mapped: bool  # k is what `key` returned

    @property
    def heads(self) -> str:
        (h, d), (g, k_width), (_, v_width) = self.q.shape, self.k.shape, self.v.shape
        return f"q has {h} heads of {d}, k and v {g} of {k_width} and {v_width}"


def check_value(encoding: Encoding, dims: Dims) -> None:
    """Raise ConfigError if `encoding`, resolved for `dims`, cannot be used as a value or a hook does not fit.

    Encodings in its fields, such as the parts of a chain, come first. It costs a trace of every hook, milliseconds, and
    is remembered.
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
    require_resolved(encoding)
    _check_value(encoding, dims)


@functools.lru_cache(maxsize=1024)
def _check_value(encoding: Encoding, dims: Dims) -> None:
    for fact, given in facts(Encoding).items():
        default = None if isinstance(given, property) else given
        check_fact(f"{type(encoding).__name__}.{fact}", fact, getattr(encoding, fact), default)
    check_hooks(encoding, dims)


def check_hooks(encoding: Encoding, dims: Dims, vectors: Any = None) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """Return {hook: (arguments, result)}: what each acting hook is given in a model of these sizes, and returns.

    Arguments are without params. `vectors` is the type of token vectors; all else has the default float type. Raises
    ConfigError for the first hook that does not fit, and if `init` returns no parameters of floats.
    """
    floats = jnp.result_type(float)
    h, d, dtype = dims.num_heads, dims.head_dim, vectors or floats
    q, k, x = (Struct(shape, dtype) for shape in ((h, d), (dims.kv_heads, d), (dims.model_dim,)))
    params = {name: Struct(array.shape, floats) for name, array in _init(encoding, dims).items()}
    check = HookCheck(encoding, params, Use(q, k, k, jnp.dtype(jnp.int32), x, {}, {}, keys_mapped=False))
    return check.run(("embed",))


def _init(encoding: Encoding, dims: Dims) -> Params:
    try:
        params = abstract_params(encoding, dims)
    except PosxError:
        raise
    except Exception as error:  # the user's own code
        raise ConfigError(f"{encoding}.init(rng, dims) raises {_one_line(error)}") from error
    if not isinstance(params, dict) or not all(isinstance(name, str) for name in params):
        raise ConfigError(f"{encoding}.init must give a dict of arrays by name, not {_shown(params)}")
    for name, array in params.items():
        if not _is_float(array):
            raise ConfigError(f"{encoding}.init must give arrays of floats, but {name!r} is {_shown(array)}")
    for fact in ("shared", "decayed"):
        for name in sorted(getattr(encoding, fact) - params.keys()):
            raise ConfigError(
                f"{encoding}.{fact} names {name!r}, which init does not give; {nearest(name, list(params))}"
                f"init gives: {', '.join(params) or 'nothing'}"
            )
    return params


def with_history(encoding: Encoding, hook: str, x: Struct) -> Struct:
    """Return x [t, ...] with the earlier tokens beside each one that the hook sees."""
    n = encoding.history.get(hook, 0)
    return Struct((x.shape[0], 1 + n, *x.shape[1:]), x.dtype) if n else x


class HookCheck:
    """Calls every hook that acts, with numbers of tokens that no other axis has, so that no two can be mistaken."""

    def __init__(self, encoding: Encoding, params: Params, use: Use):
        self.encoding, self.params, self.use = encoding, params, use
        taken = {size for x in (use.q, use.k, use.v, use.x) if x is not None for size in x.shape} | {1}
        q, k, n = itertools.islice((size for size in itertools.count(3) if size not in taken), 3)
        self.sizes = {"h": use.q.shape[0], "g": use.k.shape[0], "d": use.q.shape[1], "q": q, "k": k, "n": n}
        self.sizes |= {"m": use.x.shape[0]} if use.x is not None else {}
        #: The arguments of each hook, and its result.
        self.called: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def run(self, before: tuple[str, ...] = ()) -> dict[str, tuple[tuple[Any, ...], Any]]:
        """Return `called`. Raises ConfigError for the first hook that does not return what the formula needs.

        before: hooks that act outside of attention and are called too.
        """
        self._check_history()
        use, sizes = self.use, self.sizes
        q, k, v = (self._tokens(letter, x) for letter, x in (("q", use.q), ("k", use.k), ("k", use.v)))
        given: dict[str, Any] = {"q_pos": self._pos("q"), "k_pos": self._pos("k"), "distance": self._pos("n")}
        given["s"] = Struct((sizes["h"], sizes["q"], sizes["k"]), wide_dtype(use.q.dtype))
        if "embed" in before and self.encoding.acts_on("embed"):
            self._expect("embed", self._call("embed", self._tokens("q", use.x), given["q_pos"]), HOOKS["embed"].gives)
        q_features, k_features = self._features()
        mapped_q, mapped_k = self._map("query", q, q_features), k
        if not use.keys_mapped:
            mapped_k = self._map("key", k, k_features)
        self._check_widths(mapped_q, mapped_k)
        sizes["d'"] = mapped_q.shape[-1]
        given |= {"pos": given["q_pos"], "features": q_features}
        given["tile"] = Tile._make((
            q, _repeated(k, sizes["h"]), mapped_q, _repeated(mapped_k, sizes["h"]), q_features, k_features,
            given["q_pos"], given["k_pos"], Struct((1, sizes["q"], 1), given["s"].dtype),
            Struct((sizes["q"], sizes["k"]), jnp.bool_),
        ))  # fmt: skip
        for name in acting(self.encoding):
            if name in ("embed", "features", "query", "key"):
                continue
            found = self._call(name, *(given[argument] for argument in HOOKS[name].takes))
            if name == "by_distance":
                self._check_by_distance(found, v.shape[-1])
            else:
                self._expect(name, found, HOOKS[name].gives)
        return self.called

    def _features(self) -> tuple[Features, Features]:
        """Return the features of queries and of keys; the second call goes on from what the first one carried."""
        use = self.use
        if use.x is None or not self.encoding.acts_on("features"):
            return self._tokens("q", use.q_features), self._tokens("k", use.k_features)
        carry, found = None, []
        for letter in ("q", "k"):
            x = with_history(self.encoding, "features", self._tokens(letter, use.x))
            given = self._call("features", x, self._pos(letter), carry)
            if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Mapping)):
                raise ConfigError(
                    f"{self.encoding}.features must give ({{name: [t, ...]}}, carry), not {_shown(given)}"
                )
            if carry is not None and _types(given[1]) != _types(carry):
                raise ConfigError(
                    f"{self.encoding}.features: the carry changes from {_types(carry)} to {_types(given[1])}, so a "
                    "cache cannot hold it"
                )
            features, carry = given
            for name, array in features.items():
                if not hasattr(array, "shape") or array.shape[:1] != (self.sizes[letter],):
                    raise ConfigError(
                        f"{self.encoding}.features gives {name!r} {_shown(array)} where [{letter}, ...] is wanted "
                        f"({self._where})"
                    )
            found.append(dict(features))
        return found[0], found[1]

    def _map(self, hook: str, vectors: Struct, features: Features) -> Struct:
        if not self.encoding.acts_on(hook):
            return vectors
        given = with_history(self.encoding, hook, vectors)
        return self._expect(hook, self._call(hook, given, self._pos(hook[0]), features), HOOKS[hook].gives)

    def _check_history(self) -> None:
        history = self.encoding.history
        check_fact(f"{type(self.encoding).__name__}.history", "history", history, None)
        if idle := [hook for hook in history if not self.encoding.acts_on(hook)]:
            raise ConfigError(f"{self.encoding}.history names {idle[0]}, which this encoding does not define")

    def _check_widths(self, q: Struct, k: Struct) -> None:
        if q.shape[-1] != k.shape[-1]:
            hook = "query" if self.encoding.acts_on("query") else "key"
            raise ConfigError(
                f"{self.encoding}.{hook}: queries are {q.shape[-1]} wide and keys {k.shape[-1]} wide, but they meet in "
                f"a product; give both the same channels ({self._where})"
            )

    def _check_by_distance(self, found: Any, value_width: int) -> None:
        if not isinstance(found, ByDistance) or (
            all(term is None for term in found) and not isinstance(self.encoding, Composite)
        ):
            raise ConfigError(f"{self.encoding}.by_distance must give ByDistance(bias=..., ...), not {_shown(found)}")
        forms = {"bias": "h or 1, n", "scaled": "h or 1, n", "query": "n, h or 1, d", "key": "n, h or 1, d"}
        for name, term in found._asdict().items():
            if term is not None:
                self._expect(f"by_distance.{name}", term, forms.get(name, "n, h or 1, d"),
                             **({"d": value_width} if name == "value" else {}))  # fmt: skip

    def _tokens(self, letter: str, tree: Any) -> Any:
        return jax.tree.map(lambda x: Struct((self.sizes[letter], *x.shape), x.dtype), tree)

    def _pos(self, letter: str) -> Struct:
        return Struct((self.sizes[letter],), self.use.pos)

    def _call(self, hook: str, *arguments: Any) -> Any:
        """Return the shapes that `hook` returns; what it raises becomes one line."""
        shapes = (f"{list(x.shape)}" if hasattr(x, "shape") else "..." for x in arguments)
        made = f"{self.encoding}.{hook}({', '.join(('params', *shapes))})"
        try:
            found = jax.eval_shape(getattr(self.encoding, hook), self.params, *arguments)
        except PosxError:
            raise
        except KeyError as error:
            has = ", ".join(self.params) or "nothing"
            given = [x if isinstance(x, dict) else getattr(x, "q_features", {}) for x in arguments]
            features = ", ".join(name for names in given for name in names)
            has += f"; features: {features}" if features else ""
            raise ConfigError(f"{made} reads {error}, which is not there; params has: {has} ({self._where})") from error
        except Exception as error:  # the user's own code
            raise ConfigError(f"{made} raises {_one_line(error)} ({self._where})") from error
        self.called[hook] = arguments, found
        return found

    def _expect(self, what: str, found: Any, wanted: str, **sizes: int) -> Any:
        """Return `found`. Raises ConfigError unless it is floats of the `wanted` shape: letters, 1, "*" for any."""
        known: dict[str, Any] = {"1": 1, "*": "*"} | self.sizes | sizes
        form = [[known[letter] for letter in axis.split(" or ")] for axis in wanted.split(", ")]
        fits = _is_float(found) and len(found.shape) == len(form)
        if fits and all(size in axis or "*" in axis for size, axis in zip(found.shape, form, strict=True)):
            return found
        numbers = ", ".join(" or ".join(map(str, dict.fromkeys(axis))) for axis in form)
        raise ConfigError(
            f"{self.encoding}.{what} gives {_shown(found)} where [{wanted}] = [{numbers}] is wanted ({self._where})"
        )

    @property
    def _where(self) -> str:
        return f"{self.use.heads}; {', '.join(f'{letter} = {self.sizes[letter]}' for letter in 'qkn')}"


def _repeated(x: Struct, heads: int) -> Struct:
    return Struct((x.shape[0], heads, x.shape[2]), x.dtype)


def _is_float(found: Any) -> bool:
    return hasattr(found, "dtype") and jnp.issubdtype(found.dtype, jnp.floating)


def _shown(found: Any) -> str:
    """Return a result in a few words: the shape of an array of floats, else its type too."""
    if hasattr(found, "shape"):
        return f"{list(found.shape)}{'' if _is_float(found) else f' of {found.dtype}'}"
    return "None" if found is None else f"a {type(found).__name__}"


def _one_line(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"


def _types(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype.name), tree)
