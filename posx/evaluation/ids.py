"""Checks of token ids and other arrays that a user gives, of NumPy, JAX, torch or plain lists."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.errors import ConfigError


def token_ids(given: Any, *shapes: str, name: str = "tokens", least: int = 0, vocab_size: int | None = None) -> Any:
    """Return token ids as an array, after checks of shape, type and known values.

    Args:
      given: an array or a list.
      shapes: the allowed shapes, such as "[b, t]".
      name: the name of the argument in messages.
      least: the least id that is allowed.
      vocab_size: ids must be below it; None for 2**31.

    Raises:
      ConfigError: another shape, numbers that are not whole, or known ids out of range.
    """
    ids = given if isinstance(given, jax.Array) else host(given)
    if not jnp.issubdtype(ids.dtype, jnp.integer) or ids.ndim not in [shape.count(",") + 1 for shape in shapes]:
        form = "a text" if isinstance(given, str | bytes) else f"{list(ids.shape)} of {ids.dtype}"
        raise ConfigError(
            f"{name}: {form} cannot be token ids. Give whole numbers {' or '.join(shapes)}, such as "
            "tokenizer.encode(text) returns."
        )
    if isinstance(ids, jax.core.Tracer) or not getattr(ids, "is_fully_addressable", True):
        return ids
    known, end = np.asarray(ids), 2**31 if vocab_size is None else vocab_size
    if known.size and not least <= known.min() <= known.max() < end:
        raise ConfigError(
            f"{name}: token ids go from {known.min()} to {known.max()}, but {least} to {end - 1} are allowed. "
            "Give ids of the tokenizer that the model was trained with."
        )
    return ids


def host(array: Any) -> np.ndarray:
    """Return a NumPy, JAX or torch array, or a list, as a NumPy array. If that is impossible, it holds None.

    Torch tensors may require gradients, be on a GPU, or be bfloat16.
    """
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        array = array.float() if array.is_floating_point() else array
    try:
        return np.asarray(array)
    except (TypeError, ValueError):  # random keys, rows of different lengths
        return np.asarray(None)
