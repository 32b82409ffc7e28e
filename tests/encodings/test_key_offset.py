"""The partial key offset: what a query finds, what stays, and the form it was published in."""

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from posx.encodings import Chain, KeyOffset, Nope, Rope
from tests.encodings.probes import attention_weights, vectors

T, H, D = 12, 2, 8
POS = np.arange(T, dtype=np.int32)


def keys(k, share=0.5):
    before = np.concatenate([0 * k[:1], k[:-1]])
    return np.asarray(KeyOffset(share).key({}, np.stack([k, before], axis=1), POS, {}))


def test_the_last_channels_are_those_of_the_token_before():
    k = vectors(T, H, D)
    for share, kept in ((0.5, 4), (0.25, 6), (1.0, 0), (0.3, 5)):
        assert_array_equal(keys(k, share)[:, :, :kept], k[:, :, :kept])
        assert_array_equal(keys(k, share)[1:, :, kept:], k[:-1, :, kept:])
        assert not keys(k, share)[0, :, kept:].any()


def test_key_offset_of_all_channels_is_nope_on_shifted_keys():
    q, k = vectors(T, H, D), vectors(T, H, D, seed=1)
    shifted = np.concatenate([0 * k[:1], k[:-1]])
    wanted = attention_weights(Nope(), {}, q, shifted, POS)
    assert_allclose(attention_weights(KeyOffset(share=1.0), {}, q, k, POS), wanted, atol=1e-6)
    assert np.abs(attention_weights(Nope(), {}, q, k, POS) - wanted).max() > 0.1


def test_key_offset_does_induction_in_one_layer():
    """Induction: the query at the second A attends to the token behind the first A."""
    letters = 5 * np.eye(D, dtype=np.float32)[[4, 5, 6, 7, 4]][:, None]
    found = attention_weights(KeyOffset(), {}, letters, letters, np.arange(5))
    assert found[0, 4].argmax() == 1 and found[0, 4, 1] > 0.99
    without = attention_weights(Nope(), {}, letters, letters, np.arange(5))
    assert without[0, 4, 1] < 0.01


def test_positions_are_not_read():
    q, k = vectors(T, H, D), vectors(T, H, D, seed=1)
    assert_array_equal(
        attention_weights(KeyOffset(), {}, q, k, POS), attention_weights(KeyOffset(), {}, q, k, POS[::-1] * 7)
    )


def test_key_offset_with_partial_rope_is_the_published_record():
    """There RoPE has zeros for half of the frequencies of a half-split head, and turns clockwise."""
    n = D // 4
    q, k = vectors(T, H, D), vectors(T, H, D, seed=1)
    theta = np.concatenate([(1 / 1024) ** np.linspace(0, 1, n), np.zeros(n)])

    def turned(x):
        sin, cos = (wave(POS[:, None] * theta)[:, None] for wave in (np.sin, np.cos))
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1)

    their_q, their_k = turned(q), turned(k)
    for quarter in (slice(D // 4, D // 2), slice(3 * D // 4, D)):
        their_k[1:, :, quarter] = their_k[:-1, :, quarter].copy()
    wanted = np.einsum("qhd,khd->hqk", their_q, their_k)[..., 1:] / np.sqrt(D)

    #: Their channels in our order: the turned planes with both sides swapped, then what stands still.
    order = np.concatenate([np.arange(n) + D // 2, np.arange(n), np.arange(n, 2 * n), np.arange(n, 2 * n) + D // 2])
    chain = Chain((KeyOffset(), Rope(base=1024.0 ** (n / (n - 1)), rotary_dim=D // 2)))
    w = np.float64(attention_weights(chain, {}, q[..., order], k[..., order], POS))[..., 1:]
    logits = np.log(w) - np.log(w).mean(axis=-1, keepdims=True)
    assert_allclose(logits, wanted - wanted.mean(axis=-1, keepdims=True), atol=1e-4)
