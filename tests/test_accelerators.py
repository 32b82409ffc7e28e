"""Every encoding and executor is lowered for accelerators: no float64, no callback, no form that is for CPUs alone."""

import ast
import functools
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax  # noqa: F401  mixes types when it is imported under strict promotion
import pytest

import posx
from posx.attention import accelerators, causal, plan, refusal, strips
from posx.conformance.subject import KNOWN, LENGTH, add_axes, even_tiles
from posx.contract import abstract_params, distance_terms, position_shape
from posx.lab.config import EvalConfig, TrainConfig
from posx.lab.config.sections import ModelConfig
from posx.lab.model import make_model
from posx.lab.runs.scores import Way, score_rows
from posx.lab.training.step import init_state, loss, train_step, train_steps
from posx.machine.platforms import platform, trace_platform
from tests.encodings.cases import APART, CASES, DIMS, SPECS, STRUCTURAL, first
from tests.lowered import ACCELERATORS, SERVED, SIZES, faults, lowered, shape_of
from tests.test_architecture import FILES
from tests.tiny import environment

ROWS = 2
VECTORS = [shape_of(ROWS, LENGTH, heads, DIMS.head_dim) for heads in (4, 2, 2)]
SLOTS = posx.Slots(*[shape_of(ROWS, LENGTH, dtype="int32")] * 3)
#: Products in a bias of both positions, in terms by distance inside the scale, and in a network of distances.
BY_POSITION = ("fire", "transformer_xl", "dynamic_bias", "t5", "sandwich")
every_encoding = pytest.mark.parametrize("case", first(CASES, BY_POSITION))
#: Vectors by distance, features with a carry, and scores of whole rows.
LOWERED = ("shaw", "selective_rope", "cope")
#: CUDA programs have the forms of TPUs too, but for the vendor's kernel: TPUs have a case of each encoding.
every_accelerator = pytest.mark.parametrize(
    "platform", [pytest.param(name, marks=() if name == "cuda" else pytest.mark.slow) for name in ACCELERATORS]
)


def attention(encoding, executor, params, q, k, v, x, slots, mask=posx.causal()):
    """The outputs and all gradients."""

    def total(params, q, k, v, x):
        known = add_axes(encoding, KNOWN)
        embedded = x if x is None else jax.vmap(encoding.embed, in_axes=(None, 0, None))(params, x, jnp.asarray(known))
        reads = embedded if encoding.acts_on("features") else None
        at = known if slots is None else slots
        o = posx.attend(encoding, params, q, k, v, at, x=reads, executor=executor, mask=mask)
        return jnp.sum(o.astype(jnp.float32)) + (0 if embedded is None else jnp.sum(embedded)), o

    return jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True)(params, q, k, v, x)


@pytest.mark.parametrize(
    ("case", "platform"),
    [pytest.param(case, "cuda", marks=() if case in LOWERED else pytest.mark.slow) for case in CASES]
    + [pytest.param(case, "tpu", marks=pytest.mark.slow) for case in posx.ENCODINGS],
)
def test_attention_is_lowered_for_accelerators(case, platform):
    encoding = CASES[case]
    params = abstract_params(encoding, DIMS)
    x = shape_of(ROWS, LENGTH, DIMS.model_dim) if encoding.acts_on("features") or encoding.acts_on("embed") else None
    # Traced slots and known positions take different ways through the formula. CPUs widen bfloat16.
    slots = SLOTS._replace(pos=shape_of(ROWS, LENGTH, *position_shape(encoding), dtype="int32"))
    ways = [("dense", "float32", slots), (even_tiles, "bfloat16", None)]
    if not refusal(encoding, params, causal(), in_order=True, segments=False):
        ways.append(("fused", "float32", None))
    for executor, dtype, slots in ways:
        vectors = [shape_of(*a.shape, dtype=dtype) for a in VECTORS]
        function = functools.partial(attention, encoding, executor)
        assert not faults(lowered(function, platform, params, *vectors, x, slots)), executor


