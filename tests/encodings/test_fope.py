"""FoPE: which planes turn, which stand still, and that mixed waves are absolute positions."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posx.conformance import DIMS
from posx.encodings import Fope, Nope, Rope, build
from tests.cheap import in_one_program
from tests.encodings.probes import attention_weights, vectors

H, D = 4, 16
POS = np.array([0, 1, 2, 5, 17, 400])


def fope(**fields):
    return Fope(**({"original_len": 100, "base": 50.0, "num_kv_heads": H, "head_dim": D} | fields))


def turned(encoding, x, pos=POS, params=()):
    return np.asarray(in_one_program(encoding.query, dict(params), x, jnp.asarray(pos), {}))


def planes(x):
    return x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]


def turning(encoding, width):
    """How many planes of a head of this width change with the position."""
    x = np.ones((2, H, width), np.float32)
    moved = np.abs(planes(np.diff(turned(encoding, x, [0, 1]), axis=0))).max(axis=(0, 1)) > 1e-6
    assert (np.diff(moved.astype(int)) <= 0).all()
    return int(moved.sum())


@pytest.mark.parametrize(("length", "base", "planes_left"), [(512, 1e4, 16), (1024, 1e4, 18), (6, 1e4, 0), (7, 1e4, 1)])
def test_only_planes_that_turn_once_in_the_training_length_turn(length, base, planes_left):
    """Heads of 64 in the published runs of 512 and 1024 tokens; 2 pi tokens is the shortest period."""
    for dropped in ("doubled", "plain"):
        encoding = fope(original_len=length, base=base, gain=0.1, dropped=dropped, head_dim=64)
        assert turning(encoding, 64) == planes_left


def test_matrices_of_one_are_rope_with_still_planes():
    x, rope = vectors(len(POS), H, D), Rope(base=50.0, rotary_dim=D)
    assert_allclose(turned(fope(gain=0.0, original_len=10**9), x), turned(rope, x), atol=1e-6)
    left = turning(fope(gain=0.0), D)
    assert 0 < left < D // 2
    moved, still = np.split(planes(turned(rope, x)), [left], axis=-1)[0], planes(x)[..., left:]
    for dropped, factor in (("plain", 1), ("doubled", 1 + 1j)):
        wanted = np.concatenate([moved, factor * still], axis=-1)
        assert_allclose(planes(turned(fope(gain=0.0, dropped=dropped), x)), wanted, atol=1e-6)


def test_planes_that_stand_still_count_twice_or_once():
    """Of a head whose planes all stand still, nothing but the content is left."""
    q, k = vectors(len(POS), H, D), vectors(len(POS), H, D, seed=1)
    for dropped, scale in (("plain", 1), ("doubled", 2)):
        found = attention_weights(fope(original_len=6, dropped=dropped), {}, q, k, POS)
        assert_allclose(found, attention_weights(Nope(), {}, scale * q, k, POS), atol=1e-5)


def test_logits_depend_on_the_distance_alone_only_without_mixing():
    q, k = vectors(len(POS), H, D), vectors(len(POS), H, D, seed=1)
    for gain, bound in ((0.0, 1e-5), (0.3, None)):
        here, there = (attention_weights(fope(gain=gain), {}, q, k, POS + shift) for shift in (0, 17))
        off = np.abs(here - there).max()
        assert off < bound if bound else off > 0.01


def test_far_positions_are_exact():
    x, far = vectors(len(POS), H, D), POS + 2**24 + 1
    theta = 50.0 ** (-np.arange(0, D, 2) / D)
    theta = theta[theta >= 2 * math.pi / 100]
    n = len(theta)
    rng = np.random.default_rng(3)
    params = {name: rng.standard_normal((H, n, n)).astype(np.float32) for name in ("sin", "cos")}
    angle = far[:, None] * theta
    wave = np.einsum("tn,hnf->thf", np.cos(angle), params["cos"]) + 1j * np.einsum(
        "tn,hnf->thf", np.sin(angle), params["sin"]
    )
    wave = np.concatenate([wave, np.full((len(far), H, D // 2 - n), 1 + 1j)], axis=-1)
    assert_allclose(planes(turned(fope(learned=True), x, far, params)), planes(x) * wave, atol=2e-5)


def test_fope_matrices_depend_on_seed_or_layer():
    x = vectors(len(POS), H, D)
    assert_array_equal(turned(fope(), x), turned(fope(seed=0), x))
    assert np.abs(turned(fope(seed=1), x) - turned(fope(), x)).max() > 0.01
    dims = dataclasses.replace(DIMS, head_dim=D)
    assert build("fope", dims).init(jax.random.key(0), dims) == {}
    one, other = (fope(learned=True).init(jax.random.key(seed), dims) for seed in (0, 1))
    assert fope(learned=True).decayed == one.keys() == {"sin", "cos"} and not fope().decayed
    assert np.abs(turned(fope(learned=True), x, params=one) - turned(fope(learned=True), x, params=other)).max() > 0.01


def test_matrices_are_one_and_xavier_noise():
    """n planes and g heads: PyTorch takes [g, n, n] for a convolution's weights."""
    dims = dataclasses.replace(DIMS, num_heads=8, num_kv_heads=None, head_dim=64, train_len=512)
    learned = build({"name": "fope", "learned": True, "gain": 0.6}, dims)
    params = learned.init(jax.random.key(0), dims)
    at_zero = {True: turned(learned, np.ones((1, 8, 64), np.float32), [0], params)}
    fixed = dataclasses.replace(learned, learned=False)
    at_zero[False] = turned(fixed, np.ones((1, 8, 64), np.float32), [0])
    std = 0.6 * math.sqrt(2 / (8 * 16 + 16 * 16))
    noise = np.stack(list(params.values())) - np.eye(16)
    assert noise.shape == (2, 8, 16, 16) and noise.std() == pytest.approx(std, rel=4 / (2 * noise.size) ** 0.5)
    for found in at_zero.values():  # at position 0 a plane's cosine is the sum of its column
        columns = planes(found)[0, :, :16].real - 1
        assert columns.std() == pytest.approx(4 * std, rel=4 / (2 * columns.size) ** 0.5)


@pytest.mark.peers
def test_noise_is_as_large_as_that_of_torch():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    theirs = torch.nn.init.xavier_normal_(torch.empty(8, 16, 16), gain=0.6)
    assert float(theirs.std()) == pytest.approx(0.6 * math.sqrt(2 / (8 * 16 + 16 * 16)), rel=0.1)
