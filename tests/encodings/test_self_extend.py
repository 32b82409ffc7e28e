"""Self-Extend and ReRoPE: identities with RoPE, and the largest distance."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.conformance import DIMS
from posx.encodings import Rope, SelfExtend
from tests.encodings.probes import attention_weights, vectors

D, POS = 8, np.arange(12)
Q, K = vectors(12, 2, D), vectors(12, 2, D, seed=1)
ROPE = Rope(rotary_dim=D)


def weights(**fields):
    return attention_weights(SelfExtend(ROPE, **fields), {}, Q, K, POS)


@pytest.mark.parametrize("fields", [{"window": 12, "group": 3}, {"window": 4, "group": 1}, {"window": 12, "group": 0}])
def test_without_far_tokens_or_groups_it_is_rope(fields):
    assert_allclose(weights(**fields), attention_weights(ROPE, {}, Q, K, POS), atol=1e-5)


def test_one_group_of_all_is_rerope():
    assert_allclose(weights(window=4, group=100), weights(window=4, group=0), atol=1e-5)
    assert np.abs(weights(window=4, group=2) - weights(window=4, group=0)).max() > 1e-3


def test_rerope_has_no_distance_beyond_its_window():
    """Keys beyond the window are compared as at the window's distance, so their order does not count."""
    swapped = K.copy()
    swapped[[0, 3]] = K[[3, 0]]
    found, other = weights(window=4, group=0), attention_weights(SelfExtend(ROPE, 4, 0), {}, Q, swapped, POS)
    assert_allclose(found[:, 11, 0], other[:, 11, 3], atol=1e-5)


def test_the_window_is_a_quarter_of_the_training_length():
    assert posx.build("self_extend", DIMS).window == DIMS.train_len // 4


@pytest.mark.parametrize(("size", "sinks"), [(4, 2), (3, 1), (12, 0)])
def test_a_window_with_sinks_makes_it_lm_infinite(size, sinks):
    """Han et al. 2023: the last L tokens and the first n are visible, and no distance is above L."""
    rope, mask = SelfExtend(ROPE, window=size, group=0), posx.window(size, sinks=sinks)
    theta = 10000.0 ** (-2 * np.arange(D // 2) / D)
    q, k = (np.float64(x[..., : D // 2]) + 1j * x[..., D // 2 :] for x in (Q, K))
    wanted = np.zeros((2, 12, 12))
    for h, i in np.ndindex(2, 12):
        for j in range(i + 1):
            if i - j < size or j < sinks:
                turned = q[i, h] * np.conj(k[j, h]) * np.exp(1j * min(i - j, size) * theta)
                wanted[h, i, j] = np.exp(turned.real.sum() / np.sqrt(D))
    wanted /= wanted.sum(axis=-1, keepdims=True)
    assert_allclose(attention_weights(rope, {}, Q, K, POS, mask=mask), wanted, atol=1e-6)