def transpositions(text):
    """The transpositions of the last two axes in a program: of matrices, not of tokens and heads."""
    found = re.findall(r"stablehlo.transpose .*dims = \[([\d, ]+)\]", text)
    return [dims for dims in found if dims.split(", ")[:-3:-1] == [str(dims.count(",") - 1), str(dims.count(","))]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "heads", "mask", "tiles"),
    [
        (4, 12, posx.causal(), {(1024, 1024), (1024, 2048), (512, 3072), (512, 4096)}),
        (1, 2, posx.causal(), {(1024, n) for n in (1024, 2048, 3072, 4096)}),
        (1024, 12, posx.causal(), {(128, 128)}),
        (4, 12, posx.window(512), {(512, 512)}),
    ],
)
def test_tiles_fill_an_accelerator_and_have_no_form_of_cpus(rows, heads, mask, tiles):
    """By the sizes of the call: few tiles, whose scores fit in memory. Gradients transpose no matrix."""
    encoding, slots = posx.build("alibi", posx.Dims(64, heads, 8, heads, 8, 1)), np.arange(4096, dtype=np.int32)

    def loss(q, k, v):
        return jnp.sum(posx.attend(encoding, {}, q, k, v, slots, mask=mask, executor="blockwise").astype(jnp.float32))

    vectors = [shape_of(rows, 4096, heads, 8, dtype="bfloat16")] * 3
    gradients = jax.grad(loss, argnums=(0, 1, 2))
    text = lowered(gradients, "cuda", *vectors)
    products = re.findall(rf"dot_general.* -> tensor<{rows}x{heads}x(\d+)x(\d+)xf32>", text)
    assert {(int(q), int(k)) for q, k in products if k != "8"} == tiles and not transpositions(text)
    assert not faults(text)
    with trace_platform("cuda"):  # one part of the queries waits for the other
        whole = jax.jit(lambda *given: gradients(*given)).trace(*vectors).lower(lowering_platforms=("cuda",)).as_text()
    barriers = re.findall(r"stablehlo.optimization_barrier .* : (.*)", whole)
    assert any("xf32" in types for types in barriers) == (len(tiles) > 1)  # the others store weights in 16 bits
    assert transpositions(lowered(gradients, "cpu", *vectors))


def test_a_learned_bias_of_the_kernel_is_summed_over_diagonals():
    """Its gradient scatters sums of distances, and not all pairs, as it does if positions are traced."""
    encoding, length, vectors = posx.build("t5", DIMS), 48, [shape_of(1, 48, heads, 8) for heads in (4, 2, 2)]

    def loss(params, q, k, v, slots):
        at = np.arange(length, dtype=np.int32) if slots is None else slots
        return jnp.sum(posx.attend(encoding, params, q, k, v, at, executor="fused"))

    def rows(slots):
        """How many rows each scatter of the gradient adds."""
        text = lowered(jax.grad(loss), "cuda", abstract_params(encoding, DIMS), *vectors, slots)
        found = re.findall(r"stablehlo\.scatter.*?\}\) : \(\S+, tensor<(\d+)x1xi32>", text, re.S)
        return sorted(map(int, found))

    assert rows(shape_of(length, dtype="int32")) == [length**2] and rows(None) == [2 * length]


@pytest.mark.parametrize(
    ("case", "platform"),
    [pytest.param(case, "cuda", marks=() if case in LOWERED else pytest.mark.slow) for case in (*STRUCTURAL, *APART)]
    + [pytest.param("rope", "tpu", marks=pytest.mark.slow)],
)
def test_a_cached_step_is_lowered_for_accelerators(case, platform):
    model = make_model(
        ModelConfig(1, DIMS.model_dim, DIMS.num_heads, DIMS.num_kv_heads, DIMS.head_dim), SPECS[case], 7, 32
    )

    def step(params, tokens, cache):
        pos = jnp.broadcast_to(cache.filled, (1, *model.position_shape))
        return model.decode(params, tokens, pos, cache.filled[None], cache)

    cache = jax.eval_shape(lambda: model.empty_cache(ROWS, LENGTH))
    assert not faults(lowered(step, platform, model.abstract(), shape_of(ROWS, 1, dtype="int32"), cache))


