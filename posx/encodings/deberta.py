"""DeBERTa's disentangled attention."""

import dataclasses
from typing import Annotated, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from posx.contract import About, ByDistance, Dims, Encoding, Features, Params, as_float, exact_einsum, fact, normals
from posx.contract.fields import NOT_EMPTY, Buckets, Length
from posx.encodings.t5 import geometric_series
from posx.errors import ConfigError

#: The projection of P that each term reads.
PROJECTIONS = {"c2p": "w_k", "p2c": "w_q"}


@dataclasses.dataclass(frozen=True)
class Deberta(Encoding):
    """s_ij = [ q_i . k_j + q_i . Kr_{delta(i,j)} (c2p) + k_j . Qr_{delta(j,i)} (p2c) ] / sqrt((1 + terms) d).

    delta(i, j) = clip(i - j + k, 0, 2k - 1), so the table covers the distances -k .. k - 1, not k itself. Kr = P W_k
    and Qr = P W_q, with P [2k, m] once for all layers and W_k, W_q [m, h, d] per layer. All are N(0, 0.02). k is
    `max_distance` in tokens, by default L. `log_buckets` B > 0 is v2's variant: distances beyond B/2 share logarithmic
    buckets up to `max_distance`, and P has 2B rows.

    Reference: He et al. 2021, arXiv 2006.03654, equations 2 to 4; v2 buckets arXiv 2111.09543.
    Differs: the authors' code and HF read p2c at delta(i, j); `release_index=True` does so. Left out are v1's bias on
    the position query, and the absolute positions of the enhanced mask decoder, which serves masked language models.
    Also left out are two further changes of v2: LayerNorm of P, and the layer's own projections of content in place of
    W_k and W_q.
    Bucket borders are exact here. The first release has the same ones, in float64. Later releases and HF take
    logarithms in float32, which puts a distance of some sizes one bucket lower: 3396 of B = 1024, max_distance = 4096.
    Distances are clipped to max_distance - 1 before they are mapped, as in the release: keys further ahead read row 1.
    HF does not clip, and they read row 0 there.
    Sensitive: to the rate (30 times a model's 4e-3 is worse by 0.16 nats a byte at L) and, beyond L, to k. With k = L,
    all distances from k on read one row. Training reads it once a window (c2p), or never in causal models (p2c). With
    k = L/4 no row is untrained: it is as good at L and flat to 32 L, while k = L rises (small study).
    """

    max_distance: Length | None = None
    terms: Annotated[tuple[Literal["c2p", "p2c"], ...], NOT_EMPTY] = ("c2p", "p2c")
    release_index: bool = False
    log_buckets: Buckets = 0

    integer_positions = True
    reads_raw_keys = True
    shared = frozenset({"table"})
    decayed = fact(lambda self: frozenset({"table", *(PROJECTIONS[term] for term in self.terms)}))
    reach = fact(lambda self: self.max_distance)
    about = About(
        "arXiv 2006.03654",
        "with k = L no: rises beyond 4 L, untrained rows; flat to 32 L with k = L/4 in our small study",
        lr_multiplier=3.0,  # products of small arrays; 10 gains nothing over 1, see experiments/recipe
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.log_buckets and (self.log_buckets < 4 or self.log_buckets % 2):
            raise ConfigError(f"deberta: log_buckets={self.log_buckets} must be 0 (off) or even and at least 4")
        if self.log_buckets and self.max_distance is not None and self.max_distance - 1 <= self.log_buckets // 2:
            least = self.log_buckets // 2 + 2
            raise ConfigError(f"deberta: log_buckets={self.log_buckets} needs max_distance of at least {least}")

    @property
    def _half(self) -> int:
        return self.log_buckets or self.max_distance

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(max_distance=dims.train_len)

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        m, h, d = dims.model_dim, dims.num_heads, dims.head_dim
        shapes = {"table": (2 * self._half, m), "w_k": (m, h, d), "w_q": (m, h, d)}
        params = normals(rng, shapes, 0.02)
        return {name: params[name] for name in params if name in self.decayed}  # all that are used

    def logit_scale(self, params: Params, pos: jax.Array, features: Features) -> jax.Array:
        return jnp.full((1, *pos.shape), (1 + len(self.terms)) ** -0.5, as_float(0).dtype)

    def by_distance(self, params: Params, distance: jax.Array) -> ByDistance:
        def read(term: str, r: jax.Array) -> jax.Array | None:
            if term not in self.terms:
                return None
            return exact_einsum("nm,mhd->nhd", params["table"], params[PROJECTIONS[term]])[self.rows(r)]

        return ByDistance(query=read("c2p", distance), key=read("p2c", distance if self.release_index else -distance))

    def rows(self, distance: jax.Array) -> jax.Array:
        """Return delta, the rows of P for whole signed distances i - j of any shape."""
        if self.log_buckets:
            mid = self.log_buckets // 2
            # The last distance of bucket mid + j is mid ((max_distance - 1) / mid)^(j / (mid - 1)), rounded down.
            ends = geometric_series(mid, self.max_distance - 1, mid - 1, up=False)
            ends = np.minimum(ends, np.iinfo(distance.dtype).max)
            distance = jnp.clip(distance, -int(ends[-1]), int(ends[-1]))
            far = jnp.searchsorted(jnp.asarray(ends, distance.dtype), jnp.abs(distance)).astype(distance.dtype)
            distance = jnp.where(jnp.abs(distance) <= mid, distance, (mid + far) * jnp.sign(distance))
        return jnp.clip(distance + self._half, 0, 2 * self._half - 1)
