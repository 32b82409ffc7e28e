"""Accumulated RoPE: RoPE for constant steps, and random steps that belong to positions."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.attention import Slots, batch_features
from posx.conformance import DIMS
from posx.encodings import Rope
from tests.cheap import in_one_program
from tests.encodings.cases import tokens
from tests.encodings.probes import attention_weights, vectors

T, D = 12, DIMS.head_dim
POS = np.arange(T, dtype=np.int32)
Q, K = vectors(T, DIMS.num_heads, D), vectors(T, DIMS.num_kv_heads, D, seed=1)
X = tokens(1, T)[0]
LEARNED, RANDOM = (posx.build(f"accumulated_rope(random={random})", DIMS) for random in (False, True))


def angles(encoding, params, x, pos=POS, carry=None):
    features, carry = in_one_program(batch_features, encoding, params, x[None], pos, carry)
    return np.float64(features["angles"][0]), carry


def test_steps_of_one_are_rope_at_positions_from_1():
    x = np.concatenate([np.ones((T, 1), np.float32), X[:, 1:]], axis=1)
    params = {"steps": np.zeros((DIMS.model_dim, DIMS.num_kv_heads, D // 2), np.float32)}
    params["steps"][0] = 1
    found, _ = angles(LEARNED, params, x)
    wanted = (1 + POS[:, None, None]) * 10_000.0 ** (-np.arange(0, D, 2) / D)
    assert_allclose(np.exp(1j * found), np.broadcast_to(np.exp(1j * wanted), found.shape), atol=1e-6)
    weights = attention_weights(LEARNED, params, Q, K, POS, x=x)
    assert_allclose(weights, attention_weights(Rope(rotary_dim=D), {}, Q, K, POS + 1), atol=1e-6)


def test_initial_steps_have_mean_0_and_size_1():
    dims = posx.Dims(model_dim=512, num_heads=8, head_dim=64, num_layers=2, train_len=64)
    encoding = posx.build("accumulated_rope", dims)
    x = np.random.default_rng(0).standard_normal((1, 1, 512)).astype(np.float32)
    step, _ = angles(encoding, encoding.init(jax.random.key(0), dims), x[0], POS[:1])
    drawn = step / 10_000.0 ** (-np.arange(0, 64, 2) / 64)
    assert abs(drawn.mean()) < 0.2 and 0.8 < drawn.std() < 1.2


def test_random_steps_belong_to_positions_alone():
    """They are the same for other tokens, in parts of a text, and beside empty slots."""
    whole, _ = angles(RANDOM, {}, X)
    assert_array_equal(angles(RANDOM, {}, 3 * X + 1)[0], whole)
    first, carry = angles(RANDOM, {}, X[:5], POS[:5])
    second, _ = angles(RANDOM, {}, X[5:], POS[5:], carry)
    assert_array_equal(np.concatenate([first, second]), whole)
    padded, pos = np.pad(X, ((3, 0), (0, 0))), np.pad(POS, (3, 0))
    found, _ = angles(RANDOM, {}, padded, Slots(pos, np.r_[-1, -1, -1, POS].astype(np.int32)))
    assert_array_equal(found[3:], whole)
    moved, _ = angles(RANDOM, {}, X, POS + 1)
    assert np.abs(moved - whole).max() > 0.1


def test_random_steps_have_variance_1_and_are_apart():
    n = 2000
    pos, x = np.arange(n, dtype=np.int32), jnp.ones((n, DIMS.model_dim))
    drawn = np.asarray(RANDOM._draw_steps(x, jnp.asarray(pos))).reshape(n, -1)
    assert abs(drawn.mean()) < 0.05 and abs(drawn.std() - 1) < 0.05
    planes = np.corrcoef(drawn.T) - np.eye(drawn.shape[1])
    assert np.abs(planes).max() < 0.1 and abs(np.corrcoef(drawn[1:, 0], drawn[:-1, 0])[0, 1]) < 0.1


def test_random_steps_learn_nothing():
    assert RANDOM.init(jax.random.key(0), DIMS) == {} and not RANDOM.decayed
    assert LEARNED.decayed == LEARNED.init(jax.random.key(0), DIMS).keys()
