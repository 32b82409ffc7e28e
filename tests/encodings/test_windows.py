"""What a window and sinks hide from an encoding, and what acts on the way although nobody sees it."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from tests.encodings.cases import CASES, DIMS, layer, params_of, projections, reference_layer, tokens
from tests.encodings.probes import attention_weights, vectors

T = 12
ORDER = np.arange(T, dtype=np.int32)[None]
MASK = posx.window(3, sinks=1)


@pytest.mark.parametrize("case", ["cope", "dape-v2", "inkling"])
def test_scores_are_made_of_what_a_query_sees(case):
    encoding = CASES[case]
    given = params_of(encoding), projections(), tokens(1, T), ORDER, ORDER, 0 * ORDER
    wanted = reference_layer(encoding, *given, mask=MASK)
    assert_allclose(layer(encoding, *given, mask=MASK), wanted, rtol=0, atol=1e-5)
    assert np.abs(layer(encoding, *given) - wanted).max() > 0.01


@pytest.mark.parametrize("case", ["fox", "path", "key_offset", "selective_rope"])
def test_tokens_between_act_whether_they_are_seen_or_not(case):
    """So a mask takes weights away, and those that stay are to each other as before."""
    encoding, x = CASES[case], tokens(1, T)[0]
    params = params_of(encoding)
    q, k = vectors(T, DIMS.num_heads, DIMS.head_dim), vectors(T, DIMS.num_kv_heads, DIMS.head_dim, seed=1)
    i, j = np.ogrid[:T, :T]
    seen = (j <= i) & ((i - j < 3) | (j < 1))
    x = x if encoding.acts_on("features") else None
    whole, found = (attention_weights(encoding, params, q, k, ORDER[0], mask=m, x=x) for m in (posx.causal(), MASK))
    wanted = np.where(seen, whole, 0)
    assert_allclose(found, wanted / wanted.sum(axis=-1, keepdims=True), atol=1e-5)


def test_key_offset_reads_a_key_that_the_window_hides():
    """Its weight is 1 anyway; the gradient of another key shows whether it was read."""
    encoding = posx.build("key_offset+ssmax", DIMS)
    q, k = vectors(T, 4, 6), vectors(T, 2, 6, seed=1)
    params = {"1.s": np.ones(4, np.float32)}

    def near(k):
        return attention_weights(encoding, params, q, k, ORDER[0], mask=posx.window(2))[0, 5, 4]

    moved = np.abs(jax.grad(near)(k)).max(axis=(1, 2)) > 0
    assert moved.tolist() == [n in (3, 4, 5) for n in range(T)]
