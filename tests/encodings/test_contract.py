"""Every registered encoding passes the checks of `posx.conformance` and agrees with the reference of its paper."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.conformance import CHECKS, check_encoding
from posx.encodings import encoding_name
from tests.encodings.cases import (
    CASES,
    DIMS,
    SPECS,
    STRUCTURAL,
    first,
    layer_outputs,
    params_of,
    projections,
    reference_of,
    tokens,
)  # fmt: skip

#: What is left of a variant's contract where its plumbing is that of its base case.
OF_A_FORMULA = ("hooks", "value", "reference", "strips", "decode", "shift_invariant", "reach", "causal_only")
#: Variants with learned arrays of their own.
GRADIENTS = ("learned-interpolate", "shaw-keys", "tupe-untied")
#: One for each way into the formula: outside jit every operation is compiled by itself.
EAGER = ("learned", "shaw", "rope+alibi", "t5")


def checks_of(case):
    skipped = () if case in EAGER else ("eager",)
    if case in STRUCTURAL:
        return [name for name in CHECKS if name not in skipped]
    return [*OF_A_FORMULA, *(("tiles", "gradients", "fused") if case in GRADIENTS else ())]


def test_every_registered_encoding_has_a_case():
    assert set(posx.ENCODINGS) <= {encoding_name(encoding) for encoding in CASES.values()}
    assert {encoding_name(CASES[case]) for case in STRUCTURAL} >= set(posx.ENCODINGS)


#: The default tests run the whole contract on these, and check the formula of every other encoding.
QUICK = ("learned", "shaw", "selective_rope", "fox", "cope")


@pytest.mark.parametrize("case", first(CASES, QUICK))
def test_every_registered_encoding_keeps_the_contract(case):
    keeps(case, checks_of(case))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in posx.ENCODINGS if SPECS.get(name) != name])
def test_posx_check_passes_what_is_registered_as_it_is(name):
    """Of those whose cases set their fields to other than the defaults. Gradients and types are those of the cases."""
    report = check_encoding(name, only=[*(one for one in OF_A_FORMULA if one != "reference"), "tiles"])
    assert report.ok, f"{name}: {report}"


#: Gradients and decoding too: of other maps for near and far keys, of keys that look back or are revised.
#: Gradients and decoding of other encodings take the paths of QUICK, and the slow tests check them.
IN_FULL = ("dual_chunk", "canon", "path")


#: Variants whose formula is checked by default: of the planes of a decay, and of both sides of the query.
OF_SIDES = ("xpos-interleaved", "t5-bidirectional", "tupe-r-bidirectional", "deberta-log")


@pytest.mark.parametrize("case", [case for case in (*STRUCTURAL, *OF_SIDES) if case not in QUICK])
def test_every_formula_is_that_of_its_reference(case):
    keeps(case, ["hooks", "reference", *(("gradients", "decode") if case in IN_FULL else ())])


def keeps(case, checks):
    report = check_encoding(CASES[case], DIMS, reference=reference_of(CASES[case]), only=checks)
    assert report.ok, f"{case}: {report}"


#: A table; with a carry, scores of whole rows, and a scan of their own.
CARRYING = [pytest.param(case, marks=pytest.mark.slow) for case in ("learned", "fox", "cope", "selective_rope", "path")]


@pytest.mark.parametrize("case", ["shaw", "rope", *CARRYING])
def test_checkpointing_changes_no_gradient(case):
    encoding, weights, x = CASES[case], projections(), tokens(1)
    order = np.arange(x.shape[1], dtype=np.int32)[None]

    def loss(params, x):
        return layer_outputs(encoding, params, weights, x, order, order, 0 * order).sum()

    params = params_of(encoding)
    plain, again = (jax.jit(jax.grad(f, argnums=(0, 1)))(params, x) for f in (loss, jax.checkpoint(loss)))
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=0, atol=1e-5), again, plain)
