"""Scores that act pair by pair, in the kernel: interpreted against the dense one, compiled for CUDA, or refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.attention import kernel_refusal
from posx.attention.programs import ELEMENTWISE
from posx.contract import abstract_params, as_float, at_least_float32, exact_einsum
from posx.contract.shapes import tile_shapes
from posx.encodings import Encoding
from tests.attention.test_kernel import assert_agree, lowered_gradients, run, slowly, small_blocks, vectors
from tests.encodings.cases import CASES, DIMS, params_of
from tests.lowered import custom_calls

#: The documents of 37 tokens.
SEGMENT = np.stack([np.arange(37) // 10, np.arange(37) // 25]).astype(np.int32)


@jax.custom_jvp
def passed(x):
    """Return tanh(x), with a derivative of 1."""
    return jnp.tanh(x)


passed.defjvp(lambda x, tangents: (passed(*x), tangents[0]))


@dataclasses.dataclass(frozen=True)
class Gated(Encoding):
    """A user's score: a learned soft cap, gates of queries and features of keys by distance, and masked pairs."""

    reads_raw_keys = True

    def init(self, rng, dims):
        h, d = dims.num_heads, dims.head_dim
        shapes = {"cap": (), "slope": (h,), "gate": (h, d), "f": (dims.model_dim, h)}
        return {name: jnp.zeros(shape) for name, shape in shapes.items()}

    def features(self, params, x, pos, carry):
        return {"f": exact_einsum("tm,mh->th", at_least_float32(x), params["f"])}, carry

    def score(self, params, s, tile):
        cap, far = 1 + jax.nn.softplus(params["cap"]), jnp.abs(tile.q_pos[:, None] - tile.k_pos[None, :])
        gate = jax.nn.sigmoid(exact_einsum("qhd,hd->hq", at_least_float32(tile.mapped_q), params["gate"]))
        capped = cap * passed(s / cap) * tile.logit_scale
        added = params["slope"][:, None, None] * jax.nn.relu(as_float(9 - far))[None] * gate[:, :, None]
        seen = jnp.broadcast_to(far[None], s.shape) != 5
        return jnp.where(seen, capped + added * jnp.expand_dims(tile.k_features["f"].T, 1), -jnp.inf)


@dataclasses.dataclass(frozen=True)
class Pairs(Encoding):
    """A score out of any function of one."""

    function: object

    def score(self, params, s, tile):
        return self.function(s, tile)


SERVED = {
    "gated": Gated(),
    "rope+gape": posx.build("rope+gape", DIMS),
    "xpos+grape_a": posx.build("xpos+grape_a", DIMS),
    "log_length+gated": posx.build(["log_length", Gated()], DIMS),
    "alibi+gated+sinks": posx.build(["alibi", Gated(), "learned_sinks"], DIMS),
    "soft cap": Pairs(lambda s, tile: 30 * jnp.tanh(s / 30)),
    "unchanged": Pairs(lambda s, tile: s),
}


@pytest.mark.parametrize("case", [case if case == "gated" else slowly(case) for case in SERVED])
def test_scores_of_pairs_agree_with_dense(case):
    assert_agree(SERVED[case], params_of(SERVED[case]), mask=posx.window(20, sinks=3))


@pytest.mark.parametrize("mask", [posx.full(), posx.causal(), posx.window(9)], ids=str)
@pytest.mark.parametrize("encoding", [Gated(), CASES["grape_a"]], ids=["gated", "grape_a"])
@pytest.mark.slow
def test_scores_of_pairs_keep_documents_apart(encoding, mask):
    assert_agree(encoding, params_of(encoding), mask=mask, segment=SEGMENT)


@pytest.mark.slow
def test_gradients_of_numbers_have_the_types_of_vectors():
    encoding = SERVED["rope+gape"]
    params = params_of(encoding)
    found, wanted = (
        run(encoding, params, executor, dtype=dtype)
        for executor, dtype in ((small_blocks, "bfloat16"), ("dense", "float32"))
    )
    (of_params, *of_vectors), _ = found
    assert {x.dtype.name for x in jax.tree.leaves(of_params)} == {"float32"}
    assert {x.dtype.name for x in of_vectors} == {"bfloat16"}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_allclose(np.float32(a), b, atol=2.0**-4 * np.abs(b).max())


@dataclasses.dataclass(frozen=True)
class Hidden(Encoding):
    """A bias that masks every pair."""

    def by_distance(self, params, distance):
        return posx.ByDistance(bias=jnp.full((1, *distance.shape), -jnp.inf))


@pytest.mark.parametrize("encoding", [Pairs(lambda s, tile: jnp.full_like(s, -jnp.inf)), Hidden()])
def test_pairs_that_are_all_masked_weigh_the_same(encoding):
    (q, k, v), pos = vectors(length=20), np.arange(20, dtype=np.int32)
    o = posx.attend(encoding, {}, q, k, v, pos, executor=small_blocks)
    means = jnp.cumsum(v, axis=1) / (1 + pos[None, :, None, None]).astype(np.float32)
    assert_allclose(o, jnp.repeat(means, 2, axis=2), atol=1e-5)


