"""RoPE by accumulated steps: the plainest rotation by a path of tokens, and its control with random steps."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp

from posx.contract import About, Dims, Encoding, Features, Params, fact
from posx.contract.arrays import as_float, at_least_float32, exact_einsum, normal
from posx.contract.fields import Base, Channels, Heads
from posx.encodings.angles import check_pairs, inverse_frequencies, running_angles
from posx.encodings.rope import rotate_planes


@dataclasses.dataclass(frozen=True)
class AccumulatedRope(Encoding):
    """RoPE whose positions are sums of steps: plane c of token t is rotated by theta_c sum_{s<=t} delta_sc.

    theta_c = base^(-2c/d). delta_s = W x_s is a linear map of the layer's input to each plane of each key head. delta =
    1 is RoPE at positions 1, 2, ... W starts as N(0, 1/m), so that steps start with mean 0 and size 1. Query heads that
    share keys rotate alike.

    With `random` nothing is learned, as a control: delta_sc is uniform with mean 0 and variance 1, drawn from the
    token's position. So the same text has the same steps in each call, layer and model. Moved texts have other steps.
    rotated_values(base=accumulated_rope) rotates values too.

    Reference: Godavarti 2026, arXiv 2606.24975, of which the abstract was read.
    Differs: the map from tokens to steps, its scale and the random draws are choices of posx. They are the simplest
    that are RoPE for constant steps. Earlier code of the author, github.com/mahesh-godavarti/joformer, has a
    table of angles by token, or a network of two layers, without theta. A random control there draws new angles in each
    call.
    """

    base: Base = 10000.0
    random: bool = False
    head_dim: Channels | None = None
    num_kv_heads: Heads | None = None

    shift_invariant = fact(lambda self: not self.random)
    axes = fact(lambda self: int(self.random))  # learned steps read no position
    integer_positions = fact(lambda self: self.random)
    planes = fact(lambda self: f"half_split of {self.head_dim}")
    decayed = fact(lambda self: frozenset() if self.random else frozenset({"steps"}))
    about = About("arXiv 2606.24975", "further than RoPE in its paper, then degrades; rises as RoPE here")

    def resolve(self, dims: Dims) -> Self:
        check_pairs("accumulated_rope", dims)
        return super().resolve(dims)

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        if self.random:
            return {}
        return {"steps": normal(rng, (dims.model_dim, dims.kv_heads, dims.head_dim // 2), dims.model_dim**-0.5)}

    def features(self, params: Params, x: jax.Array, pos: jax.Array, carry: Any) -> tuple[Features, Any]:
        if self.random:
            steps = self._draw_steps(x, pos)
        else:
            steps = exact_einsum("tm,mgc->tgc", at_least_float32(x), params["steps"])
        angles, carry = running_angles(steps, inverse_frequencies(self.base, self.head_dim), carry)
        return {"angles": angles}, carry

    def _draw_steps(self, x: jax.Array, pos: jax.Array) -> jax.Array:
        """Draw the steps [t, g, c] of tokens at pos [t], 0 for an empty slot."""

        def draw(pos: jax.Array) -> jax.Array:
            rng = jax.random.fold_in(jax.random.key(0), pos)
            return jax.random.bits(rng, (self.num_kv_heads, self.head_dim // 2), jnp.uint32)

        # From bits, because XLA rounds normal numbers differently in batches of other sizes.
        odd = 2 * (jax.vmap(draw)(pos.astype(jnp.uint32)) >> 9).astype(jnp.int32) + 1 - 2**23
        drawn = as_float(odd) * (math.sqrt(3) / 2**23)
        return jnp.where((x != 0).any(axis=-1)[:, None, None], drawn, 0)

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return rotate_planes(features["angles"], vectors)

    key = query
