"""ALiBi with gates: closed form at zero, straight lines where only the query gates, and exact differences far out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.encodings import Chain, GrapeA, Nope, Rope
from posx.encodings.alibi import alibi_slopes
from posx.errors import ConfigError
from tests.encodings.probes import attention_weights, plain_logits, softmax, vectors

T, H, D = 9, 4, 6
POS = np.arange(T, dtype=np.int32)
Q, K = vectors(T, H, D), vectors(T, H, D, seed=1)
GATES = {"v": vectors(H, D, seed=2), "u": vectors(H, D, seed=3)}
OMEGA = {"omega": np.full(H, np.log(np.e - 1), np.float32)}
DISTANCE = np.abs(POS[:, None] - POS[None, :])


def weights(encoding, params, pos=POS, q=Q, k=K):
    return np.asarray(attention_weights(encoding, params, q, k, pos))


def bias(encoding, params, pos=POS):
    """What it adds to the logits, from what a query sees of itself, where it adds nothing."""
    found = np.log(weights(encoding, params, pos)) - plain_logits(Q, K)
    return found - np.diagonal(found, axis1=1, axis2=2)[..., None]


@pytest.mark.parametrize(("gates", "times"), [(("query", "key"), 2), (("query",), 1), (("key",), 1)])
def test_zero_gates_are_alibi_with_ln_2_times_the_slope_for_each(gates, times):
    encoding = GrapeA(H, gates)
    drawn = encoding.init(jax.random.key(0), posx.Dims(H * D, H, D, 1, T))
    params = {name: a if name == "omega" else 0 * a for name, a in drawn.items()}
    slopes = times * np.log(2) * alibi_slopes(H)
    wanted = softmax(plain_logits(Q, K) - slopes[:, None, None] * DISTANCE[None])
    assert_allclose(weights(encoding, params), wanted, atol=1e-6)


def test_grape_a_gates_scale_slopes_of_rows_and_columns():
    def gate(x, by):
        return np.log1p(np.exp(np.einsum("thd,hd->ht", x, by) / np.sqrt(D)))

    slopes = alibi_slopes(H)[:, None, None] * DISTANCE
    by_query, by_key = gate(Q, GATES["v"])[:, :, None], gate(K, GATES["u"])[:, None, :]
    found = bias(GrapeA(H, ("query",), unit=False), OMEGA | {"v": GATES["v"]})
    assert_allclose(found, -slopes * by_query, atol=1e-4)
    falls = np.diff(found[:, -1])
    assert (falls > 0).all() and np.ptp(falls, axis=1).max() < 1e-4
    found = bias(GrapeA(H, ("key",), unit=False), OMEGA | {"u": GATES["u"]})
    assert_allclose(found, -slopes * by_key, atol=1e-4)
    found = bias(GrapeA(H, unit=False), OMEGA | GATES)
    assert_allclose(found, -slopes * (by_query + by_key), atol=1e-4)


def test_gating_vectors_are_used_at_length_1():
    longer = {name: 7 * a for name, a in GATES.items()}
    wanted = weights(GrapeA(H), OMEGA | GATES)
    assert_allclose(weights(GrapeA(H), OMEGA | longer), wanted, atol=1e-6)
    assert np.abs(weights(GrapeA(H, unit=False), OMEGA | longer) - wanted).max() > 0.05

    def total(gates):
        return (attention_weights(GrapeA(H), OMEGA | gates, Q, K, POS) * vectors(H, T, T, seed=5)).sum()

    at_zero = jax.grad(total)(jax.tree.map(jnp.zeros_like, GATES))
    assert all(np.isfinite(a).all() and a.any() for a in at_zero.values())


def test_next_to_a_rotary_map_gates_still_hold_no_position():
    chain, params = Chain((Rope(rotary_dim=D), GrapeA(H))), {f"1.{name}": a for name, a in (OMEGA | GATES).items()}
    turned = weights(chain, params)
    assert_allclose(weights(chain, params, POS + 1000), turned, atol=1e-5)
    pairs = ((chain, params), (Rope(rotary_dim=D), {}), (GrapeA(H), OMEGA | GATES), (Nope(), {}))
    logits = [np.log(weights(*of)) for of in pairs]
    added = [a - a[:, :, :1] for a in (logits[0] - logits[1], logits[2] - logits[3])]
    assert_allclose(*added, atol=1e-4)


def test_grape_a_is_exact_where_channels_of_positions_are_not():
    """i a_i + i c_j - j a_j - j c_j as a product of four channels, in float32 at a million tokens."""
    far = 1_000_000
    assert_allclose(weights(GrapeA(H), OMEGA | GATES, POS + far), weights(GrapeA(H), OMEGA | GATES), atol=1e-7)
    a, c, p = (x.astype(np.float32) for x in (np.abs(Q[:, 0, 0]), np.abs(K[:, 0, 0]), POS + far))
    channels = np.stack([p * a, p, a, 0 * a + 1], axis=1) @ np.stack([0 * c + 1, c, -p, -p * c])
    exact = (np.float64(p)[:, None] - p) * (np.float64(a)[:, None] + c)
    assert 0.05 < np.abs(channels - exact).max() < 1


def test_wrong_values_are_refused():
    for gates in ((), ("query", "query")):
        with pytest.raises(ConfigError, match="^grape_a: gates=.* must name some of query, key, and each only once"):
            GrapeA(H, gates)
    with pytest.raises(ConfigError, match="^grape_a: num_heads=0 must be at least 1"):
        GrapeA(0)
