"""Sinusoids: a shift is a rotation, inner products know distance only, layouts are permutations."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from posx.encodings import Sinusoidal

M = 16
POS = np.arange(-5, 60)
PERMUTATION = np.concatenate([np.arange(0, M, 2), np.arange(1, M, 2)])  # interleaved -> concatenated


def vectors(encoding=Sinusoidal(), pos=POS, width=M):
    return np.asarray(encoding.embed({}, jnp.zeros((len(pos), width)), jnp.asarray(pos)), np.float64)


@pytest.mark.parametrize("exponent", ["2c/m", "c/(m/2-1)"])
def test_norm_and_inner_products(exponent):
    encoding = Sinusoidal(exponent=exponent)
    pe = vectors(encoding)
    assert_allclose((pe**2).sum(axis=1), M / 2, rtol=1e-6)
    distance = POS[:, None] - POS[None, :]
    wanted = np.cos(distance[..., None] * encoding.frequencies(M)).sum(axis=-1)
    assert_allclose(pe @ pe.T, wanted, rtol=0, atol=1e-4)


def test_a_shift_is_one_rotation_per_pair_and_shifts_compose():
    def shift(k):
        blocks = np.zeros((M, M))
        for c, w in enumerate(Sinusoidal().frequencies(M)):
            turn = [[np.cos(k * w), np.sin(k * w)], [-np.sin(k * w), np.cos(k * w)]]
            blocks[2 * c : 2 * c + 2, 2 * c : 2 * c + 2] = turn
        return blocks

    for k in (1, 7, -3, 40):
        assert_allclose(vectors(pos=POS + k), vectors() @ shift(k).T, rtol=0, atol=1e-5)
    assert_allclose(shift(3) @ shift(4), shift(7), atol=1e-12)


def test_layouts_are_one_permutation_apart():
    assert_allclose(vectors(Sinusoidal(layout="concatenated")), vectors()[:, PERMUTATION], rtol=0, atol=0)


def test_longest_wavelength_tells_the_two_exponents_apart():
    wavelengths = [2 * np.pi / Sinusoidal(exponent=e).frequencies(512)[-1] for e in ("2c/m", "c/(m/2-1)")]
    assert_allclose(wavelengths, [60611, 2 * np.pi * 10000], rtol=1e-4)
    assert_allclose(vectors(Sinusoidal(exponent="c/(m/2-1)"), width=2)[:, 0], np.sin(POS), atol=1e-5)


def test_positions_may_lie_between_tokens():
    halves = vectors(pos=np.array([0.5, 1.5], np.float32))
    assert_allclose(halves[:, 0], np.sin([0.5, 1.5]), atol=1e-6)
