"""Gates counted backwards: positions that are whole, clipped, between two rows, and of the content alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.encodings import Chain, Cope, Nope, Rope, Shaw
from posx.errors import ConfigError
from tests.encodings.probes import attention_weights, plain_logits, softmax, vectors

T, H, D = 9, 2, 4
POS, CAUSAL = np.arange(T, dtype=np.int32), np.tril(np.ones((T, T), bool))
Q, K = vectors(T, H, D), vectors(T, H, D, seed=1)
E = vectors(6, D, seed=2)


def weights(encoding, params, q=Q, k=K):
    return np.asarray(attention_weights(encoding, params, q, k, POS, mask=posx.causal()))


def log_weights(*args):
    found = weights(*args)
    return np.log(np.where(CAUSAL, found, 1))


def causal_softmax(logits):
    return softmax(np.where(CAUSAL, logits, -np.inf))


def gated(open_gates):
    """q and k whose gates are 1 or 0 to float precision: by key, in a channel that e does not reach."""
    q, k = Q.copy(), 0.1 * K
    q[..., -1], k[..., -1] = 10, np.where(open_gates, 10, -10)[:, None]
    return q, k, E * (np.arange(D) < D - 1)


def test_at_initialisation_it_is_no_position():
    encoding = Cope(6)
    params = encoding.init(jax.random.key(0), posx.Dims(H * D, H, D, 1, T))
    assert_allclose(weights(encoding, params), weights(Nope(), {}), atol=1e-6)


def test_open_gates_count_tokens_as_shaws_clipped_keys_do():
    q, k, e = gated(np.ones(T))
    clipped = np.zeros((2 * 4 + 1, D), np.float32)
    clipped[4 - np.arange(5)] = e[1 + np.arange(5)]  # distance r is gate count r + 1, from 5 on all the same
    wanted = weights(Shaw(4, values=False), {"keys": clipped}, q, k)
    assert_allclose(weights(Cope(6), {"table": e}, q, k), wanted, atol=1e-5)
    assert np.abs(wanted - weights(Nope(), {}, q, k)).max() > 0.1


def test_whole_positions_are_rows_and_closed_gates_count_nothing():
    is_open = np.array([1, 0, 0, 1, 1, 0, 1, 0, 0])
    q, k, e = gated(is_open)
    counts = np.array([[is_open[j : i + 1].sum() for j in range(T)] for i in range(T)])
    rows = np.einsum("qhd,qkd->hqk", q, e[counts]) / np.sqrt(D)
    assert set(counts[CAUSAL]) == {0, 1, 2, 3, 4}
    assert_allclose(weights(Cope(6), {"table": e}, q, k), causal_softmax(plain_logits(q, k) + rows), atol=1e-5)


def test_positions_fall_from_the_first_key_to_the_last():
    """Rows n u give the logit n (q . u), so that ratios of weights show p; clipped at 2, they say so."""
    q, u = np.abs(Q), np.ones(D, np.float32)
    table = np.arange(40)[:, None] * u[None]
    plain, slope = plain_logits(q, K), (q @ u).T[:, :, None] / np.sqrt(D)
    gates = np.where(CAUSAL, 1 / (1 + np.exp(-plain)), 0)
    p = gates[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
    for num_positions in (40, 3):
        logits = log_weights(Cope(num_positions), {"table": table[:num_positions]}, q)
        found = (logits - plain) / slope
        found = np.where(CAUSAL, found - np.diagonal(found - gates, axis1=1, axis2=2)[..., None], 0)
        if num_positions == 40:
            assert_allclose(found, p, atol=1e-4)
        assert (np.diff(found, axis=2)[:, CAUSAL[:, 1:]] < 1e-4).all()
    assert_allclose(found, np.where(CAUSAL, np.minimum(p, 2), 0), atol=1e-4)


def test_cope_beyond_the_last_row_is_flat_and_has_no_gradient():
    q, k, e = gated(np.ones(T))

    def total(k, encoding, params):
        return (attention_weights(encoding, params, q, k, POS, mask=posx.causal()) * vectors(H, T, T, seed=5)).sum()

    grads = [jax.grad(total)(jnp.asarray(k), *of) for of in ((Cope(2), {"table": e[:2]}), (Nope(), {}))]
    assert_allclose(*grads, atol=1e-5)


def test_weights_move_smoothly_through_whole_positions():
    """Two tokens whose gates add to 1 halfway: rows 0, 1 and 2 stand 3 nats apart, and no weight jumps."""
    steps = np.linspace(-1, 1, 201, dtype=np.float32)
    table = {"table": np.array([[0.0], [3.0], [-3.0]], np.float32)}

    def second(step):
        q, k = jnp.ones((2, 1, 1)), jnp.stack([step, step])[:, None, None]
        return attention_weights(Cope(3), table, q, k, POS[:2], mask=posx.causal())[0, 1]

    found, slopes = jax.vmap(second)(steps), jax.vmap(jax.jacfwd(second))(steps)
    assert np.ptp(found) > 0.1
    assert np.abs(np.diff(found, axis=0)).max() < 0.02
    assert_allclose(slopes[0:99:7], np.gradient(found, steps, axis=0)[0:99:7], atol=0.02)
    assert np.isfinite(slopes[100]).all(), "at a whole position, where the slope of interpolation jumps"


def test_cope_gates_see_content_alone_in_a_chain():
    params = {"table": E}
    chain = Chain((Rope(rotary_dim=D), Cope(6)))
    pairs = ((chain, {"1.table": E}), (Rope(rotary_dim=D), {}), (Cope(6), params), (Nope(), {}))
    turned, rope, cope, plain = (log_weights(*of) for of in pairs)
    added = [
        np.where(CAUSAL, a - np.diagonal(a, axis1=1, axis2=2)[..., None], 0) for a in (turned - rope, cope - plain)
    ]
    assert_allclose(*added, atol=1e-4)
    assert np.abs(turned - cope).max() > 0.1


def test_counting_back_from_the_query_needs_a_causal_mask():
    with pytest.raises(ConfigError, match="^Cope.* is for causal masks"):
        attention_weights(Cope(6), {"table": E}, Q, K, POS, mask=posx.full())
    with pytest.raises(ConfigError, match="^cope: num_positions=1 must be at least 2"):
        Cope(1)
    assert Cope(6).shared == frozenset() and Cope(6, per_layer=False).shared == {"table"}


@pytest.mark.peers
def test_x_transformers():
    import torch
    from x_transformers.x_transformers import CoPE

    module = CoPE(dim=D, heads=H, max_pos=6)
    module.pos_emb.data = torch.tensor(E)
    plain = np.where(CAUSAL, plain_logits(Q, K), np.finfo(np.float32).min).astype(np.float32)
    added = module(torch.tensor(Q.swapaxes(0, 1))[None], torch.tensor(plain)[None])[0].detach().numpy()
    assert_allclose(weights(Cope(6, scaled=False), {"table": E}), causal_softmax(plain + added), atol=1e-6)
