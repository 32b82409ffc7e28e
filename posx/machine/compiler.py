"""A barrier around products, against a fault of XLA's CPU compiler that `posx.machine.guard` describes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def barrier(tree: Any) -> Any:
    """Return `tree` bit for bit, behind a barrier that XLA's CPU compiler neither looks through nor fuses across.

    It is for the operands of products, so that none is seen to be constant along an axis, and for results that may be
    summed. XLA's own barrier is gone before kernels are formed (jaxlib 0.10.2 and 0.11.0; not from 0.11.2 on), and the
    rounding alone lets constants through. Derivatives of every kind and order pass, behind a barrier too.
    """
    if jax.default_backend() != "cpu":
        return tree

    def one(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        form = jnp.finfo(x.dtype)
        return jax.lax.reduce_precision(jax.lax.optimization_barrier(x), form.nexp, form.nmant)

    return jax.tree.map(one, tree)
