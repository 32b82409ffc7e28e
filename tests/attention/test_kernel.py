"""The kernel executor: interpreted, against the dense one, and compiled by Triton in programs for CUDA."""

import contextlib
import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.attention import kernel_refusal
from posx.attention.kernel import kernel
from posx.conformance.subject import add_axes
from posx.contract import abstract_params, distance_terms
from posx.contract.shapes import tile_shapes
from posx.encodings import Alibi, Chain, Rope, Shaw, Xpos
from posx.errors import ConfigError
from posx.lab.config import base_config, run_config
from posx.lab.runs.checks import check_run
from posx.machine.platforms import trace_platform
from tests.encodings.cases import CASES, DIMS, params_of
from tests.lowered import custom_calls, shape_of

#: Three blocks, the last of which is padded; two for encodings of at most 32 positions.
B, T, SHORT = 2, 37, 31
POS = np.arange(T, dtype=np.int32)
small_blocks = functools.partial(kernel, block=16)
#: Encodings with vectors by position, or with hooks that read whole rows.
REFUSED = (
    "transformer_xl", "deberta", "deberta-release", "deberta-log", "deberta-p2c", "self_extend", "self_extend-rerope",
    "dual_chunk", "dual_chunk-half", "cope", "cope-unscaled", "dape", "dape-kerple", "dape-rope", "dape-v2",
    "dape-fire", "inkling", "path", "fire", "axial-alibi",
)  # fmt: skip
SERVED = [case for case in CASES if case not in REFUSED]
#: One for each term of the formula, and each kind of mask.
QUICK = {
    "t5-bidirectional": posx.full(), "fox": posx.window(9), "xpos": posx.causal(), "learned_sinks": posx.causal(),
    "shaw": posx.causal(),
}  # fmt: skip
slowly = functools.partial(pytest.param, marks=pytest.mark.slow)
#: Vectors by distance beside every other term that the kernel serves; distances of no, one and several blocks.
SHAW = {"name": "shaw", "max_distance": 5}
NEAR = {
    **{f"shaw-{n}": {"name": "shaw", "max_distance": n} for n in (0, 1, 16, 17, 40)},
    "rope": ["rope", SHAW], "fox": ["fox", SHAW], "xpos": ["xpos", SHAW], "sinks": [SHAW, "learned_sinks"],
    "t5": [SHAW, {"name": "t5", "num_buckets": 8, "max_distance": 12}],
    "xl": [SHAW, {"name": "transformer_xl", "clamp_len": 6}, "ssmax"],
}  # fmt: skip


def draw(*shapes, dtype="float32"):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def vectors(dtype="float32", length=T):
    heads = DIMS.num_heads, DIMS.kv_heads, DIMS.kv_heads
    return draw(*[(B, length, number, DIMS.head_dim) for number in heads], dtype=dtype)


def run(encoding, params, executor, mask=posx.causal(), dtype="float32", segment=None, offset=0):
    """Return the outputs and all gradients. offset: of the positions of queries to those of keys."""
    length = T if encoding.max_position is None else SHORT
    x, cotangent = draw((B, length, DIMS.model_dim), (B, length, DIMS.num_heads, DIMS.head_dim))
    x = x if encoding.acts_on("features") else None

    @jax.jit
    def gradients(params, q, k, v, x):
        def loss(params, q, k, v, x):
            own = add_axes(encoding, POS[:length])
            slots = [posx.Slots(own + ahead, segment=segment) for ahead in (offset and 9 + offset, offset and 9)]
            o = posx.attend(encoding, params, q, k, v, *slots[: 1 + bool(offset)], x=x, mask=mask, executor=executor)
            return jnp.sum(o.astype(jnp.float32) * cotangent), o

        return jax.grad(loss, argnums=(0, 1, 2, 3, *([] if x is None else [4])), has_aux=True)(params, q, k, v, x)

    return gradients(params, *vectors(dtype, length), x)


def assert_agree(encoding, params, **how):
    found, wanted = (run(encoding, params, executor, **how) for executor in (small_blocks, "dense"))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert_allclose(a, b, atol=5e-5 * max(1, np.abs(b).max()))


@dataclasses.dataclass(frozen=True)
class Low(posx.Encoding):
    """A user's bias so low that the logarithm of a sum is rounded away beside it."""

    level: float = -math.inf
    twice: bool = False
    reach = 0

    def by_distance(self, params, distance):
        level = jnp.full((1, len(distance)), self.level)
        return posx.ByDistance(bias=level, scaled=level if self.twice else None)


