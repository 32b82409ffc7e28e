"""DaRoPE: RoPE whose slow planes rotate by a coordinate that the token sets."""

import dataclasses
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp

from posx.contract import About, Dims, Encoding, Features, Params, as_float, exact_einsum, fact, normal
from posx.contract.fields import Base, Channels, Length, at_least
from posx.encodings.angles import angles, check_pairs, inverse_frequencies
from posx.encodings.frequencies import WholeTurns
from posx.encodings.rope import rotate

#: The part of L that a position keeps from both ends.
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Darope(Encoding):
    """RoPE whose slow planes rotate by c(x_p) theta_j, c(x_p) = L sigmoid(w . x_p + alpha logit((p + 1/2) / L)).

    Slow planes complete no turn within L tokens: theta_j < 2 pi / L. The others rotate by p theta_j, as in RoPE, with
    theta_j = base^(-2j/d). L is `original_len`, by default the training length. x is the layer's normalised input. p +
    1/2 is clipped to L 1e-6 and L (1 - 1e-6). Beyond L the coordinate thus depends on x alone, and lies near L unless
    alpha is small. w = 0 and alpha = 1 is RoPE up to L, half a token later. w starts as N(0, `content_std`) and alpha
    at `prior`, both per key head. Query heads that share keys share c, since a product needs the difference of one c.

    Reference: Lévy et al. 2026, arXiv 2609.34556, equations 2 to 6; both initial values are those of its appendix A.2.
    Differs: its language models up to 1 B have base 500,000, the largest 10,000. Unknown are the norm of x and weight
    decay, which acts on w alone here. It does not treat shared keys. No code was found.
    """

    base: Base = 10000.0
    original_len: Length | None = None
    content_std: Annotated[float, at_least(0)] = 0.1
    prior: float = 0.5
    head_dim: Channels | None = None

    shift_invariant = False
    planes = fact(lambda self: f"half_split of {self.head_dim}")
    decayed = frozenset({"w"})
    about = About(
        "arXiv 2609.34556", "slow planes nearly stand still; rises from 1.25 L here, to 4 L as HoPE in its paper"
    )

    def resolve(self, dims: Dims) -> Self:
        check_pairs("darope", dims)
        return super().resolve(dims).fill_open(original_len=dims.train_len)

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        w = normal(rng, (dims.model_dim, dims.kv_heads), self.content_std)
        return {"w": w, "alpha": jnp.full(dims.kv_heads, self.prior, jnp.float32)}

    def features(self, params: Params, x: jax.Array, pos: jax.Array, carry: Any) -> tuple[Features, Any]:
        content = exact_einsum("tm,mg->tg", as_float(x), as_float(params["w"]))
        prior = as_float(params["alpha"])[None] * logit_of_place(pos, self.original_len)[:, None]
        return {"c": self.original_len * jax.nn.sigmoid(content + prior)}, carry

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        fast = WholeTurns(self.original_len).frequencies(self.base, self.head_dim)
        slow = inverse_frequencies(self.base, self.head_dim) - fast
        c = jnp.repeat(features["c"], vectors.shape[1] // features["c"].shape[1], axis=1)
        radians = angles(pos, fast)[:, None, :] + as_float(c)[..., None] * as_float(slow)[None, None, :]
        return rotate(vectors, jnp.sin(radians), jnp.cos(radians))

    key = query


def logit_of_place(pos: jax.Array, length: int) -> jax.Array:
    """Return ln(u / (1 - u)) for u = (pos + 1/2) / length within EPS and 1 - EPS.

    Both tokens before and tokens after are clipped: 1 - u would lose all its digits in float32.
    """
    p = as_float(jnp.clip(pos, -1, length))
    before, after = (jnp.clip(n, EPS * length, (1 - EPS) * length) for n in (p + 0.5, length - 0.5 - p))
    return jnp.log(before / after)
