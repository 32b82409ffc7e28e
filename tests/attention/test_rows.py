"""One row of a batch is nothing to another row: whatever it holds, however long it is and however it is padded."""

import functools

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.attention import batch_features, with_previous_tokens
from posx.attention.blockwise import Tiling, blockwise
from posx.conformance.subject import add_axes
from posx.contract import acting_hooks, distance_terms
from tests.encodings.cases import APART, CASES, STRUCTURAL, params_of, project, projections, tokens

T, MASK = 9, posx.window(6, sinks=1)
ORDER = np.arange(T, dtype=np.int32)
#: Row 0: left padding, then two documents.
FIRST = {"pos": ORDER, "idx": np.maximum(ORDER - 2, -1), "segment": np.int32(ORDER > 5)}
X = tokens(2, T)
#: Row 1, one after the other: what it holds, and where and when its tokens are.
OTHERS = {
    "as it was": {},
    "other tokens": {"x": 50 * X[0]},
    "NaN": {"x": np.full_like(X[1], np.nan)},
    "longer": {"idx": ORDER},
    "shorter": {"idx": np.maximum(ORDER - 6, -1)},
    "empty": {"idx": np.full_like(ORDER, -1)},
    "other documents": {"segment": ORDER // 3},
    "later positions": {"pos": ORDER + 11},
    "positions apart": {"pos": 2 * ORDER},
    "far apart": {"pos": 10_000 * ORDER},
}
small_tiles = functools.partial(blockwise, tiling=Tiling(4, 5))


@functools.partial(jax.jit, static_argnames=("encoding", "executor"))
def answers(encoding, params, x, pos, idx, segment, executor):
    """Outputs of whole sequences, and of their last token against keys and features as a cache holds them."""
    embedded, q, k, v = project(encoding, params, projections(), x, pos)
    slots, features = posx.Slots(pos, idx, segment), {}
    if encoding.acts_on("features"):
        features, _ = batch_features(encoding, params, embedded, slots)

    def attend(queries):
        q_slots, q_features = jax.tree.map(lambda a: a[:, queries], (slots, features))
        both = (q_features, features) if features else None
        options = {"mask": MASK, "features": both, "executor": executor}
        seen = with_previous_tokens(encoding, "query", q, idx, segment)[
            0
        ]  # with the tokens before, if the query looks back
        return posx.attend(encoding, params, seen[:, queries], k, v, q_slots, slots, **options)

    return attend(slice(None)), attend(slice(-1, None))


#: Ways that differ: a table, vectors by distance, features, a token bias, a decay, scores of whole rows. And in tiles
#: alone; the others are where tests may be slow.
IN_DENSE = ("learned", "shaw", "selective_rope", "fox", "xpos", "cope")
IN_TILES = ("shaw", "fox", "xpos", "path")
CALLS = [
    pytest.param(case, executor, marks=() if case in quick else pytest.mark.slow)
    for executor, quick in (("dense", IN_DENSE), (small_tiles, IN_TILES)) for case in (*STRUCTURAL, *APART)
]  # fmt: skip


@pytest.mark.parametrize(("case", "executor"), CALLS, ids=lambda x: x if isinstance(x, str) else "tiles")
def test_a_row_does_not_depend_on_the_others(case, executor):
    """Bit for bit; where another row's distances choose between two ways to one sum, to its rounding."""
    encoding, found = CASES[case], {}
    for name, other in OTHERS.items():
        rows = {"x": X[0], **FIRST}, {"x": X[1], **FIRST, **other}
        given = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
        given["pos"] = add_axes(encoding, given["pos"])
        found[name] = jax.device_get(answers(encoding, params_of(encoding), **given, executor=executor))
    by_distance = acting_hooks(encoding, ("decay",)) or distance_terms(encoding, params_of(encoding)).keys() - {"bias"}
    for name, outputs in found.items():
        for one, wanted in zip(outputs, found["as it was"], strict=True):
            if by_distance and "apart" in name:
                assert_allclose(one[0], wanted[0], rtol=1e-6, atol=1e-6, err_msg=name)
            else:
                assert_array_equal(one[0], wanted[0], err_msg=name)
    assert not np.array_equal(found["other tokens"][0][1], found["as it was"][0][1])
