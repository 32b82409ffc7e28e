"""What some encodings make of the last few tokens: numbers of each key head, by a projection of low rank and a
convolution of each channel along the text."""

from __future__ import annotations

import jax

from posx.encodings.base import Dims, Params, exact_einsum, normal


def init_convolution(
    rng: tuple[jax.Array, jax.Array, jax.Array], dims: Dims, rank: int, taps: int, width: int
) -> Params:
    """down [m, rank], up [rank, g, width] and kernel [taps, g, width], each N(0, 0.02) from a key of its own."""
    heads = dims.num_kv_heads or dims.num_heads
    shapes = {"down": (dims.model_dim, rank), "up": (rank, heads, width), "kernel": (taps, heads, width)}
    return {name: normal(one, shape, 0.02) for one, (name, shape) in zip(rng, shapes.items(), strict=True)}


def convolved(params: Params, x: jax.Array) -> jax.Array:
    """sum_n kernel_n W_up W_down x_{t-n}, [t, g, width], of x [t, taps, m]: a token first, then those before it."""
    weights = params["down"], params["up"], params["kernel"]
    return exact_einsum("tnm,mr,rgc,ngc->tgc", x, *weights)
