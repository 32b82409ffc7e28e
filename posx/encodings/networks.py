"""Small networks that map one number per pair to a bias per head."""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from posx.contract import Params, exact_einsum


def init_layers(rng: jax.Array, widths: Sequence[int]) -> Params:
    """Draw weights w0, w1 ... [in, out] and biases b0, b1 ... [out], all U(-1, 1) / sqrt(in), as PyTorch's Linear.

    The last layer has no bias: one number for all pairs of a head changes no softmax and gets no gradient.
    """
    params: Params = {}
    rngs = iter(jax.random.split(rng, len(layer_names(len(widths) - 1))))
    for n, (width, to) in enumerate(itertools.pairwise(widths)):
        bound = width**-0.5
        for name, shape in ((f"w{n}", (width, to)), (f"b{n}", (to,))):
            if name in layer_names(len(widths) - 1):
                params[name] = jax.random.uniform(next(rngs), shape, jnp.float32, -bound, bound)
    return params


def layer_names(count: int) -> frozenset[str]:
    """Return the names of the arrays of a network of `count` layers."""
    return frozenset([f"w{n}" for n in range(count)] + [f"b{n}" for n in range(count - 1)])


def through_layers(params: Params, x: jax.Array, count: int, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return x [...] after `count` layers with the activation between them, [h, ...]."""
    hidden = x[None]
    for n in range(count):
        hidden = exact_einsum("io,i...->o...", params[f"w{n}"], hidden)
        if n < count - 1:
            hidden = activation(hidden + params[f"b{n}"].reshape(-1, *[1] * x.ndim))
    return hidden
