"""Far tiles that a falling distance bias has made weightless are left out if that is sure, and only then."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx import attention
from posx.attention.blockwise import Tiling, blockwise
from posx.contract import ByDistance
from posx.encodings import Alibi, Chain, Encoding, Kerple, LearnedSinks, Rope
from posx.machine.platforms import is_on_cpu

B, T, H, G, D = 2, 45, 4, 2, 6
RNG = np.random.default_rng(0)
Q, K, V, COTANGENT = (RNG.standard_normal((B, T, heads, D)) for heads in (H, G, G, H))
POS = np.arange(T, dtype=np.int32)
#: Nats per token: head 0 forgets within a tile, head 3 never; heads 2 and 3 share keys.
SLOPES = np.array([30.0, 8.0, 3.0, 0.01])


@dataclasses.dataclass(frozen=True)
class Steep(Encoding):
    """ALiBi with learned slopes, and a logit scale that grows along the text."""

    fades = True

    def init(self, rng, dims):
        return {"slopes": jnp.ones(dims.num_heads)}

    def logit_scale(self, params, pos, features):
        return 1 + posx.as_float(pos)[None] / T

    def by_distance(self, params, distance):
        return ByDistance(bias=-params["slopes"][:, None] * jnp.abs(posx.as_float(distance))[None, :])


ENCODINGS = {
    "steep": Steep(),
    "with rope": Chain((Rope(rotary_dim=D), Steep())),
    "with sinks": Chain((Steep(), LearnedSinks())),
    "power": Kerple("power"),
}
PARAMS = {
    "steep": {"slopes": SLOPES},
    "with rope": {"1.slopes": SLOPES},
    "with sinks": {"0.slopes": SLOPES, "1.z": np.array([-3.0, 2.0, 5.0, 0.5])},
    "power": {"a": SLOPES, "p": np.array([0.5, 1.9, 1.0, 0.3])},
}


@pytest.fixture(autouse=True)
def skipping(monkeypatch):
    run = functools.partial(blockwise, tiling=Tiling(4, 8, skip=True))
    monkeypatch.setitem(attention.EXECUTORS, "skipping", run)


def outputs(name, params, q, k, v, executor):
    return posx.attend(ENCODINGS[name], params, q, k, v, POS, executor=executor)


@functools.partial(jax.jit, static_argnums=(0, 1))
def answers(name, executor, params, q, k, v, cotangent):
    """The output and the gradients of params, q, k and v."""
    o, pull_back = jax.vjp(lambda *args: outputs(name, *args, executor), params, q, k, v)
    return o, pull_back(cotangent)


def forward(executor, q, k, v, name="steep"):
    args = jax.tree.map(np.float32, (PARAMS[name], q, k, v, COTANGENT))
    return np.asarray(answers(name, executor, *args)[0])


def compare(name, q=Q, k=K, v=V):
    args = PARAMS[name], q, k, v, COTANGENT
    with jax.enable_x64(True):
        expected = answers(name, "dense", *args)
    found = answers(name, "skipping", *jax.tree.map(np.float32, args))
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    "name", ["steep", "with sinks", *(pytest.param(name, marks=pytest.mark.slow) for name in ("with rope", "power"))]
)
def test_outputs_and_gradients_are_those_of_all_tiles(name):
    compare(name)


def test_a_far_key_that_may_still_win_is_not_skipped():
    """Scores of some 400 nats against 30 nats a token: the bound has to know the norms of q and of k."""
    q, k = Q.copy(), K.copy()
    q[0, 40], k[0, 3] = 20, 20
    compare("steep", q, k)
    moved, unmoved = (forward("dense", q, k, V) for q, k in ((q, k), (Q, K)))
    assert np.abs(moved - unmoved)[0, 40, 1].max() > 0.1


@pytest.mark.parametrize("name", ["steep", "with sinks"])
def test_each_head_skips_tiles_of_its_own(name):
    """An infinite value poisons every row that meets it, even with a weight of zero."""
    v = V.copy()
    v[:, 0] = np.inf
    o = forward("skipping", Q, K, v, name)
    finite = np.isfinite(o).all(axis=(0, 1, 3), where=(POS >= 24)[None, :, None, None])
    assert finite.tolist() == [True, True, False, False]  # a key head is skipped for all queries that it serves
    assert not np.isfinite(o[:, 0]).any()


@pytest.mark.skipif(not is_on_cpu(), reason="accelerators take larger tiles")
def test_long_texts_are_served_so_by_default():
    length, heads = 2048, 8
    q = RNG.standard_normal((1, length, heads, 4)).astype(np.float32)
    v = q.copy()
    v[:, 0] = np.inf
    pos = np.arange(length, dtype=np.int32)
    o = jax.jit(lambda q, v: posx.attend(Alibi(heads), {}, q, q, v, pos))(q, v)
    served = np.isfinite(o[0, -1]).all(axis=-1).tolist()
    assert served in ([True] * 5 + [False] * 3, [True] * 6 + [False] * 2), "tiles are larger where cores share them"
