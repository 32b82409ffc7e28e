"""Checks of an encoding and of the results of its hooks, by shapes alone: nothing is computed.

`build` checks a value for the sizes of a model. A hook that returns another shape is then one line, and not a traceback
out of a compiled step. `posx.contract.sizes` does the same for every call of `attend`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from posx.contract.arrays import wide_dtype
from posx.contract.classes import check_decorated
from posx.contract.composite import Composite
from posx.contract.encoding import Encoding, abstract_params, position_shape
from posx.contract.facts import FACTS, LOOKING_BACK, check_fact
from posx.contract.hooks import HOOKS, MAPS, ByDistance, Features, Params, Tile, acting_hooks, select_hooks
from posx.contract.value import Dims, require_resolved, walk_values
from posx.errors import ConfigError, PosxError, nearest

Struct = jax.ShapeDtypeStruct
#: The errors of operations on arrays that do not fit each other.
_OF_SHAPES = re.compile(r"^(TypeError|ValueError): .*(shape|dimension|broadcast|Size of label|axis|axes)")
#: The arguments of each hook that acts, without params, and its result.
Called = dict[str, tuple[tuple[Any, ...], Any]]


class Use(NamedTuple):
    """The sizes and types of one use of an encoding, without batch and tokens, or arrays that have those."""

    q: Any  # [h, d]
    k: Any  # [g, d], or as `key` returned it
    v: Any  # [g, d], or as `value` returned it
    pos: Any  # the positions' type
    x: Any  # [m], the input of `features`; None if they are given
    q_features: Features  # {name: [...]}
    k_features: Features
    keys_mapped: bool  # k is what `key` returned
    #: v is what `value` returned, k may be what `revise` returned, and features may lack those of `revised_by`.
    cached: bool = False

    @property
    def heads(self) -> str:
        (h, d), (g, k_width), (_, v_width) = self.q.shape, self.k.shape, self.v.shape
        return f"q has {h} heads of {d}, k and v {g} of {k_width} and {v_width}"

    @property
    def dims(self) -> str:
        of_x = "" if self.x is None else f"model_dim={self.x.shape[0]}, "
        return f"{of_x}num_heads={self.q.shape[0]}, head_dim={self.q.shape[1]}, num_kv_heads={self.k.shape[0]}"


def check_usable(encoding: Encoding, dims: Dims) -> None:
    """Raise ConfigError if `encoding`, resolved for `dims`, cannot be used as a value or a hook does not fit.

    Values in its fields, such as the parts of a chain, are checked before it. A check traces every hook, which takes
    milliseconds. Its result is remembered.
    """
    for part in reversed(list(walk_values(encoding))):
        check_decorated(type(part))
        for field in dataclasses.fields(part):
            where, value = f"{type(part).__name__}.{field.name}", getattr(part, field.name)
            try:
                hash(value)
            except TypeError:
                raise ConfigError(
                    f"{where} holds a {type(value).__name__}, but values are compared and hashed. Use a number, a text "
                    "or a tuple; arrays belong in init."
                ) from None
            if not field.compare:
                raise ConfigError(
                    f"{where} has compare=False, so two values that differ in it would be equal. Remove compare=False."
                )
        require_resolved(part)
        if isinstance(part, Encoding):
            _check_usable(part, dims)


@functools.lru_cache(maxsize=1024)
def _check_usable(encoding: Encoding, dims: Dims) -> None:
    for fact in FACTS:
        check_fact(type(encoding).__name__, fact, getattr(encoding, fact))
    hook_shapes(encoding, dims)


def hook_shapes(encoding: Encoding, dims: Dims, vectors: Any = None) -> Called:
    """Return what each hook that acts is given in a model of these sizes, and what it returns.

    `vectors` is the type of token vectors; all else has the default float type. Raises ConfigError for the first hook
    that does not fit, and if `init` returns no parameters of floats.
    """
    return _run_checks(encoding, dims, vectors).called


def tile_shapes(encoding: Encoding, dims: Dims, vectors: Any = None) -> Tile:
    """Return the shapes of the tile that `score` is given in a model of these sizes, as `hook_shapes` does."""
    return _run_checks(encoding, dims, vectors).tile


def _run_checks(encoding: Encoding, dims: Dims, vectors: Any) -> HookCheck:
    floats = jnp.result_type(float)
    h, d, dtype = dims.num_heads, dims.head_dim, vectors or floats
    q, k, x = (Struct(shape, dtype) for shape in ((h, d), (dims.kv_heads, d), (dims.model_dim,)))
    params = {name: Struct(array.shape, floats) for name, array in _init(encoding, dims).items()}
    use = Use(q, k, k, jnp.dtype(jnp.int32), x, {}, {}, keys_mapped=False)
    check = HookCheck(encoding, params, use, built_for_it=True)
    check.run()
    return check


def _init(encoding: Encoding, dims: Dims) -> Params:
    try:
        params = abstract_params(encoding, dims)
    except PosxError:
        raise
    except Exception as error:  # the user's own code
        raise ConfigError(f"{encoding}.init(rng, dims) raises {_one_line(error)}") from error
    if not isinstance(params, dict) or not all(isinstance(name, str) for name in params):
        raise ConfigError(f"{encoding}.init must give a dict of arrays by name, not {_describe(params)}.")
    for name, array in params.items():
        if not _is_float(array):
            raise ConfigError(f"{encoding}.init must give arrays of floats, but {name!r} is {_describe(array)}.")
    for fact in ("shared", "decayed"):
        for name in sorted(getattr(encoding, fact) - params.keys()):
            raise ConfigError(
                f"{encoding}.{fact} names {name!r}, which init does not give. {nearest(name, list(params))}It "
                f"gives: {', '.join(params) or 'nothing'}."
            )
    return params


def with_history(encoding: Encoding, hook: str, x: Any) -> Any:
    """Return x [t, ...] with the earlier tokens beside each one that the hook sees."""
    n = encoding.history.get(hook, 0)
    return Struct((x.shape[0], 1 + n, *x.shape[1:]), x.dtype) if n else x


class HookCheck:
    """Calls every hook that acts, with numbers of tokens that no other axis has, so that no two can be mistaken.

    Args:
      encoding: the encoding.
      params: those of one layer.
      use: the sizes and types.
      built_for_it: the encoding was built for these sizes, so that an error of a hook is its own fault.
    """

    def __init__(self, encoding: Encoding, params: Params, use: Use, built_for_it: bool = False):
        self.encoding, self.params, self.use, self.built_for_it = encoding, params, use, built_for_it
        self.called: Called = {}
        self.tile: Any = None
        taken = {size for x in (use.q, use.k, use.v, use.x) if x is not None for size in x.shape}
        taken |= {1, encoding.axes}
        q, k, n = itertools.islice((size for size in itertools.count(3) if size not in taken), 3)
        self.sizes = {"h": use.q.shape[0], "g": use.k.shape[0], "d": use.q.shape[1], "q": q, "k": k, "n": n}
        self.sizes |= {"m": use.x.shape[0]} if use.x is not None else {}

    def run(self) -> None:
        """Fill `called` and `tile`. Raises ConfigError for the first hook that does not fit the formula."""
        encoding, use, sizes = self.encoding, self.use, self.sizes
        check_fact(type(encoding).__name__, "history", encoding.history)
        if encoding.axes != 1 and (refused := select_hooks(encoding, "distance", "channel")):
            raise ConfigError(
                f"{encoding}.axes = {encoding.axes}, but {refused[0]} acts by one distance. Define bias, which is "
                "given positions [t, n], or leave axes = 1."
            )
        if idle := [hook for hook in encoding.history if not encoding.acts_on(hook)]:
            raise ConfigError(f"{encoding}.history names {idle[0]}, which this encoding does not define. Remove it.")
        q, k, v = self._tokens("q", use.q), self._tokens("k", use.k), self._tokens("k", use.v)
        pos, k_pos = (self._tokens(letter, Struct(position_shape(encoding), use.pos)) for letter in "qk")
        distance = self._tokens("n", Struct((), use.pos))
        if use.x is not None:
            self._map("embed", self._tokens("q", use.x), pos)
        features, k_features = self._features(pos, k_pos)
        unknown = [] if use.cached else sorted(encoding.revised_by - features.keys())
        if unknown or (encoding.acts_on("revise") > bool(encoding.revised_by) and not isinstance(encoding, Composite)):
            raise ConfigError(
                f"{encoding}.revised_by names {unknown or 'nothing'}: name the features that `revise` reads, out of "
                f"{sorted(features)}."
            )
        mapped_q = self._map("query", q, pos, features)
        mapped_k = k if use.keys_mapped else self._map("key", k, k_pos, k_features)
        if not use.cached:
            self._map("value", v, k_pos, k_features)
        width, k_width = mapped_q.shape[-1], mapped_k.shape[-1]
        if width != k_width:
            raise ConfigError(
                f"{encoding}.{'query' if encoding.acts_on('query') else 'key'}: queries are {width} wide and keys "
                f"{k_width} wide, but they are multiplied. Give both the same channels ({self._where})."
            )
        sizes["d'"] = width
        s = Struct((sizes["h"], sizes["q"], sizes["k"]), wide_dtype(use.q.dtype))
        k, mapped_k = (Struct((sizes["k"], sizes["h"], x.shape[2]), x.dtype) for x in (k, mapped_k))
        scale, visible = Struct((1, sizes["q"], 1), s.dtype), Struct(s.shape[1:], jnp.bool_)
        self.tile = Tile._make((q, k, mapped_q, mapped_k, features, k_features, pos, k_pos, scale, visible))
        given = {"pos": pos, "q_pos": pos, "k_pos": k_pos, "distance": distance, "s": s, "tile": self.tile}
        given["keys"] = self._tokens("k", Struct((sizes["g"], sizes["d"]), wide_dtype(use.k.dtype)))
        given["later"] = Struct((sizes["k"], sizes["q"]), jnp.bool_)
        given["features"], given["vectors"] = features, Struct((sizes["q"], sizes["h"], use.v.shape[1]), use.q.dtype)
        called = {"embed", *LOOKING_BACK, *(["revise"] if use.cached else [])}
        for hook in acting_hooks(encoding):
            if hook not in called:
                self._call(hook, *(given[argument] for argument in HOOKS[hook].takes))

    def _map(self, hook: str, x: Any, *rest: Any) -> Any:
        """Return x as the hook maps it."""
        return self._call(hook, with_history(self.encoding, hook, x), *rest) if self.encoding.acts_on(hook) else x

    def _features(self, *sides: Struct) -> list[Features]:
        """Return the features of queries and of keys at pos; the second call starts from the carry of the first."""
        use, carry = self.use, None
        by_side: list[Features] = []
        if use.x is None or not self.encoding.acts_on("features"):
            return [self._tokens("q", use.q_features), self._tokens("k", use.k_features)]
        for letter, pos in zip("qk", sides, strict=True):
            given = self._map("features", self._tokens(letter, use.x), pos, carry)
            name, before = f"{self.encoding}.features", carry
            if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Mapping)):
                raise ConfigError(f"{name} must give ({{name: [t, ...]}}, carry), not {_describe(given)}.")
            features, carry = given
            if before is not None and _types(carry) != _types(before):
                raise ConfigError(
                    f"{name}: the carry changes from {_types(before)} to {_types(carry)}, so a cache cannot hold it. "
                    "Return it with one shape and type."
                )
            for feature, array in features.items():
                if not hasattr(array, "shape") or array.shape[:1] != pos.shape[:1]:
                    raise ConfigError(
                        f"{name} gives {feature!r} {_describe(array)}, but [{letter}, ...] is expected ({self._where})."
                    )
            by_side.append(dict(features))
        return by_side

    def _tokens(self, letter: str, tree: Any) -> Any:
        return jax.tree.map(lambda x: Struct((self.sizes[letter], *x.shape), x.dtype), tree)

    def _call(self, hook: str, *arguments: Any) -> Any:
        """Return the shapes that `hook` returns. Raises ConfigError, one line, for what it raises and for others."""
        made = f"{self.encoding}.{hook}({', '.join(('params', *map(_argument, arguments)))})"
        try:
            shapes = jax.eval_shape(getattr(self.encoding, hook), self.params, *arguments)
        except PosxError:
            raise
        except KeyError as error:
            has = ", ".join(self.params) or "nothing"
            given = [x if isinstance(x, dict) else getattr(x, "q_features", {}) for x in arguments]
            features = ", ".join(name for names in given for name in names)
            has += f"; features: {features}" if features else ""
            raise ConfigError(f"{made} reads {error}, which is not there; params has: {has} ({self._where})") from error
        except Exception as error:  # the user's own code
            if not self.built_for_it and _OF_SHAPES.search(_one_line(error)):  # JAX names sizes of its own
                of_x = f"x has {self.use.x.shape[0]} channels, " if hook == "features" else ""
                raise ConfigError(
                    f"{self.encoding}.{hook} does not fit: {of_x}{self.use.heads}. Build the encoding for these sizes: "
                    f"posx.build(spec, posx.Dims({self.use.dims}, ...)). If it was, the error above is in its own code."
                ) from error
            raise ConfigError(f"{made} raises {_one_line(error)} ({self._where})") from error
        self.called[hook] = arguments, shapes
        wanted, width = HOOKS[hook].gives, arguments[0].shape[-1] if hook in MAPS else 0
        if isinstance(wanted, ByDistance):
            self._check_terms(shapes, wanted)
        elif wanted:
            self._expect(hook, shapes, wanted, width)
        return shapes

    def _check_terms(self, terms: Any, wanted: ByDistance) -> None:
        idle = isinstance(terms, ByDistance) and all(term is None for term in terms)
        if not isinstance(terms, ByDistance) or (idle and not isinstance(self.encoding, Composite)):
            raise ConfigError(
                f"{self.encoding}.by_distance must give ByDistance(bias=..., ...), not {_describe(terms)}."
            )
        for name, term in terms._asdict().items():
            if term is not None:
                width = (self.use.v if name == "value" else self.use.q).shape[1]
                self._expect(f"by_distance.{name}", term, getattr(wanted, name), width)

    def _expect(self, what: str, shape: Any, wanted: str, d: int = 0) -> None:
        """Raise ConfigError unless `shape` is floats of the `wanted` shape: letters, 1, "*" for any size."""
        sizes: dict[str, Any] = self.sizes | {"1": 1, "*": "*"} | ({"d": d} if d else {})
        form = [[sizes[letter] for letter in axis.split(" or ")] for axis in wanted.split(", ")]
        fits = _is_float(shape) and len(shape.shape) == len(form)
        if not fits or not all(size in axis or "*" in axis for size, axis in zip(shape.shape, form, strict=True)):
            numbers = ", ".join(" or ".join(map(str, dict.fromkeys(axis))) for axis in form)
            raise ConfigError(
                f"{self.encoding}.{what} gives {_describe(shape)}, but [{wanted}] = [{numbers}] is expected "
                f"({self._where})."
            )

    @property
    def _where(self) -> str:
        return f"{self.use.heads}; {', '.join(f'{letter} = {self.sizes[letter]}' for letter in 'qkn')}"


def _is_float(result: Any) -> bool:
    return hasattr(result, "dtype") and jnp.issubdtype(result.dtype, jnp.floating)


def _describe(result: Any) -> str:
    """Return a result in a few words: the shape of an array of floats, else its type too."""
    if hasattr(result, "shape"):
        return f"{list(result.shape)}{'' if _is_float(result) else f' of {result.dtype}'}"
    return "None" if result is None else f"a {type(result).__name__}"


def _argument(given: Any) -> str:
    """Return an argument of a hook in a few words: its shape, or several shapes by name."""
    if isinstance(given, Tile):
        return "; ".join(f"tile.{name} {_argument(x)}" for name, x in given._asdict().items())
    if isinstance(given, dict):
        return f"{{{', '.join(f'{name}: {_argument(x)}' for name, x in given.items())}}}"
    return f"{list(given.shape)}" if hasattr(given, "shape") else "..."


def _one_line(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"


def _types(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype.name), tree)
