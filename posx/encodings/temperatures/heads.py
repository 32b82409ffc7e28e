"""What temperatures share: how many keys a query has before it, and heads that are left as they are."""

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, as_float
from posx.errors import ConfigError


def keys_so_far(pos: jax.Array) -> jax.Array:
    """p + 1, at least 1: the keys that a causal mask shows to a query at pos [q], whatever a window hides of them."""
    return jnp.maximum(as_float(pos), 0) + 1


def after_plain_heads(plain_heads: int, temperature: jax.Array) -> jax.Array:
    """[h, q] from the temperatures [h - plain_heads, q] of the last heads: 1 for those before."""
    if not plain_heads:
        return temperature
    return jnp.concatenate([jnp.ones((plain_heads, temperature.shape[1]), temperature.dtype), temperature])


def check_plain_heads(name: str, plain_heads: int, dims: Dims | None = None) -> None:
    """Raises ConfigError where no head would be left."""
    if plain_heads < 0:
        raise ConfigError(f"{name}: plain_heads={plain_heads} must be at least 0")
    if dims is not None and plain_heads >= dims.num_heads:
        raise ConfigError(f"{name}: plain_heads={plain_heads} must be below num_heads={dims.num_heads}")
