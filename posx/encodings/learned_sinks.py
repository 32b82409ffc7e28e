"""Attention sinks that are learned, one number for each head."""

import dataclasses

import jax
import jax.numpy as jnp

from posx.contract import About, Dims, Encoding, Params


@dataclasses.dataclass(frozen=True)
class LearnedSinks(Encoding):
    """w_ij = exp(s_ij) / (exp(z_h) + sum_j exp(s_ij)): a share of each row's weight goes to no key.

    z is learned, per head and layer, from 0. At z = 0 the weights are those of "softmax off by one", so a model starts
    there. Keys at z -> -infinity have all the weight, as in plain attention. It says nothing about positions: join it
    with an encoding that does, as in rope+learned_sinks.

    Reference: gpt-oss, OpenAI 2025, arXiv 2508.10925; off by one: Miller 2023, evanmiller.org/attention-is-off-by-one.
    Differs: transformers draws a new model's z from N(0, 0.02). How gpt-oss began is not published.
    """

    axes = 0  # no position is read
    about = About("arXiv 2508.10925", "not measured here; meant for windows and long texts")

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        return {"z": jnp.zeros(dims.num_heads)}

    def sink(self, params: Params) -> jax.Array:
        return params["z"]
