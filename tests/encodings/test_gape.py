"""GAPE: ALiBi and no position as limits, the mask of the paper, and gates that no rotation reaches."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.encodings import Alibi, Chain, Gape, Nope, Rope
from posx.encodings.alibi import alibi_slopes
from posx.errors import ConfigError
from tests.encodings.probes import attention_weights, plain_logits, softmax, vectors

T, H, D, L = 11, 4, 6, 16
POS, CAUSAL = np.arange(T, dtype=np.int32), np.tril(np.ones((T, T), bool))
Q, K = vectors(T, H, D), vectors(T, H, D, seed=1)
NUMBERS = {name: vectors(H, seed=n) for n, name in enumerate(("b_g", "b_l", "gamma"), start=4)}
PARAMS = {"w_g": vectors(H, D, seed=2), "w_l": vectors(H, D, seed=3), **NUMBERS}


def weights(encoding, params, pos=POS):
    return np.asarray(attention_weights(encoding, params, Q, K, pos, mask=posx.causal()))


def constant(b_g=0.0, b_l=0.0, gamma=0.0):
    """Gates that read no content."""
    given = {"b_g": b_g, "b_l": b_l, "gamma": gamma}
    return {"w_g": 0 * PARAMS["w_g"], "w_l": 0 * PARAMS["w_l"]} | {
        name: np.broadcast_to(np.float32(value), (H,)) for name, value in given.items()
    }


def gates(params):
    """Gamma_h g_i [h, i, 1] and l_j [h, 1, j] in float64."""
    q, k = (np.einsum("thd,hd->ht", x, np.float64(params[w])) for x, w in ((Q, "w_g"), (K, "w_l")))
    g = np.log1p(np.exp(q + params["b_g"][:, None])) * np.log1p(np.exp(params["gamma"]))[:, None]
    return g[:, :, None], 1 / (1 + np.exp(-(k + params["b_l"][:, None])))[:, None, :]


def penalised(logits):
    """The weights of logits [h, i, j] with the penalty."""
    g, landmark = gates(PARAMS)
    penalty = g * (1 - landmark) * (POS[:, None] - POS[None, :]) / L
    return softmax(np.where(CAUSAL, logits - penalty, -np.inf))


def test_landmarks_alone_are_no_position():
    assert_allclose(weights(Gape(L), PARAMS | {"b_l": np.full(H, 100, np.float32)}), weights(Nope(), {}), atol=1e-6)
    assert np.abs(weights(Gape(L), PARAMS) - weights(Nope(), {})).max() > 0.05


def test_gates_without_content_are_alibi():
    """With g = 1, l = 1/2 and Gamma_h = 2 L slope_h."""
    params = constant(b_g=np.log(np.e - 1), gamma=np.log(np.expm1(2 * L * alibi_slopes(H))))
    for times in (1, 2):
        assert_allclose(weights(Gape(times * L), params, times * POS), weights(Alibi(H), {}), atol=1e-6)


def test_weights_are_those_of_the_mask_in_the_paper():
    """Gamma_h g_i (j (1 - l_j) + i l_j) / T, which has a number for each query besides."""
    g, landmark = gates(PARAMS)
    mask = g * (POS[None, None, :] * (1 - landmark) + POS[None, :, None] * landmark) / L
    wanted = softmax(np.where(CAUSAL, plain_logits(Q, K) + mask, -np.inf))
    assert_allclose(weights(Gape(L), PARAMS), wanted, atol=1e-6)


def test_the_penalty_is_outside_of_the_scale():
    """A logit scale multiplies the products alone."""
    chain = posx.build("log_length(train_len=2)+gape", posx.Dims(H * D, H, D, 1, L))
    scale = np.maximum(1, np.log(POS + 1.0) / np.log(2))[:, None]
    found = weights(chain, {f"1.{name}": a for name, a in PARAMS.items()})
    assert_allclose(found, penalised(scale * plain_logits(Q, K)), atol=1e-6)


def test_beside_rope_gates_hold_no_position():
    """They read q and k before the rotation, in either order."""
    rope = Rope(rotary_dim=D)
    wanted = penalised(np.log(np.where(CAUSAL, weights(rope, {}), 1)))
    for n, chain in ((1, Chain((rope, Gape(L)))), (0, Chain((Gape(L), rope)))):
        params = {f"{n}.{name}": a for name, a in PARAMS.items()}
        for pos in (POS, POS + 1000):
            assert_allclose(weights(chain, params, pos), wanted, atol=1e-5)


def test_gape_is_exact_where_channels_of_positions_are_not():
    """At 16 million tokens float32 has steps of a token, so that products of positions would lose everything."""
    assert_allclose(weights(Gape(L), PARAMS, POS + 2**24), weights(Gape(L), PARAMS), atol=1e-7)


def test_gape_starts_with_a_mild_penalty():
    """Without w, half of (ln 2)^2 nats at a distance of the training length."""
    dims = posx.Dims(H * D, H, D, 1, L)
    encoding = posx.build("gape", dims)
    params = encoding.init(jax.random.key(0), dims)
    assert encoding == Gape(L) and encoding.decayed == {"w_g", "w_l"}
    penalty = np.log(2) ** 2 / 2 * (POS[:, None] - POS[None, :]) / L
    wanted = softmax(np.where(CAUSAL, plain_logits(Q, K) - penalty, -np.inf))
    found = weights(encoding, {name: 0 * a if name[0] == "w" else a for name, a in params.items()})
    assert_allclose(found, wanted, atol=1e-6)


def test_gape_refuses_masks_that_show_later_keys():
    with pytest.raises(ConfigError, match="^Gape.* is for causal masks"):
        attention_weights(Gape(L), PARAMS, Q, K, POS, mask=posx.full())
