"""The network of distance: its input, its sizes, and its start."""

import jax
import numpy as np
from numpy.testing import assert_allclose

import posx
from posx.encodings import DynamicBias
from tests.encodings.cases import CASES, DIMS, params_of
from tests.encodings.probes import distance_bias

R = np.float32([-300, -2, -1, 0, 1, 2, 300])
PARAMS = params_of(CASES["dynamic_bias"])


def test_dynamic_bias_keeps_the_sign_of_the_distance():
    by_log = np.asarray(distance_bias(DynamicBias(width=3), PARAMS, R))
    plain = distance_bias(DynamicBias(width=3, log_distance=False), PARAMS, np.sign(R) * np.log(1 + np.abs(R)))
    assert_allclose(by_log, plain, atol=1e-5)
    assert (np.abs(by_log - by_log[:, ::-1])[:, R != 0] > 1e-3).all()


def test_dynamic_bias_is_smooth_at_distance_0():
    slope = jax.jit(jax.grad(lambda r: distance_bias(DynamicBias(width=3), PARAMS, r)[0].sum()))
    before, at, after = slope(np.float32([-1e-3, 0, 1e-3]))
    assert np.isfinite(at) and abs(before - after) < 0.01 + 0.01 * abs(before)


def test_sizes_and_start_are_those_of_x_transformers():
    dims = posx.Dims(model_dim=256, num_heads=8, head_dim=32, num_layers=2, train_len=64)
    encoding = posx.build("dynamic_bias", dims)
    params = encoding.init(jax.random.key(0), dims)
    wanted = {"w0": (1, 64), "b0": (64,), "w1": (64, 64), "b1": (64,), "w2": (64, 8)}
    assert {name: a.shape for name, a in params.items()} == wanted
    for name, a in params.items():
        bound = 1 if name.endswith("0") else 1 / 8
        assert 0.9 * bound < np.abs(a).max() <= bound and abs(float(a.mean())) < 0.3 * bound
    assert encoding.shared == params.keys()
    assert posx.build("dynamic_bias(per_layer=True)", DIMS).shared == frozenset()
