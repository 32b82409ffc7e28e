"""Scores and biases adapted to each other by a small network over the heads."""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from posx.encodings.around import Around, of_base
from posx.encodings.base import BIASES, Dims, Encoding, HiddenUnits, Params, Tile, acting
from posx.encodings.biases.kerple import Kerple
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Dape(Around):
    """s_ij = A_ij + B_ij + f([A; B])_ij, f = W2 leaky_relu(W1 . + b) over the heads of a pair, 2H -> width -> H.

    A are the scaled products with all that comes before `score` in the formula, or in a chain, B is the bias or the
    score that `base` adds to them, the papers' best being KERPLE, in each layer its own. Where it adds none it is f(A),
    from H: so of RoPE and NoPE, and of FoX, Transformer-XL and others that act elsewhere. `kernel` = 1 is version 1, 3
    is version 2: W1 and W2 span a key and its neighbours, and both see 0 for keys that the query does not see. width =
    32; f is per layer, drawn as PyTorch does, uniform within 1/sqrt(inputs).

    Reference: Zheng et al. 2024, arXiv 2405.14722; version 2 Zheng et al. 2024, arXiv 2410.04798.
    Differs: the release gives the second layer a bias vector, which adds the same to all keys of a query and so changes
    no weight. It hides later keys from the first convolution alone: the second one reads a hidden layer at the key
    after the query's own, unless the text ends there, so that rows change as the text grows. Here every row is as its
    last one is.
    """

    base: Encoding = Kerple(per_layer=True)  # noqa: RUF009  (a frozen value)
    kernel: Annotated[int, "keys"] = 1
    width: HiddenUnits = 32

    extrapolates = "as far as its base; flat to 16 L over KERPLE, in its paper and our small study"
    paper = "arXiv 2405.14722"

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"dape: kernel={self.kernel} must be odd and at least 1")
        if self.width < 1:
            raise ConfigError(f"dape: width={self.width} must be at least 1")

    @property
    def tiling(self) -> str:  # type: ignore[override]
        return "rows" if self.kernel > 1 else self.base.tiling

    @property
    def reads_neighbours(self) -> bool:  # type: ignore[override]
        return self.kernel > 1 or self.base.reads_neighbours

    @property
    def decayed(self) -> frozenset[str]:
        return super().decayed | {"w_1", "w_2"}

    @property
    def _has_bias(self) -> bool:
        return bool(acting(self.base, BIASES))

    @property
    def _adds(self) -> bool:
        """Whether there is a B."""
        return self._has_bias or self.base.acts_on("score")

    def acts_on(self, hook: str) -> bool:
        """The bias of the base is added in `score`, where f sees it apart from the products."""
        return hook == "score" or (hook not in BIASES and self.base.acts_on(hook))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        base_rng, first, second, b_rng = jax.random.split(rng, 4)
        h = dims.num_heads
        inputs = 2 * h if self._adds else h
        return super().init(base_rng, dims) | {
            "w_1": _uniform(first, (self.kernel, inputs, self.width), self.kernel * inputs),
            "b_1": _uniform(b_rng, (self.width,), self.kernel * inputs),
            "w_2": _uniform(second, (self.kernel, self.width, h), self.kernel * self.width),
        }

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        logits, added = s, []
        if self._has_bias:
            added.append(jnp.broadcast_to(self.base.bias(of_base(params), tile.q_pos, tile.k_pos), s.shape))
            logits = s + added[0]
        if self.base.acts_on("score"):
            before, logits = logits, super().score(params, logits, tile)
            added.append(logits - before)
        inputs = jnp.concatenate([s, sum(added[1:], added[0])]) if added else s
        seen = tile.visible[None]
        inputs = jnp.where(seen & (inputs > -jnp.inf), inputs, 0)  # a base may hide pairs too
        hidden = jax.nn.leaky_relu(_convolved(inputs, params["w_1"]) + params["b_1"][:, None, None])
        return logits + _convolved(jnp.where(seen, hidden, 0), params["w_2"])


def _uniform(rng: jax.Array, shape: tuple[int, ...], inputs: int) -> jax.Array:
    return jax.random.uniform(rng, shape, jnp.float32, -(inputs**-0.5), inputs**-0.5)


def _convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    """[o, q, k] of x [c, q, k] by w [taps, c, o] along the keys, 0 beyond both ends.

    One product for all taps: of the shifted inputs, or shifted after it, whichever are the fewer.
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