@pytest.mark.slow
@every_accelerator
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_training_is_lowered_for_accelerators(dtype, platform):
    model = make_model(ModelConfig(2, 16, 2, dtype=dtype, dropout=0.1), ["rope", "shaw"], 7, LENGTH)
    config = TrainConfig(length=LENGTH, batch_size=4, steps=9, accumulation=2, executor="blockwise")
    state, rows = jax.eval_shape(lambda: init_state(model, config)), (4, LENGTH + 1)
    one, several = (functools.partial(step, model, config) for step in (train_step, train_steps))
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes types
        text = lowered(one, platform, state, shape_of(*rows, dtype="int32"))
        assert not faults(text)
        # Four products of attention and two of the MLP, in 2 layers. The backward pass reads the same casts.
        shapes = ("16x16", "16x64", "64x16")
        casts = [text.count(f": (tensor<{shape}xf32>) -> tensor<{shape}xbf16>") for shape in shapes]
        assert casts == ([8, 2, 2] if dtype == "bfloat16" else [0] * 3)
        many, count = shape_of(3, *rows, dtype="int32"), shape_of(dtype="int32")
        assert not faults(lowered(several, platform, state, many, count))


def precisions(text):
    """The precisions of products of float32 numbers in a program."""
    products = re.findall(r"stablehlo\.dot_general .*", text)
    wide = [line for line in products if not re.search(r"bf16|f16|i32", line.split(" : (")[-1])]
    return {found[1] if (found := re.search(r"precision = \[(\w+)", line)) else "DEFAULT" for line in wide}


@pytest.mark.slow
def test_float32_is_what_the_settings_say_on_an_accelerator():
    """Evaluation multiplies in full float32, training in the device's own precision, unless they are asked."""
    model = make_model(ModelConfig(1, 16, 2), ["alibi"], 7, LENGTH)
    tokens = shape_of(2, LENGTH + 1, dtype="int32")

    def scored(precision):
        return lowered(
            functools.partial(score_rows, model, Way("blockwise", precision), 1), "cuda", model.abstract(), tokens
        )

    def trained(precision):
        config = TrainConfig(
            length=LENGTH, batch_size=2, steps=9, warmup_steps=1, precision=precision, executor="blockwise"
        )
        state = jax.eval_shape(lambda: init_state(model, config))
        with jax.numpy_dtype_promotion("standard"):
            return lowered(functools.partial(train_step, model, config), "cuda", state, tokens)

    with jax.default_matmul_precision(None):
        assert TrainConfig().precision == "default" and EvalConfig().precision == "highest"
        for program in (scored, trained):
            assert precisions(program("highest")) == {"HIGHEST"} and precisions(program("default")) == {"DEFAULT"}


@pytest.mark.slow
def test_the_fused_executor_calls_cudnn_wherever_it_fits(tmp_path):
    """A training step calls it for every encoding that it serves, with vectors and gradients of outputs in one type."""
    (plugin := tmp_path / "jax_cuda12_plugin").mkdir()
    (plugin / "__init__.py").touch()
    (plugin / "_versions.py").write_text("def cudnn_get_version(): return 91002\n")
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    done = subprocess.run(
        [sys.executable, "-m", "tests.lowered"], text=True, capture_output=True, check=True, cwd=os.getcwd(),
        env=environment() | {"PYTHONPATH": path},
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert len(found) > 15
    for name, of_sizes in found.items():
        encoding = posx.build(name, DIMS)
        bias = "ScaleBias" if encoding.acts_on("by_distance") or encoding.acts_on("bias") else ""
        for case, calls in of_sizes.items():
            both = {f"__cudnn$fmha{bias}Softmax": ["bf16"] * 3, f"__cudnn$fmha{bias}SoftmaxBackward": ["bf16"] * 5}
            assert calls == (both if case in SERVED else {}), (name, case)
    assert {case for cases in found.values() for case in cases} == {*SIZES}


@every_encoding
def test_numbers_by_position_are_not_rounded(case):
    """Accelerators round the operands of float32 products, unless the product asks for the highest precision."""
    encoding, many = CASES[case], shape_of(ROWS, LENGTH, dtype="int32")
    pos = shape_of(LENGTH, *position_shape(encoding), dtype="int32")
    params, calls = abstract_params(encoding, DIMS), []
    if encoding.acts_on("by_distance"):
        calls.append((encoding.by_distance, params, pos))
    if encoding.acts_on("bias"):
        calls.append((encoding.bias, params, pos, pos))
    if "scaled" in distance_terms(encoding, params):

        def scaled(params, q_pos, k_pos):
            return strips.term_numbers(lambda r: encoding.by_distance(params, r).scaled.T[..., None], q_pos, k_pos)

        calls.append((scaled, params, many, many))
    for call in calls:
        rounded = [
            line for line in lowered(call[0], "tpu", *call[1:]).splitlines()
            if "stablehlo.dot_general" in line and "precision = [HIGHEST, HIGHEST]" not in line
        ]  # fmt: skip
        assert not rounded, call[0]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "executor"), [("shaw", even_tiles), ("t5", even_tiles), ("deberta-p2c", "blockwise")])
