"""What every registered encoding owes: one formula, whichever executor, position family or cache it runs through."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.attention.cache import write
from posx.encodings import encoding_name
from tests.encodings.cases import (
    CASES,
    DIMS,
    EVEN_TILES,
    FAMILIES,
    LARGEST,
    LENGTH,
    SMALL_TILES,
    angle_error,
    batch,
    in_float64,
    layer,
    params_of,
    project,
    projections,
    reference_layer,
    tokens,
)

all_cases = pytest.mark.parametrize("case", CASES)
#: Variants of a formula that run through the code of their base case add nothing where only the plumbing is tested.
STRUCTURAL = [*(case for case in CASES if "-" not in case), "transformer_xl-clamp", "tupe-r"]
#: One case per set of learned arrays.
LEARNED = [case for case in STRUCTURAL if params_of(CASES[case])] + ["learned-interpolate", "shaw-keys", "tupe-untied"]
structural_cases = pytest.mark.parametrize("case", STRUCTURAL)


def inputs(case, dtype=np.float32):
    """encoding, (params, weights, x), (pos, idx, segment)."""
    encoding = CASES[case]
    where = batch(encoding)
    return encoding, (params_of(encoding, dtype), projections(dtype), tokens(dtype=dtype)), vars(where).values()


def test_every_registered_encoding_has_a_case():
    assert set(posx.ENCODINGS) <= {encoding_name(encoding) for encoding in CASES.values()}


@all_cases
def test_executors_match_the_reference(case):
    encoding, floats, where = inputs(case)
    wanted = reference_layer(encoding, *floats, *where)
    if case in STRUCTURAL:
        o = layer(encoding, *floats, *where)
        assert_allclose(o, wanted, rtol=0, atol=1e-5 + 2 * angle_error(encoding, LARGEST))
    with jax.enable_x64(True):
        for executor in ("dense", SMALL_TILES):
            o = layer(encoding, *in_float64(floats), *where, executor=executor)
            assert_allclose(o, wanted, rtol=0, atol=1e-10)
            assert_array_equal(o[FAMILIES.index("left padded"), :4], 0)


@functools.partial(jax.jit, static_argnames=("encoding", "executor"))
def loss_and_grads(encoding, floats, where, cotangent, *, executor):
    return jax.value_and_grad(lambda f: jnp.sum(layer(encoding, *f, *where, executor=executor) * cotangent))(floats)


@pytest.mark.parametrize("case", [*LEARNED, "rope", "alibi"])
def test_gradients_agree_between_executors_and_with_finite_differences(case):
    encoding, floats, where = inputs(case, np.float64)
    where = tuple(where)
    rng = np.random.default_rng(4)
    cotangent = rng.standard_normal((len(FAMILIES), LENGTH, DIMS.num_heads, DIMS.head_dim))
    with jax.enable_x64(True):
        dense = loss_and_grads(encoding, floats, where, cotangent, executor="dense")
        tiles = loss_and_grads(encoding, floats, where, cotangent, executor=SMALL_TILES)
        jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-10, atol=1e-10), tiles, dense)
        leaves, structure = jax.tree.flatten(floats)
        for n, (leaf, grad) in enumerate(zip(leaves, jax.tree.leaves(dense[1]), strict=True)):
            direction, step = rng.standard_normal(leaf.shape), 1e-6

            def loss(shift, n=n, direction=direction):
                moved = structure.unflatten([a + shift * direction if m == n else a for m, a in enumerate(leaves)])
                return loss_and_grads(encoding, moved, where, cotangent, executor="dense")[0]

            slope = (loss(step) - loss(-step)) / (2 * step)
            assert_allclose(np.sum(grad * direction), slope, rtol=1e-6, atol=1e-7)
        # Outputs of the first t tokens pull nothing back to later ones, and padding gets nothing from anywhere.
        t = 7
        early = cotangent * (np.arange(LENGTH) < t)[:, None, None]
        for executor in ("dense", SMALL_TILES):
            x_grad = loss_and_grads(encoding, floats, where, early, executor=executor)[1][2]
            assert_array_equal(x_grad[:, t:], 0)
            assert np.abs(x_grad[:, :t]).max() > 1e-2
    padding = FAMILIES.index("left padded"), slice(0, 4)
    assert_array_equal(dense[1][2][padding], 0)
    assert_array_equal(tiles[1][2][padding], 0)


@functools.partial(jax.jit, static_argnames=("encoding", "executor", "mask"))
def in_order(encoding, params, q, k, v, cotangent, *, executor, mask):
    """Outputs and gradients where positions are known to count up: tables of distances, read as strips."""
    pos = np.arange(6, 6 + LENGTH, dtype=np.int32)

    def loss(params, q, k, v):
        o = posx.attend(encoding, params, q, k, v, q_pos=pos, k_pos=pos, mask=mask, executor=executor)
        return jnp.sum(o * cotangent), o

    return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(params, q, k, v)


@pytest.mark.parametrize("case", [c for c, e in CASES.items() if e.acts_on("curve") or e.acts_on("relative")])
def test_strips_of_distances_give_the_same_as_every_distance_by_itself(case):
    encoding, (params, weights, x), (pos, _, _) = inputs(case, np.float64)
    rng = np.random.default_rng(5)
    cotangent = rng.standard_normal((2, LENGTH, DIMS.num_heads, DIMS.head_dim))
    with jax.enable_x64(True):
        q, k, v = (a[:2] for a in jit_project(encoding, params, weights, x, pos))
        for mask in (
            (posx.causal(), posx.full()) if case in ("shaw", "deberta", "t5-bidirectional") else (posx.causal(),)
        ):
            dense, tiles = (
                in_order(encoding, params, q, k, v, cotangent, executor=executor, mask=mask)
                for executor in ("dense", EVEN_TILES)
            )
            jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-10, atol=1e-10), tiles, dense)


@functools.partial(jax.jit, static_argnames=("encoding", "executor", "keys_mapped"))
def decode_step(encoding, params, q, k, v, q_pos, k_pos, q_idx, k_idx, *, executor, keys_mapped):
    where = {"q_pos": q_pos, "k_pos": k_pos, "q_idx": q_idx, "k_idx": k_idx}
    return posx.attend(encoding, params, q, k, v, executor=executor, keys_mapped=keys_mapped, **where)


jit_project = jax.jit(project, static_argnames="encoding")
jit_write = jax.jit(write)


def decoded(encoding, params, weights, x, pos, idx, keys_mapped):
    """The outputs of `layer` out of a buffer of 20 slots: one token, one token, eight tokens, then one by one."""
    q, k, v = jit_project(encoding, params, weights, x, pos)
    if keys_mapped:
        k = jax.vmap(encoding.key, in_axes=(None, 0, 0, None))(params, k, pos, {})
        v = jax.vmap(encoding.value, in_axes=(None, 0, 0, None))(params, v, pos, {})
    capacity = len(x), 20
    slots = {"k": np.zeros((*capacity, *k.shape[2:]), np.float32), "v": np.zeros((*capacity, *v.shape[2:]), np.float32)}
    slots |= {"pos": np.zeros(capacity, np.int32), "idx": np.full(capacity, -1, np.int32)}
    outputs = []
    for start, stop in ((0, 1), (1, 2), (2, 10), (10, 11), (11, 12), (12, 13)):
        new = {"k": k, "v": v, "pos": jnp.asarray(pos), "idx": jnp.asarray(idx)}
        slots = {name: jit_write(slots[name], new[name][:, start:stop], start) for name in slots}
        o = decode_step(
            encoding, params, q[:, start:stop], slots["k"], slots["v"], pos[:, start:stop], slots["pos"],
            idx[:, start:stop], slots["idx"],
            executor="dense" if stop - start == 1 else SMALL_TILES, keys_mapped=keys_mapped,
        )  # fmt: skip
        outputs.append(o)
    return np.concatenate(outputs, axis=1)


@structural_cases
def test_cached_decode_equals_the_whole_sequence(case):
    encoding, (params, weights, x), (pos, idx, _) = inputs(case)
    whole = layer(encoding, params, weights, x, pos, idx, np.zeros_like(idx))
    for keys_mapped in (False, True)[: 1 + encoding.caches_mapped_keys]:
        o = decoded(encoding, params, weights, x, pos, idx, keys_mapped)
        assert_allclose(o, whole, rtol=0, atol=1e-5)


@structural_cases
def test_a_prefix_does_not_change_with_what_follows(case):
    encoding, (params, weights, x), where = inputs(case)
    assert encoding.prefix_consistent
    where, t = tuple(where), 7
    later = x + 100.0 * (np.arange(LENGTH) >= t)[:, None].astype(np.float32)
    before = layer(encoding, params, weights, x, *where)[:, :t]
    assert_array_equal(layer(encoding, params, weights, later, *where)[:, :t], before)
    prefix = layer(encoding, params, weights, x[:, :t], *(a[:, :t] for a in where))
    assert_allclose(prefix, before, rtol=0, atol=1e-5)


SHIFTS = (1, 17, 1000, 32768)


@pytest.mark.parametrize("case", [c for c, e in CASES.items() if e.shift_invariant])
def test_shift_invariant_encodings_do_not_see_a_shift_of_all_positions(case):
    encoding, floats, (pos, idx, segment) = inputs(case)
    still = layer(encoding, *floats, pos, idx, segment)
    for shift in SHIFTS:
        moved = layer(encoding, *floats, pos + np.int32(shift), idx, segment)
        # Transformer-XL forms its angles from differences, so only rotations owe anything to the size of the shift.
        largest = LARGEST + ("rope" in case) * shift
        assert_allclose(moved, still, rtol=0, atol=1e-5 + 2 * angle_error(encoding, largest))


@pytest.mark.parametrize("case", [c for c, e in CASES.items() if not e.shift_invariant])
def test_the_others_do_see_it(case):
    encoding, (params, weights, x), _ = inputs(case)
    assert encoding_name(encoding).split("+")[0] in ("sinusoidal", "learned", "tupe")
    idx = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (len(FAMILIES), LENGTH))
    outputs = [layer(encoding, params, weights, x, idx + shift, idx, 0 * idx) for shift in (0, 1, 17)]
    assert np.abs(outputs[1] - outputs[0]).max() > 1e-2
    assert np.abs(outputs[2] - outputs[0]).max() > 1e-2


@pytest.mark.parametrize("case", ["learned", "shaw", "rope"])
def test_jit_and_checkpoint_change_nothing(case):
    encoding, (params, weights, x), where = inputs(case)
    x, where = x[:1], [a[:1] for a in where]
    with jax.disable_jit():
        eager = layer(encoding, params, weights, x, *where)
    assert_allclose(layer(encoding, params, weights, x, *where), eager, rtol=0, atol=1e-5)

    def loss(params, x):
        return layer(encoding, params, weights, x, *where).sum()

    plain, again = (jax.jit(jax.grad(f, argnums=(0, 1)))(params, x) for f in (loss, jax.checkpoint(loss)))
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=0, atol=1e-5), again, plain)
