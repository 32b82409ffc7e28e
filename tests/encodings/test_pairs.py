"""Chains of two encodings: every term of either counts once, for every pair of the catalogue."""

import itertools

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from golden import reference
from posx.conformance.subject import add_axes
from posx.encodings import Chain
from posx.errors import ConfigError
from tests.encodings import reference_pairs
from tests.encodings.cases import CASES, DIMS, WAYS, first, layer, layer_outputs, params_of, projections, tokens

#: Beyond the reach of some encodings, and of the lengths that logit scales start from.
POS = np.array([0, 1, 3, 6, 9], np.int32)
X = tokens(1, len(POS), np.float64)
WEIGHTS = projections(np.float64)
NAMES = list(posx.ENCODINGS)
MAPS_KEYS = (
    "tupe", "rope", "xpos", "pope", "fope", "darope", "selective_rope", "self_extend", "dual_chunk", "key_offset",
    "accumulated_rope", "rotated_values", "canon", "mrope", "axial",
)  # fmt: skip
MOVERS = {"self_extend", "dual_chunk"}
#: One that maps, put before others, and one that reads all that comes before it. The slow test has all pairs.
WITH = ("rope", "dape")


def project(x):
    return tuple(np.einsum("tm,mhd->thd", x, WEIGHTS[n]) for n in "qkv")


def refusal(first, second):
    """What the message says of a pair that cannot be; "" for all others."""
    if (second == "key_offset" and first in MAPS_KEYS) or (
        second == "canon" and first in (*MAPS_KEYS, "transformer_xl")
    ):
        return "reads earlier vectors before any map"
    if first in MOVERS and second in (*MAPS_KEYS, "transformer_xl"):
        return "changes the scores of vectors that it rotates"
    if "xpos" in (first, second) and {first, second} & MOVERS:
        return "knows no decay"
    if len({CASES[name].axes for name in (first, second)} - {0}) > 1:
        return "Give all parts equal axes"
    if first == "pope" and second in (*MAPS_KEYS, "transformer_xl"):
        return r"maps the channels of a head, but .* before it"
    if "xpos" in (first, second) and {first, second} & {"tupe", "pope"}:
        return r"\.decay gives \[1, 6\], but \[h or 1, d'\] = \[4 or 1, 12\] is expected"
    return ""


def check_pair(first, second, run=layer):
    chain = Chain((CASES[first], CASES[second]))
    own = [params_of(part, np.float64, seed) for seed, part in enumerate(chain.parts)]
    params = {f"{n}.{name}": array for n, tree in enumerate(own) for name, array in tree.items()}
    order = np.arange(len(POS), dtype=np.int32)[None]
    with jax.enable_x64(True):
        found = run(chain, params, WEIGHTS, X, POS[None], order, 0 * order)
    parts, pos = list(zip((first, second), chain.parts, own, strict=True)), add_axes(chain, POS)
    wanted = reference_pairs.outputs(parts, X[0], project, pos)
    assert_allclose(found[0], wanted, rtol=0, atol=1e-11, err_msg=f"{first}+{second}")


def test_every_encoding_has_a_reference_for_pairs():
    places = (reference_pairs.MAPS, reference_pairs.INSIDE, reference_pairs.LOGIT_SCALES, reference_pairs.OUTSIDE)
    known = set().union(*places, reference_pairs.SCORES, reference_pairs.SINKS, reference.EMBEDDINGS)
    assert known | {"nope"} == set(posx.ENCODINGS)


#: A kind each: vectors by distance, a map, a map by features, a token bias, a decay, scores of whole rows.
KINDS = ("transformer_xl", "tupe", "selective_rope", "fox", "xpos", "cope")


@pytest.mark.parametrize("name", first([name for name in WAYS if name in NAMES], KINDS))
def test_a_pair_with_each_kind_is_the_sum_of_its_parts(name):
    for pair in ((WITH[0], name), (name, WITH[1])):
        if not refusal(*pair):
            check_pair(*pair)


def have_an_order(one, other):
    """Whether both map vectors, or both change scores. All other terms of two parts are added or multiplied."""
    return any({one, other} <= set(kind) for kind in (MAPS_KEYS, reference_pairs.VALUES, reference_pairs.SCORES))


@pytest.mark.slow
@pytest.mark.parametrize("first", NAMES)
def test_every_pair_is_the_sum_of_its_parts(first):
    """Outside of `jit`: the pairs share the programs of their operations."""
    for second in NAMES:
        once = NAMES.index(first) <= NAMES.index(second) or have_an_order(first, second) or refusal(second, first)
        if once and not refusal(first, second):
            check_pair(first, second, layer_outputs)


def test_pope_passes_the_channels_that_tupe_appends():
    check_pair("tupe", "pope")


@pytest.mark.parametrize("mover", sorted(MOVERS))
def test_a_remap_of_distances_keeps_the_maps_before_it(mover):
    for name in ("key_offset", "tupe"):
        check_pair(name, mover)


def test_pairs_whose_maps_do_not_compose_are_refused():
    for pair in itertools.product(NAMES, NAMES):
        if message := refusal(*pair):
            with pytest.raises(ConfigError, match=message):
                posx.build([CASES[name] for name in pair], DIMS)
    for mover in MOVERS:
        with pytest.raises(ConfigError, match="changes the scores of vectors that it rotates"):
            posx.build([f"dape(base={mover})", "rope"], DIMS)