def test_the_forms_of_accelerators_agree_with_those_of_cpus(case, executor, monkeypatch):
    """DeBERTa has tiles of whole rows: two parts of the queries in blocks of 4, with strips that end at its reach."""
    for module in (accelerators, plan):
        monkeypatch.setattr(module, "FEWEST_QUERIES", 2)
    monkeypatch.setattr(accelerators, "IN_ROWS", 4 * ROWS * 4 * LENGTH)
    monkeypatch.setattr(sys.modules["posx.attention.blockwise"], "ACCELERATOR_STEPS", (2, 6))
    encoding = CASES[case]
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(a.shape, np.float32) for name, a in abstract_params(encoding, DIMS).items()}
    vectors = [rng.standard_normal(a.shape, np.float32) for a in VECTORS]
    run, both = jax.jit(attention, static_argnums=(0, 1)), []
    for name in ("cpu", "tpu"):
        with trace_platform(name):
            both.append(run(encoding, executor, params, *vectors, None, None))
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


def test_cudnn_gets_vectors_and_gradients_of_one_type(monkeypatch):
    """The slow test above reads it for all encodings. Here the XLA form of the kernel stands in for it."""
    kernel, types = jax.nn.dot_product_attention, []

    @jax.custom_vjp
    def outputs(o):
        return o

    outputs.defvjp(lambda o: (o, None), lambda _, grad: (types.append(str(grad.dtype)), (grad,))[1])

    def stand_in(q, k, v, *, implementation, **options):
        o = kernel(q, k, v, implementation="xla", **options)
        types.extend(str(x.dtype) for x in (q, k, v, o))
        return outputs(o)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr("posx.attention.fused.is_native", lambda vectors: True)
    model = make_model(ModelConfig(1, 12, 2, 1, 6, dtype="bfloat16"), "alibi", 7, LENGTH)
    step = jax.grad(functools.partial(loss, model, dropout_rng=None, executor="fused"))
    with trace_platform("cuda"):
        jax.eval_shape(step, model.abstract(), shape_of(ROWS, LENGTH + 1, dtype="int32"))
    assert types == ["bfloat16"] * 5


@pytest.mark.parametrize("mask", [posx.causal(), posx.full(), posx.window(5)], ids=["causal", "full", "window"])
def test_padding_for_cudnn_changes_no_number(mask, monkeypatch):
    """At an odd length and width the kernel gets padded operands; here its XLA form stands in for it."""
    kernel, widths = jax.nn.dot_product_attention, []

    def stand_in(q, *rest, implementation, **options):
        widths.append((implementation, *q.shape[1::2]))
        return kernel(q, *rest, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr("posx.attention.fused.is_native", lambda vectors: True)
    encoding, rng = CASES["alibi"], np.random.default_rng(0)
    vectors = [rng.standard_normal(a.shape, np.float32) for a in VECTORS]
    run = jax.jit(attention, static_argnums=(0, 1, 8))
    found, wanted = (run(encoding, executor, {}, *vectors, None, None, mask) for executor in ("fused", "dense"))
    assert {*widths} == {("cudnn", LENGTH + 1, 8)}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


def test_functions_are_traced_anew_for_another_platform():
    traced = []

    @jax.jit
    def function(x):
        traced.append(platform())
        return x

    for name in ("cuda", "tpu", "cuda"):
        with trace_platform(name):
            jax.export.export(function, platforms=[name])(shape_of(3))
    function(jnp.ones(3))
    with jax.default_device(jax.devices("cpu")[0]):
        function(jnp.ones(3))
    here = "cpu" if jax.default_backend() == "cpu" else platform()
    assert traced[:2] == ["cuda", "tpu"] and {*traced[2:]} == {here, "cpu"}
    with pytest.raises(ValueError, match="platform 'gpu' is unknown; allowed: cpu, cuda, rocm, tpu"):
        trace_platform("gpu")


def test_one_function_alone_asks_for_the_platform():
    askers = {
        name for name, tree in FILES.items() for node in ast.walk(tree)
        if getattr(node, "attr", getattr(node, "id", "")) in ("default_backend", "default_export_platform")
    }  # fmt: skip
    assert askers == {"machine/platforms"}
