"""Masks as values: the pairs that may see each other, by arrival order (`idx`), never by position.

A slot with idx -1 is empty or padding: it sees no slot, and no slot sees it.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from posx.errors import ConfigError

#: The values that stand for a boolean mask.
MASKS = (
    "give posx.causal(), posx.full() or posx.window(size). Padding is an idx of -1, and packed documents are segment "
    "numbers, both in posx.Slots."
)


@dataclasses.dataclass(frozen=True)
class Mask:
    """The visible pairs of queries and keys.

    Sinks are the tokens whose idx is below `sinks`. Number each row from its first token, not from its padding, as
    `prefill` does. Packed documents have their own sinks only if q_idx and k_idx start at 0 in each document.

    Attributes:
      causal: later keys are hidden.
      window: all keys but the last `window` tokens, the query included, are hidden; 0 for no limit.
      sinks: the first `sinks` tokens stay visible outside the window.
    """

    causal: bool = True
    window: int = 0
    sinks: int = 0

    def __init_subclass__(cls) -> None:
        """Raise ConfigError: tile skipping and fused kernels read the fields, so another `visible` would be ignored."""
        raise ConfigError(f"{cls.__name__}: a mask is posx.causal(), full() or window(). It cannot be subclassed.")

    def __post_init__(self) -> None:
        sizes = self.window, self.sinks
        if not all(isinstance(size, int | np.integer) and 0 <= size < 2**31 for size in sizes):
            raise ConfigError(
                f"mask: window={self.window}, sinks={self.sinks}: both must be whole numbers, below 2**31."
            )
        if self.window and not self.causal:
            raise ConfigError(
                f"mask: window={self.window}, causal=False: a window needs causal=True. Give window=0 or causal=True."
            )

    def visible(self, q_idx: jax.Array, k_idx: jax.Array) -> jax.Array:
        """Return bool [q, k] from arrival orders [q] and [k]."""
        i, j = q_idx[:, None], k_idx[None, :]
        seen = (i >= 0) & (j >= 0)
        if self.causal:
            seen &= j <= i
        if self.window:
            seen &= (i - j < self.window) | (j < self.sinks)
        return seen


def causal() -> Mask:
    """Return the mask under which each token sees itself and all earlier tokens."""
    return Mask()


def full() -> Mask:
    """Return the mask under which each token sees all tokens."""
    return Mask(causal=False)


def window(size: int, sinks: int = 0) -> Mask:
    """Return the mask under which each token sees the last `size` tokens, itself included, and the first `sinks`."""
    if size < 1:
        raise ConfigError(f"window: size={size} must be at least 1. posx.causal() has no limit.")
    return Mask(window=size, sinks=sinks)


def require_mask(given: Any) -> None:
    """Raise ConfigError unless `given` is a Mask: an array has no window to skip tiles by, and no arrival orders."""
    if isinstance(given, Mask):
        return
    if any(given is made for made in (causal, full, window)):
        raise ConfigError(f"mask is the function {given.__name__}: call it. Write mask=posx.{given.__name__}(...).")
    shown = "jax.Array" if isinstance(given, jax.Array) else type(given).__name__
    raise ConfigError(f"mask is {repr(given) if isinstance(given, str | bool) else shown}: {MASKS}")
