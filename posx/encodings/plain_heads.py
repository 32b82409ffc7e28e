"""Functions that logit scales share: the number of keys a query sees, and heads that stay unscaled."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp

from posx.contract import Dims, as_float
from posx.contract.fields import at_least, snake_case
from posx.errors import ConfigError

#: The number of first heads with unscaled logits.
PlainHeads = Annotated[int, "heads", at_least(0)]


def keys_so_far(pos: jax.Array) -> jax.Array:
    """Return p + 1, at least 1: the keys up to a query at pos [q], with those that a window hides."""
    return jnp.maximum(as_float(pos), 0) + 1


def after_plain_heads(plain_heads: int, scales: jax.Array) -> jax.Array:
    """Return logit scales [h, q]: 1 for the plain heads, `scales` [h - plain_heads, q] for the last heads."""
    if not plain_heads:
        return scales
    return jnp.concatenate([jnp.ones((plain_heads, scales.shape[1]), scales.dtype), scales])


def check_plain_heads(encoding: Any, dims: Dims) -> None:
    """Raise ConfigError if no head would be scaled."""
    if encoding.plain_heads >= dims.num_heads:
        name = snake_case(type(encoding))
        raise ConfigError(f"{name}: plain_heads={encoding.plain_heads} must be below num_heads={dims.num_heads}")
