"""Attention without a causal mask: gradients reach the terms of both sides of the query.

`test_contract` has the rest: the checks `reference` and `strips` compare one sequence without a mask.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from tests.encodings.cases import CASES, first, layer, layer_outputs, params_of, projections, tokens

T = 13
ORDER = np.arange(T, dtype=np.int32)[None]


def gradients_without_mask(case):
    """The gradients of a weighted sum of outputs [1, t, h, d] without a mask, by parameters and tokens."""
    encoding, weights = CASES[case], projections()
    cotangent = np.random.default_rng(4).standard_normal((1, T, 4, 6)).astype(np.float32)

    def run(params, x):
        given = weights, x, ORDER, ORDER, 0 * ORDER
        o = layer_outputs(encoding, params, *given, mask=posx.full())
        return jnp.sum(o * cotangent)

    return jax.jit(jax.grad(run, argnums=(0, 1)))(params_of(encoding), tokens(1, T))


#: The rows of a table for keys behind the query and for keys ahead of it, of those that have one.
SIDES = {
    "shaw": ("keys", slice(0, 5), slice(6, None)),
    "t5-bidirectional": ("table", slice(1, 4), slice(5, None)),
    "tupe-r-bidirectional": ("1.table", slice(1, 4), slice(5, None)),
    "deberta-log": ("table", slice(7, None), slice(1, 6)),
}


@pytest.mark.parametrize("case", first(SIDES, ("t5-bidirectional",)))
def test_gradients_reach_the_terms_of_both_sides(case):
    name, *sides = SIDES[case]
    params, _ = gradients_without_mask(case)
    for rows in sides:
        sizes = np.abs(params[name][rows]).reshape(len(params[name][rows]), -1).max(axis=1)
        assert (sizes > 1e-4).all(), sizes


@pytest.mark.parametrize("case", first(("alibi", "kerple", "sandwich", "nape"), ("alibi",)))
def test_symmetric_biases_do_not_tell_the_sides_apart(case):
    """The text reversed has the outputs reversed."""
    given, x = (params_of(CASES[case]), projections()), tokens(1, T)
    there, back = (layer(CASES[case], *given, y, ORDER, ORDER, 0 * ORDER, mask=posx.full()) for y in (x, x[:, ::-1]))
    assert_allclose(back[:, ::-1], there, rtol=0, atol=1e-5)
