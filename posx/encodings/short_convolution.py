"""A low-rank projection and a convolution of each channel over the last few tokens, per key head."""

from __future__ import annotations

import jax

from posx.contract import Dims, Params, exact_einsum, normal


def init_convolution(
    rng: tuple[jax.Array, jax.Array, jax.Array], dims: Dims, rank: int, taps: int, width: int
) -> Params:
    """Draw down [m, rank], up [rank, g, width] and kernel [taps, g, width], each N(0, 0.02) from its own key."""
    heads = dims.kv_heads
    shapes = {"down": (dims.model_dim, rank), "up": (rank, heads, width), "kernel": (taps, heads, width)}
    return {name: normal(one, shape, 0.02) for one, (name, shape) in zip(rng, shapes.items(), strict=True)}


def convolved(params: Params, x: jax.Array) -> jax.Array:
    """Return sum_n kernel_n W_up W_down x_{t-n}, [t, g, width]. x [t, taps, m] starts with the token."""
    weights = params["down"], params["up"], params["kernel"]
    return exact_einsum("tnm,mr,rgc,ngc->tgc", x, *weights)
