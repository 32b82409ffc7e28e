"""Transformer-XL: the relative shift of the paper, each bias on its own, memory, and clamping."""

import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose

from posx.encodings import Nope, TransformerXL
from tests.encodings.probes import attention_weights, plain_logits, softmax, vectors

M, H, D, T = 12, 2, 6, 9
PARAMS = {"u": vectors(H, D, seed=1), "v": vectors(H, D, seed=2), "w_r": vectors(M, H, D, seed=3)}
POS = np.arange(T, dtype=np.int32)
Q, K = vectors(T, H, D, seed=4), vectors(T, H, D, seed=5)


def weights(params=PARAMS, q=Q, k=K, q_pos=POS, k_pos=POS, **fields):
    return np.asarray(attention_weights(TransformerXL(**fields), params, q, k, q_pos, k_pos))


def relative_shift(x):
    """Appendix B of the paper: a zero column, one reshape, and row i of [h, q, k] moves left by q - 1 - i."""
    h, q, k = x.shape
    padded = np.concatenate([np.zeros((h, q, 1)), x], axis=-1)
    return padded.reshape(h, k + 1, q)[:, 1:].reshape(h, q, k)


def test_the_causal_half_is_the_papers_relative_shift():
    for num_queries in (T, 4):
        q = Q[-num_queries:]
        angles = np.arange(T - 1, -1, -1)[:, None] * 10000.0 ** (-np.arange(0, M, 2) / M)
        rows = np.einsum("rm,mhd->rhd", np.concatenate([np.sin(angles), np.cos(angles)], axis=1), PARAMS["w_r"])
        by_position = relative_shift(np.einsum("qhd,rhd->hqr", q + PARAMS["v"], rows)) / np.sqrt(D)
        logits = plain_logits(q + PARAMS["u"], K) + by_position
        seen = POS[None, :] <= POS[-num_queries:, None]
        wanted = softmax(np.where(seen, logits, -np.inf))
        w = weights(q=q, q_pos=POS[-num_queries:])
        w = np.where(seen, w, 0) / np.where(seen, w, 0).sum(axis=-1, keepdims=True)
        assert_allclose(w, wanted, atol=1e-5)


def test_nothing_learned_is_plain_attention():
    zero = {name: 0 * a for name, a in PARAMS.items()}
    assert_allclose(weights(zero), attention_weights(Nope(), {}, Q, K, POS), atol=1e-6)


def test_u_alone_prefers_keys_whatever_their_position():
    only_u = PARAMS | {"w_r": 0 * PARAMS["w_r"]}
    assert_allclose(weights(only_u, q=0 * Q), softmax(plain_logits(0 * Q + PARAMS["u"], K)), atol=1e-5)
    order = np.random.default_rng(0).permutation(T)
    assert_allclose(weights(only_u, k_pos=POS[order]), weights(only_u), atol=1e-6)


def test_without_content_logits_depend_on_distance_only():
    empty = PARAMS | {"u": 0 * PARAMS["u"]}
    logits = np.log(weights(empty, q=0 * Q))
    differences = logits[:, :, 1:] - logits[:, :, :-1]
    assert_allclose(differences[:, 1:, 1:], differences[:, :-1, :-1], atol=1e-4)
    assert np.abs(differences).max() > 0.1


def test_memory_is_more_keys_at_earlier_positions():
    memory = 4
    late = weights(q=Q[memory:], q_pos=POS[memory:])
    assert_allclose(late, weights()[:, memory:], atol=1e-5)
    assert_allclose(late, weights(q=Q[memory:], q_pos=POS[memory:] - memory, k_pos=POS - memory), atol=1e-5)


def test_clamping_saturates_and_is_off_at_the_longest_distance():
    assert_allclose(weights(clamp_len=T), weights(), atol=1e-5)
    same_key = np.broadcast_to(K[:1], K.shape)
    w = weights(k=same_key, clamp_len=3)
    assert_allclose(w[:, 8, :5], np.broadcast_to(w[:, 8, 5:6], (H, 5)), rtol=1e-5)
    far = weights(k=same_key, clamp_len=3, q_pos=jnp.asarray(POS + 500))
    assert_allclose(far, 1 / T, atol=1e-5)
    assert np.abs(weights(k=same_key)[:, 8, 0] / w[:, 8, 0] - 1).max() > 0.05


def test_biases_are_shared_unless_untied():
    assert TransformerXL().shared == {"u", "v"}
    assert TransformerXL(untie_biases=True).shared == frozenset()
