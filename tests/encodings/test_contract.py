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
    FAMILIES,
    LARGEST,
    LENGTH,
    SMALL_TILES,
    STRUCTURAL,
    angle_error,
    in_float64,
    inputs,
    layer,
    layer_outputs,
    params_of,
    project,
    reference_layer,
)

all_cases = pytest.mark.parametrize("case", CASES)
structural_cases = pytest.mark.parametrize("case", STRUCTURAL)


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
    t = 7
    later = x + 100.0 * (np.arange(LENGTH) >= t)[:, None].astype(np.float32)
    before = layer(encoding, params, weights, x, *where)[:, :t]
    assert_array_equal(layer(encoding, params, weights, later, *where)[:, :t], before)
    prefix = layer(encoding, params, weights, x[:, :t], *(a[:, :t] for a in where))
    assert_allclose(prefix, before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [c for c, e in CASES.items() if e.reach is not None])
def test_beyond_its_reach_an_encoding_sees_no_distance(case):
    encoding, params = CASES[case], params_of(CASES[case])
    far = encoding.reach + np.array([0, 1, 2, 1000, 100_000])
    distances = np.concatenate([far, -far, np.arange(encoding.reach)])

    @jax.jit
    def terms(params):
        curve = encoding.curve(params, jnp.float32(distances)) if encoding.acts_on("curve") else None
        return *encoding.relative(params, jnp.asarray(distances)), None if curve is None else curve.T

    for term in jax.device_get(jax.tree.leaves(terms(params))):
        ahead, behind, near = np.split(term, [len(far), 2 * len(far)])
        assert_array_equal(ahead, np.broadcast_to(ahead[:1], ahead.shape))
        assert_array_equal(behind, np.broadcast_to(behind[:1], behind.shape))
        assert np.abs(near - ahead[:1]).max() > 1e-2


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
        return layer_outputs(encoding, params, weights, x, *where).sum()

    plain, again = (jax.jit(jax.grad(f, argnums=(0, 1)))(params, x) for f in (loss, jax.checkpoint(loss)))
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=0, atol=1e-5), again, plain)