def test_one_token_is_served_by_blockwise():
    encoding = CASES["gape"]
    call = functools.partial(posx.attend, encoding, params_of(encoding), *vectors(length=1), np.zeros(1, np.int32))
    assert_allclose(*(jax.jit(functools.partial(call, executor=name))() for name in ("kernel", "dense")), atol=1e-6)


def why(encoding):
    return kernel_refusal(encoding, abstract_params(encoding, DIMS), posx.causal(), tile=tile_shapes(encoding, DIMS))


def masked(s, tile):
    return jnp.where(tile.visible[None], s, 0)


def mixed(s, tile):
    return jnp.einsum("hqk,hj->jqk", s, jnp.ones((len(s), len(s))))


def along_keys(s, tile):
    return jax.nn.log_softmax(s, axis=-1)


def all_products(s, tile):
    return s + (tile.q[:, None] * tile.k[None]).sum(axis=-1).transpose(2, 0, 1)


def flat(s, tile):
    return s.reshape(-1, s.shape[2]).reshape(s.shape)


@jax.custom_vjp
def unknown(s):
    return s


unknown.defvjp(lambda s: (s, None), lambda _, g: (g,))


@pytest.mark.parametrize(
    ("encoding", "reason"),
    [
        (CASES["cope"], "applies dot_general to pairs"),
        (CASES["dape-v2"], "applies slice to pairs"),
        (CASES["path"], "applies cummax to pairs"),
        (CASES["inkling"], "applies slice to pairs"),
        (CASES["self_extend"], "applies reduce_or to pairs"),
        (CASES["dual_chunk"], "applies reduce_or to pairs"),
        (Pairs(masked), "reads tile.visible"),
        (Pairs(mixed), "applies dot_general to pairs"),
        (Pairs(along_keys), "applies reduce_max to pairs"),
        (Pairs(all_products), "makes arrays of more than heads, queries and keys by mul"),
        (Pairs(flat), "applies reshape to pairs"),
        (Pairs(lambda s, tile: s + np.zeros(s.shape, np.float32)), "holds an array of all pairs"),
        (Pairs(lambda s, tile: unknown(s)), "applies custom_vjp_call to pairs"),
        (Pairs(lambda s, tile: jax.lax.erf(s)), "applies erf to pairs"),
    ],
)
def test_other_scores_are_refused_by_name(encoding, reason):
    assert why(encoding) == f"the score of {type(encoding).__name__} {reason}, which the kernel does not support"


def test_a_score_is_not_served_with_vectors_by_distance():
    both = why(posx.build([{"name": "shaw", "max_distance": 5}, "gape"], DIMS))
    assert both == "Chain has a score and vectors by distance, which the kernel does not support together"


def test_a_score_that_depends_on_sizes_is_an_error():
    encoding = Pairs(lambda s, tile: s * 2 if s.shape[1] > 30 else s)
    with pytest.raises(ValueError, match=r"Pairs.score has other steps for 37 tokens than for fewer"):
        posx.attend(encoding, {}, *vectors(), np.arange(37, dtype=np.int32), executor="kernel")


@pytest.mark.parametrize("dtype", ["bfloat16", slowly("float32")])
def test_scores_of_pairs_are_lowered_for_cuda(dtype):
    assert custom_calls(lowered_gradients(Gated(), dtype, 100)) == {"__gpu$xla.gpu.triton"}


UNARY = (
    "abs acos acosh asin asinh atan atanh cbrt ceil cos cosh exp exp2 expm1 floor is_finite log log1p logistic neg "
    "rsqrt sign sin sinh sqrt square stop_gradient tan tanh"
)
BINARY = "add atan2 div eq ge gt le lt max min mul ne pow rem sub"


def test_every_operation_of_pairs_has_its_test():
    others = {"add_any", "and", "clamp", "convert_element_type", "integer_pow", "not", "or", "select_n", "xor"}
    assert {*UNARY.split(), *BINARY.split()} | others == ELEMENTWISE


@pytest.mark.parametrize("name", [*UNARY.split(), *BINARY.split(), "others"])
@pytest.mark.slow
def test_every_operation_of_pairs_is_lowered_for_cuda(name):
    def score(s, tile):
        x = tile.q[:, :, 0].T[:, :, None] * tile.k[:, :, 0].T[:, None, :]
        if name == "others":
            odd = (s > 0) & ~(x > 0) | (s > 1) ^ (x > 1)
            found = jnp.where(odd, jnp.clip(s, -1, 1), x**3)
        else:
            found = getattr(jax.lax, name)(*([s, x] if name in BINARY.split() else [s]))
        return s + found.astype(s.dtype)

    encoding = Pairs(score)
    assert why(encoding) is None
    assert custom_calls(lowered_gradients(encoding, "float32", 20)) == {"__gpu$xla.gpu.triton"}
