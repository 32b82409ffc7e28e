"""posx against transformers, x-transformers and attn-gym: committed arrays always, recomputed ones with the `peers`."""

import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.encodings import (
    T5,
    Alibi,
    Deberta,
    DynamicBias,
    Llama4Temperature,
    Rope,
    Sandwich,
    Shaw,
    Sinusoidal,
    TransformerXL,
)
from tests.encodings.probes import attention_weights, plain_logits, softmax

ROOT = pathlib.Path(__file__).parent.parent.parent
jit_attend = jax.jit(posx.attend, static_argnums=0, static_argnames="mask")
GOLDEN = sorted(path.stem for path in (ROOT / "tests" / "golden").glob("*.npz"))


@pytest.fixture
def golden():
    def load(name):
        with np.load(ROOT / "tests" / "golden" / f"{name}.npz") as arrays:
            return dict(arrays)

    return load


def of_pairs(encoding, params, length):
    """The bias by distance of all pairs of `length` tokens, [h, q, k]."""
    pos = jnp.arange(length)
    bias = encoding.by_distance(params, (pos[:, None] - pos[None, :]).ravel()).bias
    return np.asarray(bias).reshape(-1, length, length)


@pytest.mark.peers
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_arrays_are_what_the_libraries_compute(name, golden):
    script = importlib.import_module("tests.golden.write")
    assert set(GOLDEN) == set(script.ORACLES)
    stored, live = golden(name), script.compute(name)
    assert stored.keys() == live.keys()
    for key in stored:
        assert_allclose(live[key], stored[key], rtol=1e-6, atol=1e-6, err_msg=key)


