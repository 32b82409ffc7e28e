"""TUPE: what is left without its projections, and the untied positions."""

import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from posx.encodings import Nope, Tupe
from tests.encodings.probes import attention_weights, vectors

M, H, D, T = 10, 2, 4, 8
PARAMS = {
    "table": vectors(T, M, seed=1), "norm_scale": vectors(M, seed=2), "norm_bias": vectors(M, seed=3),
    "u_q": 0.3 * vectors(M, H, D, seed=4), "u_k": vectors(M, H, D, seed=5), "theta": vectors(2, H, seed=6),
}  # fmt: skip
POS = jnp.arange(T)
Q, K = vectors(T, H, D, seed=7), vectors(T, H, D, seed=8)


def test_without_projections_it_is_plain_attention_at_scale_sqrt_2d():
    zero = PARAMS | {"u_q": 0 * PARAMS["u_q"]}
    w = attention_weights(Tupe(T), zero, Q, K, POS)
    assert_allclose(w, attention_weights(Nope(), {}, Q / np.float32(np.sqrt(2)), K, POS), atol=1e-5)


def test_the_position_term_knows_no_content_and_is_not_symmetric():
    bias = np.asarray(Tupe(T).bias(PARAMS, POS, POS))
    order = np.random.default_rng(0).permutation(T)
    moved = np.asarray(Tupe(T).bias(PARAMS, POS[order], POS[order]))
    assert_allclose(moved, bias[:, order][:, :, order], atol=1e-5)
    assert np.abs(bias - bias.swapaxes(1, 2)).max() > 0.1
    logits = np.log(attention_weights(Tupe(T), PARAMS, 0 * Q, K, POS))
    assert_allclose(logits - logits[..., :1], bias - bias[..., :1], atol=1e-4)


def test_scaling_the_table_changes_nothing_as_it_is_normalised():
    larger = PARAMS | {"table": 50 * PARAMS["table"] + 3}
    assert_allclose(Tupe(T).bias(larger, POS, POS), Tupe(T).bias(PARAMS, POS, POS), rtol=1e-3, atol=1e-3)


def test_untied_positions_read_theta_as_query_first_then_as_key():
    tied, untied = (np.asarray(Tupe(T, untied=u).bias(PARAMS, POS, POS)) for u in ((), (0, 5)))
    theta, special, others = PARAMS["theta"], np.array([0, 5]), np.array([1, 2, 3, 4, 6, 7])
    for h in range(H):
        assert_array_equal(untied[h][special], np.full((2, T), theta[0, h]))
        assert_array_equal(untied[h][others][:, special], np.full((6, 2), theta[1, h]))
        assert_array_equal(untied[h][others][:, others], tied[h][others][:, others])


def test_everything_is_shared_by_all_layers():
    assert Tupe(T).shared == {"table", "norm_scale", "norm_bias", "u_q", "u_k"}
    assert Tupe(T, untied=(0,)).shared == PARAMS.keys()
