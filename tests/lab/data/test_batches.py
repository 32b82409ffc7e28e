"""Batches are pure, visit every window of an epoch once, and say clearly when the text is too short."""

import numpy as np
import pytest

from posx.errors import DataError
from posx.lab.data import batch, check_length, num_windows


def draw(tokens, step=0, *, digest="d", seed=0, batch_size=4, length=8):
    return batch(tokens, digest=digest, seed=seed, step=step, batch_size=batch_size, length=length)


def starts(tokens, count, **options):
    """First tokens of the first `count` windows; they name the windows if the tokens are 0, 1, 2, ..."""
    return draw(tokens, batch_size=count, **options)[:, 0]


def test_batch_is_pure_and_int32():
    tokens = np.arange(1000, dtype=np.uint16)
    first = draw(tokens, 7)
    assert first.dtype == np.int32 and first.shape == (4, 9)
    np.testing.assert_array_equal(first, draw(tokens, 7))
    assert not np.array_equal(first, draw(tokens, 8))


def test_targets_are_inputs_shifted_by_one():
    window = draw(np.arange(1000, dtype=np.uint16), 3)
    np.testing.assert_array_equal(window[:, 1:], window[:, :-1] + 1)


@pytest.mark.parametrize("size", [9, 10, 15, 16, 17, 24, 25, 100, 777, 1000, 4097])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_an_epoch_covers_every_window_once(size, length):
    tokens = np.arange(size, dtype=np.uint16)
    windows = num_windows(size, length)
    for epoch in range(3):
        first = starts(tokens, windows, step=epoch, length=length)
        offset = first.min()
        assert 0 <= offset < length
        np.testing.assert_array_equal(np.sort(first), offset + length * np.arange(windows))
        assert first.max() + length < size  # the last target exists


def test_nearly_all_tokens_are_used():
    size, length = 1000, 8
    assert size - 2 * length < num_windows(size, length) * length <= size - 1


def test_batches_of_any_size_read_the_same_stream():
    tokens = np.arange(500, dtype=np.uint16)
    windows = num_windows(500, 8)
    whole = starts(tokens, 3 * windows + 1)
    parts = np.concatenate([draw(tokens, step, batch_size=7)[:, 0] for step in range(3 * windows // 7 + 1)])
    shared = min(len(whole), len(parts))
    assert shared > 2 * windows  # crosses epoch borders inside batches
    np.testing.assert_array_equal(whole[:shared], parts[:shared])


def test_order_and_offset_differ_by_seed_epoch_and_digest():
    tokens = np.arange(2000, dtype=np.uint16)
    windows = num_windows(2000, 16)
    base = starts(tokens, windows, length=16)
    for other in ({"seed": 1}, {"digest": "e"}, {"step": 1}):
        moved = starts(tokens, windows, length=16, **other)
        assert not np.array_equal(np.argsort(base), np.argsort(moved)), other
    offsets = {int(starts(tokens, windows, length=16, seed=seed).min()) for seed in range(40)}
    assert len(offsets) > 8


def test_order_looks_shuffled():
    tokens = np.arange(60_000, dtype=np.uint16)
    order = starts(tokens, num_windows(60_000, 8)).astype(float)
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


def test_order_is_the_same_on_every_machine():
    # A change of these numbers changes the data order of every run: resuming older runs would no longer be exact.
    assert starts(np.arange(1000, dtype=np.uint16), 6).tolist() == [941, 677, 389, 709, 629, 637]


def test_late_steps_cost_no_more_and_need_no_state():
    assert draw(np.arange(1000, dtype=np.uint16), 10**12).shape == (4, 9)


@pytest.mark.parametrize(("size", "usable"), [(0, 0), (1, 0), (8, 7)])
def test_too_short_stream_names_size_need_and_what_fits(size, usable):
    tokens = np.zeros(size, np.uint16)
    assert num_windows(size, 8) == 0
    with pytest.raises(DataError, match=rf"has {size} tokens.*length 8, which needs 9.*usable length is {usable}"):
        draw(tokens)
    with pytest.raises(DataError, match="^the validation text has"):
        check_length(size, 8, "the validation text")
