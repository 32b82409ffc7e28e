"""The attention weights of a model on items: how far, how sharply, and at the right token?

An item is one of a task or a window of text. A query is scored if it predicts a token of an answer, in a text always.
The right token of a query is the one that its answer is read from, see `posx.lab.tasks.Items`. A text has none.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy

from posx.errors import OutOfMemoryError
from posx.evaluation.scoring import out_of_memory
from posx.lab import interrupts
from posx.lab.model import Model
from posx.lab.progress import size
from posx.lab.tasks import Items
from posx.lab.tasks.base import PAD
from posx.lab.training.layout import Layout, whole_program
from posx.machine.devices import replicate
from posx.machine.platforms import product_precision

#: The most weights of a layer that are held at a time, 64 MB in float32.
LARGEST_WEIGHTS = 2**24
#: Decimal places of stored numbers.
PLACES = 6


def window_items(stream: np.ndarray, windows: np.ndarray, length: int, count: int) -> Items | None:
    """Return at most `count` windows of a text, evenly spread over it; None if the text has no whole window.

    Args:
      stream: tokens [n + 1].
      windows: [n, 3], as `Targets.windows`. All tokens of a window are read, also those that are not scored there.
      length: of windows, in tokens.
      count: of windows.
    """
    starts = windows[windows[:, 0] + length < len(stream), 0]
    if not len(starts):
        return None
    chosen = starts[np.unique(np.linspace(0, len(starts) - 1, count).astype(int))]
    tokens = jnp.asarray(stream[chosen[:, None] + np.arange(length + 1)], jnp.int32)
    return Items(tokens, jnp.ones(tokens.shape, bool))


def attention_facts(
    model: Model,
    params: Any,
    items: Items,
    precision: str,
    layout: Layout = Layout(),
    pos: np.ndarray | None = None,
    padding: int | None = PAD,
) -> dict[str, Any]:
    """Return the fields of a row about the attention weights of a model on items.

    A weight is that of the dense executor, from logits of at least float32. In bfloat16 it is rounded afterwards. Pairs
    are the visible ones between tokens of an item, so `padding` does not count. L is the training length.

    Args:
      model: for windows of the length of the items.
      params: its parameters.
      items: rows [n, t + 1].
      precision: of products of float32 numbers.
      layout: of the parameters.
      pos: positions [t], None for 0 to t - 1.
      padding: the token that fills items up, None for windows of a text.

    Returns:
      `attention` holds lists [layers, heads]. Three are means over scored queries: the weight on the right token, the
      entropy in nats, and `far_weight`. The latter is the weight on tokens L or more back. Two are the shares of
      weights that are exactly 0. The other fields sum them up over heads. Without right tokens the weight on them is
      None.

    Raises:
      OutOfMemoryError: the weights of one item do not fit.
    """
    tokens, scored = np.asarray(items.tokens), np.asarray(items.scored)
    source = np.full_like(tokens, -1) if items.source is None else np.asarray(items.source)
    inside = np.ones(tokens.shape, bool) if padding is None else tokens != padding
    params = params if layout.is_global else replicate(params, 1)
    length, heads = tokens.shape[1] - 1, model.dims.num_heads
    rows, totals = max(1, LARGEST_WEIGHTS // (heads * length**2)), None
    for start in range(0, len(tokens), rows):
        interrupts.raise_pending()
        missing = max(0, start + rows - len(tokens)) if start else 0  # so that one program serves all
        padded = (
            np.pad(x[start : start + rows], ((0, missing), (0, 0)), constant_values=value)
            for x, value in ((tokens, PAD), (scored, False), (source, -1), (inside, False))
        )
        try:
            with jax.set_mesh(layout.mesh) if layout.is_global else contextlib.nullcontext():
                sums = jax.device_get(whole_program(layout, _sums, model, precision)(params, pos, *padded))
            sums = jax.tree.map(np.float64, sums)
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"eval.attention_items: the attention weights of {length} tokens, {size(4.0 * heads * length**2)} in "
                "each layer, do not fit. Lower eval.lengths, or pass --config.eval.attention_items=0."
            ) from None
        totals = sums if totals is None else jax.tree.map(np.add, totals, sums)
    return _fields(totals, len(tokens), int(scored[:, 1:].sum()), int((source[:, 1:] >= 0).sum()))


def _fields(totals: Any, count: int, num_scored: int, num_right: int) -> dict[str, Any]:
    """Return the stored numbers of sums [layers, heads], over so many scored queries and queries with a right token."""
    pairs = totals["pairs"][:, None]
    means = {
        "right_weight": totals["right"] / num_right if num_right else None,
        "zero_weights": totals["zero"] / pairs,
        "zero_weights_bfloat16": totals["zero_bfloat16"] / pairs,
        "entropy": totals["entropy"] / num_scored,
        "far_weight": totals["far"] / num_scored,
    }
    known = {name: x.round(PLACES) for name, x in means.items() if x is not None}
    every = {name: round(float(x.mean()), PLACES) for name, x in known.items()}
    return {
        "attention_items": count,
        "attention": {name: x.tolist() for name, x in known.items()},
        "right_weight": float(known["right_weight"].max()) if num_right else None,
        "mean_right_weight": every.get("right_weight"),
        "zero_weights": every["zero_weights"],
        "zero_weights_bfloat16": every["zero_weights_bfloat16"],
        "attention_entropy": every["entropy"],
        "far_weight": every["far_weight"],
    }


def _sums(
    model: Model,
    precision: str,
    params: Any,
    pos: Any,
    tokens: jax.Array,
    scored: jax.Array,
    source: jax.Array,
    inside: jax.Array,
) -> dict[str, jax.Array]:
    """Return sums over queries of items, [layers, heads], and the number of visible `pairs` [layers].

    Args:
      model: a model.
      precision: of products of float32 numbers.
      params: its parameters.
      pos: positions [t], None for 0 to t - 1.
      tokens, scored, source: [b, t + 1], as in `Items`. -1 has no right token.
      inside: bool [b, t + 1], whether a token belongs to its item.
    """
    inputs, scored, source, is_inside = tokens[:, :-1], scored[:, 1:], source[:, 1:], inside[:, :-1]
    place = jnp.arange(inputs.shape[1])
    is_far = place[:, None] - place[None, :] >= model.dims.train_len

    def read(w: jax.Array, visible: jax.Array) -> dict[str, jax.Array]:
        seen = visible & is_inside[:, :, None] & is_inside[:, None, :]
        rounded = jax.lax.reduce_precision(w, exponent_bits=8, mantissa_bits=7)  # XLA would drop a pair of casts

        def count_zeros(w: jax.Array) -> jax.Array:
            return ((w == 0) & seen[:, None]).sum(axis=(0, 2, 3))

        at_source = jnp.take_along_axis(w, jnp.maximum(source, 0)[:, None, :, None], axis=3)[..., 0]
        return {
            "right": jnp.where(source[:, None] >= 0, at_source, 0).sum(axis=(0, 2)),
            "entropy": jnp.where(scored[:, None], -xlogy(w, w).sum(axis=3), 0).sum(axis=(0, 2)),
            "far": jnp.where(scored[:, None, :, None] & is_far[None, None], w, 0).sum(axis=(0, 2, 3)),
            "zero": count_zeros(w),
            "zero_bfloat16": count_zeros(rounded),
            "pairs": seen.sum(),
        }

    with product_precision(precision):
        layers = model.read_attention(params, inputs, pos, read)
    return jax.tree.map(lambda *each: jnp.stack(each), *layers)
