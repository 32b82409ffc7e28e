"""Selective RoPE: RoPE where every token makes one step, nothing where none makes any, and what the steps see."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.attention import batch_features
from posx.conformance import DIMS
from posx.encodings import Nope, Rope, SelectiveRope
from posx.errors import ConfigError
from tests.cheap import in_one_program
from tests.encodings.cases import params_of, tokens
from tests.encodings.probes import vectors

T, D = 12, DIMS.head_dim
POS = np.arange(T, dtype=np.int32)
Q, K = vectors(T, DIMS.num_heads, D), vectors(T, DIMS.num_kv_heads, D, seed=1)
X = tokens(1, T)[0]
FULL = posx.build("selective_rope(drift=True, gated=True)", DIMS)
PARAMS = params_of(FULL)


def with_full(params, x, pos):
    return found(FULL, params, x, pos)


@functools.partial(jax.jit, static_argnums=0)
def found(encoding, params, x, pos=POS):
    """Weights [h, q, k]: with the identity as values, the outputs are the weights."""
    v = jnp.broadcast_to(jnp.eye(T)[:, None], (T, DIMS.num_kv_heads, T))
    x = None if x is None else x[None]
    return posx.attend(encoding, params, Q[None], K[None], v[None], pos, x=x)[0].swapaxes(0, 1)


def test_steps_of_one_are_rope_at_positions_from_1():
    """exp(0) = 1 of the drift is all there is where the kernel is zero; a gate of 1/2 makes half steps of it."""
    params = PARAMS | {"drift": 0 * PARAMS["drift"], "kernel": 0 * PARAMS["kernel"], "gate": 0 * PARAMS["gate"]}
    rope = Rope(base=500000.0, rotary_dim=D)
    for gate, step in ((100.0, 1.0), (0.0, 0.5)):
        gated = params | {"gate_bias": np.full_like(params["gate_bias"], gate)}
        wanted = found(rope, {}, None, step * POS.astype(np.float32))
        assert_allclose(with_full(gated, X, POS), wanted, atol=1e-6)
    params = gated | {"gate_bias": 100 + 0 * gated["gate_bias"]}
    features, _ = in_one_program(batch_features, FULL, params, X[None], POS, None)
    angles = (1 + POS[:, None, None]) * 500000.0 ** (-np.arange(0, D, 2) / D)
    turned = np.exp(1j * np.float64(features["angles"][0]))
    assert_allclose(turned, np.broadcast_to(np.exp(1j * angles), (T, 2, 3)), atol=1e-6)


def test_no_steps_are_no_positions():
    plain = found(Nope(), {}, None)
    shut = PARAMS | {"gate_bias": np.full_like(PARAMS["gate_bias"], -100.0)}
    assert_allclose(with_full(shut, X, POS), plain, atol=1e-6)
    assert np.abs(with_full(PARAMS, X, POS) - plain).max() > 0.1


def test_neither_positions_nor_the_size_of_the_input_count():
    weights = with_full(PARAMS, X, POS)
    assert_array_equal(with_full(PARAMS, X, POS[::-1] * 1000), weights)
    assert_allclose(with_full(PARAMS, 1000 * X, POS), weights, atol=1e-3)
    by_head = np.repeat(10.0 ** np.arange(DIMS.num_heads), DIMS.model_dim // DIMS.num_heads)
    assert_allclose(with_full(PARAMS, 10 * X * by_head.astype(np.float32), POS), weights, atol=1e-3)


def test_a_token_turns_what_follows_it():
    """Another token turns itself and those whose kernel sees it: tokens after these keep their angles to each other."""
    at, late = 5, POS > 5 + FULL.kernel - 1
    weights, others = (np.asarray(with_full(PARAMS, x, POS)) for x in (X, X + 9 * (POS == at)[:, None]))
    assert_array_equal(weights[:, :at], others[:, :at])
    assert (np.abs(weights - others)[:, at + 1 :].max(axis=(0, 2)) > 1e-3).all()
    among = [w[:, late][:, :, late] / w[:, late][:, :, late][:, :, :1] for w in (weights, others)]
    assert_allclose(*among, atol=1e-4)


def test_hardly_anything_turns_at_first():
    encoding = posx.build("selective_rope", DIMS)
    params = encoding.init(jax.random.key(0), DIMS)
    assert set(params) == {"down", "up", "kernel"}
    features, _ = batch_features(encoding, params, X[None], POS, None)
    assert 0 < np.abs(features["angles"]).max() < 0.01


def test_weight_decay_acts_on_every_parameter():
    """As in the releases, whose AdamW is given all of them."""
    for spec in ("selective_rope", "selective_rope(drift=True)", "selective_rope(gated=True)"):
        encoding = posx.build(spec, DIMS)
        assert encoding.decayed == encoding.init(jax.random.key(0), DIMS).keys()


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="selective_rope: model_dim=14 must be a multiple of num_heads=4"):
        posx.build("selective_rope", dataclasses.replace(DIMS, model_dim=14))
    with pytest.raises(ConfigError, match="num_heads is not set"):
        posx.attend(SelectiveRope(), PARAMS, Q[None], K[None], K[None], POS, x=X[None])
