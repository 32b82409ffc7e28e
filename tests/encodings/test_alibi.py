"""Slopes for any number of heads, a bias that falls in straight lines, and the two other ways to write it."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from golden import reference
from posx.encodings import Alibi, Kerple, Nope
from posx.encodings.alibi import alibi_slopes
from tests.encodings.probes import attention_weights, distance_bias, plain_logits, softmax, vectors

POS = np.arange(30, dtype=np.int32)


def bias(num_heads, pos=POS):
    return np.float64(distance_bias(Alibi(num_heads), {}, pos[:, None] - pos))


def test_published_slopes():
    assert_allclose(alibi_slopes(1), [2**-8])
    assert_allclose(alibi_slopes(8), 0.5 ** np.arange(1, 9))
    twelve = [*(0.5 ** np.arange(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert_allclose(alibi_slopes(12), twelve)
    assert_allclose(twelve[8:], [0.7071, 0.3536, 0.1768, 0.0884], atol=1e-4)


@pytest.mark.parametrize("num_heads", range(1, 41))
def test_slopes_of_any_number_of_heads(num_heads):
    slopes = alibi_slopes(num_heads)
    assert_allclose(slopes, reference.alibi_slopes(num_heads), rtol=1e-12)
    assert len(set(slopes)) == num_heads
    if num_heads & (num_heads - 1) == 0:
        assert_allclose(slopes[1:] / slopes[:-1], 2 ** (-8 / num_heads))


@pytest.mark.parametrize("num_heads", [4, 6])
def test_alibi_falls_in_a_straight_line_to_both_sides(num_heads):
    b = bias(num_heads)
    slopes = alibi_slopes(num_heads)
    for i in (0, 7, 29):
        assert_allclose(np.diff(b[:, i, : i + 1]), np.repeat(slopes[:, None], i, axis=1), rtol=1e-5)
    assert_allclose(b, b.swapaxes(1, 2))
    assert_allclose(bias(num_heads, POS + 1000), b)


def test_key_index_form_and_extra_channels_give_the_same_weights():
    num_heads, d = 4, 6
    q, k, pos = vectors(30, num_heads, d), vectors(30, num_heads, d, seed=1), POS.astype(np.float32)
    causal = np.tril(np.ones((30, 30), bool))
    wanted = attention_weights(Alibi(num_heads), {}, q, k, POS, mask=posx.causal())
    slopes = alibi_slopes(num_heads)[:, None, None]
    by_key = plain_logits(q, k) + slopes * pos[None, None, :]
    assert_allclose(softmax(np.where(causal, by_key, -np.inf)), wanted, atol=1e-5)

    # sqrt(d) [1, i] appended to q and [m j, -m] to k: the product is sqrt(d) * -m (i - j), scaled like any other.
    ones, m = np.ones_like(pos), alibi_slopes(num_heads).astype(np.float32)
    q_extra = np.sqrt(d) * np.stack([ones, pos], axis=-1)[:, None].repeat(num_heads, axis=1)
    k_extra = np.stack([m[None] * pos[:, None], -m[None] * ones[:, None]], axis=-1)
    q_long, k_long = np.concatenate([q, q_extra], axis=-1), np.concatenate([k, k_extra], axis=-1)
    by_channel = np.einsum("qhd,khd->hqk", q_long, k_long) / np.sqrt(d)
    assert_allclose(softmax(np.where(causal, by_channel, -np.inf)), wanted, atol=1e-5)


def test_equal_positions_are_no_positions():
    q, k = vectors(6, 4, 6), vectors(6, 4, 6, seed=1)
    same = attention_weights(Alibi(4), {}, q, k, np.full(6, 9))
    assert_allclose(same, attention_weights(Nope(), {}, q, k, np.arange(6)), atol=1e-6)


def test_the_log_form_is_kerple_with_fixed_parameters():
    far, slopes = np.array([0, 1, 7, 1000, 10**7], np.int32), alibi_slopes(8)
    log = distance_bias(Alibi(8, scale="log"), {}, far)
    kerple = distance_bias(Kerple(), {"p": np.float32(slopes), "a": np.ones(8, np.float32)}, far)
    assert_allclose(log[:6], kerple[:6], rtol=1e-6)  # KERPLE mirrors p below 0.01
    assert (np.exp(np.float32(distance_bias(Alibi(8), {}, far[-2:]))[0]) == 0).all()
    assert_allclose(np.exp(np.float32(log)), (1.0 + far) ** -slopes[:, None], rtol=1e-5)
