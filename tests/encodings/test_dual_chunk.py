"""Dual Chunk Attention: its distances, read off the weights, and identities with RoPE."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.conformance import DIMS
from posx.encodings import DualChunk, Rope
from posx.encodings.frequencies import Linear
from tests.encodings.probes import attention_weights, vectors

D = 8
ROPE = Rope(rotary_dim=D)


def distances(encoding, length):
    """Return the distances [query, key] at which RoPE compares causal pairs, -1 for others.

    One plane turns by 0.02 per token, so that equal unit vectors have the product cos(0.02 r).
    """
    slow = Rope(rotary_dim=2, frequencies=Linear(factor=50.0))
    same, pos = np.tile(np.float32([[[8.0, 0.0]]]), (length, 1, 1)), np.arange(length)
    w = np.float64(attention_weights(DualChunk(slow, *encoding), {}, same, same, pos, mask=posx.causal())[0])
    cosines = 1 + np.log(np.where(w > 0, w, 1) / np.diag(w)[:, None]) * np.sqrt(2) / 64
    return np.where(np.tri(length) > 0, np.rint(50 * np.arccos(np.clip(cosines, -1, 1))), -1).astype(int)


def test_distances_of_two_chunks_are_as_published():
    """12 tokens in chunks of 6, and a window of 10: the next chunk goes on counting, up to 9."""
    found = distances((6, 10), 12)
    assert_array_equal(
        found[6:, :6], [[6, 5, 4, 3, 2, 1], [7, 6, 5, 4, 3, 2], [8, 7, 6, 5, 4, 3], *[[9, 8, 7, 6, 5, 4]] * 3]
    )
    own = np.arange(6)[:, None] - np.arange(6)
    assert_array_equal(found[6:, 6:], np.where(own < 0, -1, own))


@pytest.mark.parametrize(("chunk", "window"), [(4, 6), (4, 4), (5, 12), (1, 3)])
def test_no_distance_leaves_the_window_and_near_ones_stay(chunk, window):
    found, own = distances((chunk, window), 30), np.arange(30)[:, None] - np.arange(30)
    assert found.max() == window - 1
    near = (own >= 0) & (own <= min(window - chunk, chunk))
    assert_array_equal(found[near], own[near])
    far = own // chunk > 2
    assert_array_equal(found[far], (window - 1 - np.arange(30) % chunk + 0 * own)[far])


@pytest.mark.parametrize(
    "fields", [{"chunk": 12, "window": 12}, {"chunk": 12, "window": 99}, {"chunk": 6, "window": 12}]
)
def test_within_a_chunk_or_a_window_of_two_it_is_rope(fields):
    q, k, pos = vectors(12, 2, D), vectors(12, 2, D, seed=1), np.arange(12)
    found = attention_weights(DualChunk(ROPE, **fields), {}, q, k, pos, mask=posx.causal())
    assert_allclose(found, attention_weights(ROPE, {}, q, k, pos, mask=posx.causal()), atol=1e-5)
    smaller = DualChunk(ROPE, chunk=6, window=9)
    assert np.abs(attention_weights(smaller, {}, q, k, pos, mask=posx.causal()) - found).max() > 1e-3


def test_a_chunk_is_three_quarters_of_the_training_length():
    built = posx.build("dual_chunk", DIMS)
    assert (built.chunk, built.window) == (3 * DIMS.train_len // 4, DIMS.train_len)
