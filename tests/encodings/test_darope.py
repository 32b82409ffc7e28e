"""DaRoPE: RoPE and HoPE as limits, the coordinate of the paper, and slow planes beyond the training length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.conformance import DIMS
from posx.encodings import Darope, Rope
from posx.encodings.darope import logit_of_place
from posx.encodings.frequencies import WholeTurns
from tests.encodings.cases import tokens
from tests.encodings.probes import attention_weights, vectors

T, L, D = 12, 16, 8
POS = np.arange(T, dtype=np.int32)
H, G, M = DIMS.num_heads, DIMS.num_kv_heads, DIMS.model_dim
Q, K, X = vectors(T, H, D), vectors(T, G, D, seed=1), tokens(1, T)[0]
DAROPE, ROPE = Darope(original_len=L, head_dim=D), Rope(rotary_dim=D)
HOPE = Rope(rotary_dim=D, frequencies=WholeTurns(L))
PARAMS = {"w": vectors(M, G, seed=2), "alpha": np.array([0.5, 0.8], np.float32)}


def given(w=0.0, alpha=1.0):
    return {"w": np.full((M, G), w, np.float32), "alpha": np.full(G, alpha, np.float32)}


def weights(encoding, params, pos=POS, x=X):
    x = x if encoding.acts_on("features") else None
    return np.asarray(attention_weights(encoding, params, Q, K, pos, x=x))


@jax.jit
def coordinates(params, pos, x=X):
    return DAROPE.features(params, jnp.asarray(x), jnp.asarray(pos), None)[0]["c"]


def test_without_content_it_is_rope_up_to_the_length():
    assert_allclose(weights(DAROPE, given()), weights(ROPE, {}), atol=1e-6)
    far = weights(DAROPE, given(), POS + L)
    assert np.abs(far - weights(ROPE, {})).max() > 0.01


def test_planes_with_whole_turns_are_those_of_rope():
    """With base 2 and L = 1000 each plane makes a turn, so that no content counts."""
    every, rope = Darope(2.0, 1000, head_dim=D), Rope(2.0, rotary_dim=D)
    assert_allclose(weights(every, PARAMS), weights(rope, {}), atol=1e-6)


@pytest.mark.parametrize(("params", "pos"), [(given(alpha=0.0), POS), (given(), POS + L)])
def test_one_coordinate_for_all_tokens_is_hope(params, pos):
    """Positions are at least L in the second case, so that they are clipped."""
    assert_allclose(weights(DAROPE, params, pos), weights(HOPE, {}, pos), atol=1e-6)


def test_the_coordinate_reads_the_input_only_by_its_weights():
    hidden = X + 0
    hidden[:, 0] += 5
    params = PARAMS | {"w": PARAMS["w"] * (np.arange(M) > 0)[:, None]}
    assert_allclose(coordinates(params, POS, hidden), coordinates(params, POS), atol=1e-5)
    assert np.abs(coordinates(PARAMS, POS, hidden) - coordinates(PARAMS, POS)).max() > 0.5
    assert_array_equal(coordinates(given(), POS, hidden), coordinates(given(), POS))


def test_coordinates_are_half_a_token_late_and_end_at_length():
    assert_allclose(coordinates(given(), POS), np.tile(POS[:, None] + 0.5, G), rtol=1e-6)
    far = np.array([-5, L, 2**31 - 1], np.int32)
    assert_allclose(
        coordinates(given(), np.resize(far, T))[:3, 0], [L * 1e-6, L * (1 - 1e-6), L * (1 - 1e-6)], rtol=1e-5
    )
    assert (np.ptp(coordinates(PARAMS, L + POS), axis=0) > 1e-3).all()  # beyond L content is left


def test_the_logit_of_a_place_keeps_its_digits_at_both_ends():
    for length in (1, 64, 4096, 10**6):
        pos = np.array([-1, 0, length // 2, length - 1, length, length + 10**9], np.int64).astype(np.int32)
        place = np.clip(pos + 0.5, length * 1e-6, length * (1 - 1e-6)) / length
        assert_allclose(logit_of_place(jnp.asarray(pos), length), np.log(place / (1 - place)), rtol=1e-5, atol=1e-5)


def test_absolute_positions_count_but_for_rope():
    for params, differ in ((given(), False), (given(alpha=0.5), True)):
        moved = np.abs(weights(DAROPE, params, POS + 4) - weights(DAROPE, params)).max()
        assert (moved > 1e-3) == differ


def test_query_heads_with_one_key_head_share_a_coordinate():
    """Equal vectors at equal coordinates then have the product of no rotation, in each head."""
    slow, keys = Darope(original_len=3, head_dim=D), Q[:, :: H // G]  # no plane makes a turn

    @jax.jit
    def mapped(params):
        features, _ = slow.features(params, jnp.asarray(X), jnp.asarray(POS), None)
        return slow.query(params, Q, POS, features), slow.key(params, keys, POS, features)

    (q, k), keys = mapped(PARAMS), np.repeat(keys, H // G, axis=1)
    products = np.einsum("thd,thd->th", q, np.repeat(k, H // G, axis=1))
    assert_allclose(products, np.einsum("thd,thd->th", Q, keys), atol=1e-5)


def test_darope_starts_as_in_the_paper():
    dims = posx.Dims(512, 8, 64, 2, 4096, 4)
    encoding = posx.build("darope(base=500000)", dims)
    params = encoding.init(jax.random.key(0), dims)
    assert params["w"].shape == (512, 4) and params["alpha"].tolist() == [0.5] * 4
    theta = WholeTurns(encoding.original_len).frequencies(encoding.base, encoding.head_dim)
    assert (theta > 0).sum() == 16  # its table 4: d/4
    plain = posx.build("darope(content_std=0, prior=1)", dims).init(jax.random.key(0), dims)
    assert not plain["w"].any() and (plain["alpha"] == 1).all()
