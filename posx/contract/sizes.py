"""Checks that an encoding, its parameters and its features fit q, k and v, once for each combination of shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posx.contract.encoding import Encoding, abstract_params, position_shape
from posx.contract.hooks import Params
from posx.contract.shapes import HookCheck, Struct, Use, with_history
from posx.contract.value import Dims, walk_values
from posx.errors import ConfigError, other_names

#: Shapes of arrays by name; "*" is any size.
Shapes = dict[str, tuple[int | str, ...]]


def check_call(encoding: Encoding, params: Params, use: Use) -> None:
    """Raise ConfigError unless the encoding, its parameters and its hooks fit a `use` with arrays [b, t, ...] in it.

    The sizes that an encoding was built for are read off three places, so that a user's own is covered too. They are
    its fields named as in `Dims`, the axes of its parameters that depend on the heads, and the results of its hooks.
    """
    shapes = jax.tree.map(lambda x: Struct(x.shape, x.dtype), params)
    arrays = use.q, use.k, use.v, use.x, use.q_features, use.k_features
    q, k, v, x, q_features, k_features = jax.tree.map(lambda x: Struct(x.shape[2:], x.dtype), arrays)
    use = Use(q, k, v, use.pos, x, q_features, k_features, use.keys_mapped, use.cached)
    leaves, tree = jax.tree.flatten((shapes, use))
    _check_call(encoding, tuple(leaves), tree)


@functools.lru_cache(maxsize=1024)
def _check_call(encoding: Encoding, leaves: tuple[Any, ...], tree: Any) -> None:
    params, use = tree.unflatten(leaves)
    sizes = dict(zip(("num_heads", "head_dim", "num_kv_heads"), (*use.q.shape, use.k.shape[0]), strict=True))
    for part in walk_values(encoding):
        for name, size in sizes.items():
            if (built_for := getattr(part, name, None)) and built_for != size:
                raise ConfigError(f"{part} was built for {name}={built_for}, but {use.heads}")
    if (wanted := _shapes(abstract_params, encoding, use)) is not None:
        merged = ", with the shared arrays merged into each layer's own" if encoding.shared else ""
        remedy = f"Give all that init(rng, dims) returns{merged}, and nothing else ({use.heads})."
        check_params(str(encoding), array_shapes(params), wanted, remedy)
    if use.x is None and encoding.acts_on("features"):
        _check_features(encoding, use)
    HookCheck(encoding, params, use).run()


def check_params(whose: str, given: Shapes, wanted: Shapes, remedy: str) -> None:
    """Raise ConfigError, one line, unless `given` has the names and shapes of `wanted`: `whose` parameters."""
    if other := other_names(given, wanted):
        raise ConfigError(f"{whose}: params are not its own: {other}. {remedy}")
    for name, shape in wanted.items():
        if not _fits(given[name], shape):
            raise ConfigError(f"{whose}: parameter {name!r} is {_text(given[name])}, not {_text(shape)}. {remedy}")


def array_shapes(params: Any) -> Shapes:
    """Return the shapes of a tree of arrays by name: {"layers.layer_00.mlp.up": (m, f)}."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}


def _check_features(encoding: Encoding, use: Use) -> None:
    """Raise ConfigError if features out of a cache are not those that the encoding keeps of a token."""
    wanted = _shapes(_feature_shapes, encoding, use) or {}
    revised = encoding.revised_by if use.cached else frozenset()
    for side, given in (("q_features", array_shapes(use.q_features)), ("k_features", array_shapes(use.k_features))):
        for name, axes in wanted.items():
            if name not in given and name in revised:
                continue
            if name not in given:
                has = ", ".join(given) or "nothing"
                raise ConfigError(f"{side} lacks {name!r}; it has {has}. Give the result of batch_features.")
            if not _fits(given[name], axes):
                raise ConfigError(
                    f"{side}[{name!r}] is {_text(('b', 't', *given[name]))}, but {encoding} keeps "
                    f"{_text(('b', 't', *axes))} for {use.heads}. Give the result of batch_features."
                )


def _shapes(made: Callable[[Encoding, Dims], dict[str, Any]], encoding: Encoding, use: Use) -> Shapes | None:
    """Return the shapes of the arrays made for these heads, "*" on an axis that depends on other sizes of the model.

    None if no model of these heads that is tried here can have them; the hooks are checked all the same.
    """
    (h, d), (g, _) = use.q.shape, use.k.shape
    try:
        one, other = (array_shapes(made(encoding, Dims(n * h * d, h, d, n, 64 * n, g))) for n in (2, 4))
        return {
            name: tuple(a if a == b else "*" for a, b in zip(shape, other[name], strict=True))
            for name, shape in one.items()
        }
    except Exception:
        return None


def _feature_shapes(encoding: Encoding, dims: Dims) -> dict[str, Any]:
    """Return the shapes of the features of one token in a model of `dims`."""
    x = with_history(encoding, "features", Struct((1, dims.model_dim), jnp.result_type(float)))
    features, _ = jax.eval_shape(
        lambda params, x, pos: encoding.features(params, x, pos, None),
        abstract_params(encoding, dims), x, Struct((1, *position_shape(encoding)), jnp.int32),
    )  # fmt: skip
    return {name: Struct(array.shape[1:], array.dtype) for name, array in features.items()}


def _fits(shape: tuple[int | str, ...], wanted: tuple[int | str, ...]) -> bool:
    return len(shape) == len(wanted) and all(axis in (size, "*") for size, axis in zip(shape, wanted, strict=True))


def _text(axes: tuple[int | str, ...]) -> str:
    return f"[{', '.join(map(str, axes))}]"
