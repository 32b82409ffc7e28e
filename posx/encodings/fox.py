"""The forgetting transformer's gates."""

import dataclasses
from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from posx.contract import About, Dims, Encoding, Features, Params, at_least_float32, exact_einsum, fact, normal
from posx.contract.fields import FloatTokens, above
from posx.errors import ConfigError

#: Tokens of a plain sum, few enough to round little.
CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Fox(Encoding):
    """s_ij += sum_{l=j+1}^{i} log f_l, f_l = sigmoid(w x_l + b): gates that forget.

    Every token has one gate per head, which discounts the keys before it. x is the layer's normalised input, so this is
    an ALiBi with slopes set by the text. `gate` is "forget", or "cable" for sigmoid(-w x_l - b), as in CABLE's code, or
    "constant" for b alone. The last starts so that head h forgets within T_h tokens, f_h = exp(-1/T_h), with T_h from
    `shortest` to `longest` in equal ratios. `gate_bias` is the initial b: at the release's 0 a gate is 1/2, a window of
    two tokens before anything is learned. `gate_scale` multiplies every log f_l. PaTH's forget gate has 1/sqrt(d)
    there.

    Reference: Lin et al. 2025, arXiv 2503.02130, section 3; w N(0, 0.02) as in the release. CABLE: Veisi et al.
    2025, arXiv 2503.08067.
    Differs: the release's Pro block (QK-norm, output gate, key and value shift) is no part of it. x-transformers starts
    b at 5, and its cached decoding sums the gates of new tokens only. CABLE's code does not scale its logits. The
    weights of the query that multiply the sums in CABLE's paper are neither in that code nor here.
    """

    gate: Literal["forget", "cable", "constant"] = "forget"
    gate_bias: float = 0.0
    shortest: FloatTokens = 2.0
    longest: FloatTokens | None = None
    gate_scale: Annotated[float, above(0)] = 1.0

    axes = 0  # no position is read
    causal_only = True
    fades = True
    decayed = fact(lambda self: frozenset() if self.gate == "constant" else frozenset({"w"}))
    about = About(
        "arXiv 2503.02130",
        "yes, as far as the gates forget; flat to 16 L in our small study",
        lr_multiplier=0.1,  # 0.02 nats a byte better than 1, see experiments/leaderboard
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest is not None and not 0.01 <= self.shortest <= self.longest:
            raise ConfigError(f"fox: shortest={self.shortest} must be at least 0.01 and at most longest={self.longest}")

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(longest=max(float(dims.train_len), self.shortest))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        h = dims.num_heads
        if self.gate == "constant":
            times = np.geomspace(self.shortest, self.longest, h)
            return {"b": jnp.asarray(-np.log(np.expm1(1 / times)), jnp.float32)}
        return {"w": normal(rng, (dims.model_dim, h), 0.02), "b": jnp.full(h, self.gate_bias, jnp.float32)}

    def features(self, params: Params, x: jax.Array, pos: jax.Array, carry: Any) -> tuple[Features, Any]:
        z = jnp.broadcast_to(params["b"], (x.shape[0], len(params["b"])))
        if self.gate != "constant":
            z = z + exact_einsum("tm,mh->th", at_least_float32(x), params["w"])
        log_f = jax.nn.log_sigmoid(-z if self.gate == "cable" else z)
        sums, carry = running_sum(self.gate_scale * log_f, carry)
        return {"log_f": sums}, carry

    def token_bias(self, params: Params, pos: jax.Array, features: Features) -> jax.Array:
        return features["log_f"]


def running_sum(x: jax.Array, carry: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the cumulative sums of x [t, h] in three parts [t, h, 3], and the carry of the next call.

    The parts are the sum before the token's chunk, high and low, and the sum inside the chunk. Subtracted part by part,
    they give the sum between two tokens with the rounding error of one chunk. A plain sum of logs of gates reaches
    -11,000 after 16,000 tokens. Float32 has steps of 0.001 there.

    carry: the one that the call for the tokens before returned, None at the start. It is the sum of all, high and low.
    """
    length, heads = x.shape
    chunks = -(-length // CHUNK)
    size = min(length, CHUNK)
    inside = jnp.cumsum(jnp.pad(x, ((0, chunks * size - length), (0, 0))).reshape(chunks, size, heads), axis=1)
    sums = jnp.zeros_like(x[:1]), jnp.zeros_like(x[:1])
    if carry is not None:
        sums = carry[0][None], carry[1][None]
    chunks_too = zip(sums, (inside[:, -1], jnp.zeros_like(inside[:, -1])), strict=True)
    sums = jax.lax.associative_scan(_add_exactly, tuple(jnp.concatenate(both) for both in chunks_too))
    before = (jnp.broadcast_to(part[:-1, None], inside.shape) for part in sums)
    parts = jnp.stack([*before, inside], axis=-1)
    return parts.reshape(chunks * size, heads, 3)[:length], (sums[0][-1], sums[1][-1])


def _add_exactly(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the sum of two numbers (high, low), with its rounding error in the low part (Knuth's TwoSum)."""
    high = a[0] + b[0]
    got = high - a[0]
    low = (a[1] + b[1]) + ((a[0] - (high - got)) + (b[0] - got))
    total = high + low
    return total, low - (total - high)
