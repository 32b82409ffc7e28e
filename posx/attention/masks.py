"""Masks as values: who may see whom, by arrival order (`idx`), never by position.

A slot with idx -1 is empty or padding: it sees nothing and nobody sees it.
"""

import dataclasses

import jax

from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Mask:
    """Visible pairs: no later key if `causal`, none further back than `window` tokens (0: no limit), except the first
    `sinks` tokens, which stay visible.

    Sinks are the tokens of idx below `sinks`: number each row from its first token, not from its padding, as `prefill`
    does. Packed documents have sinks of their own only if q_idx and k_idx start again with each.
    """

    causal: bool = True
    window: int = 0
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window < 0 or self.sinks < 0:
            raise ConfigError(f"mask: window={self.window} and sinks={self.sinks} must not be negative")
        if self.window and not self.causal:
            raise ConfigError("mask: a window needs causal=True")

    def visible(self, q_idx: jax.Array, k_idx: jax.Array) -> jax.Array:
        """bool [q, k] from arrival orders [q] and [k]."""
        i, j = q_idx[:, None], k_idx[None, :]
        seen = (i >= 0) & (j >= 0)
        if self.causal:
            seen &= j <= i
        if self.window:
            seen &= (i - j < self.window) | (j < self.sinks)
        return seen


def causal() -> Mask:
    """Every token sees itself and what came before."""
    return Mask()


def full() -> Mask:
    """Every token sees every token."""
    return Mask(causal=False)


def window(size: int, sinks: int = 0) -> Mask:
    """Every token sees the last `size` tokens, itself included, and the first `sinks` of the sequence."""
    return Mask(window=size, sinks=sinks)
