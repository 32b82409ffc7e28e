"""Rotations: norms, the group law, layouts, and what logits may depend on."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posx.encodings import Nope, Rope
from tests.encodings.probes import attention_weights, vectors

D = 8
POS = np.array([0, 1, 2, 5, 17, 400])
#: Channels of a half-split head in the order of an interleaved one: 0, d/2, 1, d/2 + 1, ...
INTERLEAVE = np.arange(D).reshape(2, -1).T.ravel()
both_layouts = pytest.mark.parametrize("layout", ["half_split", "interleaved"])


def rotate(x, pos, **options):
    return np.asarray(Rope(**({"rotary_dim": D} | options)).query({}, x, jnp.asarray(pos), {}))


@both_layouts
def test_rotations_keep_norms_and_compose(layout):
    x = vectors(len(POS), 3, D)
    turned = rotate(x, POS, layout=layout)
    assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)
    assert_array_equal(rotate(x, 0 * POS, layout=layout), x)
    assert_allclose(rotate(turned, POS[::-1], layout=layout), rotate(x, POS + POS[::-1], layout=layout), atol=1e-4)
    assert_allclose(rotate(turned, -POS, layout=layout), x, atol=1e-5)


def test_layouts_are_one_channel_permutation_apart():
    x = vectors(len(POS), 2, D)
    assert_allclose(rotate(x, POS)[..., INTERLEAVE], rotate(x[..., INTERLEAVE], POS, layout="interleaved"), atol=1e-6)
    q, k = vectors(len(POS), 2, D, seed=1), vectors(len(POS), 2, D, seed=2)
    split = attention_weights(Rope(rotary_dim=D), {}, q, k, POS)
    woven = Rope(rotary_dim=D, layout="interleaved")
    assert_allclose(attention_weights(woven, {}, q[..., INTERLEAVE], k[..., INTERLEAVE], POS), split, atol=1e-5)
    assert np.abs(attention_weights(woven, {}, q, k, POS) - split).max() > 0.1


@both_layouts
def test_equal_vectors_give_twice_the_sum_of_cosines(layout):
    ones = np.ones((len(POS), 1, D), np.float32)
    turned = rotate(ones, POS, layout=layout)[:, 0]
    theta = 10000.0 ** (-np.arange(0, D, 2) / D)
    wanted = 2 * np.cos((POS[:, None] - POS[None, :])[..., None] * theta).sum(axis=-1)
    assert_allclose(turned @ turned.T, wanted, rtol=0, atol=1e-3)


def test_the_turn_is_counter_clockwise_in_the_first_plane():
    x = np.zeros((1, 1, 4), np.float32)
    x[..., 0] = 1
    assert_allclose(rotate(x, [1], rotary_dim=4)[0, 0], [np.cos(1), 0, np.sin(1), 0], atol=1e-6)
    assert_allclose(rotate(x, [1], rotary_dim=4, layout="interleaved")[0, 0], [np.cos(1), np.sin(1), 0, 0], atol=1e-6)


def test_channels_beyond_rotary_dim_pass():
    x = vectors(len(POS), 2, D)
    part = rotate(x, POS, rotary_dim=4)
    assert_array_equal(part[..., 4:], x[..., 4:])
    assert_allclose(part[..., :4], rotate(x[..., :4], POS, rotary_dim=4), atol=1e-6)
    assert np.abs(part[1:, :, :4] - x[1:, :, :4]).max() > 0.1


def test_equal_positions_are_no_positions():
    q, k = vectors(6, 2, D), vectors(6, 2, D, seed=1)
    same = attention_weights(Rope(rotary_dim=D), {}, q, k, np.full(6, 9))
    assert_allclose(same, attention_weights(Nope(), {}, q, k, POS), atol=1e-5)


def test_negative_and_fractional_positions_turn_too():
    x = vectors(2, 1, D)
    assert_allclose(rotate(rotate(x, [-3, -40]), [3, 40]), x, atol=1e-5)
    halves = np.array([0.5, 2.25], np.float32)
    assert_allclose(rotate(rotate(x, halves), halves), rotate(x, 2 * halves), atol=1e-5)
