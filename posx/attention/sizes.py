"""Whether an encoding's fields, parameters and hooks fit q, k and v: asked by shapes alone, once for each combination.

What an encoding was made for is read off three places, so that every one is covered, a user's own too: its fields that
are named as in `Dims`; the axes of its parameters that `init` makes as large as the heads ask for; what its hooks give.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Params
from posx.encodings.shapes import Call, Hooks, Struct
from posx.errors import ConfigError


def check_sizes(encoding: Encoding, params: Params, call: Call) -> None:
    """Asks of a `call` with arrays [b, t, ...] in it. Raises ConfigError, one line that names the encoding, what it
    gives and what q, k and v want."""
    shapes = jax.tree.map(lambda x: Struct(x.shape, x.dtype), params)
    arrays = {name: getattr(call, name) for name in ("q", "k", "v", "x", "q_features", "k_features")}
    call = call._replace(**jax.tree.map(lambda x: Struct(x.shape[2:], x.dtype), arrays))
    leaves, tree = jax.tree.flatten((shapes, call))
    _check(encoding, tuple(leaves), tree)


@functools.lru_cache(maxsize=1024)
def _check(encoding: Encoding, leaves: tuple[Any, ...], tree: Any) -> None:
    params, call = tree.unflatten(leaves)
    (h, d), (g, _) = call.q.shape, call.k.shape
    for part in parts(encoding):
        for name, size in (("num_heads", h), ("head_dim", d), ("num_kv_heads", g)):
            if (built_for := getattr(part, name, None)) and built_for != size:
                raise ConfigError(f"{part} was built for {name}={built_for}, but {call.heads}")
    given, wanted = _named(params), _params_of_init(encoding, h, d, g)
    for name in filter(wanted.__contains__, given):
        if len(given[name]) != len(wanted[name]) or any(
            axis not in (size, "*") for size, axis in zip(given[name], wanted[name], strict=True)
        ):
            raise ConfigError(
                f"{encoding}: parameter {name!r} is {_text(given[name])}, but init gives {_text(wanted[name])} where "
                f"{call.heads}"
            )
    if call.x is None and encoding.acts_on("features"):
        _check_features(encoding, call)
    try:
        Hooks(encoding, params, call).check()
    except ConfigError as error:
        lacking = [name for name in wanted if name not in given]
        if not (lacking and isinstance(error.__cause__, KeyError)):
            raise
        merged = ", the shared ones merged into each layer's own" if encoding.shared else ""
        raise ConfigError(
            f"{encoding} reads parameters that params lacks: {', '.join(lacking)}; give what init(rng, dims) "
            f"returns{merged}"
        ) from None


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


def _check_features(encoding: Encoding, call: Call) -> None:
    """Raises ConfigError if features out of a cache are not those that the encoding keeps of a token."""
    (h, d), (g, _) = call.q.shape, call.k.shape
    wanted = _shapes(functools.partial(_features_of, encoding), h, d, g)
    for side, features in (("q_features", call.q_features), ("k_features", call.k_features)):
        given = _named(features)
        for name, axes in wanted.items():
            if name not in given:
                has = ", ".join(given) or "nothing"
                raise ConfigError(f"{side} lacks {name!r}, it has {has}. Give what batch_features returns")
            if len(given[name]) != len(axes) or any(
                axis not in (size, "*") for size, axis in zip(given[name], axes, strict=True)
            ):
                raise ConfigError(
                    f"{side}[{name!r}] is {_text(('b', 't', *given[name]))}, but {encoding} keeps "
                    f"{_text(('b', 't', *axes))} where {call.heads}. Give what batch_features returns"
                )


def _params_of_init(encoding: Encoding, h: int, d: int, g: int) -> dict[str, tuple[int | str, ...]]:
    return _shapes(functools.partial(_params_of, encoding), h, d, g)


def _shapes(made_for: Callable[[Dims], dict[str, Any]], h: int, d: int, g: int) -> dict[str, tuple[int | str, ...]]:
    """Shapes of the arrays that are made for these heads, "*" where another model has another size."""
    try:
        one, other = (_named(made_for(Dims(n * h * d, h, d, n, 64 * n, g))) for n in (2, 4))
    except Exception:  # no model of these sizes can have it: its hooks are asked all the same
        return {}
    return {
        name: tuple(a if a == b else "*" for a, b in zip(shape, other[name], strict=True))
        for name, shape in one.items()
    }


def _params_of(encoding: Encoding, dims: Dims) -> Params:
    return jax.eval_shape(functools.partial(encoding.init, dims=dims), _key())


def _features_of(encoding: Encoding, dims: Dims) -> dict[str, Any]:
    """What the encoding keeps of one token of a model of `dims`."""
    tokens, back = 1, encoding.history.get("features", 0)
    x = Struct((tokens, *((1 + back,) if back else ()), dims.model_dim), jnp.result_type(float))
    features, _ = jax.eval_shape(
        lambda params, x, pos: encoding.features(params, x, pos, None),
        _params_of(encoding, dims), x, Struct((tokens,), jnp.int32),
    )  # fmt: skip
    return {name: Struct(array.shape[1:], array.dtype) for name, array in features.items()}


def _key() -> Struct:
    return jax.eval_shape(lambda: jax.random.key(0))


def _text(axes: tuple[int | str, ...]) -> str:
    return f"[{', '.join(map(str, axes))}]"
