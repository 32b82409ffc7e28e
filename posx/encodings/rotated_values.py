"""Values that are rotated as the keys are."""

import dataclasses
from typing import Self

import jax

from posx.contract import About, Composite, Dims, Encoding, Features, Params
from posx.encodings.rope import Rope
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class RotatedValues(Composite):
    """o_i = R_i^T sum_j w_ij R_j v_j, with the rotations R_i of queries and R_j of keys of the encoding `base`.

    The weights w are those of `base`. For RoPE, R_i^T R_j rotates plane c by (j - i) theta_c. A value thus arrives
    rotated by its distance, as a key does in its product with a query. Far values then add up out of phase.

    Reference: Godavarti 2026, arXiv 2606.24975, for accumulated rotations; 2506.08652 for RoPE's.
    Differs: a base may be any encoding or chain that rotates queries and keys. Outputs are rotated by the transposed
    map of queries, which is the inverse of a rotation. If a rule for RoPE's frequencies multiplies cosines and sines
    by a factor, values are multiplied by its square.
    """

    base: Encoding = Rope()  # noqa: RUF009 (a value)

    about = About(
        "arXiv 2606.24975", "further than its base in its paper; rises from 1.5 L on accumulated rotations here"
    )

    def resolve(self, dims: Dims) -> Self:
        if not (self.base.planes and self.base.acts_on("query") and self.base.acts_on("key")):
            raise ConfigError(
                f"rotated_values: base={self.base} does not rotate queries and keys. Give it one that does, such as "
                "rotated_values(base=rope)."
            )
        if back := self.base.history.keys() & {"query", "key"}:
            raise ConfigError(
                f"rotated_values: base={self.base} maps a {min(back)} together with earlier ones, which no value has. "
                "Put that part before it in a chain, such as key_offset+rotated_values(base=rope)."
            )
        return super().resolve(dims)

    def value(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self.key(params, super().value(params, vectors, pos, features), pos, features)

    def output(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        def rotate_forward(x: jax.Array) -> jax.Array:
            return self.query(params, x, pos, features)

        (back,) = jax.linear_transpose(rotate_forward, vectors)(vectors)
        return super().output(params, back, pos, features)
