"""The types that hooks give, found by shapes alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from posx.encodings import Dims, Encoding
from posx.encodings.values import check_hooks


@contextlib.contextmanager
def promotion(strict: bool) -> Iterator[None]:
    """No silent broadcasting between ranks and no silent mixing of types; or both, as JAX comes."""
    rank, dtype = ("raise", "strict") if strict else ("allow", "standard")
    with jax.numpy_rank_promotion(rank), jax.numpy_dtype_promotion(dtype):
        yield


def types_found(encoding: Encoding, dims: Dims, vectors: str) -> dict[str, set[str]]:
    """The types of floats each hook gives for `vectors` of this type, {hook: names}; float64 turns 64-bit types on.

    Raises ConfigError where a hook does not fit the contract.
    """
    with jax.enable_x64(vectors == "float64"), promotion(strict=True):
        called = check_hooks(encoding, dims, jnp.dtype(vectors))
    return {
        hook: {leaf.dtype.name for leaf in jax.tree.leaves(result) if jnp.issubdtype(leaf.dtype, jnp.floating)}
        for hook, (_, result) in called.items()
    }
