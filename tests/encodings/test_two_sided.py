"""Attention without a causal mask: executors agree, and gradients reach the terms of both sides of the query.

The formulas are checked in `test_contract`: the check `reference` compares one sequence without a mask.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from tests.encodings.cases import CASES, STRUCTURAL, first, layer, layer_outputs, params_of, projections, tokens

T = 13
ORDER = np.arange(T, dtype=np.int32)[None]

TWO_SIDED = [case for case in (*STRUCTURAL, "t5-bidirectional", "tupe-r-bidirectional") if not CASES[case].causal_only]


def outputs_and_gradients(case, executor):
    """Outputs [1, t, h, d] without a mask, and the gradients of a weighted sum by parameters and tokens."""
    encoding, weights = CASES[case], projections()
    cotangent = np.random.default_rng(4).standard_normal((1, T, 4, 6)).astype(np.float32)

    def run(params, x):
        given = weights, x, ORDER, ORDER, 0 * ORDER
        o = layer_outputs(encoding, params, *given, executor=executor, mask=posx.full())
        return jnp.sum(o * cotangent), o

    gradients, o = jax.jit(jax.grad(run, argnums=(0, 1), has_aux=True))(params_of(encoding), tokens(1, T))
    return o, gradients


@pytest.mark.parametrize("case", first(TWO_SIDED, ("t5-bidirectional",)))
def test_tiles_without_a_mask_equal_dense_attention(case):
    wanted, found = (outputs_and_gradients(case, executor) for executor in ("dense", "blockwise"))
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=2e-5), found, wanted)


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
    _, (params, _) = outputs_and_gradients(case, "dense")
    for rows in sides:
        sizes = np.abs(params[name][rows]).reshape(len(params[name][rows]), -1).max(axis=1)
        assert (sizes > 1e-4).all(), sizes


@pytest.mark.parametrize("case", first(("alibi", "kerple", "sandwich", "nape"), ("alibi",)))
def test_symmetric_biases_do_not_tell_the_sides_apart(case):
    """The text reversed has the outputs reversed."""
    given, x = (params_of(CASES[case]), projections()), tokens(1, T)
    there, back = (layer(CASES[case], *given, y, ORDER, ORDER, 0 * ORDER, mask=posx.full()) for y in (x, x[:, ::-1]))
    assert_allclose(back[:, ::-1], there, rtol=0, atol=1e-5)
