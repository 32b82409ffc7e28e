"""Derivatives beyond one gradient: forward mode and second order through the dense executor, for every encoding; what
the others give of them is the same or refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx import attention
from posx.attention import cpu, strips
from posx.attention.blockwise import Tiling, blockwise
from posx.conformance.subject import add_axes
from posx.encodings import Alibi
from posx.lab import layers
from tests.encodings.cases import ACTING

B, T, H, G, D = 2, 7, 2, 1, 4
DIMS = posx.Dims(model_dim=6, num_heads=H, head_dim=D, num_layers=1, train_len=16, num_kv_heads=G)
RNG = np.random.default_rng(0)
QKV = [RNG.standard_normal((B, T, heads, D)) for heads in (H, G, G)]
X = RNG.standard_normal((B, T, DIMS.model_dim))
COTANGENT = RNG.standard_normal((B, T, H, D))
POS = np.arange(T, dtype=np.int32)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setitem(attention.EXECUTORS, "small_tiles", functools.partial(blockwise, tiling=Tiling(2, 4)))


def random_like(tree):
    """The same numbers whichever tests run before."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda a: rng.standard_normal(a.shape), tree)


def loss(encoding, executor, args):
    params, q, k, v, *x = args
    o = posx.attend(encoding, params, q, k, v, add_axes(encoding, POS), executor=executor, **dict(zip("x", x)))  # noqa: B905
    return jnp.sum(COTANGENT.astype(q.dtype) * o)


@functools.partial(jax.jit, static_argnums=(0, 1))
def answers(encoding, executor, args, direction):
    """The gradient, the slope along a direction, and the gradient's own slope."""
    of = functools.partial(loss, encoding, executor)
    grad, bend = jax.jvp(jax.grad(of), (args,), (direction,))
    return grad, jax.jvp(of, (args,), (direction,))[1], bend


def dot(a, b):
    return sum(np.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def moved(args, direction, step):
    return jax.tree.map(lambda a, b: a + step * b, args, direction)


def all_close(found, wanted, tolerance):
    """Leaf by leaf, to `tolerance` times the largest number of all."""
    size = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted))
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=0, atol=tolerance * size), found, wanted)


#: A running sum with a rule of its own, and terms by distance. The others are slow in their number.
QUICK = ("selective_rope", "deberta")
#: Heads have two planes here, and M-RoPE one a section.
SMALL = {"mrope": {"name": "mrope", "sections": (1, 1)}}
#: Encodings that act on embeddings alone run the program of `nope`.
NOT_EMBEDDING = [name for name, hooks in ACTING.items() if hooks != ("embed",)]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NOT_EMBEDDING]
)
def test_second_derivatives_of_every_encoding(name):
    """Float64 against central differences, then float32, whose angles have a rule of their own, against float64."""
    encoding, step = posx.build(SMALL.get(name, name), DIMS), 2e-6
    vectors = [*QKV, X] if encoding.acts_on("features") else QKV
    params = jax.tree.map(np.float64, encoding.init(jax.random.key(0), DIMS))
    args = (moved(params, random_like(params), 0.5), *vectors)
    direction = random_like(args)
    run = functools.partial(answers, encoding, "dense")
    with jax.enable_x64(True):
        grad, slope, bend = jax.device_get(run(args, direction))
        up, down = (jax.device_get(run(moved(args, direction, s), direction)[0]) for s in (step, -step))
    assert_allclose(slope, dot(grad, direction), rtol=1e-10)
    all_close(bend, jax.tree.map(lambda a, b: (a - b) / (2 * step), up, down), 1e-6)
    all_close(run(*jax.tree.map(np.float32, (args, direction)))[2], bend, 1e-4)


