"""Whether an encoding's fields, parameters and hooks fit q, k and v: asked by shapes alone, once for each combination.

What an encoding was made for is read off three places, so that every one is covered, a user's own too: its fields that
are named as in `Dims`; the axes of its parameters that `init` makes as large as the heads ask for; what its hooks give.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Params, parts
from posx.encodings.shapes import Call, Hooks, Struct
from posx.errors import ConfigError, other_names

#: Shapes of parameters by name; "*" stands for any size.
Shapes = dict[str, tuple[int | str, ...]]


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
    wanted = _shapes(functools.partial(_params_of, encoding), h, d, g)
    if wanted is not None:
        merged = ", with the shared arrays merged into each layer's own" if encoding.shared else ""
        remedy = f"Give all that init(rng, dims) returns{merged}, and nothing else ({call.heads})."
        check_params(str(encoding), named(params), wanted, remedy)
    if call.x is None and encoding.acts_on("features"):
        _check_features(encoding, call)
    Hooks(encoding, params, call).check()


def check_params(whose: str, given: Shapes, wanted: Shapes, remedy: str) -> None:
    """Raise ConfigError, one line, unless `given` has the names and shapes of `wanted`: `whose` parameters."""
    if other := other_names(given, wanted):
        raise ConfigError(f"{whose}: params are not its own: {other}. {remedy}")
    for name, shape in wanted.items():
        if not _fits(given[name], shape):
            raise ConfigError(f"{whose}: parameter {name!r} is {_text(given[name])}, not {_text(shape)}. {remedy}")


def _fits(shape: tuple[int | str, ...], wanted: tuple[int | str, ...]) -> bool:
    return len(shape) == len(wanted) and all(axis in (size, "*") for size, axis in zip(shape, wanted, strict=True))


def named(params: Any) -> Shapes:
    """Return the shapes of a tree of arrays by name: {"layers.layer_00.mlp.up": (m, f)}."""
    found = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in found}


def _check_features(encoding: Encoding, call: Call) -> None:
    """Raises ConfigError if features out of a cache are not those that the encoding keeps of a token."""
    (h, d), (g, _) = call.q.shape, call.k.shape
    wanted = _shapes(functools.partial(_features_of, encoding), h, d, g) or {}
    for side, features in (("q_features", call.q_features), ("k_features", call.k_features)):
        given = named(features)
        for name, axes in wanted.items():
            if name not in given:
                has = ", ".join(given) or "nothing"
                raise ConfigError(f"{side} lacks {name!r}, it has {has}. Give what batch_features returns")
            if not _fits(given[name], axes):
                raise ConfigError(
                    f"{side}[{name!r}] is {_text(('b', 't', *given[name]))}, but {encoding} keeps "
                    f"{_text(('b', 't', *axes))} where {call.heads}. Give what batch_features returns"
                )


def _shapes(made_for: Callable[[Dims], dict[str, Any]], h: int, d: int, g: int) -> Shapes | None:
    """Return the shapes of the arrays made for these heads, "*" on an axis that depends on other sizes of the model.

    None if they can be made for no model of these heads that is tried here; the hooks are checked all the same.
    """
    try:
        one, other = (named(made_for(Dims(n * h * d, h, d, n, 64 * n, g))) for n in (2, 4))
        return {
            name: tuple(a if a == b else "*" for a, b in zip(shape, other[name], strict=True))
            for name, shape in one.items()
        }
    except Exception:
        return None


def _params_of(encoding: Encoding, dims: Dims) -> Params:
    return jax.eval_shape(functools.partial(encoding.init, dims=dims), _key())


def _features_of(encoding: Encoding, dims: Dims) -> dict[str, Any]:
    """Return the shapes of the features of one token in a model of `dims`."""
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
