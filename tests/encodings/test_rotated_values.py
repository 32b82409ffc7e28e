"""Rotated values: a value arrives rotated by its distance, and nothing else changes."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.conformance import DIMS
from posx.encodings import Rope
from posx.errors import ConfigError
from tests.encodings.probes import vectors

T, H, G, D = 9, DIMS.num_heads, DIMS.num_kv_heads, DIMS.head_dim
POS = np.arange(T, dtype=np.int32)
Q, K, V = vectors(T, H, D), vectors(T, G, D, seed=1), vectors(T, G, D, seed=2)
ROPE = posx.build("rope", DIMS)
ROTATED = posx.build("rotated_values", DIMS)
jit_attend = jax.jit(posx.attend, static_argnums=0, static_argnames="mask")


def outputs(encoding, q, k, v, params=None, x=None, mask=posx.causal()):
    x = None if x is None else x[None]
    return np.asarray(jit_attend(encoding, params or {}, q[None], k[None], v[None], POS, x=x, mask=mask)[0])


def test_an_own_value_arrives_as_it_was():
    found = outputs(ROTATED, Q, K, V, mask=posx.window(1))
    assert_allclose(found, np.repeat(V, H // G, axis=1), atol=1e-6)


def test_a_value_arrives_rotated_by_its_distance():
    """Keys are long, and alike but for the one token that queries attend to."""
    at, unit = 2, np.ones((T, H, D), np.float32)
    k = np.zeros_like(K)
    for i in range(at, T):
        k[at] = 1000 * np.asarray(ROPE.query({}, unit[:1, :G], np.int32([i - at]), {}))[0]
        found = outputs(ROTATED, unit, k, V)[i]
        wanted = np.asarray(ROPE.key({}, V[at : at + 1], np.int32([at - i]), {}))[0]
        assert_allclose(found, np.repeat(wanted, H // G, axis=0), atol=1e-5)


def test_weights_are_those_of_the_base():
    """Values along channels that no plane rotates add up as those of the base do."""
    base = Rope(rotary_dim=D - 2)
    rotated = posx.build("rotated_values(base=rope(rotary_dim=4))", DIMS)
    still = V * (np.arange(D) >= D - 2)
    assert_allclose(outputs(rotated, Q, K, still), outputs(base, Q, K, still), atol=1e-6)
    assert np.abs(outputs(rotated, Q, K, V) - outputs(base, Q, K, V)).max() > 0.1


def test_constant_steps_rotate_values_as_rope_does():
    encoding = posx.build("rotated_values(base=accumulated_rope)", DIMS)
    steps = np.zeros((DIMS.model_dim, G, D // 2), np.float32)
    steps[0] = 1
    x = np.ones((T, DIMS.model_dim), np.float32)
    found = outputs(encoding, Q, K, V, {"base.steps": steps}, x)
    assert_allclose(found, outputs(ROTATED, Q, K, V), atol=1e-5)


def test_a_chain_rotates_values_once():
    found = outputs(posx.build("rotated_values+alibi", DIMS), Q, K, V)
    assert_allclose(found, outputs(posx.build("rotated_values(base=rope+alibi)", DIMS), Q, K, V), atol=1e-6)


def test_arrays_of_the_base_are_those_of_the_base():
    encoding = posx.build("rotated_values(base=selective_rope)", DIMS)
    assert set(encoding.init(jax.random.key(0), DIMS)) == encoding.decayed == {"base.down", "base.up", "base.kernel"}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("rotated_values(base=nope)", r"base=Nope\(\) does not rotate queries and keys. Give it one that does"),
        ("rotated_values(base=key_offset+rope)", "maps a key together with earlier ones, which no value has. Put"),
        ("rotated_values(base=pope)", r"value gives \[\d+, 2, 12\], but \[k, g, d\] = "),
    ],
)
def test_bases_that_do_not_rotate_values_are_refused(spec, says):
    with pytest.raises(ConfigError, match=says):
        posx.build(spec, DIMS)
