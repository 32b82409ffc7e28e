"""Learned vectors of clipped distances, added to keys and values."""

import dataclasses
from typing import Annotated, Self

import jax
import jax.numpy as jnp

from posx.contract import About, ByDistance, Dims, Encoding, Params, fact, normals
from posx.contract.fields import at_least


@dataclasses.dataclass(frozen=True)
class Shaw(Encoding):
    """s_ij = q_i . (k_j + aK_m) / sqrt(d), o_i = sum_j w_ij (v_j + aV_m), m = clip(j - i, -k, k) + k.

    k is `max_distance` in tokens, by default min(16, L/2). aK, aV [2k + 1, d] are N(0, d^-1/2), shared by the heads,
    one pair per layer. `values=False` leaves out aV. The paper's tables are two-sided: a causal model reads k + 1 rows.

    Reference: Shaw, Uszkoreit and Vaswani 2018, arXiv 1803.02155, equations 3 and 4.
    Sensitive: little. At a base rate of 4e-3, 1 to 30 times that rate agree to 0.012 nats a byte at L. At 1e-3 they
    agree to 0.09.
    """

    max_distance: Annotated[int, "tokens", at_least(0)] | None = None
    values: bool = True

    integer_positions = True
    reach = fact(lambda self: self.max_distance)
    about = About(
        "arXiv 1803.02155",
        "everything beyond k shares a vector; flat to 32 L in our small study",
        lr_multiplier=10.0,  # 0.01 nats a byte better than 1 or 3, see experiments/recipe
    )

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(max_distance=min(16, dims.train_len // 2))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        shape = (2 * self.max_distance + 1, dims.head_dim)
        tables = normals(rng, {"keys": shape, "values": shape}, dims.head_dim**-0.5)
        return tables if self.values else {"keys": tables["keys"]}

    def by_distance(self, params: Params, distance: jax.Array) -> ByDistance:
        rows = jnp.clip(-distance, -self.max_distance, self.max_distance) + self.max_distance
        keys, values = params["keys"][rows], params["values"][rows] if self.values else None
        return ByDistance(query=keys[:, None], value=None if values is None else values[:, None])
