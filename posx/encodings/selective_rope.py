"""Selective rotary position embedding."""

import dataclasses
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp

from posx.contract import About, Dims, Encoding, Features, Params, fact
from posx.contract.arrays import at_least_float32, exact_einsum, normals
from posx.contract.fields import Base, Channels, Heads, at_least
from posx.encodings.angles import check_pairs, inverse_frequencies, running_angles
from posx.encodings.networks import convolution_shapes, convolve
from posx.encodings.rope import rotate_planes
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class SelectiveRope(Encoding):
    """RoPE with steps set by tokens: plane c of token t is rotated by theta_c sum_{l<=t} phi_lc.

    theta_c = base^(-2c/d) and phi_tc = sum_n kernel_nc (W_up W_down x^_{t-n})_c over the last `kernel` tokens. x^ is
    the layer's input with each head's slice scaled to length 1. phi = 1 is RoPE at positions 1, 2, ... No position is
    read. `drift` adds a learned exp(b_c) > 0 to phi. `gated` then multiplies phi by sigmoid(w x^_t + b), one gate per
    head. All weights start as N(0, 0.02), biases at 0, so hardly anything rotates at first, except for exp(0) = 1 of
    `drift`. Angles belong to key heads. Query heads that share keys rotate alike, since products must depend on the
    tokens between.

    Reference: Movahedi et al. 2026, arXiv 2511.17388; github.com/timurcarstensen/selective-rope, modules/rotary.py.
    Differs: its language models set rank 32. It needs as many key heads as query heads. Left out: full-rank projections
    and other gates, differences in place of the convolution, learned or "rfa" frequencies, an activation after it.
    """

    base: Base = 500000.0
    rank: Annotated[int, at_least(1)] = 16
    kernel: Annotated[int, "tokens", at_least(2)] = 4
    drift: bool = False
    gated: bool = False
    num_heads: Heads | None = None
    head_dim: Channels | None = None

    planes = fact(lambda self: f"half_split of {self.head_dim}")
    axes = 0  # no position is read
    history = fact(lambda self: {"features": self.kernel - 1})
    decayed = fact(
        lambda self: frozenset({"down", "up", "kernel", *["drift"] * self.drift, *["gate", "gate_bias"] * self.gated})
    )
    about = About(
        "arXiv 2511.17388",
        "no: tokens choose the angles, which grow on as RoPE's do",
        lr_multiplier=3.0,  # 0.02 nats a byte better than 1; 10 loses 0.1, see experiments/leaderboard
    )

    def resolve(self, dims: Dims) -> Self:
        check_pairs("selective_rope", dims)
        if dims.model_dim % dims.num_heads:
            raise ConfigError(
                f"selective_rope: model_dim={dims.model_dim} must be a multiple of num_heads={dims.num_heads}, "
                "because the slice of each head is normalised"
            )
        return super().resolve(dims)

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        g, half = dims.kv_heads, dims.head_dim // 2
        shapes = convolution_shapes(dims, self.rank, self.kernel, half) | {"gate": (dims.model_dim, g)}
        params = normals(rng, shapes, 0.02)
        params |= {"gate_bias": jnp.zeros(g, jnp.float32), "drift": jnp.zeros((g, half), jnp.float32)}
        return {name: params[name] for name in params if name in self.decayed}  # all that are used

    def features(self, params: Params, x: jax.Array, pos: jax.Array, carry: Any) -> tuple[Features, Any]:
        slices = at_least_float32(x).reshape(*x.shape[:2], self.num_heads, -1)
        x = (slices * jax.lax.rsqrt((slices**2).sum(axis=-1, keepdims=True) + 1e-6)).reshape(x.shape)
        phi = convolve(params, x)
        if self.drift:
            phi = phi + jnp.exp(params["drift"])[None]
        if self.gated:
            gate = exact_einsum("tm,mg->tg", x[:, 0], params["gate"])
            phi = phi * jax.nn.sigmoid(gate + params["gate_bias"][None])[..., None]
        theta = inverse_frequencies(self.base, 2 * phi.shape[-1])
        angles, carry = running_angles(phi, theta, carry)
        return {"angles": angles}, carry

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return rotate_planes(features["angles"], vectors)

    key = query