STRIP = RNG.standard_normal((H, T + 5, D))
#: Every function of posx with a derivative written by hand, and its arguments; `with_slope` has one in its float32.
RULES = {
    "skew": (strips.skew, [RNG.standard_normal((H, T, T + 5))]),
    "unskew": (strips.unskew, [RNG.standard_normal((H, T, 5))]),
    "plus_shared": (cpu.plus_shared, [RNG.standard_normal((n, H, T, 5)) for n in (B, 1)]),
    "toeplitz": (lambda strip: strips.toeplitz(strip, T), [STRIP[..., 0]]),
    "strip_products": (lambda x, strip: strips.strip_products(x, strip, 5), [COTANGENT.swapaxes(1, 2), STRIP]),
    "strip_products of one row": (
        lambda x, strip: strips.strip_products(x, strip, 5), [COTANGENT.swapaxes(1, 2), STRIP[:, :1]],
    ),
    "strip_sums": (strips.strip_sums, [RNG.standard_normal((B, H, T, 5)), STRIP]),
    "linear": (lambda x, w: layers.linear(x, w, "float32"), [X[0], RNG.standard_normal((DIMS.model_dim, 3))]),
    "gelu": (layers.gelu, [X]),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_second_derivatives_of_every_rule_by_hand(name):
    """Reverse mode twice, and forward mode over reverse where there is one, against central differences."""
    function, args = RULES[name]
    # `linear` gives float32, whatever its operands.
    direction, (step, tolerance) = random_like(args), (3e-3, 1e-3) if name == "linear" else (1e-5, 1e-6)

    grad = jax.jit(jax.grad(lambda args: jnp.sin(function(*args)).sum()))

    with jax.enable_x64(True):
        up, down = (grad(moved(args, direction, s)) for s in (step, -step))
        wanted = jax.tree.map(lambda a, b: np.asarray(a - b) / (2 * step), up, down)
        assert max(np.abs(leaf).max() for leaf in wanted) > 0.1
        twice = jax.jit(jax.grad(lambda args: sum(map(jnp.vdot, grad(args), direction))))
        all_close(twice(args), wanted, tolerance)
        if name in ("plus_shared", "linear", "gelu"):
            all_close(jax.jit(lambda args: jax.jvp(grad, (args,), (direction,))[1])(args), wanted, tolerance)


def test_other_ways_to_the_same_derivatives():
    """`linearize`, `jacfwd`, and second derivatives by reverse mode twice and by forward mode in reverse."""
    encoding = posx.build("t5", DIMS)
    table = random_like(np.zeros((encoding.num_buckets, H)))

    def of(table, executor="dense"):
        return loss(encoding, executor, ({"table": table}, *QKV))

    with jax.enable_x64(True):
        grad, hessian = jax.jit(jax.grad(of))(table), jax.jit(jax.hessian(of))(table)
        assert_allclose(jax.jit(jax.jacfwd(of))(table), grad, rtol=1e-10)
        assert_allclose(jax.linearize(jax.jit(of), table)[1](table), np.vdot(grad, table), rtol=1e-10)
        assert np.abs(hessian).max() > 0.1
        wanted = np.einsum("ijkl,kl->ij", hessian, table)
        for inner in (lambda t: jnp.vdot(jax.grad(of)(t), table), lambda t: jax.jvp(of, (t,), (table,))[1]):
            assert_allclose(jax.jit(jax.grad(inner))(table), wanted, rtol=1e-9, atol=1e-12)


def test_tiles_have_the_same_second_derivatives_or_refuse():
    encoding, direction = Alibi(H), random_like(QKV)
    with jax.enable_x64(True):
        products = [
            jax.jit(lambda t, of=of: jax.jvp(jax.grad(of), (QKV,), (t,))[1])(direction)
            for of in (lambda qkv, e=e: loss(encoding, e, ({}, *qkv)) for e in ("dense", "small_tiles"))
        ]
        jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=0, atol=1e-10), *products)
    with pytest.raises(
        TypeError, match=r"^executor 'small_tiles' has no forward-mode derivative: give executor='dense'"
    ):
        jax.jvp(lambda qkv: loss(encoding, "small_tiles", ({}, *qkv)), (QKV,), (QKV,))