@pytest.mark.parametrize(
    "encoding",
    [Low(), slowly(Low(-1e6)), Chain((Shaw(3), Low(-1e6))), slowly(Chain((Shaw(3), Low(twice=True))))],
    ids=str,
)
def test_rows_of_low_scores_have_the_gradients_of_dense(encoding):
    length = 20
    q, k, v = (0.01 * x[:1] for x in vectors(length=length))
    params, twice = jax.tree.map(lambda x: 0.01 * x, params_of(encoding)), "twice=True" in str(encoding)

    @functools.partial(jax.jit, static_argnums=0)
    def row(executor, q, v):
        def output(q, v):
            return posx.attend(encoding, params, q, k, v, POS[:length], executor=executor)[0, -1].sum()

        o, (of_q, of_v) = jax.value_and_grad(output, argnums=(0, 1))(q, v)
        return o, of_v, 0 if twice else of_q  # a pair that is masked twice has no gradient in one tile

    for a, b in zip(*(jax.tree.leaves(row(executor, q, v)) for executor in (small_blocks, "dense")), strict=True):
        assert_allclose(a, b, rtol=2e-4, atol=1e-7)


@pytest.mark.slow
def test_the_kernel_serves_the_other_cases():
    def refusal(encoding):
        return kernel_refusal(
            encoding, abstract_params(encoding, DIMS), posx.causal(), tile=tile_shapes(encoding, DIMS)
        )

    assert {case for case, encoding in CASES.items() if refusal(encoding)} == set(REFUSED)


@pytest.mark.parametrize("case", [case if case in QUICK else slowly(case) for case in SERVED])
def test_the_kernel_agrees_with_dense(case):
    assert_agree(CASES[case], params_of(CASES[case]), mask=QUICK.get(case, posx.causal()))


