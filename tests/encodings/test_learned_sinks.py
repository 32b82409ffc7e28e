"""Sinks that are learned: softmax off by one, their limits, and the attention of gpt-oss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.attention import refusal
from posx.conformance import DIMS
from posx.conformance.subject import small_tiles
from posx.encodings import LearnedSinks, Nope, Rope
from tests.encodings.probes import attention_weights, plain_logits, vectors

T, H, D = 12, 4, 8
POS = np.arange(T, dtype=np.int32)
Q, K, V = (vectors(T, heads, D, seed=seed) for seed, heads in enumerate((H, 2, 2)))
executors = pytest.mark.parametrize("executor", ["dense", small_tiles], ids=["dense", "tiles"])


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradients(encoding, executor, params, q, k, v, idx):
    """Return outputs and the gradients of params, q, k and v."""

    def outputs(params, q, k, v):
        slots = posx.Slots(POS, idx)
        return posx.attend(encoding, params, q[None], k[None], v[None], slots, executor=executor)[0]

    o, pull = jax.vjp(outputs, params, q, k, v)
    return o, pull(jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape))


def test_a_model_starts_with_softmax_off_by_one():
    params = LearnedSinks().init(jax.random.key(0), DIMS)
    found = attention_weights(LearnedSinks(), params, Q, K, POS)
    w = np.exp(plain_logits(Q, np.repeat(K, 2, axis=1)))
    assert_allclose(found, w / (1 + w.sum(axis=-1, keepdims=True)), atol=1e-6)


@executors
def test_at_minus_infinity_attention_is_plain(executor):
    """Gradients too, of rows that see nothing as well."""
    idx = np.where(POS < 3, -1, POS - 3).astype(np.int32)
    plain, plain_grads = gradients(Nope(), executor, {}, Q, K, V, idx)
    for z in (-1e4, -np.inf):
        params = {"z": np.full(H, z, np.float32)}
        o, grads = gradients(LearnedSinks(), executor, params, Q, K, V, idx)
        assert_array_equal(o[:3], 0)
        assert_allclose(o, plain, atol=1e-6)
        jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-5), grads[1:], plain_grads[1:])
        assert_array_equal(grads[0]["z"], 0)


@executors
def test_a_high_sink_takes_all_weight_without_overflow(executor):
    params = {"z": np.array([-1e4, 0.0, 50.0, 1e4], np.float32)}
    o, grads = gradients(LearnedSinks(), executor, params, 30 * Q, 30 * K, V, POS)
    assert np.abs(o[:, 0]).max() > 0.1 and np.abs(o[:, 3]).max() == 0
    assert all(np.isfinite(grad).all() for grad in jax.tree.leaves((o, grads)))


@executors
def test_two_sinks_take_the_weight_of_one_twice_as_heavy(executor):
    z = vectors(H)
    twice = gradients(LearnedSinks(), executor, {"z": z + np.log(2, dtype=np.float32)}, Q, K, V, POS)
    chain = posx.build("learned_sinks+learned_sinks", DIMS)
    both = gradients(chain, executor, {"0.z": z, "1.z": z}, Q, K, V, POS)
    assert_allclose(both[0], twice[0], atol=1e-6)
    assert_allclose(both[1][0]["0.z"] + both[1][0]["1.z"], twice[1][0]["z"], atol=1e-5)


def test_the_fused_kernel_refuses_sinks():
    params = {"z": np.zeros(H, np.float32)}
    why = refusal(LearnedSinks(), params, posx.causal(), in_order=True, segments=False)
    assert why == "LearnedSinks acts on sink, which the kernel does not support"


@pytest.mark.peers
@executors
@pytest.mark.parametrize("layer", [0, 1])
def test_attention_is_that_of_gpt_oss(layer, executor):
    """Its whole layer with its weights: one window layer, one global layer, and half as many key heads."""
    import torch
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

    window = 4
    config = gpt_oss.GptOssConfig(
        hidden_size=16, num_attention_heads=H, num_key_value_heads=2, head_dim=D, sliding_window=window,
        layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 150_000.0},
    )  # fmt: skip
    torch.manual_seed(layer)
    peer = gpt_oss.GptOssAttention(config, layer)
    for array in peer.parameters():
        torch.nn.init.normal_(array, std=0.5)
    x, mask = torch.randn(1, T, 16), posx.window(window) if layer == 0 else posx.causal()
    hidden = torch.from_numpy(np.where(mask.visible(jnp.asarray(POS), jnp.asarray(POS)), 0, -np.inf))[None, None]
    with torch.no_grad():
        angles = gpt_oss.GptOssRotaryEmbedding(config)(x, torch.arange(T)[None])
        wanted = peer(x, angles, hidden.float())[0]
        q, k, v = (layer(x).reshape(1, T, -1, D).numpy() for layer in (peer.q_proj, peer.k_proj, peer.v_proj))
        chain = posx.build("rope(base=150000)+learned_sinks", posx.Dims(16, H, D, 2, T, 2))
        params = {"1.z": peer.sinks.numpy()}
        o = posx.attend(chain, params, q, k, v, POS, mask=mask, executor=executor)
        found = peer.o_proj(torch.from_numpy(np.array(o)).reshape(1, T, -1))
    assert chain.parts == (Rope(base=150_000.0, rotary_dim=D), LearnedSinks())
    assert_allclose(found, wanted, rtol=0, atol=2e-5)
