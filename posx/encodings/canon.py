"""Canon layer B: a short convolution of queries, keys and values over tokens."""

import dataclasses
from typing import Annotated

import jax

from posx.contract import About, Dims, Encoding, Features, Params, at_least_float32, exact_einsum, fact
from posx.contract.fields import at_least
from posx.encodings.networks import uniform


@dataclasses.dataclass(frozen=True)
class Canon(Encoding):
    """y_t = x_t + sum_n a_n * x_{t-n}, n = 0 .. `kernel` - 1, for queries, keys and values x as projected.

    Each channel of each head has its own numbers a_n, drawn from U(-1, 1) / sqrt(kernel). Tokens before the start of a
    document count as zeros. No position is read. In a chain it is before positional maps: canon+rope. Alone it is NoPE
    with a convolution.

    Reference: Allen-Zhu 2025, arXiv 2512.17351, Canon-B; github.com/facebookresearch/PhysicsLM4, canon_helper.py.
    Differs: there a document sees the last tokens of the one before it. Left out: Canon-A, C and D, which act outside
    of attention, and its options without the residual x_t, with a bias, or with silu.
    """

    kernel: Annotated[int, "tokens", at_least(2)] = 4

    axes = 0  # no position is read
    history = fact(lambda self: dict.fromkeys(("query", "key", "value"), self.kernel - 1))
    decayed = frozenset({"query", "key", "value"})
    about = About(
        "arXiv 2512.17351",
        "sees three tokens back at any length: the rest depends on the encodings chained with it; not measured",
    )

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        heads = {"query": dims.num_heads, "key": dims.kv_heads, "value": dims.kv_heads}
        rngs = zip(jax.random.split(rng, len(heads)), heads.items(), strict=True)
        return {hook: uniform(own, (self.kernel, n, dims.head_dim), self.kernel) for own, (hook, n) in rngs}

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return _convolve(params["query"], vectors)

    def key(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return _convolve(params["key"], vectors)

    def value(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return _convolve(params["value"], vectors)


def _convolve(kernel: jax.Array, vectors: jax.Array) -> jax.Array:
    """Return x_t + sum_n kernel_n * x_{t-n} [t, h, d], of windows [t, n, h, d] that start with the token itself."""
    wide = at_least_float32(vectors)
    return (wide[:, 0] + exact_einsum("tnhd,nhd->thd", wide, kernel)).astype(vectors.dtype)
