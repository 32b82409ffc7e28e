"""Half of the heads fall as ALiBi's do, with slopes of their own, and half have no positions."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.encodings import Nape, Nope
from tests.encodings.cases import DIMS
from tests.encodings.probes import attention_weights, distance_bias, plain_logits, softmax, vectors

R = jnp.asarray([-2.0, 0, 1, 30])


def slopes(num_heads, **fields):
    dims = posx.Dims(model_dim=8, num_heads=num_heads, head_dim=2, num_layers=1, train_len=64)
    bias = np.asarray(distance_bias(posx.build({"name": "nape", **fields}, dims), {}, R))
    assert_allclose(bias, bias[:, 2:3] * np.abs(R), rtol=1e-6)
    return -bias[:, 2]


def test_published_slopes():
    assert_allclose(slopes(8), [1, 1 / 2, 1 / 3, 1 / 4, 0, 0, 0, 0])
    assert_allclose(slopes(8, slopes="exponential"), [1, 1 / 2, 1 / 4, 1 / 8, 0, 0, 0, 0])
    assert_allclose(slopes(6, alibi_heads=4), [1, 1 / 2, 1 / 3, 1 / 4, 0, 0])


@pytest.mark.parametrize("num_heads", [1, 2, 5, 12])
def test_half_of_any_number_of_heads(num_heads):
    found = slopes(num_heads)
    assert (found > 0).sum() == num_heads // 2
    assert (np.diff(found) <= 0).all()
    assert_array_equal(slopes(num_heads, alibi_heads=0), 0)
    assert (slopes(num_heads, alibi_heads=num_heads) > 0).all()


def test_heads_without_a_slope_have_no_positions():
    q, k, pos = vectors(9, 4, 6), vectors(9, 4, 6, seed=1), np.arange(9)
    w = attention_weights(posx.build("nape", DIMS), {}, q, k, pos)
    plain = attention_weights(Nope(), {}, q, k, pos)
    assert_allclose(w[2:], plain[2:], atol=1e-6)
    falls = np.abs(pos[:, None] - pos) * np.array([1, 0.5])[:, None, None]
    assert_allclose(w[:2], softmax(plain_logits(q, k)[:2] - falls), atol=1e-5)
    assert Nape(num_heads=4, alibi_heads=2).shared == frozenset()
