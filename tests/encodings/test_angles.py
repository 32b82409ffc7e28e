"""Angles at any position: against exact fractions of a turn, and as the encodings that turn or wave show them."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.encodings.angles import angles, inverse_frequencies, running_angles, sin_cos
from tests.encodings.cases import CASES, DIMS, first, layer, params_of, projections, tokens

#: 2 pi to 60 digits, so that the reference below has no rounding but its last.
TURN = Fraction("6.28318530717958647692528676655900576839433879875021164194989")
INT32 = np.iinfo(np.int32)


def exact(pos, frequency):
    """pos * frequency, radians within half a turn of zero."""
    turns = Fraction(pos) * Fraction(frequency) / TURN
    return float((turns - round(turns)) * TURN)


@pytest.mark.parametrize(("base", "width"), [(10_000.0, 32), (500_000.0, 64), (1.5, 8)])
def test_sines_and_cosines_are_exact_at_any_int32_position(base, width):
    rng = np.random.default_rng(0)
    pos = [0, 1, -1, 131_072, 10**6, 2**24 + 1, INT32.max, INT32.min, *rng.integers(INT32.min, INT32.max, 40)]
    frequencies = inverse_frequencies(base, width)
    sin, cos = jax.jit(lambda p: sin_cos(p, frequencies))(jnp.asarray(np.array(pos, np.int32)))
    wanted = np.array([[exact(int(p), w) for w in frequencies] for p in pos])
    assert_allclose(sin, np.sin(wanted), rtol=0, atol=1e-6)
    assert_allclose(cos, np.cos(wanted), rtol=0, atol=1e-6)


def test_float_positions_are_taken_as_they_are():
    pos = np.float32([0.25, 3.7, 70_000.5, 1e6 + 0.125, -12.75])
    frequencies = inverse_frequencies(10_000.0, 16)
    wanted = np.array([[exact(float(p), w) for w in frequencies] for p in pos])
    assert_allclose(np.sin(angles(pos, frequencies)), np.sin(wanted), rtol=0, atol=1e-6)
    slopes = jax.jit(jax.vmap(jax.jacfwd(lambda p: angles(p[None], frequencies)[0])))(pos)
    assert_allclose(slopes, np.tile(frequencies, (len(pos), 1)), rtol=1e-6)


def test_angles_of_floats_beyond_int32_are_nan():
    pos = np.float32([2.0**31 - 128, 128 - 2.0**31, 2.0**31, -(2.0**31), 1e20, np.inf, np.nan])
    for frequencies in (np.array([1.0, 1e-3]), jnp.array([1.0, 1e-3])):
        found = np.isnan(jax.jit(lambda p, w=frequencies: posx.angles(p, w))(pos))
        assert_array_equal(found, np.tile(np.arange(len(pos))[:, None] > 1, (1, 2)))


#: From the least normal number on, with both signs, and above pi, where a token is more than half a turn.
LEARNED = np.float32([1.0, -0.3, 1e-4, 3.1, 6.3, 1e-9, 1.2e-38, -0.0, 1e-42, 12_345.678, 2.0**32 - 256])


def test_angles_of_traced_frequencies_are_exact_at_any_position():
    rng = np.random.default_rng(0)
    w = np.concatenate([LEARNED, rng.uniform(0, 1, 20).astype(np.float32)])
    pos = np.array(
        [0, 1, -1, 10**6, 2**24 + 1, INT32.max, INT32.min, *rng.integers(INT32.min, INT32.max, 40)], np.int32
    )
    wanted = np.array([[exact(int(p), float(f)) for f in w] for p in pos])
    for given in (w, w.reshape(31, 1)):
        found = jax.jit(posx.angles)(pos, given)
        assert found.shape == (len(pos), *given.shape) and found.dtype == np.float32
        assert np.abs(found).max() <= 1.5 * np.pi + 1e-6
        off = np.angle(np.exp(1j * (np.float64(found).reshape(wanted.shape) - wanted)))
        assert np.abs(off).max() < 1e-6
    assert np.isnan(posx.angles(pos, jnp.array([2.0**32, -jnp.inf, jnp.nan]))).all()


def test_angles_have_the_gradients_of_the_product():
    pos, w = np.float32([3.5, -70_000.25]), np.float32([0.3, 1e-4])
    by_pos, by_w = jax.jit(jax.jacfwd(posx.angles, argnums=(0, 1)))(pos, w)
    assert_array_equal(by_pos, np.eye(2)[:, None, :] * w[None, :, None])
    assert_array_equal(by_w, pos[:, None, None] * np.eye(2)[None])
    back = jax.jit(jax.jacrev(lambda w: jnp.sin(posx.angles(np.int32([10**6]), w))))(w)[0]
    assert_allclose(np.diag(back), [10**6 * np.cos(exact(10**6, float(f))) for f in w], rtol=1e-5)
    square = jax.grad(lambda w: posx.angles(np.int32([7]), w[None])[0, 0] ** 2)
    twice = jax.jit(jax.grad(square))(jnp.float32(0.25))
    assert_allclose(twice, 2 * 7**2)
    with jax.enable_x64(True):
        assert_array_equal(posx.angles(np.int32([10**6]), jnp.array([[0.3]]))[0, 0], [1e6 * 0.3])


def steps_of(kind, length, width):
    rng = np.random.default_rng(0)
    drawn = {"one": np.ones((length, 1, width)), "part": np.full((length, 1, width), 0.3)}
    return np.float32(drawn.get(kind, rng.standard_normal((length, 1, width))))


@pytest.mark.parametrize(("kind", "bound"), [("one", 1e-4), ("part", 1e-3), ("random", 2e-5)])
def test_running_angles_stay_exact_over_100_000_steps(kind, bound):
    """To rounding of the steps: a float32 sum, one step after the other, is off by whole turns where they are equal."""
    frequencies = inverse_frequencies(10_000.0, 16)
    steps = steps_of(kind, 100_000, len(frequencies))
    wanted = np.cumsum(np.float64(steps) * frequencies, axis=0)
    found, _ = jax.jit(lambda s: running_angles(s, frequencies, None))(steps)
    off = np.angle(np.exp(1j * (np.float64(found) - wanted)))
    assert np.abs(off).max() < bound
    plain = np.cumsum(steps * np.float32(frequencies), axis=0, dtype=np.float32)
    assert kind == "random" or np.abs(np.float64(plain) - wanted).max() > 100 * bound


def test_running_angles_do_not_depend_on_chunks():
    frequencies = inverse_frequencies(100.0, 6)
    steps, weights = steps_of("random", 50, 3), steps_of("other", 50, 3)[::-1]
    run = jax.jit(lambda steps, carry: running_angles(steps, frequencies, carry))
    whole, last = run(steps, None)
    first, middle = run(steps[:17], None)
    second, end = run(steps[17:], middle)
    assert_array_equal(np.concatenate([first, second]), whole)
    assert_array_equal(end, last)
    slope = jax.jit(jax.grad(lambda s: (run(s, None)[0] * weights).sum()))(steps)
    assert_allclose(slope, np.cumsum(weights[::-1], axis=0)[::-1] * frequencies, atol=1e-5)


#: Encodings of angles: each way to rotate, and to add vectors. The others are variants and chains of these.
ROTATING = ("transformer_xl", "rope", "rope-interleaved", "selective_rope", "accumulated_rope", "rope+alibi")
OF_THESE = (
    "transformer_xl-clamp", "selective_rope-gated", "self_extend-rerope", "key_offset-rope", "canon-rope", "dape-rope",
    "learned_sinks-rope",
)  # fmt: skip


@pytest.mark.parametrize("case", first((*ROTATING, *OF_THESE), ROTATING))
def test_far_from_zero_attention_is_what_it_is_at_zero(case):
    encoding, t = CASES[case], 9
    params, weights, x = params_of(encoding), projections(), tokens(1, t)
    idx = np.arange(t, dtype=np.int32)[None]
    still = layer(encoding, params, weights, x, idx, idx, 0 * idx)
    for shift in (10**6, 2**24 + 1, INT32.max - t):
        moved = layer(encoding, params, weights, x, idx + np.int32(shift), idx, 0 * idx)
        assert_allclose(moved, still, rtol=0, atol=1e-5)


def test_sinusoidal_vectors_far_from_zero():
    encoding = posx.build("sinusoidal", DIMS)
    pos = np.array([10**6, 2**24 + 1], np.int32)
    vectors = jax.jit(encoding.embed)({}, jnp.zeros((2, DIMS.model_dim)), pos)
    frequencies = inverse_frequencies(10_000.0, DIMS.model_dim)
    wanted = [[f(exact(int(p), w)) for w in frequencies for f in (np.sin, np.cos)] for p in pos]
    assert_allclose(vectors, wanted, rtol=0, atol=1e-6)
