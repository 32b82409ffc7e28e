"""PaTH: a product of Householder matrices along the path from key to query."""

import dataclasses
import functools
import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.contract import About, Dims, Encoding, Features, Params, Tile, at_least_float32, exact_einsum, fact, normals
from posx.contract.fields import Length, at_least
from posx.encodings.networks import convolution_shapes, convolve

#: Tokens of one UT transform, a power of 2. A larger block costs more operations, a smaller one more steps.
BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Path(Encoding):
    """s_ij = q_i H_i H_{i-1} .. H_{j+1} k_j / sqrt(d), H_t = I - beta_t w_t w_t^T.

    w_t = unit(silu(sum_n kernel_n W_up W_down x_{t-n})) over the last `kernel` tokens of the layer's input x. W_down
    projects to `rank` numbers. beta_t = 2 sigmoid(u x_t + b): H is I at 0, a projection at 1, a reflection at 2. w and
    beta belong to key heads. Weights start as N(0, 0.02), b at 0. No position is read. Tokens between i and j act even
    if i does not see them.

    The product of the H of a block is I - W^T T^-1 W with a triangular T, the paper's UT transform. A block of keys
    then costs products of its size: no token has a matrix. No H is inverted, which is impossible at beta = 1.

    Reference: Yang et al. 2025, arXiv 2505.16381, sections 2.2 and 3.2. silu, which the paper does not name, and the
    initial weights are those of flash-linear-attention, layers and models/path_attn.
    Differs: there 1e-6 is added to the squared length of w. Older versions rounded w to float16, and had one full
    matrix for W_up W_down if query heads share keys. Its forget gate is FoX's with sums inside the scale:
    path+fox(gate_scale=0.125) for d = 64. In a chain the path changes the product of q and k as projected.
    A cache holds keys that every new token multiplies by its H, as in the paper. In a chain with another part that maps
    or reads keys it holds them as projected, and each token visits the whole path. In float32 the error of 1,500
    reflections is 0.001 if all w are nearly equal, 0.00003 if they are random.
    """

    rank: Annotated[int, at_least(1)] = 32
    kernel: Length = 3

    tiling = "rows"
    reads_raw_keys = True
    axes = 0  # no position is read
    causal_only = True
    revised_by = frozenset({"w", "beta"})
    history = fact(lambda self: {"features": self.kernel - 1} if self.kernel > 1 else {})
    decayed = frozenset({"down", "up", "kernel", "u"})
    about = About(
        "arXiv 2505.16381",
        "falls to about 4 L, three quarters of which is lost by 16 L in our small study; stable to 8 L in its paper",
    )

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        g = dims.kv_heads
        shapes = convolution_shapes(dims, self.rank, self.kernel, dims.head_dim) | {"u": (dims.model_dim, g)}
        return normals(rng, shapes, 0.02) | {"b": jnp.zeros(g, jnp.float32)}

    def features(self, params: Params, x: jax.Array, pos: jax.Array, carry: Any) -> tuple[Features, Any]:
        x = at_least_float32(x).reshape(x.shape[0], self.kernel, -1)
        w = jax.nn.silu(convolve(params, x))
        w = w * jax.lax.rsqrt(jnp.maximum((w**2).sum(axis=-1, keepdims=True), 1e-24))  # 0 stays 0
        beta = 2 * jax.nn.sigmoid(exact_einsum("tm,mg->tg", x[:, 0], params["u"]) + params["b"][None])
        return {"w": w, "beta": beta}, carry

    def revise(self, params: Params, keys: jax.Array, features: Features, later: jax.Array) -> jax.Array:
        """Multiply keys by the H of all tokens that arrived later, the earliest first."""
        w, beta = (features[name].astype(keys.dtype) for name in ("w", "beta"))
        k = keys.swapaxes(0, 1)
        blocks = tuple(_blocks(x[::-1]) for x in (w, beta, later.T))
        moved, _ = jax.lax.scan(functools.partial(_apply_block, k), jnp.zeros_like(k), blocks, reverse=True)
        return (k + moved).swapaxes(0, 1)

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        if not tile.q_features.keys() >= self.revised_by:  # the keys have been multiplied by all H
            return s
        num_heads, q, k = tile.q.shape[1], at_least_float32(tile.q).swapaxes(0, 1), at_least_float32(tile.k)
        # The last token that a query sees is its own. All tokens up to it are on the path.
        on_path = jax.lax.cummax(tile.visible.astype(jnp.int32), axis=1, reverse=True) > 0

        def repeat_heads(features: Features) -> tuple[jax.Array, jax.Array]:
            w, beta = (features[name].astype(q.dtype) for name in ("w", "beta"))
            return tuple(jnp.repeat(x, num_heads // x.shape[1], axis=1) for x in (w, beta))  # type: ignore[return-value]

        if tile.k_features.keys() >= self.revised_by:
            terms = _path_terms(q, k, *repeat_heads(tile.k_features), on_path)
        else:  # the keys have been multiplied by the H of all tokens before the queries
            after = jnp.pad(on_path[:, 1:], ((0, 0), (0, 1)))
            terms = _chunk_terms(q, k, *repeat_heads(tile.q_features), after)
        return s + tile.logit_scale * (terms / math.sqrt(q.shape[-1])).astype(s.dtype)


def _path_terms(q: jax.Array, k: jax.Array, w: jax.Array, beta: jax.Array, on_path: jax.Array) -> jax.Array:
    """Return the terms [h, q, k] that the path adds to q . k, for k, w [k, h, d], beta [k, h] and on_path [q, k]."""
    blocks = tuple(map(_blocks, (k, w, beta, on_path.T)))
    _, terms = jax.lax.scan(functools.partial(_ut_transform, q), jnp.zeros_like(q), blocks, reverse=True)
    return jnp.moveaxis(terms, 0, 2).reshape(*q.shape[:2], -1)[..., : len(k)]


def _chunk_terms(q: jax.Array, k: jax.Array, w: jax.Array, beta: jax.Array, after: jax.Array) -> jax.Array:
    """Return the terms of `_path_terms` if the path is the queries' own tokens, with w [q, h, d] and beta [q, h].

        terms = -(Q W^T) T^-1 (W K^T)

    after [q, k]: the query's token arrived after key k, which masks W K^T.
    """
    own = jnp.asarray(np.tri(len(w), dtype=bool))
    blocks = tuple(map(_blocks, (w, beta, own.T)))
    _, qw_t = jax.lax.scan(functools.partial(_apply_block, q), jnp.zeros_like(q), blocks, reverse=True)
    qw_t = jnp.moveaxis(qw_t, 0, 2).reshape(*q.shape[:2], -1)[..., : len(w)]
    wk = jnp.where(after[None], exact_einsum("thd,khd->htk", w, k), 0)
    return -exact_einsum("hqt,htk->hqk", qw_t, wk)


def _blocks(x: jax.Array) -> jax.Array:
    """Split x [k, ...] into blocks [n, c, ...], the last one filled with tokens whose H is I."""
    size = min(BLOCK, 1 << (len(x) - 1).bit_length())
    padded = jnp.pad(x, ((0, -len(x) % size), *((0, 0),) * (x.ndim - 1)))
    return padded.reshape(-1, size, *x.shape[1:])


def _apply_block(x: jax.Array, moved: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Apply the H of one block, the last token's first, to the vectors x + `moved` [h, n, d].

        T^-1  = (I + strictLower(D W W^T))^-1 D,  D = diag(beta)
        moved <- moved - (X W^T) T^-1 W,          X = x + moved

    block: W [c, h, d], beta [c, h] and the tokens on each vector's path [c, n], which mask X W^T. Returns the new
    `moved`, and (X W^T) T^-1 [h, n, c].
    """
    w, beta, on_path = block
    xw = jnp.where(on_path.T[None], exact_einsum("hnd,chd->hnc", x + moved, w), 0)
    ww = jnp.tril(exact_einsum("ihd,jhd->hij", w, w), -1)
    t_inverse = _inverse(beta.T[..., None] * ww) * beta.T[:, None]
    xw_t = exact_einsum("hni,hij->hnj", xw, t_inverse)
    return moved - exact_einsum("hni,ihd->hnd", xw_t, w), xw_t


def _ut_transform(q: jax.Array, moved: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Apply the H of one block to the queries q + `moved` [h, q, d], with q as projected.

        terms = moved K^T - (Q W^T) T^-1 strictLower(W K^T)

    block: K [c, h, d] and the block of `_apply_block`. Returns the new `moved`, and the terms [h, q, c] that the path
    adds to q . k.
    """
    k, w, beta, on_path = block
    after, qw_t = _apply_block(q, moved, (w, beta, on_path))
    wk = jnp.tril(exact_einsum("ihd,jhd->hij", w, k), -1)
    return after, exact_einsum("hqd,chd->hqc", moved, k) - exact_einsum("hqi,hij->hqj", qw_t, wk)


def _inverse(lower: jax.Array) -> jax.Array:
    """Return (I + lower)^-1 by halves, for strictly lower triangular matrices [.., n, n], n a power of 2.

    A sum of powers would cancel: for n reflections with one w, its terms are as large as 2^n. XLA's triangular solve, a
    call of LAPACK on CPUs, was seen to wait for ever for a thread of its pool (jaxlib 0.10.2).
    """
    half = lower.shape[-1] // 2
    if not half:
        return jnp.ones_like(lower)
    first, last = _inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    corner = exact_einsum("...ij,...jk,...kl->...il", last, lower[..., half:, :half], first)
    rows = [first, jnp.zeros_like(first)], [-corner, last]
    return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)
