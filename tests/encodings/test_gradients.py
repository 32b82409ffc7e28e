"""Values and gradients of every registered encoding, the same through every executor: in float64 against finite
differences, packed and under `vmap`, and in bfloat16. Key heads serve two query heads each throughout.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.attention import refusal
from tests.encodings.cases import (
    CASES,
    DIMS,
    EVEN_TILES,
    FAMILIES,
    LENGTH,
    SMALL_SLABS,
    SMALL_TILES,
    STRUCTURAL,
    in_float64,
    inputs,
    layer_outputs,
    params_of,
    projections,
    tokens,
)

#: Fewer tokens than two tiles hold, so that tiles at the edge of the window are cut, and those beyond passed over.
WINDOW = posx.window(5)
ATTENDING = [case for case in STRUCTURAL if CASES[case].sites != ("embed",)]
BY_DISTANCE = [case for case, encoding in CASES.items() if encoding.acts_on("curve") or encoding.acts_on("relative")]
#: Every set of learned arrays.
GRADIENTS = [*STRUCTURAL, "learned-interpolate", "shaw-keys", "tupe-untied"]
COTANGENT = np.random.default_rng(4).standard_normal((len(FAMILIES), LENGTH, DIMS.num_heads, DIMS.head_dim))


def executors(encoding):
    """Those that serve it where whole sequences come in order."""
    kernel = refusal(encoding, WINDOW, in_order=True, segments=False) is None
    return ["dense", EVEN_TILES, *(["fused"] if kernel else [])]


def assert_close(a, b, tolerance):
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=tolerance, atol=tolerance), a, b)


def assert_slopes(loss, tree, grads, rng):
    """The gradient of `loss` along a random direction in each leaf of `tree` by central differences."""
    leaves, structure = jax.tree.flatten(tree)
    for n, (leaf, grad) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
        direction, step = rng.standard_normal(leaf.shape), 1e-6
        up, down = (
            loss(structure.unflatten([a + s * direction if m == n else a for m, a in enumerate(leaves)]))
            for s in (step, -step)
        )
        assert_allclose(np.sum(grad * direction), (up - down) / (2 * step), rtol=1e-6, atol=1e-7)


def values_and_grads(encoding, floats, where, cotangent, *, executor):
    """Outputs of one layer under WINDOW, and gradients of floats: params, projections, tokens."""

    def loss(floats):
        o = layer_outputs(encoding, *floats, *where, executor=executor, mask=WINDOW)
        return jnp.sum(o * cotangent), o

    grads, o = jax.grad(loss, has_aux=True)(floats)
    return o, grads


through_layer = jax.jit(values_and_grads, static_argnames=("encoding", "executor"))


@functools.partial(jax.jit, static_argnames=("encoding", "executor"))
def many_through_layer(encoding, floats, where, cotangent, *, executor):
    """The same for a leading axis of every array."""
    return jax.vmap(functools.partial(values_and_grads, encoding, executor=executor))(floats, where, cotangent)


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_agree_between_executors_and_with_finite_differences(case):
    encoding, floats, where = inputs(case, np.float64)
    rng, t = np.random.default_rng(5), 7
    with jax.enable_x64(True):
        wanted = jax.device_get(through_layer(encoding, floats, where, COTANGENT, executor="dense"))
        for executor in ("dense", SMALL_TILES):

            def run(floats, cotangent=COTANGENT, executor=executor):
                return through_layer(encoding, floats, where, cotangent, executor=executor)

            found = run(floats)
            assert_close(found, wanted, 1e-10)
            assert_slopes(lambda floats, run=run: np.sum(run(floats)[0] * COTANGENT), floats, found[1], rng)
            # Outputs of the first t tokens pull nothing back to later ones, and padding gets nothing from anywhere.
            x_grad = run(floats, COTANGENT * (np.arange(LENGTH) < t)[:, None, None])[1][2]
            assert_array_equal(x_grad[:, t:], 0)
            assert np.abs(x_grad[:, :t]).max() > 1e-2
            assert_array_equal(found[1][2][FAMILIES.index("left padded"), :4], 0)


@pytest.mark.parametrize("case", [c for c in GRADIENTS if "fused" in executors(CASES[c])])
def test_the_fused_kernel_has_the_gradients_of_the_dense_executor(case):
    """Not finite differences: `jax.nn.dot_product_attention` takes the softmax in float32 whatever it is given."""
    encoding, floats, (pos, idx, segment) = inputs(case)
    pos, in_order = pos % 32, np.broadcast_to(np.arange(LENGTH, dtype=np.int32), idx.shape)  # small angles are exact
    with jax.enable_x64(True):
        where = pos, in_order, 0 * segment
        wanted = jax.device_get(through_layer(encoding, in_float64(floats), where, COTANGENT, executor="dense"))
    for executor in ("fused", *([SMALL_SLABS] if "bias" in encoding.sites else [])):
        found = through_layer(encoding, floats, (pos, None, None), np.float32(COTANGENT), executor=executor)
        jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), found, wanted)


def apart(row, lengths):
    """Documents of these lengths out of one row [1, t, ...], each at the start of a row of its own, zeros after it."""
    rows = np.zeros((len(FAMILIES), *row.shape[1:]), row.dtype)
    for n, document in enumerate(np.split(row[0], np.cumsum(lengths)[:-1])):
        rows[n, : len(document)] = document
    return rows


def together(rows, lengths):
    return np.concatenate([row[:length] for row, length in zip(rows, lengths, strict=False)])[None]


@pytest.mark.parametrize("case", STRUCTURAL)
def test_packed_documents_are_separate_sequences_and_vmap_is_a_loop(case):
    """Two rows of documents, each with its own params, in one call, against a call a row with every document alone."""
    encoding, rng = CASES[case], np.random.default_rng(6)
    packs = ((3, 4, 6), (8, 5))
    order = np.arange(LENGTH, dtype=np.int32)[None]
    pos = np.stack([np.concatenate([order[:, :n] for n in lengths], axis=1) for lengths in packs])
    segment = np.stack([np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None] for lengths in packs])
    floats = jax.tree.map(
        lambda a: rng.standard_normal((len(packs), *a.shape)) / 2, (params_of(encoding), projections(), tokens(1))
    )
    with jax.enable_x64(True):
        alone = []
        for n, lengths in enumerate(packs):
            *shared, x = jax.tree.map(lambda a, n=n: a[n], floats)
            own_pos, own_x, own_cotangent = (apart(a, lengths) for a in (pos[n], x, COTANGENT[n : n + 1]))
            own_idx = apart(pos[n] + 1, lengths) - 1  # -1 behind the document's end
            o, (*grads, x_grad) = through_layer(
                encoding, (*shared, own_x), (own_pos, own_idx, 0 * own_pos), own_cotangent, executor="dense"
            )
            alone.append((together(o, lengths), (*grads, together(x_grad, lengths))))
        alone = jax.tree.map(lambda *rows: np.stack(rows), *alone)
        for executor, idx in (("dense", np.stack([order] * len(packs))), (EVEN_TILES, None)):
            found = many_through_layer(
                encoding, floats, (pos, idx, segment), COTANGENT[: len(packs), None], executor=executor
            )
            assert_close(found, alone, 1e-10)


@functools.partial(jax.jit, static_argnames=("encoding", "executor", "mask"))
def at_known_positions(encoding, params, q, k, v, cotangent, *, executor, mask=posx.causal()):
    """Outputs and gradients where positions are known to count up: tables of distances, read as strips."""
    pos = np.arange(6, 6 + LENGTH, dtype=np.int32)

    def loss(params, q, k, v):
        o = posx.attend(encoding, params, q, k, v, q_pos=pos, k_pos=pos, mask=mask, executor=executor)
        return jnp.sum(o.astype(cotangent.dtype) * cotangent), o

    grads, o = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(params, q, k, v)
    return o, grads


def vectors(dtype=np.float32):
    """Projected queries, keys and values of two sequences, and a cotangent; all of few enough bits for bfloat16."""
    rng = np.random.default_rng(7)
    heads = DIMS.num_heads, DIMS.num_kv_heads, DIMS.num_kv_heads, DIMS.num_heads
    drawn = (jnp.asarray(rng.standard_normal((2, LENGTH, h, DIMS.head_dim)), jnp.bfloat16) for h in heads)
    return [np.asarray(a, dtype) for a in drawn]


@pytest.mark.parametrize("case", sorted({*ATTENDING, *BY_DISTANCE}))
def test_tiles_at_known_positions_give_the_same_as_every_pair_by_itself(case):
    encoding, params = CASES[case], params_of(CASES[case], np.float64)
    *qkv, cotangent = vectors(np.float64)
    with jax.enable_x64(True):
        for mask in (
            (posx.causal(), posx.full()) if case in ("shaw", "deberta", "t5-bidirectional") else (posx.causal(),)
        ):
            run = functools.partial(at_known_positions, encoding, mask=mask, cotangent=cotangent)
            o, grads = run(params, *qkv, executor=EVEN_TILES)
            assert_close((o, grads), run(params, *qkv, executor="dense"), 1e-10)
        assert_slopes(
            lambda params: np.sum(run(params, *qkv, executor=EVEN_TILES)[0] * cotangent),
            params, grads[0], np.random.default_rng(8),
        )  # fmt: skip


@pytest.mark.parametrize("case", ATTENDING)
def test_bfloat16_vectors_are_rounded_and_nothing_else_is(case):
    """Rounding to 8 bits is off by at most one part in 256. Outputs are rounded, and vectors that a hook maps, as
    rotated queries; on CPUs scores, weights and sums are not, so that gradients of params are those of float32.
    """
    unit, encoding = 2.0**-8, CASES[case]
    mapped = {"query", "key", "value", "output"} & {*encoding.sites}
    *qkv, cotangent = vectors(np.float64)
    with jax.enable_x64(True):
        wide = params_of(encoding, np.float64)
        wanted = at_known_positions(encoding, wide, *qkv, cotangent, executor="dense")
    wanted, wanted_grads = jax.device_get(wanted)
    params, qkv = params_of(encoding), [jnp.asarray(a, jnp.bfloat16) for a in qkv]
    for executor in executors(encoding):
        o, grads = at_known_positions(encoding, params, *qkv, np.float32(cotangent), executor=executor)
        assert o.dtype == jnp.bfloat16
        # Logits of these sizes are off by up to 2 units if both sides are rounded, weights by twice that.
        assert_allclose(np.asarray(o, np.float64), wanted, rtol=unit, atol=4 * unit if mapped else 1e-5)
        bounds = {name: 2 * unit if mapped else 1e-5 for name in params}, *[2 * unit] * 3

        def off(grad, wanted, bound):
            assert np.linalg.norm(np.asarray(grad, np.float64) - wanted) <= bound * np.linalg.norm(wanted)

        jax.tree.map(off, grads, wanted_grads, bounds)
        assert all(grad.dtype == jnp.float32 for grad in grads[0].values())