@pytest.mark.parametrize("mask", [slowly(posx.full()), slowly(posx.causal()), posx.window(20, sinks=3)], ids=str)
def test_the_kernel_keeps_documents_apart(mask):
    segment = np.stack([np.arange(T) // 10, np.arange(T) % 2]).astype(np.int32)
    assert_agree(Alibi(DIMS.num_heads), {}, mask=mask, segment=segment)


@pytest.mark.parametrize("mask", [posx.full(), posx.window(9, sinks=2), posx.window(17), posx.window(2)], ids=str)
@pytest.mark.slow
def test_the_kernel_sums_learned_biases_under_every_mask(mask):
    for case in ("kerple", "bam", "fox"):
        if mask.causal or case != "fox":
            assert_agree(CASES[case], params_of(CASES[case]), mask=mask)


@pytest.mark.parametrize("mask", [posx.window(20, sinks=3), posx.window(9), posx.window(3), posx.causal()], ids=str)
@pytest.mark.slow
def test_near_and_far_keys_keep_to_the_mask_and_documents(mask):
    segment = np.stack([np.arange(T) // 10, np.arange(T) % 2]).astype(np.int32)
    encoding = CASES["shaw"]
    for documents in (None, segment):
        assert_agree(encoding, params_of(encoding), mask=mask, segment=documents)


@pytest.mark.parametrize("case", NEAR)
@pytest.mark.slow
def test_near_and_far_keys_have_the_other_terms_too(case):
    encoding = posx.build(NEAR[case], DIMS).at_length(32)
    assert_agree(encoding, params_of(encoding))


@pytest.mark.parametrize("offset", [-4, 3, 8])
@pytest.mark.slow
def test_near_keys_are_counted_from_the_positions(offset):
    assert_agree(CASES["shaw"], params_of(CASES["shaw"]), offset=offset)


def test_a_steep_decay_is_left_to_blockwise():
    encoding = Xpos(rope=Rope(rotary_dim=DIMS.head_dim), scale_base=0.02, head_dim=DIMS.head_dim)
    assert_agree(encoding, {})


@pytest.mark.parametrize("case", ["rope", slowly("shaw"), slowly("learned_sinks")])
def test_gradients_of_bfloat16_are_bfloat16(case):
    encoding = CASES[case]
    found, wanted = (
        run(encoding, params_of(encoding), executor, dtype=dtype)
        for executor, dtype in ((small_blocks, "bfloat16"), ("dense", "float32"))
    )
    leaves = jax.tree.leaves(found)
    assert [x.dtype.name for x in leaves] == ["float32"] * len(params_of(encoding)) + ["bfloat16"] * 4
    for a, b in zip(leaves, jax.tree.leaves(wanted), strict=True):
        assert_allclose(np.float32(a), b, atol=2.0**-5 * np.abs(b).max())


def test_the_kernel_says_what_it_cannot_serve():
    q, k, v = vectors()
    traced = jax.jit(lambda pos: posx.attend(Alibi(DIMS.num_heads), {}, q, k, v, pos, executor="kernel"))
    with pytest.raises(ValueError, match=r"Alibi acts on by_distance: the kernel needs known positions that count up"):
        traced(POS)
    with pytest.raises(ValueError, match="the kernel needs whole sequences in order, without idx"):
        posx.attend(CASES["rope"], {}, q, k, v, posx.Slots(POS, POS), executor="kernel")
    config = base_config("transformer_xl")
    config.train.executor = "kernel"
    why = (
        r"^train.executor='kernel' cannot serve TransformerXL\(.*by_distance\.query, .* constant from 64 tokens on, but"
    )
    with pytest.raises(ConfigError, match=why):
        check_run(run_config(config))


@pytest.mark.parametrize(
    ("encoding", "mask", "offset", "why"),
    [
        (Shaw(64), posx.causal(), 0, None),
        (Shaw(65), posx.causal(), 0, "constant from 64 tokens on, but reach=65"),
        (Shaw(60), posx.causal(), -5, "constant from 64 tokens on, but reach=60"),
        (Shaw(5), posx.full(), 0, "by_distance.query, by_distance.value, which the kernel supports under causal masks"),
        (Chain((Shaw(5), Alibi(4))), posx.causal(), 0, "reach=None"),
        (CASES["deberta"], posx.causal(), 0, "does not support by_distance.key"),
    ],
)  # fmt: skip
def test_the_kernel_serves_vectors_of_a_small_reach(encoding, mask, offset, why):
    found = kernel_refusal(encoding, abstract_params(encoding, DIMS), mask, offset=offset)
    assert found is None if why is None else why in found


def gpu():
    """Return a context in which kernels are lowered without a GPU: from JAX 0.11 on they ask which GPU it is."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def lowered_gradients(encoding, dtype, length):
    """Return the text of the outputs and gradients for CUDA."""
    heads = DIMS.num_heads, DIMS.kv_heads, DIMS.kv_heads
    x = shape_of(B, length, DIMS.model_dim) if encoding.acts_on("features") else None
    sides = [shape_of(B, length, number, DIMS.head_dim, dtype=dtype) for number in heads]

    def loss(params, q, k, v, x):
        pos = add_axes(encoding, np.arange(length, dtype=np.int32))
        return jnp.sum(posx.attend(encoding, params, q, k, v, pos, x=x, executor="kernel").astype(jnp.float32))

    with trace_platform("cuda"), gpu():
        function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
        traced = function.trace(abstract_params(encoding, DIMS), *sides, x)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


#: One for each kind of term. float16 and float32 are bfloat16 with other limits of a decay and other tiles, so that
#: these are enough for them.
LOWERED = ("shaw", "t5", "xpos")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [case if "bfloat16" in case and case[0] in LOWERED else slowly(*case)
     for case in (*itertools.product(SERVED, ["bfloat16"]), *itertools.product(LOWERED, ("float32", "float16")))],
)  # fmt: skip
def test_the_kernel_is_lowered_for_cuda(case, dtype):
    length = 200 if CASES[case].max_position is None else 20
    text = lowered_gradients(CASES[case], dtype, length)
    assert custom_calls(text) == {"__gpu$xla.gpu.triton"}
    terms = distance_terms(CASES[case], params := abstract_params(CASES[case], DIMS))
    assert ("posx_bias_gradients" in text) == bool(params and "bias" in terms)


def test_no_gradient_of_a_learned_bias_is_written_for_all_pairs():
    length = 512
    shapes = re.findall(r"tensor<([\dx]+)x[a-z]", lowered_gradients(CASES["t5"], "bfloat16", length))
    sizes = {math.prod(map(int, shape.split("x"))) for shape in shapes}
    assert B * DIMS.num_heads * length * 64 <= max(sizes) < B * DIMS.num_heads * length * length / 2
