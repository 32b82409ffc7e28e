"""DAPE: a bias adapted to the scores by a small network over the heads."""

import dataclasses
import functools
import operator
from typing import Annotated

import jax
import jax.numpy as jnp

from posx.contract import About, ByDistance, Composite, Dims, Encoding, Params, Tile, fact, inside, prefixed
from posx.contract.fields import HiddenUnits, odd
from posx.contract.hooks import acting, bias_by_distance, distance_terms
from posx.encodings.kerple import Kerple
from posx.encodings.networks import uniform


@dataclasses.dataclass(frozen=True)
class Dape(Composite):
    """s_ij = A_ij + B_ij + f([A; B])_ij, f = W2 leaky_relu(W1 . + b), a network 2H -> width -> H over the heads.

    A are the scaled products with every term that comes before `score` in the formula or in a chain. B is the bias or
    the score that the encoding `base` adds to them. The papers' best is KERPLE, with its own arrays in each layer. If
    the encoding adds no B, the network is f(A), from H heads. This is so for RoPE, NoPE, FoX and Transformer-XL, which
    act elsewhere. `kernel` = 1 is version 1. 3 is version 2: W1 and W2 span a key and its neighbours, and both see 0
    for keys that the query does not see. f is per layer, drawn as PyTorch does, uniform within 1/sqrt(inputs).

    Reference: Zheng et al. 2024, arXiv 2405.14722; version 2 Zheng et al. 2024, arXiv 2410.04798.
    Differs: the release gives the second layer a bias vector. It adds one number to all keys of a query, so it changes
    no weight. The release hides later keys from the first convolution alone. Its second one reads a hidden layer at the
    key after the query's own. Unless the text ends there, rows change as the text grows. Here every row is computed
    as the release computes the last one.
    """

    base: Encoding = Kerple(per_layer=True)  # noqa: RUF009  (a frozen value)
    kernel: Annotated[int, "keys", odd()] = 1
    width: HiddenUnits = 32

    fades = False  # no bound on what f adds
    revised_by = frozenset()  # f reads products and scores apart
    tiling = fact(lambda self: "neighbours" if self.kernel > 1 else self.base.tiling)
    decayed = fact(lambda self: super().decayed | {"w_1", "w_2"})
    about = About("arXiv 2405.14722", "as far as its base; flat to 16 L over KERPLE, in its paper and our small study")

    def acts_on(self, hook: str) -> bool:
        return hook == "score" or (hook != "bias" and self.base.acts_on(hook))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        base_rng, first, second, b_rng = jax.random.split(rng, 4)
        base, h = self.base.init(base_rng, dims), dims.num_heads
        has_b = acting(self.base, ("bias", "score")) or "bias" in distance_terms(self.base, base)
        inputs = 2 * h if has_b else h
        return prefixed("base", base) | {
            "w_1": uniform(first, (self.kernel, inputs, self.width), self.kernel * inputs),
            "b_1": uniform(b_rng, (self.width,), self.kernel * inputs),
            "w_2": uniform(second, (self.kernel, self.width, h), self.kernel * self.width),
        }

    def by_distance(self, params: Params, distance: jax.Array) -> ByDistance:
        """Return the terms of the base without its bias, which is part of B."""
        return super().by_distance(params, distance)._replace(bias=None)

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        a = s
        b, a_plus_b = self._b_and_sum(params, a, tile)
        visible = tile.visible[None]
        both = a if b is None else jnp.concatenate([a, b])
        both = jnp.where(visible & (both > -jnp.inf), both, 0)  # a base may mask pairs too
        hidden = jax.nn.leaky_relu(_convolved(both, params["w_1"]) + params["b_1"][:, None, None])
        f = _convolved(jnp.where(visible, hidden, 0), params["w_2"])
        return a_plus_b + f

    def _b_and_sum(self, params: Params, a: jax.Array, tile: Tile) -> tuple[jax.Array | None, jax.Array]:
        """Return B and A + B, [h, q, k]; B is None if the base adds nothing."""
        base, pos = inside("base", params), (tile.q_pos, tile.k_pos)
        biases = (bias_by_distance(self.base, base, *pos), self.base.bias(base, *pos))
        given = [jnp.broadcast_to(bias, a.shape) for bias in biases if bias is not None]
        b = functools.reduce(operator.add, given) if given else None
        total = a if b is None else a + b
        if not self.base.acts_on("score"):
            return b, total
        scored = super().score(params, total, tile)
        added = scored - total  # a score may depend on the scores it is given, so only its result tells what it adds
        return added if b is None else b + added, scored


def _convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return x [c, q, k] convolved with w [taps, c, o] along the keys, [o, q, k]. Beyond both ends x is 0.

    One product serves all taps. Its inputs are shifted, or its outputs if there are fewer of them.
    """
    (taps, inputs, outputs), num_keys = w.shape, x.shape[2]

    def shifted(x: jax.Array, tap: int) -> jax.Array:
        return x[..., tap : tap + num_keys]

    padded = jnp.pad(x, ((0, 0), (0, 0), (taps // 2, taps // 2)))
    if inputs < outputs:
        every = jnp.stack([shifted(padded, tap) for tap in range(taps)])
        return jnp.einsum("tco,tcqk->oqk", w, every)
    found = jnp.einsum("tco,cqk->toqk", w, padded)
    return sum((shifted(found[tap], tap) for tap in range(1, taps)), shifted(found[0], 0))
