"""Decay by plane: RoPE as its limit, no overflow however far, and the same out of a cache at any position."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from golden import reference
from posx.attention.blockwise import Tiling, blockwise
from posx.attention.decay import mapped_products
from posx.attention.tiles import Block, SharedArrays, TileInputs, Tokens
from posx.encodings import Nope, Rope, Xpos
from posx.errors import ConfigError
from tests.encodings.cases import DIMS
from tests.encodings.probes import attention_weights, vectors

H, D, T = 2, 8, 12
ROPE = Rope(rotary_dim=D)
tiles = functools.partial(blockwise, tiling=Tiling(4, 4))
Q, K = vectors(T, H, D), vectors(T, H, D, seed=1)
attend = jax.jit(posx.attend, static_argnums=0, static_argnames=("executor",))


def xpos(scale_base):
    return Xpos(ROPE, scale_base, D)


def test_a_large_base_is_rope():
    pos = np.arange(T)
    found, wanted = (attention_weights(e, {}, Q, K, pos, mask=posx.causal()) for e in (xpos(1e9), ROPE))
    assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("far", [1000, 8000])
def test_half_precision_holds_what_powers_come_to(far):
    """As accelerators multiply them: no power of a wide block overflows, and operands are rounded once."""
    encoding, pos = xpos(500.0), (jnp.array([[0, far]]), jnp.array([[0, far - 3, far]]))
    q, k = (vectors(n, 1, D, seed=n).swapaxes(0, 1)[None] for n in (2, 3))

    def products(dtype):
        sides = (Block(Tokens(x.astype(dtype)), posx.Slots(at)) for x, at in zip((q, k), pos, strict=True))
        return np.asarray(mapped_products(TileInputs(encoding, posx.causal(), SharedArrays({}), *sides)), np.float32)

    found, wanted = products(jnp.float16), products(jnp.float32)
    seen = np.array([[1, 0, 0], [1, 1, 1]], bool)
    assert_allclose(found[0, 0][seen], wanted[0, 0][seen], atol=5e-3)


def test_published_rates():
    """At 64 channels zeta goes from 0.2857 to 0.9777; the factor of the fastest plane falls by it every B tokens."""
    rate = np.asarray(Xpos(Rope(rotary_dim=64), 512.0, 64).decay({}))[0]
    assert_allclose(np.exp(-512 * rate[[0, 31, 32]]), [0.4 / 1.4, (62 + 25.6) / 89.6, 0.4 / 1.4], rtol=1e-6)
    assert (np.diff(rate[:32]) < 0).all()
    assert posx.build("xpos", DIMS).scale_base == DIMS.train_len / 2, "512 at the 1,024 tokens of the paper"


@pytest.mark.slow
def test_nothing_overflows_over_a_million_tokens():
    """Queries next to keys, 100,000 tokens and a million from them: in one tile, and in tiles; with their gradients."""
    pos = (
        np.array([0, 1, 2, 3, 50_000, 50_001, 150_000, 150_001, 150_002, 999_998, 999_999, 10**6]) + 30_000_000
    ).astype(np.int32)
    encoding, idx = xpos(512.0), np.arange(T, dtype=np.int32)

    def run(q, k, executor):
        o = posx.attend(encoding, {}, q[None], k[None], k[None], posx.Slots(pos, idx), executor=executor)
        return o.sum(), o[0]

    wide = np.float64(Q), np.float64(K)
    logits = np.array(
        [
            [
                [reference.xpos(encoding, {}, wide[0][i, h], wide[1][j, h], pos[i], pos[j], h) for j in range(i + 1)]
                + [-np.inf] * (T - 1 - i)
                for i in range(T)
            ]
            for h in range(H)
        ]
    )
    w = np.exp(logits - logits.max(axis=-1, keepdims=True))
    wanted = np.einsum("hqk,khd->qhd", w / w.sum(axis=-1, keepdims=True), wide[1])
    for executor in ("dense", tiles):
        (_, o), grads = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(Q, K, executor)
        assert_allclose(o, wanted, atol=1e-5)
        assert all(np.isfinite(grad).all() for grad in grads)


def test_learned_decay_gets_its_gradient_in_tiles():
    @dataclasses.dataclass(frozen=True)
    class Fading(posx.Encoding):
        def init(self, rng, dims):
            return {"rate": jnp.zeros((dims.num_heads, dims.head_dim))}

        def decay(self, params):
            return params["rate"]

    pos, rate = np.arange(T, dtype=np.int32), np.random.default_rng(0).uniform(0.01, 0.2, (H, D)).astype(np.float32)

    def loss(rate, executor):
        o = posx.attend(Fading(), {"rate": rate}, Q[None], K[None], K[None], pos, executor=executor)
        return (o * jnp.arange(1.0, D + 1)[None, None, None]).sum()

    found, wanted = (jax.jit(jax.grad(loss), static_argnums=1)(rate, executor) for executor in (tiles, "dense"))
    assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert np.abs(wanted).min() > 1e-3


@pytest.mark.peers
def test_x_transformers_scales_about_a_centre():
    import torch
    from x_transformers.x_transformers import RotaryEmbedding, apply_rotary_pos_emb

    freqs, scale = RotaryEmbedding(D, use_xpos=True, scale_base=64).forward(torch.arange(T))
    q, k = (torch.tensor(a).transpose(0, 1)[None] for a in (Q, K))
    theirs = apply_rotary_pos_emb(q, freqs, scale) @ apply_rotary_pos_emb(k, freqs, scale**-1).mT / D**0.5
    wanted = torch.softmax(theirs.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf), -1)[0].numpy()
    ours = Xpos(Rope(rotary_dim=D, layout="interleaved"), 64.0, D)
    assert_allclose(attention_weights(ours, {}, Q, K, np.arange(T), mask=posx.causal()), wanted, atol=1e-5)


def test_what_is_no_xpos_is_refused():
    with pytest.raises(ConfigError, match="'alibi' is given, but an encoding of the kind Rope is expected."):
        posx.build("xpos(rope=alibi)", DIMS)
    with pytest.raises(ConfigError, match="scale_base=0"):
        posx.build("xpos(scale_base=0)", DIMS)
    with pytest.raises(ConfigError, match=r"Xpos.* is for causal masks"):
        attention_weights(xpos(512.0), {}, Q, K, np.arange(T))


def test_at_one_position_it_is_none():
    pos = np.full(T, 30)
    found, wanted = (attention_weights(e, {}, Q, K, pos, mask=posx.causal()) for e in (xpos(8.0), Nope()))
    assert_allclose(found, wanted, atol=1e-6)