@pytest.mark.parametrize(("source", "exponent", "first"), [("xglm", "c/(m/2-1)", 2), ("roformer", "2c/m", 0)])
def test_sinusoids(source, exponent, first, golden):
    wanted = golden("sinusoidal")[source]
    encoding = Sinusoidal(layout="concatenated", exponent=exponent)
    vectors = encoding.embed({}, jnp.zeros(wanted.shape), jnp.arange(len(wanted)) + first)
    assert_allclose(vectors, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("source", "encoding"),
    [
        ("llama", Rope(rotary_dim=8)),
        ("neox", Rope(rotary_dim=4)),
        ("gptj", Rope(rotary_dim=8, layout="interleaved")),
        ("x_transformers", Rope(rotary_dim=4, layout="interleaved")),
    ],
)
def test_rotary(source, encoding, golden):
    arrays = golden("rotary")
    # float32 angles at position 4096 are off by up to 4096 * 2^-23 radians on both sides.
    for name, hook in (("q", encoding.query), ("k", encoding.key)):
        turned = hook({}, arrays[name], jnp.asarray(arrays["pos"], jnp.int32), {})
        assert_allclose(turned, arrays[f"{source}_{name}"], rtol=0, atol=2e-3)
        assert_allclose(turned[:6], arrays[f"{source}_{name}"][:6], rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_heads", [1, 4, 6, 8, 12])
def test_alibi(num_heads, golden):
    arrays = golden("alibi")
    bias = of_pairs(Alibi(num_heads), {}, 20)
    assert_allclose(bias, arrays[f"x_transformers_{num_heads}"], rtol=1e-6, atol=0)
    last_row = bias[:, -1]
    assert_allclose(last_row, arrays[f"mpt_{num_heads}"], rtol=1e-6, atol=0)
    # BLOOM adds slope * key index: the same row but for a constant, which softmax does not see.
    assert_allclose(last_row - last_row[:, :1], arrays[f"bloom_{num_heads}"], rtol=1e-5, atol=0)


def test_sandwich(golden):
    """attn-gym leaves out the constant, half the width over each head's ratio."""
    for name, bias in golden("sandwich").items():
        num_heads, width = map(int, name.split("_"))
        constant = width / 2 * num_heads / (8 * np.arange(1, num_heads + 1))
        found = of_pairs(Sandwich(width, num_heads=num_heads), {}, 24)
        assert_allclose(found + constant[:, None, None], bias, rtol=0, atol=2e-5)


def test_t5_buckets_and_bias(golden):
    arrays = golden("t5_bias")
    distances = np.arange(-700, 701)
    for name, buckets in arrays.items():
        if name in ("table", "bias"):
            continue
        side, num_buckets, max_distance = name.split("_")
        encoding = T5(int(num_buckets), int(max_distance), bidirectional=side == "both", head_dim=4)
        assert_array_equal(encoding.bucket(jnp.asarray(distances, jnp.float32)), buckets, err_msg=name)
    bias = of_pairs(T5(32, 128, head_dim=4), {"table": jnp.asarray(arrays["table"])}, 12)
    assert_array_equal(bias, arrays["bias"])


def test_deberta_v1_attention(golden):
    arrays = golden("deberta")
    params = {name: jnp.asarray(arrays[name]) for name in ("table", "w_k", "w_q")}
    pos = jnp.arange(len(arrays["q"]))
    q, k = arrays["q"], arrays["k"]
    w = attention_weights(Deberta(max_distance=8, release_index=True), params, q, k, pos)
    assert_allclose(w, arrays["weights"], rtol=0, atol=1e-5)
    # The library reads the second term at delta(i, j), not at the paper's delta(j, i).
    assert np.abs(attention_weights(Deberta(max_distance=8), params, q, k, pos) - arrays["weights"]).max() > 0.1


def test_deberta_v2_log_buckets(golden):
    arrays = golden("deberta")
    encoding = Deberta(max_distance=64, log_buckets=8, release_index=True)
    params = {"table": jnp.asarray(arrays["table_v2"])} | {n: jnp.asarray(arrays[n]) for n in ("w_k", "w_q")}
    q, k, pos = jnp.asarray(arrays["q_v2"]), jnp.asarray(arrays["k_v2"]), jnp.arange(40)
    vectors = jax.jit(encoding.by_distance)(params, (pos[:, None] - pos[None, :]).ravel())
    a, b = (x.reshape(40, 40, *x.shape[1:]) for x in (vectors.query, vectors.key))
    bias = (jnp.einsum("qhd,qkhd->hqk", q, a) + jnp.einsum("khd,qkhd->hqk", k, b)) / (3 * q.shape[-1]) ** 0.5
    assert_allclose(bias, arrays["bias_v2"], rtol=0, atol=1e-5)
    rows = Deberta(max_distance=512, log_buckets=256).rows(jnp.arange(-511, 512))
    assert_array_equal(rows - 256, arrays["log_buckets"])


def test_transformer_xl_with_memory(golden):
    arrays = {name: jnp.asarray(a) for name, a in golden("transformer_xl").items()}
    params = {"u": arrays["u"], "v": arrays["v_bias"], "w_r": arrays["w_r"]}
    k_pos = jnp.arange(9)
    q, k, v = (arrays[name][None] for name in "qkv")
    slots = posx.Slots(k_pos[4:], k_pos[4:]), posx.Slots(k_pos, k_pos)
    o = jit_attend(TransformerXL(), params, q, k, v, *slots, mask=posx.full())
    assert_allclose(o[0], arrays["o"], rtol=0, atol=1e-5)


def test_shaw_keys(golden):
    arrays = {name: jnp.asarray(a) for name, a in golden("shaw_keys").items()}
    x, pos = arrays["x"].reshape(1, 12, 2, 4), jnp.arange(12)
    params = {"keys": arrays["keys"]}
    encoding = Shaw(max_distance=3, values=False)
    o = jit_attend(encoding, params, x, x, x, pos, mask=posx.full())
    assert_allclose(o[0], arrays["o"], rtol=0, atol=1e-5)
    without = softmax(plain_logits(x[0], x[0]))
    assert np.abs(attention_weights(encoding, params, x[0], x[0], pos) - without).max() > 0.1


@pytest.mark.parametrize("distance", ["linear", "log"])
def test_dynamic_position_bias(distance, golden):
    arrays = {name: jnp.asarray(a) for name, a in golden("dynamic_bias").items()}
    params = {name: arrays[name] for name in ("w0", "b0", "w1", "b1", "w2")}
    bias = of_pairs(DynamicBias(width=8, log_distance=distance == "log"), params, arrays[distance].shape[-1])
    # The library's last layer adds a number per head, which softmax does not see.
    assert_allclose(bias + arrays["b2"][:, None, None], arrays[distance], rtol=1e-5, atol=1e-5)


def test_llama_4_logit_scale(golden):
    arrays = golden("llama4")
    x, pos = arrays["x"].reshape(1, 12, 2, 4), jnp.arange(12)
    encoding = Llama4Temperature(attn_scale=0.5, floor_scale=3)
    o = jit_attend(encoding, {}, x, x, x, pos, mask=posx.causal())
    assert_allclose(o[0], arrays["o"], rtol=0, atol=1e-5)
