"""Whether an encoding's fields, parameters and hooks fit q, k and v: asked by shapes alone, once for each combination.

What an encoding was made for is read off three places, so that every one is covered, a user's own too: its fields that
are named as in `Dims`; the axes of its parameters that `init` makes as large as the heads ask for; what its hooks give.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Features, Params, Tile, wide_dtype
from posx.errors import ConfigError, PosxError

Shape = jax.ShapeDtypeStruct
#: A size, several to choose from, a letter for so many tokens, "*" for any size.
Axis = int | tuple[int, ...] | str


class Call(NamedTuple):
    """The sizes and types of one call, no values, so that it can be hashed."""

    q: Shape  # [h, d]
    k: Shape  # [g, d]
    v: Shape  # [g, d]
    pos: Any  # the positions' type
    keys_mapped: bool
    leaves: tuple[Shape, ...]
    tree: Any  # of the leaves: params; x [m] or None; features of queries and of keys, {name: [...]}

    @property
    def heads(self) -> str:
        (h, d), (g, k_width), (_, v_width) = self.q.shape, self.k.shape, self.v.shape
        return f"q has {h} heads of {d}, k and v {g} of {k_width} and {v_width}"


def check_sizes(
    encoding: Encoding, params: Params, q: Any, k: Any, v: Any, pos_dtype: Any, x: Any,
    q_features: Features, k_features: Features, keys_mapped: bool,
) -> None:  # fmt: skip
    """Raises ConfigError, one line that names the encoding, what it gives and what q, k and v want."""
    shapes = jax.tree.map(lambda x: Shape(x.shape, x.dtype), params)
    q, k, v, *rest = jax.tree.map(lambda x: Shape(x.shape[2:], x.dtype), (q, k, v, x, q_features, k_features))
    leaves, tree = jax.tree.flatten((shapes, *rest))
    _check(encoding, Call(q, k, v, jnp.dtype(pos_dtype), keys_mapped, tuple(leaves), tree))


@functools.lru_cache(maxsize=1024)
def _check(encoding: Encoding, call: Call) -> None:
    (h, d), (g, _) = call.q.shape, call.k.shape
    for part in parts(encoding):
        for name, size in (("num_heads", h), ("head_dim", d), ("num_kv_heads", g)):
            if (built_for := getattr(part, name, None)) and built_for != size:
                raise ConfigError(f"{part} was built for {name}={built_for}, but {call.heads}")
    wanted = _params_of_init(encoding, h, d, g)
    for name, shape in _named(call.tree.unflatten(call.leaves)[0]).items():
        if name in wanted and not _fits(shape, wanted[name]):
            raise ConfigError(
                f"{encoding}: parameter {name!r} is {_text(shape)}, but init gives {_text(wanted[name])} where "
                f"{call.heads}"
            )
    _check_hooks(encoding, call)


def parts(encoding: Encoding) -> Iterator[Encoding]:
    """The encoding and, in whatever fields they stand, those it is made of."""
    yield encoding
    for field in dataclasses.fields(encoding):
        inside = jax.tree.leaves(getattr(encoding, field.name), is_leaf=lambda x: isinstance(x, Encoding))
        for part in inside:
            if isinstance(part, Encoding):
                yield from parts(part)


def _named(params: Params) -> dict[str, tuple[int, ...]]:
    found = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in found}


def _params_of_init(encoding: Encoding, h: int, d: int, g: int) -> dict[str, tuple[Axis, ...]]:
    """Shapes of the arrays that `init` gives for these heads, "*" where another model has another size."""
    try:
        one, other = (
            _named(jax.eval_shape(functools.partial(encoding.init, dims=Dims(n * h * d, h, d, n, 64 * n, g)), _key()))
            for n in (2, 4)
        )
    except Exception:  # no model of these sizes can have it: its hooks are asked all the same
        return {}
    return {
        name: tuple(a if a == b else "*" for a, b in zip(shape, other[name], strict=True))
        for name, shape in one.items()
    }


def _key() -> Shape:
    return jax.eval_shape(lambda: jax.random.key(0))


def _check_hooks(encoding: Encoding, call: Call) -> None:
    params, x, q_features, k_features = call.tree.unflatten(call.leaves)
    (h, d), (g, k_width) = call.q.shape, call.k.shape
    sizes = {size for leaf in (call.q, call.k, call.v) for size in leaf.shape}
    t, s = itertools.islice((n for n in itertools.count(11) if n not in sizes), 2)  # tokens: like no other size
    ask = functools.partial(_ask, encoding, call, {"q": t, "n": t, "k": s}, params)

    def tokens(n: int, tree: Any) -> Any:
        return jax.tree.map(lambda x: Shape((n, *x.shape), x.dtype), tree)

    q_pos, k_pos, distance = Shape((t,), call.pos), Shape((s,), call.pos), Shape((t,), jnp.result_type(float))
    q, k, v, q_features, k_features = (
        tokens(n, x) for n, x in ((t, call.q), (s, call.k), (s, call.v), (t, q_features), (s, k_features))
    )
    if x is not None and encoding.acts_on("features"):
        q_features, k_features = (ask("features", tokens(n, x), pos, None)[0] for n, pos in ((t, q_pos), (s, k_pos)))
    mapped_q = ask("query", q, q_pos, q_features, wanted=[("q", h, "*")], inactive=q)
    mapped_k, mapped_v = k, v
    if not call.keys_mapped:
        mapped_k = ask("key", k, k_pos, k_features, wanted=[("k", g, "*")], inactive=k)
        mapped_v = ask("value", v, k_pos, k_features, wanted=[("k", g, "*")], inactive=v)
    if mapped_q.shape[2] != mapped_k.shape[2]:
        raise ConfigError(
            f"{encoding}: queries come out {mapped_q.shape[2]} wide, keys {mapped_k.shape[2]}, but their products need "
            f"one width, where {call.heads}"
        )
    v_width = mapped_v.shape[2]
    ask("temperature", q_pos, wanted=[("q",), ((h, 1), "q")])
    ask("curve", distance, wanted=[((h, 1), "n")])
    if encoding.acts_on("bias") or encoding.acts_on("curve"):
        ask("bias", q_pos, k_pos, wanted=[((h, 1), "q", "k")])
    vectors = {"query": d, "key": k_width, "value": v_width}
    found = ask("relative", Shape((t,), call.pos))
    for name, shape in found._asdict().items() if found is not None else ():
        axes = ("n", (h, 1), vectors[name]) if name in vectors else ("n", (h, 1))
        _expect(encoding, call, {"n": t}, f"relative's {name}", shape, [axes])
    scores = Shape((h, t, s), wide_dtype(call.q.dtype))
    of_heads = [Shape((s, h, x.shape[2]), x.dtype) for x in (k, mapped_k)]
    sides = q, of_heads[0], mapped_q, of_heads[1], q_features, k_features, q_pos, k_pos
    tile = Tile._make((*sides, Shape((t, s), jnp.bool_)))
    ask("score", scores, tile, wanted=[(h, "q", "k")])
    ask("mix", scores, q_pos, k_pos, wanted=[("q", h, v_width)])
    ask("output", Shape((t, h, v_width), scores.dtype), q_pos, q_features, wanted=[("q", h, "*")])


def _ask(
    encoding: Encoding, call: Call, letters: dict[str, int], params: Params, hook: str, *args: Any,
    wanted: list[tuple[Axis, ...]] | None = None, inactive: Any = None,
) -> Any:  # fmt: skip
    """What `hook` gives, in shapes, compared with what is wanted; `inactive` where the encoding does not act there."""
    if not encoding.acts_on(hook) and not (hook == "bias" and encoding.acts_on("curve")):
        return inactive
    try:
        found = jax.eval_shape(getattr(encoding, hook), params, *args)
    except PosxError:
        raise
    except Exception as error:
        if isinstance(error, KeyError) and (missing := _missing(encoding, call, params, error)):
            raise ConfigError(missing) from None
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ConfigError(f"{encoding}: {hook} fails where {call.heads}: {reason}") from error
    if wanted is not None:
        _expect(encoding, call, letters, hook, found, wanted)
    return found


def _missing(encoding: Encoding, call: Call, params: Params, error: KeyError) -> str:
    (h, d), (g, _) = call.q.shape, call.k.shape
    names = [name for name in _params_of_init(encoding, h, d, g) if name not in _named(params)]
    if not names and error.args[0] in params:
        return ""
    merged = ", the shared ones merged into each layer's own" if encoding.shared else ""
    lacking = ", ".join(names) or error.args[0]
    return f"{encoding} reads parameters that params lacks: {lacking}; give what init(rng, dims) returns{merged}"


def _expect(
    encoding: Encoding, call: Call, letters: dict[str, int], what: str, found: Any, wanted: list[tuple[Axis, ...]]
) -> None:
    if found is None or any(_fits(found.shape, axes, letters) for axes in wanted):
        return
    in_use = {size: letter for letter, size in letters.items() if any(letter in axes for axes in wanted)}
    shape = tuple(in_use.get(size, size) for size in found.shape)
    raise ConfigError(
        f"{encoding}: {what} gives {_text(shape)}, but {' or '.join(map(_text, wanted))} is wanted where {call.heads}"
    )


def _fits(shape: tuple[int, ...], axes: tuple[Axis, ...], letters: dict[str, int] | None = None) -> bool:
    def fits(size: int, axis: Axis) -> bool:
        if isinstance(axis, tuple):
            return size in axis
        return axis == "*" or size == (letters or {}).get(axis, axis)  # type: ignore[arg-type]

    return len(shape) == len(axes) and all(map(fits, shape, axes))


def _text(axes: tuple[Axis, ...]) -> str:
    each = (" or ".join(map(str, dict.fromkeys(a))) if isinstance(a, tuple) else str(a) for a in axes)
    return f"[{', '.join(each)}]"
