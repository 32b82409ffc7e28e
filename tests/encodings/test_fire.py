"""FIRE's input is a share of the text so far; networks that make KERPLE and ALiBi of it; its threshold."""

import jax
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.encodings import Alibi, Fire, Kerple
from posx.encodings.alibi import alibi_slopes
from tests.encodings.cases import CASES, DIMS, params_of
from tests.encodings.probes import distance_bias

POS = np.arange(40, dtype=np.int32)
PAST = np.tri(40, dtype=bool)


def straight(slopes, c=0.1, multiplier=1.0):
    """A network of one unit that multiplies by `slopes` [h] what is at least 0."""
    values = {"c": c, "multiplier": multiplier, "w0": [[1]], "b0": [0], "w1": [slopes]}
    return {name: np.array(value, np.float32) for name, value in values.items()}


jit_bias = jax.jit(lambda encoding, *arguments: encoding.bias(*arguments), static_argnums=0)


def bias(threshold, params, q_pos=POS, k_pos=POS):
    return np.asarray(jit_bias(Fire(threshold), params, q_pos, k_pos))


def test_the_input_is_a_share_of_the_text_so_far():
    share = bias(10.0, straight([1.0]))[0]
    assert share[PAST].min() == 0 and share[PAST].max() <= 1
    assert_array_equal(np.diag(share), 0)
    assert_allclose(share[10:, 0], 1, atol=1e-5)
    assert (share[:10, 0] < 0.99).all()
    assert (np.diff(share[30, :31]) < 0).all()


def test_fire_depends_on_distance_alone_up_to_the_threshold():
    params = params_of(CASES["fire"]) | {"c": np.float32(0.3), "multiplier": np.float32(-1.0)}
    b = bias(20.0, params)
    assert_array_equal(b[:, 1:21, 1:21], b[:, :20, :20])
    assert np.abs(b[:, 22:, 22:] - b[:, 21:-1, 21:-1]).max() > 1e-3
    assert np.abs(bias(20.0, params, POS + 100, POS + 100)[:, 1:] - b[:, 1:])[:, PAST[1:]].max() > 0.1
    # A query by itself, as it comes out of a cache.
    assert_allclose(bias(20.0, params, POS[33:34]), b[:, 33:34], atol=1e-6)


def test_a_straight_network_is_kerple_and_nearly_alibi():
    p, a, near = np.array([0.5, 1.5]), 0.3, POS[:20]
    whole = np.log1p(a * 25) + 1e-6
    kerple = distance_bias(Kerple(), {"p": np.float32(p), "a": np.full(2, a, np.float32)}, near[:, None] - near)
    assert_allclose(bias(25.0, straight(-p * whole, a), near, near), kerple, atol=1e-5)

    slopes, c = alibi_slopes(2), 1e-3
    whole = np.log1p(c * 25) + 1e-6
    found = bias(25.0, straight(-slopes * whole / c, c), near, near)
    # ln(1 + c r) is c r but for at most (c r)^2 / 2.
    assert_allclose(found, distance_bias(Alibi(2), {}, near[:, None] - near), rtol=c * 20 / 2 + 1e-4, atol=1e-6)


def test_a_threshold_that_is_learned_away_stays_at_one_token():
    params = straight([1.0], multiplier=0.0)
    assert_allclose(bias(10.0, params), bias(10.0, params | {"multiplier": np.float32(0.1)}), atol=1e-6)
    assert_allclose(bias(10.0, params)[0, :2, 0], [0, 1], atol=2e-5)
    slopes = jax.jit(jax.grad(lambda params: Fire(10.0).bias(params, POS, POS).sum()))
    for gone in (params, straight([1.0], c=0.0)):
        grads = slopes(gone)
        assert all(np.isfinite(g).all() for g in grads.values())


def test_published_sizes_and_start():
    dims = posx.Dims(model_dim=8, num_heads=300, head_dim=2, num_layers=2, train_len=64)
    encoding = posx.build("fire", dims)
    params = encoding.init(jax.random.key(0), dims)
    assert encoding.threshold == 32 and params["c"] == np.float32(0.1) and params["multiplier"] == 1
    assert {name: a.shape for name, a in params.items() if a.ndim} == {"w0": (1, 32), "b0": (32,), "w1": (32, 300)}
    for name, bound in (("w0", 1), ("b0", 1), ("w1", 32**-0.5)):  # uniform in +-1/sqrt(in)
        assert 0.85 * bound < np.abs(params[name]).max() <= bound
    assert encoding.shared == frozenset()
    assert posx.build("fire(per_layer=False)", DIMS).shared == params.keys()
