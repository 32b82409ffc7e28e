"""DeBERTa: the half-open range, the scale per term, Shaw's keys as a special case, and v2's buckets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from golden import reference
from posx.encodings import Deberta, Nope, Shaw
from tests.encodings.probes import attention_weights, vectors

M, H, D, T, HALF = 10, 2, 4, 12, 5
PARAMS = {"table": vectors(2 * HALF, M, seed=1), "w_k": vectors(M, H, D, seed=2), "w_q": vectors(M, H, D, seed=3)}
C2P, P2C = ({name: PARAMS[name] for name in ("table", own)} for own in ("w_k", "w_q"))
POS = np.arange(T, dtype=np.int32)
Q, K = vectors(T, H, D, seed=4), vectors(T, H, D, seed=5)


def test_the_table_covers_minus_k_to_k_minus_one():
    r = np.arange(-9, 10)
    rows = Deberta(max_distance=HALF).rows(jnp.asarray(r))
    assert_array_equal(rows, np.clip(r + HALF, 0, 2 * HALF - 1))
    at = dict(zip(r.tolist(), np.asarray(rows).tolist(), strict=True))
    assert at[-HALF] == 0 == at[-HALF - 1]
    assert at[HALF] == at[HALF - 1] == 2 * HALF - 1


@pytest.mark.parametrize("terms", [("c2p",), ("p2c",), ("c2p", "p2c")])
def test_deberta_zero_table_is_attention_at_the_scale_of_terms(terms):
    zero = {("c2p",): C2P, ("p2c",): P2C}.get(terms, PARAMS) | {"table": 0 * PARAMS["table"]}
    w = attention_weights(Deberta(HALF, terms), zero, Q, K, POS)
    smaller = Q / np.float32(np.sqrt(1 + len(terms)))
    assert_allclose(w, attention_weights(Nope(), {}, smaller, K, POS), atol=1e-5)


def test_c2p_with_one_projection_for_all_heads_is_shaws_keys():
    one_head = np.broadcast_to(PARAMS["w_k"][:, :1], (M, H, D))
    w = attention_weights(Deberta(HALF, ("c2p",)), C2P | {"w_k": one_head}, Q, K, POS)
    rows = (PARAMS["table"] @ one_head[:, 0])[::-1]  # Shaw counts j - i upwards, DeBERTa i - j
    keys = {"keys": np.concatenate([rows[:1], rows])}  # DeBERTa's k reads the row of k - 1
    scaled = Q / np.float32(np.sqrt(2))
    assert_allclose(w, attention_weights(Shaw(HALF, values=False), keys, scaled, K, POS), atol=1e-5)


def test_p2c_reads_the_distance_from_the_key_to_the_query():
    """With q = 0 the only term is k_j . Qr_delta(j, i): causal queries read rows below k, the release those above."""
    paper = Deberta(HALF, ("p2c",))
    only = np.asarray(attention_weights(paper, P2C, 0 * Q, K, POS))
    mirrored = attention_weights(paper, P2C, 0 * Q[::-1], K, -POS)
    release = attention_weights(Deberta(HALF, ("p2c",), release_index=True), P2C, 0 * Q, K, POS)
    assert_allclose(release, mirrored, atol=1e-5)
    logits = np.einsum("khd,khd->hk", K, np.einsum("nm,mhd->nhd", PARAMS["table"], PARAMS["w_q"])[
        np.clip(POS - 7 + HALF, 0, 2 * HALF - 1)
    ]) / np.sqrt(2 * D)  # fmt: skip
    assert_allclose(np.log(only[:, 7]) - np.log(only[:, 7, :1]), logits - logits[:, :1], atol=1e-4)


def test_published_log_buckets():
    v2 = Deberta(max_distance=512, log_buckets=256)
    r = np.array([0, 1, 128, 200, 256, 300, 511, 512, 600, 5000])
    assert_array_equal(v2.rows(jnp.asarray(r)) - 256, [0, 1, 128, 169, 192, 207, 255, 255, 255, 255])
    assert_array_equal(v2.rows(jnp.asarray(-r)) - 256, -np.array([0, 1, 128, 169, 192, 207, 255, 255, 255, 255]))


@pytest.mark.parametrize("size", [(256, 512), (1024, 4096), (512, 4096), (64, 2048), (32, 16_384), (4, 8)])
def test_log_buckets_are_those_of_the_release(size):
    """On both sides of the query. The release clips distances first, and its logarithm is evaluated in float64 here."""
    (buckets, far), r = size, np.arange(-8192, 8193)
    mid, d = buckets // 2, np.abs(np.clip(r, 1 - far, far - 1))
    logarithmic = np.ceil(np.log(np.maximum(d, mid) / mid) / np.log((far - 1) / mid) * (mid - 1)) + mid
    wanted = np.where(d <= mid, d, logarithmic) * np.sign(r) + buckets
    rows = Deberta(max_distance=far, log_buckets=buckets).rows
    assert_array_equal(jax.jit(rows)(jnp.asarray(r)), wanted)


def test_a_log_bucket_does_not_depend_on_rounding():
    """(4095/512)^(490/511) is just below 3396/512: float32 takes it for equal, and gives 2001 and 23."""
    rows = Deberta(max_distance=4096, log_buckets=1024).rows
    assert_array_equal(rows(jnp.asarray([3396, 3395, -3396, 2**31 - 1, -(2**31)])), [2002, 2001, 46, 2047, 1])


@pytest.mark.parametrize("size", [(256, 512), (8, 64), (6, 24), (4, 5), (32, 1024), (16, 137)])
def test_log_buckets_follow_the_formula_and_grow_with_distance(size):
    encoding = Deberta(max_distance=size[1], log_buckets=size[0])
    r = np.arange(-2 * size[1], 2 * size[1] + 1)
    rows = np.asarray(jax.jit(encoding.rows)(jnp.asarray(r)))
    assert_array_equal(rows, [reference.deberta_delta(encoding, d) for d in r.tolist()])
    assert (np.diff(rows) >= 0).all()
    assert_array_equal(rows[::-1] - size[0], size[0] - rows)


def test_distances_beyond_k_are_all_k():
    w = np.asarray(attention_weights(Deberta(HALF), PARAMS, Q[:1].repeat(T, axis=0), K[:1].repeat(T, axis=0), POS))
    assert_allclose(w[:, 11, :7], np.broadcast_to(w[:, 11, :1], (H, 7)), rtol=1e-5)
    assert np.abs(w[:, 11, 6] / w[:, 11, 8] - 1).max() > 0.02


def test_the_table_is_shared_and_its_projections_are_per_layer():
    assert Deberta(HALF).shared == {"table"}
