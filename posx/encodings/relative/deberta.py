"""DeBERTa's disentangled attention."""

import dataclasses
import functools
import math
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from posx.encodings.base import (
    Buckets,
    Dims,
    Encoding,
    Features,
    Params,
    Relative,
    Tokens,
    as_float,
    exact_einsum,
    normal,
)
from posx.encodings.checks import check_names
from posx.errors import ConfigError


@functools.cache
def bucket_ends(log_buckets: int, max_distance: int) -> np.ndarray:
    """Return the last distance (tokens) of each bucket from B/2 on: of bucket B/2 + j, int(mid (far/mid)^(j/(mid-1))).

    mid = B/2 and far = max_distance - 1. Float64 finds them, exact integers decide if it is near a whole number.
    """
    mid, far = log_buckets // 2, max_distance - 1
    found = []
    for j in range(mid):
        end = mid * (far / mid) ** (j / (mid - 1))
        n = round(end)
        if abs(end - n) > 1e-9 * end:
            n = math.floor(end)
        elif n ** (mid - 1) > mid ** (mid - 1 - j) * far**j:
            n -= 1
        found.append(n)
    return np.array(found, np.int64)


@dataclasses.dataclass(frozen=True)
class Deberta(Encoding):
    """s_ij = [ q_i . k_j + q_i . Kr_{delta(i,j)} (c2p) + k_j . Qr_{delta(j,i)} (p2c) ] / sqrt((1 + terms) d).

    delta(i, j) = clip(i - j + k, 0, 2k - 1), so the table covers the distances -k .. k - 1, not k itself;
    Kr = P W_k, Qr = P W_q, with P [2k, m] once for all layers and W_k, W_q [m, h, d] per layer, all N(0, 0.02).
    k = `max_distance` in tokens (default L). `log_buckets` B > 0 is v2's variant: distances beyond B/2 share
    logarithmic buckets up to max_distance, and P has 2B rows.

    Reference: He et al. 2021, arXiv 2006.03654, equations 2 to 4; v2 buckets arXiv 2111.09543.
    Differs: the authors' code and HF read p2c at delta(i, j); `release_index=True` does so. v1's bias on the position
    query, and the absolute positions of the enhanced mask decoder (a masked-LM device), are left out. So is what the
    v2 models have beside the buckets: LayerNorm of P, and the layer's own projections of content in place of W_k, W_q.
    Bucket borders are exact here. The first release has the same ones, in float64; later ones and HF take logarithms in
    float32, and put a single distance of some sizes one bucket lower, such as 3396 of B = 1024, max_distance = 4096.
    HF does not clip distances first: there keys at max_distance or more ahead read row 0.
    Sensitive: to the rate (30 times a model's 4e-3: 0.16 nats a byte worse at L), and beyond L to k: with k = L all
    distances from k on read a row that training meets once a window (c2p) and one that causal training never meets
    (p2c); k = L/4 leaves none untrained, is as good at L and flat to 32 L where k = L rises (small study).
    """

    max_distance: Tokens | None = None
    terms: tuple[str, ...] = ("c2p", "p2c")
    release_index: bool = False
    log_buckets: Buckets = 0

    integer_positions = True
    lr_multiplier = 3.0  # products of small arrays; 10 gains nothing over 1, see experiments/recipe
    extrapolates = "with k = L no: rises beyond 4 L, untrained rows; flat to 32 L with k = L/4 in our small study"
    paper = "arXiv 2006.03654"

    def __post_init__(self) -> None:
        check_names("deberta: terms", self.terms, ("c2p", "p2c"))
        if self.max_distance is not None and self.max_distance < 1:
            raise ConfigError(f"deberta: max_distance={self.max_distance} must be at least 1")
        if self.log_buckets and (self.log_buckets < 4 or self.log_buckets % 2):
            raise ConfigError(f"deberta: log_buckets={self.log_buckets} must be 0 (off) or even and at least 4")
        if self.log_buckets and self.max_distance is not None and self.max_distance - 1 <= self.log_buckets // 2:
            least = self.log_buckets // 2 + 2
            raise ConfigError(f"deberta: log_buckets={self.log_buckets} needs max_distance of at least {least}")

    @property
    def shared(self) -> frozenset[str]:
        return frozenset({"table"})

    @property
    def decayed(self) -> frozenset[str]:
        return frozenset({"table", *(name for name, term in (("w_k", "c2p"), ("w_q", "p2c")) if term in self.terms)})

    @property
    def reach(self) -> int | None:
        return self.max_distance

    @property
    def _half(self) -> int:
        return self.log_buckets or self.max_distance

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(max_distance=dims.train_len)

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        self.require_resolved()
        table_rng, k_rng, q_rng = jax.random.split(rng, 3)
        projection = (dims.model_dim, dims.num_heads, dims.head_dim)
        params = {"table": normal(table_rng, (2 * self._half, dims.model_dim), 0.02)}
        if "c2p" in self.terms:
            params["w_k"] = normal(k_rng, projection, 0.02)
        if "p2c" in self.terms:
            params["w_q"] = normal(q_rng, projection, 0.02)
        return params

    def rows(self, distance: jax.Array) -> jax.Array:
        """delta: row of P for whole signed distances i - j, any shape."""
        self.require_resolved()
        if self.log_buckets:
            ends = np.minimum(bucket_ends(self.log_buckets, self.max_distance), np.iinfo(distance.dtype).max)
            distance = jnp.clip(distance, -int(ends[-1]), int(ends[-1]))
            far = jnp.searchsorted(jnp.asarray(ends, distance.dtype), jnp.abs(distance)).astype(distance.dtype)
            mid = self.log_buckets // 2
            distance = jnp.where(jnp.abs(distance) <= mid, distance, (mid + far) * jnp.sign(distance))
        return jnp.clip(distance + self._half, 0, 2 * self._half - 1)

    def temperature(self, params: Params, pos: jax.Array, features: Features) -> jax.Array:
        return jnp.full(pos.shape, (1 + len(self.terms)) ** -0.5, as_float(0).dtype)

    def relative(self, params: Params, distance: jax.Array) -> Relative:
        def projected(name: str, rows: jax.Array) -> jax.Array:
            return exact_einsum("nm,mhd->nhd", params["table"], params[name])[rows]

        back = distance if self.release_index else -distance
        return Relative(
            query=projected("w_k", self.rows(distance)) if "c2p" in self.terms else None,
            key=projected("w_q", self.rows(back)) if "p2c" in self.terms else None,
        )
