"""Sandwich is what sinusoidal vectors of two positions have in common, and it is not monotone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.encodings import Sandwich, Sinusoidal
from tests.cheap import in_one_program
from tests.encodings.probes import attention_weights, distance_bias, plain_logits, softmax, vectors

R = np.arange(-8, 9, dtype=np.float32)


@pytest.mark.parametrize(
    ("first", "sums"),
    [(0, [64, 62.09, 57.38, 52.19, 48.59, 47.19]), (1, [64, 62.55, 58.80, 54.18, 50.24, 47.90])],
)
def test_published_sums(first, sums):
    """Of 8 heads the first has them as they are, head h divided by h; the constant takes 64 off."""
    found = np.asarray(distance_bias(Sandwich(first=first, num_heads=8), {}, jnp.arange(6.0)))
    assert_allclose(found[0] + 64, sums, atol=0.005)
    assert_allclose(found * np.arange(1, 9)[:, None], np.repeat(found[:1], 8, axis=0), atol=1e-4)


def test_it_is_the_inner_product_of_sinusoidal_vectors():
    width, h, pos = 16, 4, np.array([0, 3, 7, 50, 4096], np.int32)
    pe = np.asarray(Sinusoidal().embed({}, jnp.zeros((5, width)), jnp.asarray(pos)), np.float64)
    found = distance_bias(Sandwich(width, num_heads=h), {}, pos[:, None] - pos)
    ratio = 8 * np.arange(1, h + 1) / h
    assert_allclose(found, (pe @ pe.T - width / 2) / ratio[:, None, None], atol=1e-5)

    q, k = vectors(5, h, 6), vectors(5, h, 6, seed=1)
    w = attention_weights(Sandwich(width, num_heads=h), {}, q, k, pos, mask=posx.full())
    without_constant = plain_logits(q, k) + (pe @ pe.T) / ratio[:, None, None]
    assert_allclose(w, softmax(without_constant), atol=1e-5)


@pytest.mark.parametrize("executor", ["dense", "blockwise"])
def test_distances_that_leave_float32_are_served_exactly(executor):
    """Biases at 2^24 + 1, + 2 and + 3 tokens, of which float32 holds one. Exact sums by NumPy in float64."""
    encoding, r = Sandwich(num_heads=6), 2**24 + np.arange(1, 4)
    waves = (np.cos(r[:, None] * 10_000.0 ** (-np.arange(64) / 64)) - 1).sum(axis=1)
    wanted = waves * (6 / 8 / np.arange(1, 7))[:, None]
    assert_allclose(distance_bias(encoding, {}, r.astype(np.int32)), wanted, atol=1e-4)
    assert wanted[0, 0] == pytest.approx(-44.495, abs=1e-3)
    # In an executor, by the weights of keys that are that far back, all of products 0.
    q, eye = np.zeros((1, 3, 6, 3), np.float32), np.broadcast_to(np.eye(3, dtype=np.float32)[:, None], (3, 6, 3))[None]
    q_pos, k_pos = np.arange(3, dtype=np.int32) + 2**24 + 1, np.arange(3, dtype=np.int32)
    given = (q, q, eye, q_pos, k_pos)
    w = in_one_program(posx.attend, encoding, {}, *given, executor=executor, mask=posx.full())
    bias = (np.cos((q_pos[:, None] - k_pos)[..., None] * 10_000.0 ** (-np.arange(64) / 64)) - 1).sum(axis=-1)
    assert_allclose(w[0].swapaxes(0, 1), softmax(bias * (6 / 8 / np.arange(1, 7))[:, None, None]), atol=2e-5)


def test_it_is_even_and_largest_at_distance_0_but_not_monotone():
    encoding = Sandwich(num_heads=4)
    near = np.asarray(distance_bias(encoding, {}, R))
    assert_array_equal(near, near[:, ::-1])
    assert_array_equal(near[:, R == 0], 0)
    with jax.enable_x64(True):
        far = np.asarray(distance_bias(encoding, {}, jnp.arange(4096.0)))
    assert far.dtype == np.float64 and (far[:, 1:] < 0).all()
    assert_array_equal((np.diff(far) > 0).sum(axis=1), 1991)  # of 4095 steps
