"""Slots and masks that are known to be mistaken: refused before tracing, with the way to write what was meant."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.encodings import Alibi
from posx.errors import ConfigError
from tests.cheap import in_one_program

B, T, H, G, D = 2, 16, 4, 2, 6
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((B, T, heads, D)).astype(np.float32) for heads in (H, G, G))
ORDER = np.arange(T, dtype=np.int32)
PACKED, DOCUMENTS = ORDER % 8, ORDER // 8


def attend(slots, k_slots=None, q=Q, k=K, v=V, **options):
    return posx.attend(Alibi(H), {}, q, k, v, slots, k_slots, **{"executor": "dense"} | options)


AGAIN, BELOW, FAR = "_pos starts again, from 7 to 0", "_pos is -1 in a slot, but without idx", "_pos jumps from 9 to "
MISTAKEN = {
    "two documents": (PACKED, f"q{AGAIN}, so one document would read another. Number packed documents: posx.Slots"),
    "two documents as floats": (np.float32(PACKED), f"q{AGAIN}"),
    "two documents of JAX": (jnp.asarray(PACKED), f"q{AGAIN}"),
    "two documents in one row": (np.stack([ORDER, PACKED]), f"q{AGAIN} in row 1"),
    "documents of other positions": (np.r_[ORDER[8:], ORDER[:8]], "q_pos starts again, from 15 to 0"),
    "a last document of one token": (np.r_[ORDER[:15], ORDER[:1]], "q_pos starts again, from 14 to 0"),
    "a border in the wrong place": (
        posx.Slots(PACKED, segment=np.int32(ORDER > 8)), r"q_pos starts again within a segment, from 7 to 0",
    ),
    "one number for all documents": (posx.Slots(PACKED, segment=0 * ORDER), "starts again within a segment"),
    "documents that take turns": (posx.Slots(PACKED, segment=ORDER // 4 % 2), "within a segment, from 3 to 0"),
    "padding on the left": (np.maximum(ORDER - 4, -1), f"q{BELOW} every slot is a token"),
    "padding on the right": (np.where(ORDER < 12, ORDER, -1), f"q{BELOW}"),
    "padding that counts on": (ORDER - 4, "q_pos is -4 in a slot"),
    "padding in one row": (np.stack([ORDER, np.maximum(ORDER - 4, -1)]), f"q{BELOW}"),
    "padding at 1": (np.r_[1, 1, 1, ORDER[:13]].astype(np.int32), "q_pos starts again, from 1 to 0"),
    "padding at 0": (np.r_[ORDER[:12], 0, 0, 0, 0].astype(np.int32), "q_pos starts again, from 11 to 0"),
    "padding far away": (np.where(ORDER < 10, ORDER, 10**9).astype(np.int32), f"q{FAR}1e\\+09, as padding does"),
    "padding at a million": (np.where(ORDER < 10, ORDER, 10**6).astype(np.int32), f"q{FAR}1e\\+06"),
    "padding at the largest": (np.where(ORDER < 15, ORDER, 2**31 - 1).astype(np.int32), "q_pos jumps from 14 to"),
    "padding of NaN": (np.where(ORDER < 4, np.nan, ORDER).astype(np.float32), "q_pos is nan in the slot of a token"),
    "padding of infinity": (np.where(ORDER < 4, np.inf, ORDER).astype(np.float32), "q_pos is inf in the slot of"),
    "floats beyond int32": (np.float32(2.0**31 + 256 * ORDER), r"q_pos is 2.14748e\+09 in .* must be below 2\*\*31"),
    "NaN in the slot of a token": (
        posx.Slots(np.where(ORDER < 4, np.nan, ORDER).astype(np.float32), np.maximum(ORDER - 3, -1)), "q_pos is nan in",
    ),
    "orders that start again": (posx.Slots(ORDER, PACKED), "k_idx is 0 in 2 slots of one document, which would see"),
    "orders of ones and zeros": (posx.Slots(ORDER, np.int32(ORDER < 12)), "k_idx is 1 in 12 slots of one document"),
    "orders that repeat in a document": (posx.Slots(PACKED, PACKED // 2, DOCUMENTS), "k_idx is 0 in 2 slots of one"),
    "orders of booleans": (posx.Slots(ORDER, ORDER < 12), r"q_idx is bool: .* Write np.where\(q_idx, order, -1\)"),
    "documents of booleans": (posx.Slots(ORDER, segment=ORDER < 12), "q_segment is bool: it must be int32"),
    "a mask for positions": (np.tri(T, dtype=bool), r"q_pos is bool: .* If it is a mask: give posx.causal\(\)"),
    "distances beyond int32": (
        posx.Slots(np.r_[-(2**31), ORDER[1:]].astype(np.int32), ORDER), "distances must be below 2\\*\\*31 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKEN)
def test_mistaken_slots_are_refused_before_tracing(case):
    slots, message = MISTAKEN[case]
    calls = (
        lambda: attend(slots),
        lambda: jax.eval_shape(lambda q: attend(slots, q=q), Q),
        lambda: attend(slots, mask=posx.full()),
    )
    for call in calls:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    if not isinstance(slots, posx.Slots):
        right = ORDER.astype(np.int32 if slots.dtype == bool else slots.dtype)
        with pytest.raises(ValueError, match=message.replace("q_", "k_", 1)):
            attend(right, slots)


def test_the_remedies_in_the_messages_work():
    """Documents and padding, marked as the messages say, change nothing of a document alone."""
    outputs = functools.partial(in_one_program, attend)
    alone = outputs(ORDER[:8], q=Q[:, 8:], k=K[:, 8:], v=V[:, 8:])
    packed = outputs(posx.Slots(PACKED, segment=DOCUMENTS))[:, 8:]
    padded = outputs(posx.Slots(np.where(ORDER < 8, -1, PACKED), np.where(ORDER < 8, -1, PACKED)))[:, 8:]
    restarted = outputs(posx.Slots(PACKED, PACKED, DOCUMENTS))[:, 8:]
    for found in (packed, padded, restarted):
        assert_allclose(found, alone, atol=1e-6)


MEANT = {
    "backwards": ORDER[::-1].copy(),
    "repeated": ORDER // 3,
    "with gaps": ORDER**3,
    "far": ORDER + np.int32(2**31 - T - 1),
    "half tokens": np.float32(ORDER) / 2,
    "any order": posx.Slots(PACKED, ORDER),
    "below 0": posx.Slots(ORDER - 4, ORDER),
    "a jump": posx.Slots(np.where(ORDER < 10, ORDER, 10**9).astype(np.int32), ORDER),
    "slots in another order": posx.Slots(ORDER[::-1].copy(), ORDER[::-1].copy()),
    "documents in any order": posx.Slots(PACKED, segment=1 - DOCUMENTS),
    "documents far apart": posx.Slots(PACKED + 10**9 * DOCUMENTS, segment=DOCUMENTS),
    "empty slots between": posx.Slots(ORDER, np.where(ORDER % 5 == 2, -1, ORDER)),
    "NaN in empty slots": posx.Slots(
        np.where(ORDER < 4, np.nan, ORDER).astype(np.float32), np.where(ORDER < 4, -1, ORDER)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANT)
def test_slots_that_are_meant_are_served(case):
    """As the same values are if they are traced, which nothing refuses."""
    given = MEANT[case]
    traced = jax.jit(attend)(given)
    assert_allclose(in_one_program(attend, given), traced, atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.tri(T, dtype=bool), r"mask is ndarray: give posx.causal\(\), .* Padding is an idx of -1, and packed doc"),
        (jnp.tri(T, dtype=bool), r"mask is jax.Array: give posx.causal\(\), posx.full\(\) or posx.window\(size\)"),
        ("causal", r"mask is 'causal': give posx.causal\(\)"),
        (True, r"mask is True: give posx.causal\(\)"),
        (None, r"mask is NoneType: give posx.causal\(\)"),
        (posx.causal, r"mask is the function causal: call it. Write mask=posx.causal\(\.\.\.\)"),
        (posx.window, "mask is the function window: call it"),
    ],
)
def test_a_mask_is_one_of_three_values(mask, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        attend(ORDER, mask=mask)


def test_axes_that_are_missing_or_exchanged_are_named():
    heads_first = [x.swapaxes(1, 2) for x in (Q, K, V)]
    cases = [
        ((Q[0], K[0], V[0]), r"q \(16, 4, 6\), .* Add the axis of the batch: q\[None\], k\[None\], v\[None\]"),
        (heads_first, r"q \(2, 4, 16, 6\) has the 16 tokens of its positions on the axis of heads\. .* q.swapaxes"),
        ((Q, *heads_first[1:]), r"k \(2, 2, 16, 6\) has the 16 tokens .* give k\.swapaxes\(1, 2\)"),
        ((Q, K[:, :, [0, 1, 0]], V[:, :, [0, 1, 0]]), r"3 key/value heads do not divide 4 .* k \(2, 16, 3, 6\)"),
    ]
    for (q, k, v), message in cases:
        with pytest.raises(ValueError, match=message):
            attend(ORDER, q=q, k=k, v=v)
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(functools.partial(attend, ORDER), q=q, k=k, v=v)
