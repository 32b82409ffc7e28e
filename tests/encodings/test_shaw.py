"""Shaw's vectors: what clipping to k = 0 leaves, mirror images, and saturation."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose

import posx
from posx.encodings import Nope, Shaw
from tests.encodings.probes import attention_weights, vectors

T, H, D, K = 9, 2, 4, 3
POS = jnp.arange(T)
PARAMS = {"keys": vectors(2 * K + 1, D, seed=7), "values": vectors(2 * K + 1, D, seed=8)}
KEYS_ONLY = {"keys": PARAMS["keys"]}
Q, KEYS, V = (vectors(1, T, H, D, seed=n) for n in range(3))


jit_attend = jax.jit(posx.attend, static_argnums=0, static_argnames="mask")


def attended(encoding, params, q=Q, k=KEYS, v=V, q_pos=POS, mask=posx.full()):
    return np.asarray(jit_attend(encoding, params, q, k, v, q_pos, mask=mask))


def test_distance_zero_only_adds_one_constant_to_plain_attention():
    one_row = {name: table[:1] for name, table in PARAMS.items()}
    for mask in (posx.full(), posx.causal()):
        wanted = attended(Nope(), {}, mask=mask) + one_row["values"]
        assert_allclose(attended(Shaw(0), one_row, mask=mask), wanted, atol=1e-5)


def test_zero_tables_are_plain_attention():
    zero = {name: 0 * table for name, table in PARAMS.items()}
    assert_allclose(attended(Shaw(K), zero), attended(Nope(), {}), atol=1e-6)


def test_values_are_a_field():
    with_values, without = attended(Shaw(K), PARAMS), attended(Shaw(K, values=False), KEYS_ONLY)
    w = attention_weights(Shaw(K, values=False), KEYS_ONLY, Q[0], KEYS[0], POS)
    rows = np.clip(np.arange(T)[None] - np.arange(T)[:, None], -K, K) + K
    assert_allclose(with_values - without, np.einsum("hqk,qkd->qhd", w, PARAMS["values"][rows])[None], atol=1e-5)


def test_shaw_flipped_tables_reverse_outputs_of_reversed_text():
    flipped = {name: table[::-1] for name, table in PARAMS.items()}
    backwards = attended(Shaw(K), flipped, Q[:, ::-1], KEYS[:, ::-1], V[:, ::-1])
    assert_allclose(backwards[:, ::-1], attended(Shaw(K), PARAMS), atol=1e-5)


def test_distances_beyond_k_are_all_k():
    q = np.broadcast_to(vectors(1, H, D), (T, H, D))
    same_key = np.broadcast_to(vectors(1, H, D, seed=1), (T, H, D))
    w = np.asarray(attention_weights(Shaw(K, values=False), KEYS_ONLY, q, same_key, POS))
    for i in range(T):
        before, after = w[:, i, : max(i - K + 1, 0)], w[:, i, i + K :]
        assert_allclose(before, np.broadcast_to(before[:, :1], before.shape), rtol=1e-5)
        assert_allclose(after, np.broadcast_to(after[:, :1], after.shape), rtol=1e-5)
    assert np.abs(w[:, 8, 5] / w[:, 8, 6] - 1).max() > 0.05
