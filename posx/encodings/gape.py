"""GAPE: a distance penalty with gates of queries, from which landmark keys are exempt."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from posx.contract import About, Dims, Encoding, Params, Tile, at_least_float32, distances, exact_einsum, normals
from posx.contract.fields import Length


@dataclasses.dataclass(frozen=True)
class Gape(Encoding):
    """s_ij -= Gamma_h g_i (1 - l_j) (i - j) / L, g_i = softplus(w_g . q_i + b_g), l_j = sigmoid(w_l . k_j + b_l).

    Gamma_h = softplus(gamma_h). The query sets the slope of an ALiBi, and keys with l_j = 1, landmarks, are exempt. It
    is in nats, after the 1/sqrt(d) scale. L is `original_len`, by default the training length. Gates read q and k as
    projected, before a rotary map. It is meant beside one: rope+gape.

    The paper adds M_ij = Gamma_h g_i (j (1 - l_j) + i l_j) / L. As j (1 - l_j) + i l_j = i - (1 - l_j) (i - j), M_ij is
    the term above plus Gamma_h g_i i / L. That is one number for all keys of a query, which the softmax removes.

    Reference: Ali et al. 2026, arXiv 2605.10414, read in the blog of an author: alessioborgi.github.io, gape-paper.
    Differs: L is T there, which the blog does not define. Nor does it say if heads share w and b: here each head has
    its own. Initial values are unknown. Here w is N(0, 0.02) and all else 0, a penalty of 0.24 nats at distance L. A
    logit scale in a chain multiplies q . k alone. The gate of a key needs it as projected, so RoPE rotates a whole
    cache for each new token. At 2,000 tokens, rope+gape takes 7 times as long as NoPE for a new token on one CPU core.
    GAPE alone takes 1.1 times as long.
    """

    original_len: Length | None = None

    reads_raw_keys = True
    causal_only = True  # a later key would gain with its distance
    decayed = frozenset({"w_g", "w_l"})
    about = About(
        "arXiv 2605.10414",
        "linear as ALiBi but for landmark keys; beside RoPE flat to 16 L here",
        lr_multiplier=10.0,  # beside RoPE 0.015 nats a byte better than 1, see experiments/leaderboard
    )

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(original_len=dims.train_len)

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        weights = normals(rng, dict.fromkeys(("w_g", "w_l"), (dims.num_heads, dims.head_dim)), 0.02)
        return weights | {name: jnp.zeros(dims.num_heads, jnp.float32) for name in ("b_g", "b_l", "gamma")}

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        def gate(vectors: jax.Array, side: str) -> jax.Array:
            products = exact_einsum("thd,hd->ht", at_least_float32(vectors), params[f"w_{side}"])
            return products + params[f"b_{side}"][:, None]

        amplitude = jax.nn.softplus(params["gamma"])[:, None] / self.original_len
        slopes = amplitude * jax.nn.softplus(gate(tile.q, "g"))
        exposed = jax.nn.sigmoid(-gate(tile.k, "l"))  # 1 - l, exact near l = 1
        return s - slopes[:, :, None] * exposed[:, None, :] * distances(tile.q_pos, tile.k_pos)[None]
