"""A curve over distances that every query mixes for itself: Shaw's keys where it can, nothing beyond its extent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.encodings import Inkling, Nope, Shaw
from posx.errors import ConfigError
from tests.encodings.probes import plain_logits, softmax, vectors

T, H, D, M, E, RANK = 11, 2, 4, 6, 7, 3
POS, CAUSAL = np.arange(T, dtype=np.int32), np.tril(np.ones((T, T), bool))
X, Q, K = vectors(T, M, seed=4), vectors(T, H, D), vectors(T, H, D, seed=1)
PARAMS = {"w": vectors(M, H, RANK, seed=2), "bank": vectors(RANK, E, seed=3)}


def weights(encoding, params, q=Q, k=K, pos=POS):
    return np.asarray(_weights(encoding, params, q, k, jnp.asarray(pos)))


@jax.jit(static_argnums=0)
def _weights(encoding, params, q, k, pos):
    v = jnp.broadcast_to(jnp.eye(T)[:, None], (T, H, T))
    o = posx.attend(encoding, params, q[None], k[None], v[None], pos, x=X[None])
    return o[0].swapaxes(0, 1)


def test_each_query_has_a_curve_that_ends_at_the_extent():
    curves = np.einsum("qm,mhr,re->hqe", X, PARAMS["w"], PARAMS["bank"])
    wanted = np.zeros((H, T, T))
    for i in range(T):
        for r in range(min(i + 1, E)):
            wanted[:, i, i - r] = curves[:, i, r]
    wanted = softmax(np.where(CAUSAL, plain_logits(Q, K) + wanted, -np.inf))
    assert_allclose(weights(Inkling(E, RANK), PARAMS), wanted, atol=1e-6)


def test_a_query_projected_as_the_bias_is_makes_it_shaws_keys():
    """r_i = q_i / sqrt(d), so that a column of the bank is one of Shaw's vectors; beyond the extent those are 0."""
    w = vectors(M, H, D, seed=5)
    q = np.einsum("tm,mhd->thd", X, w)
    bank = vectors(D, E, seed=6)
    keys = np.zeros((2 * E + 1, D), np.float32)
    keys[E - np.arange(E)] = bank.T
    found = weights(Inkling(E, D), {"w": w / np.sqrt(np.float32(D)), "bank": bank}, q)
    assert_allclose(found, weights(Shaw(E, values=False), {"keys": keys}, q), atol=1e-5)
    assert np.abs(found - weights(Nope(), {}, q)).max() > 0.1


def test_inkling_has_no_positions_beyond_the_extent():
    """But for themselves, at distance 0."""
    plain, far = weights(Nope(), {}), weights(Inkling(E, RANK), PARAMS, pos=POS * E)
    added = np.log(np.where(CAUSAL, far / np.where(CAUSAL, plain, 1), 1))
    for i in range(1, T):
        assert_allclose(np.ptp(added[:, i, :i], axis=1), 0, atol=1e-4)
    assert np.abs(added).max() > 0.1
    near = weights(Inkling(E, RANK), PARAMS, pos=POS * (E - 1))
    assert np.abs(near - far).max() > 0.1


def test_no_array_is_as_large_as_pairs_times_the_rank():
    q, k, rank = 50, 60, 9
    encoding = Inkling(20, rank)
    tile = posx.Tile(
        *(jnp.ones((n, 1, 1)) for n in (q, k, q, k)), {"r": jnp.ones((q, 1, rank))}, {"r": jnp.ones((k, 1, rank))},
        jnp.arange(q), jnp.arange(k), jnp.ones((1, q, 1)), jnp.ones((q, k), bool),
    )  # fmt: skip
    params = {"w": jnp.ones((4, 1, rank)), "bank": jnp.ones((rank, 20))}
    program = jax.make_jaxpr(lambda s: encoding.score(params, s, tile))(jnp.ones((1, q, k)))
    sizes = [v.aval.size for step in program.eqns for v in step.outvars]
    assert q * k <= max(sizes) <= 4 * q * k < rank * q * k


def test_wrong_uses_are_refused():
    with pytest.raises(ConfigError, match="^Inkling.* is for causal masks"):
        posx.attend(Inkling(E, RANK), PARAMS, Q[None], K[None], K[None], POS, x=X[None], mask=posx.full())
    with pytest.raises(ConfigError, match="^inkling: extent=0 must be at least 1"):
        Inkling(0)


@pytest.mark.peers
def test_transformers_and_x_transformers():
    import torch
    from transformers.models.inkling.modeling_inkling import InklingRelativeLogits
    from x_transformers.x_transformers import RelativeProjPositionalBias

    params = {name: torch.tensor(a) for name, a in PARAMS.items()}
    port = InklingRelativeLogits(RANK, E)
    port.proj.data = params["bank"]
    pos = torch.tensor(POS)
    by_port = port(torch.einsum("tm,mhr->thr", torch.tensor(X), params["w"])[None], pos, pos)
    other = RelativeProjPositionalBias(M, H, RANK, E)
    linear = other.to_distance_weights[0]
    linear.weight.data, linear.bias.data = params["w"].reshape(M, H * RANK).T.contiguous(), torch.zeros(H * RANK)
    other.distance_bank.data = params["bank"]
    for added in (by_port, other(torch.tensor(X)[None])):
        wanted = softmax(np.where(CAUSAL, plain_logits(Q, K) + added[0].detach().numpy(), -np.inf))
        assert_allclose(weights(Inkling(E, RANK), PARAMS), wanted, atol=1e-6)
