"""PoPE: content cannot turn anything, position cannot stretch anything; and RoPE of twice the width in disguise."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.conformance import DIMS
from posx.encodings import Pope, Rope
from tests.encodings.probes import attention_weights, vectors

H, D = 2, 6
POS = np.array([0, 1, 2, 5, 17, 400, 401, 90_000])
ZERO = {"delta": np.zeros((H, D), np.float32)}
SOME = {"delta": -2 * math.pi * np.random.default_rng(5).random((H, D), np.float32)}


def mapped(hook, params, x, pos=POS):
    return np.asarray(getattr(Pope(), hook)(params, x, jnp.asarray(pos), {}))


def logits(params, q, k, pos=POS):
    """[h, q, k] of vectors [t, h, d]."""
    return np.einsum("qhd,khd->hqk", mapped("query", params, q, pos), mapped("key", params, k, pos)) / math.sqrt(D)


def everywhere(x):
    """One vector for every head and token."""
    return np.broadcast_to(x, (len(POS), H, D)).astype(np.float32)


def test_pope_without_delta_is_rope_of_magnitudes():
    x = vectors(len(POS), H, D)
    magnitudes = np.log1p(np.exp(x))
    planes = np.concatenate([magnitudes, 0 * x], axis=-1)
    turned = Rope(rotary_dim=2 * D).query({}, planes, jnp.asarray(POS), {})
    for hook in ("query", "key"):
        assert_allclose(mapped(hook, ZERO, x), turned, atol=1e-6)


def test_pope_logits_are_even_in_distance_without_delta():
    q, k = everywhere(vectors(D)), everywhere(vectors(D, seed=1))
    even, skew = logits(ZERO, q, k), logits(SOME, q, k)
    assert_allclose(even, even.swapaxes(1, 2), atol=1e-5)
    assert np.abs(skew - skew.swapaxes(1, 2)).max() > 0.1


def test_pope_logits_reach_their_bound_at_distance_0():
    q, k = vectors(len(POS), H, D), vectors(len(POS), H, D, seed=1)
    bound = np.einsum("qhd,khd->hqk", *(np.log1p(np.exp(x)) for x in (q, k))) / math.sqrt(D)
    for params in (ZERO, SOME):
        assert (np.abs(logits(params, q, k)) <= bound + 1e-5).all()
    assert_allclose(logits(ZERO, q, k, 0 * POS + 7), bound, rtol=1e-5)
    assert (logits(SOME, q, k, 0 * POS + 7) < 0.9 * bound).all()


def test_pope_magnitudes_keep_large_positive_vectors_alone():
    q, k = 20 + np.abs(vectors(len(POS), H, D)), 20 + np.abs(vectors(len(POS), H, D, seed=1))
    theta = 10000.0 ** (-np.arange(D) / D)
    cosines = np.cos((POS[:, None] - POS[None, :])[..., None] * theta)
    assert_allclose(logits(ZERO, q, k), np.einsum("qhd,khd,qkd->hqk", q, k, cosines) / math.sqrt(D), atol=1e-2)
    assert np.abs(logits(ZERO, -q, k)).max() < 1e-5


def test_delta_is_clamped_and_learns_from_where_it_starts():
    q, k = vectors(len(POS), H, D), vectors(len(POS), H, D, seed=1)
    for far, end in ((9.0, 0.0), (-9.0, -2 * math.pi)):
        ends = ({"delta": np.full((H, D), value, np.float32)} for value in (far, end))
        assert_array_equal(*(mapped("query", params, q) for params in ends))
    keys = mapped("key", ZERO, k, POS[::-1])
    slope = jax.grad(lambda delta: (Pope().query({"delta": delta}, q, jnp.asarray(POS), {}) * keys).sum())
    assert (np.abs(slope(ZERO["delta"])) > 1e-4).all()
    assert not slope(0 * ZERO["delta"] + 9.0).any()


def test_delta_starts_at_zero_or_spread_over_a_turn():
    dims = dataclasses.replace(DIMS, head_dim=64)
    assert_array_equal(Pope().init(jax.random.key(0), dims)["delta"], np.zeros((4, 64)))
    spread = Pope(delta_start="uniform").init(jax.random.key(0), dims)["delta"] / (-2 * math.pi)
    assert spread.shape == (4, 64) and 0 <= spread.min() < 0.05 and 0.95 < spread.max() <= 1
    assert abs(spread.mean() - 0.5) < 0.1


def test_query_heads_that_share_keys_have_a_delta_each():
    q, k = np.repeat(vectors(len(POS), 1, D), H, axis=1), vectors(len(POS), 1, D, seed=1)
    w = attention_weights(Pope(), SOME, q, k, POS)
    alone = [attention_weights(Pope(), {"delta": SOME["delta"][h : h + 1]}, q[:, :1], k, POS)[0] for h in range(H)]
    assert_allclose(w, alone, atol=1e-6)
    assert np.abs(w[0] - w[1]).max() > 0.1


@pytest.mark.peers
def test_logits_are_those_of_x_transformers():
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("x_transformers.x_transformers")
    embedding = library.PolarEmbedding(D, H)
    embedding.learned_bias.data = torch.from_numpy(3 * vectors(H, 1, D, seed=7))
    q, k, pos = vectors(50, H, D), vectors(50, H, D, seed=1), np.arange(50)
    freqs, bias = embedding(torch.from_numpy(pos))
    theirs = [
        library.apply_polar_pos_emb(torch.from_numpy(x.swapaxes(0, 1)[None]), phase).detach().numpy()[0]
        for x, phase in ((q, freqs), (k, freqs + bias))
    ]
    params = {"delta": embedding.learned_bias.detach().numpy()[:, 0]}
    wanted = np.einsum("hqd,hkd->hqk", *theirs) / math.sqrt(D)
    assert_allclose(logits(params, q, k, pos), wanted, atol=2e-5)
    weights = attention_weights(Pope(), params, q, k, pos, mask=posx.causal())
    masked = torch.from_numpy(np.where(np.tril(np.ones((50, 50), bool)), wanted, -np.inf))
    assert_allclose(weights, torch.softmax(masked, dim=-1), atol=2e-5)
