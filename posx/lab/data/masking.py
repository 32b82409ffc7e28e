"""The masked objective: some tokens of a window are hidden, and the model predicts them from both sides.

Source: Devlin et al. 2019 (arXiv 1810.04805), section 3.1, and create_pretraining_data.py of its release.
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np

from posx.lab.data.batches import Dataset, Weighted

#: The share of the tokens of a window that are predicted.
HIDDEN_SHARE = 0.15
#: The shares of these that become <mask> and a random token. The others stay.
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1


class Masked(NamedTuple):
    """A batch of windows with hidden tokens, or several batches.

    Attributes:
      inputs: int32 [..., b, t], the tokens that the model reads.
      targets: int32 [..., b, t], the tokens of the text at the same places.
      weights: of the targets, float32 [..., b, t], with a mean of 1 in each row. They are 0 at places that are not
        predicted.
    """

    inputs: Any
    targets: Any
    weights: Any


def num_hidden(length: int) -> int:
    """Return the number of tokens that are predicted in a window of `length` tokens: 15 %, at least one."""
    return max(1, round(HIDDEN_SHARE * length))


def mask_id(vocab_size: int) -> int:
    """Return the id of <mask>, the first that a tokenizer of `vocab_size` ids does not have."""
    return vocab_size


def masked_batch(
    dataset: Dataset, *, seed: int, step: int, batch_size: int, length: int, rows: slice = slice(None)
) -> Masked:
    """Return rows of batch number `step` with hidden tokens. A row depends on seed, step and its number.

    `num_hidden` places of a row are drawn without replacement. Each of these becomes <mask> with a probability of 0.8,
    a random id of the tokenizer with 0.1, and stays with 0.1.

    Arguments are those of `Dataset.batch`. The last token of a window of text is not read, nor the first of an item.
    """
    batch = dataset.batch(seed=seed, step=step, batch_size=batch_size, length=length, rows=rows)
    given = batch.tokens[:, 1:] if isinstance(batch, Weighted) else batch[:, :-1]
    vocab_size = dataset.tokenizer.vocab_size
    order, kind, other = np.moveaxis(draw_numbers(seed, step, (batch_size, 3, length))[rows], 1, 0)
    hidden, place = choose_hidden(order), kind / 2.0**64
    inputs = np.where(hidden & (place < MASK_SHARE), mask_id(vocab_size), given)
    replaced = hidden & (place >= MASK_SHARE) & (place < MASK_SHARE + RANDOM_SHARE)
    inputs = np.where(replaced, other % np.uint64(vocab_size), inputs).astype(np.int32)
    return Masked(inputs, given, (hidden * (length / num_hidden(length))).astype(np.float32))


def choose_hidden(order: np.ndarray) -> np.ndarray:
    """Return which tokens are predicted, bool [b, t]: the `num_hidden` of each row with the lowest numbers."""
    hidden, count = np.zeros(order.shape, bool), num_hidden(order.shape[1])
    np.put_along_axis(hidden, np.argpartition(order, count - 1, axis=1)[:, :count], True, axis=1)
    return hidden


def draw_numbers(seed: int | str, step: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return random uint64 numbers. A row has the same ones whatever the number of rows."""
    key = hashlib.sha256(f"posx masks 1\n{seed}\n{step}".encode()).digest()
    bits = np.random.Philox(key=np.frombuffer(key[:16], "<u8"))  # NumPy keeps the raw numbers of a key, unlike others
    return bits.random_raw(int(np.prod(shape))).reshape(shape)
