"""Small networks that encodings share: a bias per head from one number per pair, and a convolution over tokens."""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from posx.contract import Dims, Params, exact_einsum


def uniform(rng: jax.Array, shape: tuple[int, ...], inputs: int) -> jax.Array:
    """Draw from U(-1, 1) / sqrt(inputs), as PyTorch's Linear."""
    return jax.random.uniform(rng, shape, jnp.float32, -(inputs**-0.5), inputs**-0.5)


def init_layers(rng: jax.Array, widths: Sequence[int]) -> Params:
    """Draw weights w0, w1 ... [in, out] and biases b0, b1 ... [out], all `uniform` for `in` inputs.

    The last layer has no bias: one number for all pairs of a head changes no softmax and gets no gradient.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for n, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        shapes |= {f"w{n}": (inputs, outputs), f"b{n}": (outputs,)}
    shapes.popitem()
    rngs = jax.random.split(rng, len(shapes))
    return {name: uniform(own, shapes[name], widths[int(name[1:])]) for own, name in zip(rngs, shapes, strict=True)}


def layer_names(count: int) -> frozenset[str]:
    """Return the names of the arrays of a network of `count` layers."""
    return frozenset([f"w{n}" for n in range(count)] + [f"b{n}" for n in range(count - 1)])


def apply_layers(params: Params, x: jax.Array, count: int, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return x [...] after `count` layers with the activation between them, [h, ...]."""
    hidden = x[None]
    for n in range(count):
        hidden = exact_einsum("io,i...->o...", params[f"w{n}"], hidden)
        if n < count - 1:
            hidden = activation(hidden + params[f"b{n}"].reshape(-1, *[1] * x.ndim))
    return hidden


def convolution_shapes(dims: Dims, rank: int, taps: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of W_down [m, rank], W_up [rank, g, width] and the kernel [taps, g, width]."""
    g = dims.kv_heads
    return {"down": (dims.model_dim, rank), "up": (rank, g, width), "kernel": (taps, g, width)}


def convolve(params: Params, x: jax.Array) -> jax.Array:
    """Return sum_n kernel_n W_up W_down x_{t-n}, [t, g, width]. x [t, taps, m] starts with the token."""
    weights = params["down"], params["up"], params["kernel"]
    return exact_einsum("tnm,mr,rgc,ngc->tgc", x, *weights)
