"""Sums, interpolation and distances along keys, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from posx.encodings.along_keys import bank_products, evaluate_pairs, interpolate, sums_from_each
from tests.encodings.probes import vectors


@pytest.mark.parametrize("n", [1, 31, 32, 33, 1100])
def test_sums_from_each_entry_are_cumulative_sums(n):
    x = np.abs(vectors(2, n))
    wanted = np.cumsum(x[:, ::-1], axis=1, dtype=np.float64)[:, ::-1]
    assert_allclose(sums_from_each(jnp.asarray(x)), wanted, rtol=2e-6)


def test_interpolated_rows_and_their_gradients():
    rows, at = vectors(2, 3, 5), np.abs(vectors(2, 3, 7, seed=1)).clip(0, 4)
    at[0, 0, :2] = 0, 4
    hats = np.maximum(0, 1 - np.abs(at[..., None, :] - np.arange(5)[:, None]))
    assert_allclose(interpolate(jnp.asarray(rows), jnp.asarray(at)), (rows[..., None] * hats).sum(axis=2), atol=1e-6)
    found = jax.grad(lambda rows: interpolate(rows, jnp.asarray(at)).sum())(jnp.asarray(rows))
    assert_allclose(found, hats.sum(axis=-1), atol=1e-6)


@pytest.mark.parametrize("step", [1, 3])
def test_distances_are_read_at_any_positions(step):
    q_pos, k_pos = np.arange(4) * step + 2, np.arange(6) * step
    distance, bank, r = q_pos[:, None] - k_pos, vectors(3, 5), vectors(4, 2, 3, seed=1)
    inside = (distance >= 0) & (distance < 5)
    wanted = np.where(inside, np.einsum("qhr,rqk->hqk", r, bank[:, distance.clip(0, 4)]), 0)
    given = jnp.asarray(distance, jnp.int32)
    assert_allclose(bank_products(jnp.asarray(r), jnp.asarray(bank), given), wanted, atol=1e-5)
    assert_allclose(evaluate_pairs(lambda r: jnp.stack([2 * r, r * r]), given), np.stack([2 * distance, distance**2]))
