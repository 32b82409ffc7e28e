"""What a resolved encoding must be to be used as a value: compared, hashed, and fit for the sizes of its model.

`build` checks it once for every value and sizes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Params
from posx.encodings.checks import check_decorated, check_fact, facts
from posx.encodings.shapes import Call, Hooks, Struct, is_float, one_line, shown
from posx.errors import ConfigError, PosxError, nearest


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
    check_hooks(encoding, dims)


def check_hooks(encoding: Encoding, dims: Dims, vectors: Any = None) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """What each acting hook is given in a model of these sizes, and what it gives: {hook: (arguments, result)}.

    Arguments stand without params. `vectors` is the type of token vectors; all else has the default float type. Raises
    ConfigError for the first hook that does not fit, and where `init` gives no parameters of floats.
    """
    floats = jnp.result_type(float)
    h, d, dtype = dims.num_heads, dims.head_dim, vectors or floats
    q, k, x = (Struct(shape, dtype) for shape in ((h, d), (dims.num_kv_heads or h, d), (dims.model_dim,)))
    params = {name: Struct(array.shape, floats) for name, array in _init(encoding, dims).items()}
    hooks = Hooks(encoding, params, Call(q, k, k, jnp.dtype(jnp.int32), x, {}, {}, keys_mapped=False))
    hooks.check_embed()
    hooks.check()
    return hooks.called


def _init(encoding: Encoding, dims: Dims) -> Params:
    try:
        params = jax.eval_shape(lambda: encoding.init(jax.random.key(0), dims))
    except PosxError:
        raise
    except Exception as error:  # the user's own code
        raise ConfigError(f"{encoding}.init(rng, dims) raises {one_line(error)}") from error
    if not isinstance(params, dict) or not all(isinstance(name, str) for name in params):
        raise ConfigError(f"{encoding}.init must give a dict of arrays by name, not {shown(params)}")
    for name, array in params.items():
        if not is_float(array):
            raise ConfigError(f"{encoding}.init must give arrays of floats, but {name!r} is {shown(array)}")
    for fact in ("shared", "decayed"):
        for name in sorted(getattr(encoding, fact) - params.keys()):
            raise ConfigError(
                f"{encoding}.{fact} names {name!r}, which init does not give; {nearest(name, list(params))}"
                f"init gives: {', '.join(params) or 'nothing'}"
            )
    return params
