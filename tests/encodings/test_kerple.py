"""Both forms against ALiBi, the bounds of their parameters, and the kernel that their name promises."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.conformance import check_encoding
from posx.encodings import Kerple
from posx.encodings.alibi import alibi_slopes
from tests.encodings.cases import DIMS
from tests.encodings.probes import distance_bias

R = np.arange(-20, 41, dtype=np.float32)
P, A = np.array([0.4, 1.0, 1.9, 2.0], np.float32), np.array([0.3, 0.05, 2.0, 0.7], np.float32)
FORMS = ("log", "power")
forms = pytest.mark.parametrize("form", FORMS)


def bias(form, p=P, a=A, r=R):
    return np.asarray(distance_bias(Kerple(form), {"p": np.float32(p), "a": np.float32(a)}, np.float32(r)))


@forms
def test_nothing_at_distance_0_and_ever_less_to_both_sides(form):
    b = bias(form)
    assert_array_equal(b[:, R == 0], 0)
    assert (np.diff(b[:, R >= 0]) < 0).all()
    assert_array_equal(b[:, (R >= -20) & (R <= 20)], b[:, (R >= -20) & (R <= 20)][:, ::-1])


def test_the_power_form_at_1_is_alibi():
    slopes = alibi_slopes(4)[:3]  # the fourth, 2^-8, is below the least a
    found = bias("power", np.ones(4), np.append(slopes, 0.01))
    assert_allclose(found, -np.append(slopes, 0.01)[:, None] * np.abs(R), rtol=1e-6)


def test_the_log_form_nears_alibi_as_a_falls():
    """p a = m: the series of the logarithm is off by at most m a r^2 / 2, and by nearly that."""
    m, a = np.array([0.5, 0.1]), np.array([0.01, 0.02])
    off = bias("log", m / a, a) + m[:, None] * np.abs(R)
    bound = (m * a)[:, None] * R**2 / 2
    assert (off <= bound + 1e-4).all() and (off >= 0.5 * bound - 1e-4).all()


@forms
def test_it_is_a_kernel(form):
    """Conditionally positive definite: c' B c >= 0 for every c that sums to 0; beyond a power of 2 it would not be."""
    i = np.arange(12)
    c = np.random.default_rng(0).standard_normal((200, 12))
    c -= c.mean(axis=1, keepdims=True)

    def least(b):
        return np.einsum("ni,hij,nj->hn", c, b[:, np.abs(i[:, None] - i[None, :])].astype(np.float64), c).min()

    assert least(bias(form, r=i)) > -1e-3
    assert least(-1.0 * i[None] ** 3) < -1


@forms
def test_kerple_mirrors_parameters_beyond_a_bound(form):
    assert_allclose(bias(form, p=0.02 - P), bias(form, p=P), rtol=1e-6)
    assert_allclose(bias(form, a=0.02 - A), bias(form, a=A), rtol=1e-6)
    most = np.full(4, 2.0)
    assert np.allclose(bias(form, p=most + 0.5), bias(form, p=most - 0.5)) == (form == "power")
    slope = jax.jit(jax.grad(lambda params: Kerple(form).by_distance(params, np.float32([3, 5])).bias.sum()))
    for name, beyond in (
        ("p", -0.3),
        ("a", -0.3),
        ("p", 0.01),
        ("a", 0.01),
        *([("p", 2.3)] if form == "power" else []),
    ):
        params = {"p": P, "a": A} | {name: np.full(4, beyond, np.float32)}
        assert (np.abs(slope(params)[name]) > 0).all()


def test_every_stored_power_is_read_between_the_bounds():
    """By the bias at distance 2: -2^p, whatever is stored. Between the bounds it is p itself, bit for bit."""
    stored = np.float32([-1e6, -4.0, -2.0, -1e-3, 0, 0.01, 1.3, 2, 2.5, 3.98, 4, 6.5, 100, 3e8])
    read = np.log2(-bias("power", p=stored, a=np.ones(len(stored)), r=[2])[:, 0])
    assert (read > 0.0099).all() and (read < 2.00001).all()
    assert_allclose(read[1:-2], [0.04, 1.98, 0.021, 0.02, 0.01, 1.3, 2, 1.5, 0.02, 0.02, 1.48], atol=3e-6)
    start = np.asarray(Kerple("power").init(jax.random.key(0), DIMS)["p"])
    assert_allclose(bias("power", p=start, r=[3])[:, 0], -A * 3**start, rtol=1e-6)


@forms
def test_gradients_are_finite_at_distance_0(form):
    def total(params, r):
        return Kerple(form).by_distance(params, r).bias.sum()

    slopes = jax.jit(jax.grad(total, argnums=(0, 1)))
    by_params, by_distance = slopes({"p": P, "a": A}, np.float32([0, 1, -2]))
    assert all(np.isfinite(g).all() for g in (*by_params.values(), by_distance))
    assert (np.abs(by_params["a"]) > 0).all()


def test_published_start():
    dims = posx.Dims(model_dim=8, num_heads=4000, head_dim=2, num_layers=1, train_len=64)
    for seed, (name, most) in enumerate({"p": 2.0, "a": 1.0}.items()):
        drawn = np.asarray(Kerple().init(jax.random.key(seed), dims)[name])
        assert_allclose(np.quantile(drawn, [0, 0.25, 0.5, 0.75, 1]), most * np.array([0, 0.25, 0.5, 0.75, 1]), atol=0.1)
        assert 0 <= drawn.min() and drawn.max() < most


def test_facts_of_the_forms():
    assert Kerple("power").fades and not Kerple("log").fades
    assert check_encoding(Kerple("power"), DIMS, only=("fades",)).ok
    assert Kerple().shared == {"p", "a"} and Kerple(per_layer=True).shared == frozenset()
