"""Inkling: a bank of biases by distance, mixed anew by every query."""

import dataclasses
from typing import Annotated, Any, Self

import jax

from posx.contract import About, Dims, Encoding, Features, Params, Tile, at_least_float32, exact_einsum, normals
from posx.contract.fields import Length, at_least
from posx.encodings.along_keys import bank_products


@dataclasses.dataclass(frozen=True)
class Inkling(Encoding):
    """s_ij += r_i . bank[:, i - j] for 0 <= i - j < E, and nothing from there on; r_i = x_i W, in nats.

    W [m, h, rank] and bank [rank, E] are per layer, N(0, 0.02); the heads share the bank. E is `extent` in tokens: the
    training length, which leaves no column untrained, at most the published 1024.

    Reference: Thinking Machines 2026, https://huggingface.co/thinkingmachines/Inkling, no paper and so no arXiv number;
    by its port in transformers, `InklingRelativeLogits`.
    Differs: x-transformers gives the projection a bias vector. The model itself normalises q and k and divides their
    product by d. Its full-attention layers multiply all by 1 + 0.1 log(max(1, (i + 1) / floor)). Here a logit scale in
    a chain multiplies q . k alone. Its windowed layers have an extent of the window.
    """

    extent: Length | None = None
    rank: Annotated[int, at_least(1)] = 16

    integer_positions = True
    causal_only = True
    about = About(
        "https://huggingface.co/thinkingmachines/Inkling",
        "partly: no position signal beyond the extent; rises from 4 to 6 L in our small study",
        lr_multiplier=3.0,  # 0.01 nats a byte better than 1; 10 is worse than both, see experiments/leaderboard
    )

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(extent=min(dims.train_len, 1024))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        shapes = {"w": (dims.model_dim, dims.num_heads, self.rank), "bank": (self.rank, self.extent)}
        return normals(rng, shapes, 0.02)

    def features(self, params: Params, x: jax.Array, pos: jax.Array, carry: Any) -> tuple[Features, Any]:
        return {"r": exact_einsum("tm,mhr->thr", at_least_float32(x), params["w"])}, carry

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        distance = tile.q_pos[:, None] - tile.k_pos[None, :]
        return s + bank_products(tile.q_features["r"], params["bank"], distance)
