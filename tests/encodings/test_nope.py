"""NoPE knows order only through the mask."""

import jax
import numpy as np
from numpy.testing import assert_allclose

import posx
from posx.encodings import Nope
from tests.encodings.probes import vectors

T, H, D = 9, 2, 4
POS = np.arange(T, dtype=np.int32)
jit_attend = jax.jit(posx.attend, static_argnums=0, static_argnames="mask")


def attended(x, mask):
    q, k, v = (x @ vectors(H * D, H * D, seed=n) for n in (1, 2, 3))
    shape = (1, T, H, D)
    o = jit_attend(Nope(), {}, *(a.reshape(shape) for a in (q, k, v)), mask=mask, q_slots=POS)
    return np.asarray(o).reshape(T, H * D)


def test_one_causal_layer_sees_the_past_as_a_set_and_two_do_not():
    x = vectors(T, H * D)
    shuffled = x[[3, 0, 5, 1, 7, 2, 6, 4, 8]]
    once, once_shuffled = attended(x, posx.causal()), attended(shuffled, posx.causal())
    assert_allclose(once_shuffled[-1], once[-1], rtol=0, atol=1e-5)
    twice, twice_shuffled = attended(x + once, posx.causal()), attended(shuffled + once_shuffled, posx.causal())
    assert np.abs(twice_shuffled[-1] - twice[-1]).max() > 1e-2


def test_without_a_causal_mask_a_permutation_passes_through():
    x, order = vectors(T, H * D), np.random.default_rng(0).permutation(T)
    assert_allclose(attended(x[order], posx.full()), attended(x, posx.full())[order], rtol=0, atol=1e-5)
