"""TUPE: what is left without its projections, and the untied positions."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.encodings import Nope, Tupe
from tests.encodings.probes import attention_weights, vectors

M, H, D, T = 10, 2, 4, 8
PARAMS = {
    "table": vectors(T, M, seed=1), "norm_scale": vectors(M, seed=2), "norm_bias": vectors(M, seed=3),
    "u_q": 0.3 * vectors(M, H, D, seed=4), "u_k": vectors(M, H, D, seed=5), "theta": vectors(2, H, seed=6),
}  # fmt: skip
TIED = {name: array for name, array in PARAMS.items() if name != "theta"}
POS = np.arange(T, dtype=np.int32)
Q, K = vectors(T, H, D, seed=7), vectors(T, H, D, seed=8)


def test_tupe_without_projections_is_attention_at_scale_sqrt_2d():
    zero = TIED | {"u_q": 0 * PARAMS["u_q"]}
    w = attention_weights(Tupe(T), zero, Q, K, POS)
    assert_allclose(w, attention_weights(Nope(), {}, Q / np.float32(np.sqrt(2)), K, POS), atol=1e-5)


def position_term(params=PARAMS, pos=POS, untied=()):
    """What TUPE adds to logits [h, q, k]: those of vectors that are zero."""
    encoding, pos, zero = Tupe(T, untied=untied), jnp.asarray(pos), jnp.zeros((T, H, D))
    q, k = (getattr(encoding, hook)(params, zero, pos, {}) for hook in ("query", "key"))
    return np.asarray(encoding.logit_scale(params, pos, {})[..., None] * jnp.einsum("qhd,khd->hqk", q, k)) / D**0.5


def test_the_position_term_knows_no_content_and_is_not_symmetric():
    term = position_term()
    order = np.random.default_rng(0).permutation(T)
    assert_allclose(position_term(pos=POS[order]), term[:, order][:, :, order], atol=1e-5)
    assert np.abs(term - term.swapaxes(1, 2)).max() > 0.1
    logits = np.log(attention_weights(Tupe(T), TIED, 0 * Q, K, POS))
    assert_allclose(logits - logits[..., :1], term - term[..., :1], atol=1e-4)


def test_scaling_the_table_changes_nothing_as_it_is_normalised():
    larger = PARAMS | {"table": 50 * PARAMS["table"] + 3}
    assert_allclose(position_term(larger), position_term(), rtol=1e-3, atol=1e-3)


def test_untied_positions_read_theta_as_query_first_then_as_key():
    tied, untied = position_term(), position_term(untied=(0, 5))
    theta, special, others = PARAMS["theta"], np.array([0, 5]), np.array([1, 2, 3, 4, 6, 7])
    for h in range(H):
        assert_allclose(untied[h][special], np.full((2, T), theta[0, h]), rtol=1e-6)
        assert_allclose(untied[h][others][:, special], np.full((6, 2), theta[1, h]), rtol=1e-6)
        assert_array_equal(untied[h][others][:, others], tied[h][others][:, others])


def test_tupe_heads_that_share_keys_share_their_projection():
    dims = posx.Dims(model_dim=M, num_heads=4, head_dim=D, num_layers=1, train_len=T, num_kv_heads=2)
    shapes = {name: a.shape for name, a in jax.eval_shape(lambda: Tupe(T).init(jax.random.key(0), dims)).items()}
    assert (shapes["u_q"], shapes["u_k"]) == ((M, 4, D), (M, 2, D))


def test_everything_is_shared_by_all_layers():
    assert Tupe(T).shared == {"table", "norm_scale", "norm_bias", "u_q", "u_k"}
    assert Tupe(T, untied=(0,)).shared == PARAMS.keys()
