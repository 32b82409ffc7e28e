"""Features with a carry, and scores that need a whole row of keys, in two small encodings.

Each runs dense, in tiles and out of a cache, against NumPy.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx import attention
from posx.attention import sharding, tiles
from posx.attention.blockwise import Tiling, blockwise
from posx.attention.tiles import map_batch
from posx.encodings import Chain, Encoding

B, T, H, D, M = 2, 11, 2, 4, 5
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((B, T, H, D)).astype(np.float32) for _ in range(3))
X = RNG.standard_normal((B, T, M)).astype(np.float32)
POS = np.arange(T, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Forget(Encoding):
    """s_ij += sum over l in (j, i] of log sigmoid(x_l W): a running sum, kept per token and carried on."""

    def init(self, rng, dims):
        return {"w": jax.random.normal(rng, (dims.model_dim, dims.num_heads))}

    def features(self, params, x, pos, carry):
        logs = jax.nn.log_sigmoid(x @ params["w"])
        sums = jnp.cumsum(logs, axis=0) + (0.0 if carry is None else carry[None])
        return {"sums": sums}, sums[-1]

    def score(self, params, s, tile):
        return s + (tile.q_features["sums"][:, None] - tile.k_features["sums"][None]).transpose(2, 0, 1)


@dataclasses.dataclass(frozen=True)
class Counted(Encoding):
    """s_ij -= the sum of sigmoid(s_il) over the visible l >= j: needs all keys of a row in order, as CoPE does."""

    tiling = "rows"

    def score(self, params, s, tile):
        gates = jax.nn.sigmoid(s) * tile.visible[None].astype(s.dtype)
        return s - jnp.flip(jnp.cumsum(jnp.flip(gates, axis=-1), axis=-1), axis=-1)


def wanted(encoding, params, b):
    """The definition above in float64, one query at a time; [t, h, d]."""
    q, k, v, x = (np.float64(a[b]) for a in (Q, K, V, X))
    o = np.zeros((T, H, D))
    for i in range(T):
        for h in range(H):
            s = k[: i + 1, h] @ q[i, h] / np.sqrt(D)
            if isinstance(encoding, Forget):
                gates = np.log(1 / (1 + np.exp(-x @ np.float64(params["w"]))))[:, h]
                s = s + np.array([gates[j + 1 : i + 1].sum() for j in range(i + 1)])
            else:
                gates = 1 / (1 + np.exp(-s))
                s = s - np.array([gates[j:].sum() for j in range(i + 1)])
            w = np.exp(s - s.max())
            o[i, h] = w / w.sum() @ v[: i + 1, h]
    return o


def in_tiles(*args, **known):
    return blockwise(*args, **known, tiling=Tiling(4, 5))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setitem(attention.EXECUTORS, "small_tiles", in_tiles)


PARAMS = {Forget(): {"w": RNG.standard_normal((M, H)).astype(np.float32)}, Counted(): {}}
batch_features = jax.jit(attention.batch_features, static_argnums=0)
attend = jax.jit(posx.attend, static_argnums=0)
toys = pytest.mark.parametrize("encoding", PARAMS, ids=lambda e: type(e).__name__)


def follow_the_definition(encoding):
    params = PARAMS[encoding]

    def loss(executor, params, q, k, v, x):
        o = posx.attend(encoding, params, q, k, v, POS, x=x, executor=executor)
        return (o * jnp.arange(1.0, D + 1)[None, None, None]).sum(), o

    run = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3, 4, 5), has_aux=True), static_argnums=0)
    (_, dense), dense_grads = run("dense", params, Q, K, V, X)
    (_, tiles), tiles_grads = run("small_tiles", params, Q, K, V, X)
    for o in (dense, tiles):
        assert_allclose(o, np.stack([wanted(encoding, params, b) for b in range(B)]), rtol=0, atol=1e-5)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=0, atol=1e-4), tiles_grads, dense_grads)
    return dense_grads


@toys
def test_both_executors_follow_the_definition(encoding):
    follow_the_definition(encoding)


@toys
def test_scores_of_sequences_one_by_one_are_those_of_all_at_once(encoding, monkeypatch):
    """As on one core of a CPU, from a size on."""
    at_once = follow_the_definition(encoding)
    calls = []

    def watched(*given, in_turn=False):
        calls.extend([given] if in_turn else [])
        return map_batch(*given, in_turn=in_turn)

    monkeypatch.setattr(tiles, "map_batch", watched)
    monkeypatch.setattr(tiles, "LARGE", 1)
    monkeypatch.setattr(sharding, "is_one_core", lambda: True)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=0, atol=1e-5), follow_the_definition(encoding), at_once)
    assert calls


@toys
@pytest.mark.parametrize("chained", [False, True])
def test_cached_decode_carries_features_on(encoding, chained):
    params = PARAMS[encoding]
    whole = np.stack([wanted(encoding, params, b) for b in range(B)])
    if chained:
        encoding, params = Chain((posx.encodings.Nope(), encoding)), {f"1.{n}": a for n, a in params.items()}
    carry, stored, outputs = None, {}, []
    for start, stop in ((0, 8), (8, 9), (9, 11)):
        pos = jnp.asarray(POS[start:stop])
        new, carry = batch_features(encoding, params, X[:, start:stop], pos, carry)
        stored = {n: jnp.concatenate([stored[n], a], axis=1) if stored else a for n, a in new.items()}
        sides = (posx.Slots(order, order) for order in (pos, POS[:stop]))
        qkv = Q[:, start:stop], K[:, :stop], V[:, :stop]
        outputs.append(attend(encoding, params, *qkv, *sides, features=(new, stored)))
    assert_allclose(np.concatenate(outputs, axis=1), whole, rtol=0, atol=1e-5)


def test_missing_features_are_asked_for():
    with pytest.raises(ValueError, match=r"Forget reads features. Give x, or features=\(q_features, k_features\)"):
        posx.attend(Forget(), PARAMS[Forget()], Q, K, V, POS)
