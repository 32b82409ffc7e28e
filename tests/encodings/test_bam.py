"""BAM starts as ALiBi; its shape, scale and location one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.encodings import Alibi, Bam, Kerple
from posx.encodings.alibi import alibi_slopes
from tests.encodings.cases import DIMS
from tests.encodings.probes import distance_bias

R = np.arange(-12, 31, dtype=np.float32)
H = DIMS.num_heads


def built(**fields):
    encoding = posx.build({"name": "bam", **fields}, DIMS)
    return encoding, encoding.init(jax.random.key(0), DIMS)


def bias(encoding, params, r=R):
    return np.asarray(distance_bias(encoding, params, np.float32(r)))


@pytest.mark.parametrize("learned", [("shape", "scale"), (), ("shape", "scale", "loc")])
def test_it_starts_as_alibi(learned):
    encoding, params = built(learned=learned)
    assert params.keys() == set(learned) == encoding.shared
    wanted = bias(Alibi(H), {})
    # 1e-5 of a token more, in every head.
    assert_allclose(bias(encoding, params), wanted - 1e-5 * alibi_slopes(H)[:, None], rtol=1e-5)


def test_starting_values_are_those_of_the_fields():
    fields = {"learned": ("shape", "scale", "loc"), "shapes": (0.0, 1.0), "initial_scale": 0.2, "initial_loc": -0.5}
    _, params = built(**fields)
    assert_allclose(params["shape"], np.linspace(0, 1, H))
    assert_allclose(params["scale"], np.full(H, np.log(0.2)), rtol=1e-6)
    assert_array_equal(params["loc"], np.full(H, -0.5, np.float32))
    moved, some = built(**{**fields, "learned": ("shape",)})
    assert_allclose(bias(moved, some), bias(Bam(("shape", "scale", "loc"), num_heads=H), params), rtol=1e-5)


def test_shape_0_has_no_positions_and_others_are_powers():
    encoding, _ = built(learned=("shape",))
    assert_allclose(np.ptp(bias(encoding, {"shape": jnp.zeros(H)}), axis=1), 0, atol=1e-6)
    p, a = np.array([0.5, 0.8, 1.3, 2.0], np.float32), np.maximum(alibi_slopes(H), 0.01).astype(np.float32)
    power = bias(Kerple("power"), {"p": p, "a": a})
    found = bias(Bam(num_heads=H), {"shape": jnp.asarray(p), "scale": jnp.log(a)})
    assert_allclose(found[:, R != 0], power[:, R != 0], rtol=1e-4)
    assert_allclose(found[:, R == 0], 0, atol=1e-3)


@pytest.mark.parametrize("centre", [-3, 0, 4])
def test_bam_is_largest_at_its_centre_ahead_if_loc_is_positive(centre):
    encoding, params = built(learned=("shape", "scale", "loc"))
    params["loc"] = jnp.full(H, np.arcsinh(centre / 2), jnp.float32)
    assert_array_equal(R[bias(encoding, params).argmax(axis=1)], -centre)
    away = np.arange(8)
    assert_allclose(bias(encoding, params, away - centre), bias(encoding, params, -away - centre), atol=1e-5)


@pytest.mark.parametrize("shape", [-0.5, 0.0, 0.3])
def test_gradients_are_finite_at_the_centre(shape):
    encoding, params = built(learned=("shape", "scale", "loc"))
    params["shape"] = jnp.full(H, shape, jnp.float32)
    slopes = jax.jit(jax.grad(lambda params, r: encoding.by_distance(params, r).bias.sum(), argnums=(0, 1)))
    grads = slopes(params, np.float32([0, 2]))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    assert (np.abs(grads[0]["scale"]) > 0).all()
    assert built(per_layer=True)[0].shared == frozenset()
