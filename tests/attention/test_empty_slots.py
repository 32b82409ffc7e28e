"""Empty slots: whatever stands in them, NaN, infinity and positions out of range, reaches no output and no gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx import attention
from posx.attention.blockwise import Tiling, blockwise
from posx.encodings import Shaw, Tupe
from tests.attention.test_hooks import Forget
from tests.cheap import in_one_program
from tests.encodings.cases import ACTING

B, T, H, D, M = 2, 11, 2, 4, 6
EMPTY = 3
RNG = np.random.default_rng(0)
Q, K, V, COTANGENT = (RNG.standard_normal((B, T, H, D)).astype(np.float32) for _ in range(4))
X = RNG.standard_normal((B, T, M)).astype(np.float32)
IDX = np.where(np.arange(T) < EMPTY, -1, np.arange(T) - EMPTY).astype(np.int32)


def random(encoding):
    """Parameters that depend on the encoding alone, whatever other tests draw."""
    shapes, rng = jax.eval_shape(lambda: encoding.init(jax.random.key(0), DIMS)), np.random.default_rng(0)
    return jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(np.float32), shapes)


DIMS = posx.Dims(model_dim=M, num_heads=H, head_dim=D, num_layers=1, train_len=T)
#: A way into the formula each: relative vectors and values, a table that ends, features; a history, a path along the
#: keys, gates over whole rows, a decay.
CALLS = [
    (Shaw(3), "small_tiles"), (Tupe(T), "dense"), (Forget(), "dense"), (Forget(), "small_tiles"),
    (posx.build("key_offset+selective_rope(drift=true)", DIMS), "dense"), (posx.build("path", DIMS), "dense"),
]  # fmt: skip
SLOW = [(posx.build("cope", DIMS), "dense"), (posx.build("xpos", DIMS), "small_tiles")]
PARAMS = {encoding: random(encoding) for encoding, _ in (*CALLS, *SLOW)}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setitem(attention.EXECUTORS, "small_tiles", functools.partial(blockwise, tiling=Tiling(4, 5)))


@functools.partial(jax.jit, static_argnames=("encoding", "executor"))
def answers(encoding, params, q, k, v, x, pos, idx, executor):
    """The outputs and the gradients of params, q, k, v and x."""

    def outputs(params, q, k, v, x):
        return posx.attend(encoding, params, q, k, v, posx.Slots(pos, idx), x=x, executor=executor)

    o, pull_back = jax.vjp(outputs, params, q, k, v, x)
    return o, pull_back(COTANGENT)


def spoiled(array, value):
    return np.concatenate([np.full_like(array[:, :EMPTY], value), array[:, EMPTY:]], axis=1)


@pytest.mark.parametrize(
    ("encoding", "executor"),
    [*CALLS, *(pytest.param(*call, marks=pytest.mark.slow) for call in SLOW)],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_what_stands_in_empty_slots_reaches_nothing(encoding, executor):
    pos = np.maximum(np.arange(T) - EMPTY, 0).astype(np.int32)
    run = functools.partial(answers, encoding, PARAMS[encoding], executor=executor)
    wanted = run(*(spoiled(a, 0) for a in (Q, K, V, X)), pos, IDX)
    assert_array_equal(wanted[0][:, :EMPTY], 0)
    assert np.isfinite(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(wanted)])).all()
    for value in (np.nan, np.inf):
        for place in (pos[EMPTY], -(2**31), 2**31 - 1):
            found = run(*(spoiled(a, value) for a in (Q, K, V, X)), np.where(IDX < 0, place, pos).astype(np.int32), IDX)
            jax.tree.map(assert_array_equal, found, wanted)


def test_slots_known_to_be_empty_are_as_well():
    """Where the caller's arrays lie on the host, and rows are empty in different places, or all over."""
    idx = np.stack([IDX, np.where(np.arange(T) > 7, -1, np.arange(T)), np.full(T, -1)]).astype(np.int32)
    pos = np.where(idx < 0, 10**6, idx).astype(np.int32)
    q, k, v = (np.where(idx[..., None, None] < 0, np.nan, np.concatenate([a, a[:1]])) for a in (Q, K, V))
    run = functools.partial(posx.attend, Tupe(T), PARAMS[Tupe(T)], q_slots=posx.Slots(pos, idx), executor="dense")
    found = jax.jit(run)(*map(jnp.float32, (q, k, v)))
    assert np.isfinite(found).all()
    assert_array_equal(found[2], 0)
    alone = answers(Tupe(T), PARAMS[Tupe(T)], Q, K, V, X, np.arange(T, dtype=np.int32), idx[1], "dense")[0]
    assert_allclose(found[1, :8], alone[1, :8], atol=1e-6)


def test_an_infinity_in_a_slot_that_is_seen_is_seen():
    v = V.copy()
    v[:, 7] = np.inf
    order = np.arange(T, dtype=np.int32)
    o = np.asarray(answers(Tupe(T), PARAMS[Tupe(T)], Q, K, v, X, order, order, "dense")[0])
    assert not np.isfinite(o[:, 7:]).any()


#: Encodings whose features of a key reach every later query; of the others only a query's own are read.
READ_LATER = ("darope", "selective_rope", "fox", "path")


@pytest.mark.parametrize("name", [name for name, hooks in ACTING.items() if "features" in hooks])
def test_a_nan_in_x_reaches_the_outputs(name):
    """A NaN at one token of the first sequence. An infinity may come to rest in a gate."""
    encoding, at = posx.build(name, DIMS), 4
    order, x = np.arange(T, dtype=np.int32), np.repeat(X[:1], 2, axis=0)
    x[0, at, 2] = np.nan
    q, k, v = (np.repeat(a[:1], 2, axis=0) for a in (Q, K, V))
    o = np.asarray(in_one_program(posx.attend, encoding, random(encoding), q, k, v, order, x=x, executor="dense"))
    spoiled = ~np.isfinite(o).all(axis=(2, 3))
    assert spoiled[0, at : T if name in READ_LATER else at + 1].all()
    assert not spoiled[1].any()
