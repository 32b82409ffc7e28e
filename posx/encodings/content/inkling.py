"""Inkling's bank of biases by distance, mixed anew by every query."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Features, Params, Tile, Tokens, at_least_float32, exact_einsum, normal
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Inkling(Encoding):
    """s_ij += r_i . bank[:, i - j] for 0 <= i - j < E, and nothing from there on; r_i = x_i W, in nats.

    W [m, h, rank] and bank [rank, E] are per layer, N(0, 0.02); the heads share the bank. rank = 16. E = `extent` in
    tokens: the training length, which leaves no column untrained, at most the published 1024.

    Reference: Thinking Machines 2026, https://huggingface.co/thinkingmachines/Inkling, no paper and so no arXiv number;
    by its port in transformers, `InklingRelativeLogits`.
    Differs: x-transformers gives the projection a bias vector. The model itself normalises q and k, divides their
    product by d, and in its full-attention layers multiplies all by 1 + 0.1 log(max(1, (i + 1) / floor)): here a
    temperature in a chain acts on q . k alone. Its windowed layers have an extent of the window.
    """

    extent: Tokens | None = None
    rank: int = 16

    caches_mapped_keys = True
    integer_positions = True
    causal_only = True
    lr_multiplier = 3.0  # 0.01 nats a byte better than 1; 10 is worse than both, see experiments/leaderboard
    extrapolates = "partly: no position signal beyond the extent; rises from 6 L in our small study"
    paper = "https://huggingface.co/thinkingmachines/Inkling"

    def __post_init__(self) -> None:
        if self.extent is not None and self.extent < 1:
            raise ConfigError(f"inkling: extent={self.extent} must be at least 1")
        if self.rank < 1:
            raise ConfigError(f"inkling: rank={self.rank} must be at least 1")

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(extent=min(dims.train_len, 1024))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        self.require_resolved()
        w_rng, bank_rng = jax.random.split(rng)
        return {
            "w": normal(w_rng, (dims.model_dim, dims.num_heads, self.rank), 0.02),
            "bank": normal(bank_rng, (self.rank, self.extent), 0.02),
        }

    def features(self, params: Params, x: jax.Array, pos: jax.Array, carry: Any) -> tuple[Features, Any]:
        return {"r": exact_einsum("tm,mhr->thr", at_least_float32(x), params["w"])}, carry

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        self.require_resolved()
        distance = tile.q_pos[:, None] - tile.k_pos[None, :]
        # One curve for each query, [h, q, extent], of which every key reads a point: nothing is [q, k, rank].
        curves = exact_einsum("qhr,re->hqe", tile.q_features["r"], params["bank"])
        bias = jnp.take_along_axis(curves, jnp.clip(distance, 0, self.extent - 1)[None], axis=2)
        return s + jnp.where(((distance >= 0) & (distance < self.extent))[None], bias, 0)
