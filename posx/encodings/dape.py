"""DAPE: a bias adapted to the scores by a small network over the heads."""

import dataclasses
import functools
import operator
from typing import Annotated

import jax
import jax.numpy as jnp

from posx.contract import About, ByDistance, Composite, Dims, Encoding, Params, Tile, fact, prefix_names, select_part
from posx.contract.fields import HiddenUnits, odd
from posx.contract.hooks import acting_hooks, distance_terms
from posx.encodings.along_keys import evaluate_pairs
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
        has_b = acting_hooks(self.base, ("bias", "score")) or "bias" in distance_terms(self.base, base)
        inputs = 2 * h if has_b else h
        return prefix_names("base", base) | {
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
        both = a if b is None else jnp.concatenate([a, b])
        both = jnp.where(tile.visible[None] & (both > -jnp.inf), both, 0)  # a base may mask pairs too
        seen = tile.visible[None].astype(both.dtype)
        convolved = _convolve(_flat(jnp.concatenate([both, seen]), self.kernel), self._first_layer(params))
        hidden = jax.nn.leaky_relu(convolved[:-1]) * jax.lax.stop_gradient(convolved[-1:])
        f = _convolve(hidden, params["w_2"])
        return a_plus_b + f.reshape(*a.shape[:2], -1)[..., : a.shape[2]]

    def _first_layer(self, params: Params) -> jax.Array:
        """Return W1 [taps, inputs + 1, width + 1] for a last input that is 1 at visible keys and 0 elsewhere.

        b is its weight, so that the gradient of b is a part of a product and not a sum. The last output is that input
        again: it masks the hidden layer, as a row in memory and not computed anew for every unit.
        """
        w_1, b_1, middle = params["w_1"], params["b_1"], self.kernel // 2
        w = jnp.pad(w_1, ((0, 0), (0, 1), (0, 1)))
        return w.at[middle, -1, :-1].set(b_1).at[middle, -1, -1].set(1)

    def _b_and_sum(self, params: Params, a: jax.Array, tile: Tile) -> tuple[jax.Array | None, jax.Array]:
        """Return B and A + B, [h, q, k]; B is None if the base adds nothing."""
        base, distance = select_part("base", params), tile.q_pos[:, None] - tile.k_pos[None, :]
        biases = [self.base.bias(base, tile.q_pos, tile.k_pos)]
        if "bias" in distance_terms(self.base, base, distance.dtype):
            biases += [evaluate_pairs(lambda r: self.base.by_distance(base, r).bias, distance)]
        given = [jnp.broadcast_to(bias, a.shape) for bias in biases if bias is not None]
        b = functools.reduce(operator.add, given) if given else None
        total = a if b is None else a + b
        if not self.base.acts_on("score"):
            return b, total
        scored = super().score(params, total, tile)
        added = scored - total  # a score may read the scores it is given, so only its result shows what it adds
        return added if b is None else b + added, scored


def _flat(x: jax.Array, taps: int) -> jax.Array:
    """Return x [c, q, k] as [c, n]: rows of keys side by side, with taps - 1 zeros after each and at both ends."""
    if taps == 1:
        return x.reshape(len(x), -1)
    rows = jnp.pad(x, ((0, 0), (0, 0), (0, taps - 1))).reshape(len(x), -1)
    return jnp.pad(rows, ((0, 0), (taps - 1, taps - 1)))


def _convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return x [c, n + taps - 1] convolved with w [taps, c, o], [o, n].

    One product serves all taps. Its inputs are shifted, or its outputs if there are fewer of them. Pairs have one axis,
    as gradients take five times as long with two.
    """
    (taps, inputs, outputs), n = w.shape, x.shape[1] - w.shape[0] + 1
    if inputs < outputs:
        every = jnp.concatenate([x[:, tap : tap + n] for tap in range(taps)])
        return w.reshape(-1, outputs).T @ every
    by_tap = (w.swapaxes(1, 2).reshape(-1, inputs) @ x).reshape(taps, outputs, -1)
    return functools.reduce(operator.add, (partial[:, tap : tap + n] for tap, partial in enumerate(by_tap)))
