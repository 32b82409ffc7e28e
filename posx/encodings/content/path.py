"""PaTH: keys reach a query through a reflection at every token between."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Features, Params, Tile, Tokens, at_least_float32, exact_einsum, normal
from posx.encodings.short_convolution import convolved, init_convolution
from posx.errors import ConfigError

#: Keys whose product is formed at once, a power of 2: more cost more beside it, fewer make the way longer.
BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Path(Encoding):
    """s_ij = q_i H_i H_{i-1} .. H_{j+1} k_j / sqrt(d), H_t = I - beta_t w_t w_t^T: each token turns all that passes it.

    w_t = unit(silu(sum_n kernel_n W_up W_down x_{t-n})) over the last `kernel` tokens of the layer's input, W_down to
    `rank` numbers; beta_t = 2 sigmoid(u x_t + b), by which H is I at 0, a projection at 1, a reflection at 2. Both
    belong to key heads. Weights start as N(0, 0.02), b at 0. No position is read. Tokens between i and j act whether i
    sees them or not.

    Several H together are I - W^T T W with T triangular (the paper's UT transform), so that a block of keys costs
    products of its size: no token has a matrix, and no H is inverted, which at beta = 1 could not be done.

    Reference: Yang et al. 2025, arXiv 2505.16381, sections 2.2 and 3.2; silu, which the paper does not name, and the
    weights at the start are those of flash-linear-attention, layers and models/path_attn.
    Differs: there 1e-6 is added to the square of the length; older versions rounded w to float16, and had one full
    matrix for W_up W_down where query heads share keys. Its forget gate is FoX's with sums inside the scale:
    path+fox(gate_scale=0.125) for d = 64. In a chain what the path changes is the product of q and k as projected.
    Cached keys stay as they are, where the paper's are multiplied by H at every token. In float32 1,500 reflections at
    nearly one w are off by 0.001, at random ones by 0.00003.
    """

    rank: int = 32
    kernel: Tokens = 3

    tiling = "rows"
    causal_only = True
    extrapolates = "falls to 4 L or so, half of which is back by 16 L in our small study; stable to 8 L in its paper"
    paper = "arXiv 2505.16381"

    def __post_init__(self) -> None:
        for name in ("rank", "kernel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"path: {name}={getattr(self, name)} must be at least 1")

    @property
    def history(self) -> Mapping[str, int]:  # type: ignore[override]
        return {"features": self.kernel - 1} if self.kernel > 1 else {}

    @property
    def decayed(self) -> frozenset[str]:
        return frozenset({"down", "up", "kernel", "u"})

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        down, up, kernel, u = jax.random.split(rng, 4)
        heads = dims.num_kv_heads or dims.num_heads
        return {
            **init_convolution((down, up, kernel), dims, self.rank, self.kernel, dims.head_dim),
            "u": normal(u, (dims.model_dim, heads), 0.02),
            "b": jnp.zeros(heads, jnp.float32),
        }

    def features(self, params: Params, x: jax.Array, pos: jax.Array, carry: Any) -> tuple[Features, Any]:
        x = at_least_float32(x).reshape(x.shape[0], self.kernel, -1)
        w = jax.nn.silu(convolved(params, x))
        w = w * jax.lax.rsqrt(jnp.maximum((w**2).sum(axis=-1, keepdims=True), 1e-24))  # 0 stays 0
        beta = 2 * jax.nn.sigmoid(exact_einsum("tm,mg->tg", x[:, 0], params["u"]) + params["b"][None])
        return {"w": w, "beta": beta}, carry

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        (length, num_heads, _), features = tile.k.shape, tile.k_features
        q, k = at_least_float32(tile.q), at_least_float32(tile.k)
        w, beta = (jnp.repeat(features[n], num_heads // features[n].shape[1], axis=1) for n in ("w", "beta"))
        w, beta = w.astype(q.dtype), beta.astype(q.dtype)
        # The last token that a query sees is its own, so all up to there are no later than it.
        passed = jax.lax.cummax(tile.visible.astype(jnp.int32), axis=1, reverse=True)

        def blocks(x: jax.Array) -> jax.Array:
            """[n, BLOCK, ...] of [k, ...], filled up with tokens that turn nothing."""
            size = min(BLOCK, 1 << (length - 1).bit_length())
            padded = jnp.pad(x, ((0, -length % size), *((0, 0),) * (x.ndim - 1)))
            return padded.reshape(-1, size, *x.shape[1:])

        walk = functools.partial(_through_block, q.swapaxes(0, 1))
        along = blocks(k), blocks(w), blocks(beta), blocks(passed.T > 0)
        _, added = jax.lax.scan(walk, jnp.zeros_like(q).swapaxes(0, 1), along, reverse=True)
        added = jnp.moveaxis(added, 0, 2).reshape(num_heads, len(q), -1)[..., :length]
        return s + tile.temperature * (added / math.sqrt(q.shape[-1])).astype(s.dtype)


def _through_block(q: jax.Array, turned: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """What a block's tokens make of queries q [h, q, d] that have been turned by all later ones, to q + `turned`.

    block: k, w [c, h, d], beta [c, h] and which of them a query has passed, [c, q]. Gives `turned` after the block, and
    what comes of the path to each of its keys beside q . k, [h, q, c].
    """
    k, w, beta, passed = block
    met = jnp.where(passed.T[None], exact_einsum("hqd,chd->hqc", q + turned, w), 0)
    between = jnp.tril(exact_einsum("ihd,jhd->hij", w, w), -1)
    t = _inverse(beta.T[..., None] * between) * beta.T[:, None]
    t = exact_einsum("hqi,hij->hqj", met, t)
    later = jnp.tril(exact_einsum("ihd,jhd->hij", w, k), -1)
    added = exact_einsum("hqd,chd->hqc", turned, k) - exact_einsum("hqi,hij->hqj", t, later)
    return turned - exact_einsum("hqi,ihd->hqd", t, w), added


def _inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 of matrices [.., n, n] that are 0 from the diagonal up, n a power of 2, by halves.

    A sum of powers would cancel: n reflections at one w have powers of 2^n. XLA's triangular solve, a call of LAPACK on
    CPUs, was seen to wait for ever for a thread of its pool (jaxlib 0.10.2).
    """
    half = lower.shape[-1] // 2
    if not half:
        return jnp.ones_like(lower)
    first, last = _inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    corner = exact_einsum("...ij,...jk,...kl->...il", last, lower[..., half:, :half], first)
    rows = [first, jnp.zeros_like(first)], [-corner, last]
    return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)
