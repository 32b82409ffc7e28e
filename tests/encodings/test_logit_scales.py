"""The factor of logits at each position, and the terms that it acts on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.encodings import Alibi, Chain, Cope, Llama4Temperature, LogLength, Nope, Ssmax
from posx.encodings.alibi import alibi_slopes
from tests.encodings.cases import CASES, DIMS, params_of, projections, tokens
from tests.encodings.probes import attention_weights, plain_logits, softmax, vectors

T, H, D = 12, 4, 6
POS = np.arange(T, dtype=np.int32)
CAUSAL = np.tri(T, dtype=bool)
Q, K = vectors(T, H, D), vectors(T, H, D, seed=1)


def tau(encoding, pos, params=None, features=None):
    return np.asarray(encoding.logit_scale(params or {}, jnp.asarray(pos), features or {}))


def sharpened(logits, factor, bias=0.0):
    """Causal weights of logits [h, q, k] times factor [h or 1, q]."""
    return softmax(np.where(CAUSAL, logits * np.atleast_2d(factor)[..., None] + bias, -np.inf))


def test_log_length_acts_beyond_the_training_length_only():
    assert_array_equal(tau(LogLength(64), np.arange(64)), 1)
    far = np.array([64, 127, 4095, 131_071])
    assert_allclose(tau(LogLength(64), far)[0], np.log(far + 1) / np.log(64), rtol=1e-6)
    assert_allclose(tau(LogLength(64), [4095]), 2, rtol=1e-6)
    assert [posx.build("log_length", _dims(n)).train_len for n in (1, 2, 64)] == [2, 2, 64]
    w = attention_weights(LogLength(64), {}, Q, K, POS, mask=posx.causal())
    assert_allclose(w, attention_weights(Nope(), {}, Q, K, POS, mask=posx.causal()), atol=1e-6)


def test_llama_4_steps_at_every_floor_scale_tokens():
    published = Llama4Temperature(floor_scale=8192)
    assert_array_equal(tau(published, [0, 1, 8190]), 1)
    assert_allclose(tau(published, [8191, 16382, 16383])[0], 1 + 0.1 * np.log([2, 2, 3]), rtol=1e-6)
    assert len(np.unique(tau(published, np.arange(8191, 16383, 7)))) == 1
    default = posx.build("llama4_temperature", _dims(64))
    assert_allclose(tau(default, [62, 63])[0], [1, 1 + 0.1 * np.log(2)], rtol=1e-6)
    # Also where float32 has no odd numbers left.
    far = np.array([2**25 - 2, 2**25 - 1])
    assert_allclose(tau(Llama4Temperature(floor_scale=2**24), far)[0], 1 + 0.1 * np.log([2, 3]), rtol=1e-6)


def test_ssmax_raises_the_number_of_keys_to_the_logits():
    s = np.array([0.5, 1.0, 0.0, -1.0], np.float32)
    n = np.where(CAUSAL, POS + 1.0, 1)[None].swapaxes(1, 2).max(axis=1)[..., None]
    powers = np.where(CAUSAL, n ** (s[:, None, None] * plain_logits(Q, K)), 0)
    w = attention_weights(Ssmax(), {"s": s}, Q, K, POS, mask=posx.causal())
    assert_allclose(w, powers / powers.sum(axis=-1, keepdims=True), atol=1e-5)
    assert_array_equal(w[:, 0, 0], 1)  # the only key of the first query, at a factor of 0
    assert_array_equal(tau(Ssmax(), [0], {"s": s}), 0)


def test_starts_of_the_learned_ones():
    dims = posx.Dims(model_dim=500, num_heads=800, head_dim=2, num_layers=1, train_len=1024)
    s = Ssmax().init(jax.random.key(0), dims)["s"]
    assert s.mean() == pytest.approx(1, abs=0.002) and s.std() == pytest.approx(0.01, rel=0.1)
    even = Ssmax(initial=0.168)
    mean = tau(even, np.arange(1024), even.init(jax.random.key(0), dims))[:100].mean()
    assert mean == pytest.approx(1, abs=0.02)
    adaptive = posx.build("adaptive_temperature", dims)
    params = adaptive.init(jax.random.key(1), dims)
    assert all(w.std() == pytest.approx(0.02, rel=0.02) for w in params.values())


def test_adaptive_scale_is_a_constant_plus_a_power_of_the_log():
    encoding, pos = posx.build("adaptive_temperature", DIMS), np.array([0, 5, 1000])
    w_gamma = np.zeros((DIMS.model_dim, H))
    w_gamma[0] = [-40, 40, 0, np.arctanh(0.5)]
    params = {"w_beta": jnp.zeros(w_gamma.shape), "w_gamma": jnp.asarray(w_gamma, jnp.float32)}
    x = np.eye(DIMS.model_dim, dtype=np.float32)[[0, 0, 0]]
    features, carry = encoding.features(params, jnp.asarray(x), jnp.asarray(pos), None)
    grown = np.log(pos + 2)
    gammas = np.array([-2, 2, 0, 1])[:, None]
    assert carry is None
    assert_allclose(tau(encoding, pos, params, features), 1 + np.log(2) * grown**gammas, rtol=1e-5)
    # A slot that says nothing, whatever was learned.
    silent, _ = encoding.features(params_of(encoding), jnp.zeros((3, DIMS.model_dim)), jnp.asarray(pos), None)
    assert_allclose(tau(encoding, pos, params, silent), 1 + np.log(2), rtol=1e-6)


def test_plain_heads_are_left_as_they_are():
    s = np.array([0.7], np.float32)
    factor = np.concatenate([np.ones((3, T)), 0.7 * np.log(POS + 1)[None]])
    w = attention_weights(Ssmax(plain_heads=3), {"s": s}, Q, K, POS, mask=posx.causal())
    assert_allclose(w, sharpened(plain_logits(Q, K), factor), atol=1e-5)


@pytest.mark.parametrize("case", ["rope", "transformer_xl"])
def test_logit_scale_multiplies_all_products_inside_it(case):
    """Logits are known from weights but for a number per row, so that weights to the power tau tell."""
    inner, params = CASES[case], params_of(CASES[case])
    w = np.asarray(attention_weights(inner, params, Q, K, POS, mask=posx.causal()), np.float64)
    both = Chain((inner, LogLength(3)))
    named = {f"0.{name}": value for name, value in params.items()}
    power = w ** np.maximum(np.log(POS + 1) / np.log(3), 1)[:, None]
    found = attention_weights(both, named, Q, K, POS, mask=posx.causal())
    assert_allclose(found, power / power.sum(axis=-1, keepdims=True), atol=1e-5)
    assert np.abs(found - w).max() > 0.05


#: Encodings whose terms outside the products see nothing of q, so that a logit scale equals a larger query.
BESIDE = ("kerple", "sandwich", "fire", "fox", "inkling", "dape-kerple", "dape-v2", "path", "xpos", "fope",
          "selective_rope", "key_offset")  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "path" else pytest.mark.slow) for c in BESIDE])
def test_logit_scale_is_a_larger_query_and_nothing_else(case):
    encoding, params, weights, x = CASES[case], params_of(CASES[case]), projections(), tokens(1, T)
    order = np.arange(T, dtype=np.int32)[None]
    k, v, q = (jnp.einsum("btm,mhd->bthd", x, weights[n]) for n in "kvq")
    factor = np.maximum(np.log(POS + 1) / np.log(3), 1).astype(np.float32)[None, :, None, None]
    chain, named = Chain((encoding, LogLength(3))), {f"0.{name}": value for name, value in params.items()}
    given = {"x": x if encoding.acts_on("features") else None, "executor": "dense", "q_slots": posx.Slots(order, order)}
    found = jax.jit(lambda q: posx.attend(chain, named, q, k, v, **given))(q)
    plain = jax.jit(lambda q: posx.attend(encoding, params, q, k, v, **given))
    assert_allclose(found, plain(q * factor), atol=2e-5)
    assert np.abs(found - plain(q)).max() > 0.01


@pytest.mark.parametrize("scaled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_logit_scale_acts_on_the_rows_of_cope_not_on_its_gates(scaled):
    e = vectors(6, D, seed=2)
    gates = np.where(CAUSAL, 1 / (1 + np.exp(-plain_logits(Q, K))), 0)
    p = np.minimum(gates[:, :, ::-1].cumsum(axis=2)[:, :, ::-1], 5)
    rows = np.einsum("qhd,pd->hqp", Q, e)
    z = np.array([[[np.interp(p[h, i, j], np.arange(6), rows[h, i]) for j in range(T)] for i in range(T)]
                  for h in range(H)])  # fmt: skip
    factor = np.maximum(np.log(POS + 1) / np.log(3), 1)
    logits = plain_logits(Q, K) + z / np.sqrt(D) if scaled else plain_logits(Q, K)
    wanted = sharpened(logits, factor, 0.0 if scaled else z)
    both = Chain((Cope(6, scaled=scaled), LogLength(3)))
    assert_allclose(attention_weights(both, {"0.table": e}, Q, K, POS, mask=posx.causal()), wanted, atol=1e-5)


@pytest.mark.parametrize("first", [0, 1])
def test_logit_scale_leaves_biases_alone(first):
    parts = (Alibi(H), LogLength(3))
    factor = np.maximum(np.log(POS + 1) / np.log(3), 1)
    falls = alibi_slopes(H)[:, None, None] * np.abs(POS[:, None] - POS)
    found = attention_weights(Chain((parts[first], parts[1 - first])), {}, Q, K, POS, mask=posx.causal())
    assert_allclose(found, sharpened(plain_logits(Q, K), factor, -falls), atol=1e-5)


COUNTING = ("log_length", "ssmax", "llama4_temperature", "adaptive_temperature")


@pytest.mark.parametrize("name", COUNTING)
def test_keys_ahead_of_the_query_are_refused_if_keys_are_counted(name):
    """SSMax multiplied the logits of the first query by ln 1 = 0, however many keys it saw."""
    encoding = posx.build(name, DIMS)
    x = tokens(1, T) if encoding.acts_on("features") else None
    for given in (encoding, Chain((Nope(), encoding))):
        with pytest.raises(posx.errors.ConfigError, match="is for causal masks"):
            attention_weights(given, {}, Q, K, POS, mask=posx.full(), x=x)


def test_logit_scales_hold_at_the_ends_of_int32():
    ends, n = np.array([-(2**31), -1, 0, 2**31 - 2, 2**31 - 1], np.int32), np.array([1, 1, 1, 2**31 - 1, 2.0**31])
    half = np.full((len(ends), H), 0.5, np.float32)
    wanted = {
        "log_length(train_len=64)": (np.maximum(np.log(n) / np.log(64), 1), {}, {}),
        "ssmax": (0.5 * np.log(n), {"s": half[0]}, {}),
        "llama4_temperature(floor_scale=8192)": (1 + 0.1 * np.log(1 + n // 8192), {}, {}),
        "llama4_temperature(floor_scale=2147483647)": (1 + 0.1 * np.log(1 + n // (2**31 - 1)), {}, {}),
        "llama4_temperature(floor_scale=1)": (1 + 0.1 * np.log(1 + n), {}, {}),
        "adaptive_temperature": (1 + 0.5 * np.log(n + 1) ** 0.5, {}, {"beta": half, "gamma": half}),
        "t5(scaled=False)": (np.full(5, DIMS.head_dim**0.5), {}, {}),
        "tupe": (np.full(5, 0.5**0.5), {}, {}),
        "deberta": (np.full(5, 3**-0.5), {}, {}),
    }  # fmt: skip
    for spec, (values, params, features) in wanted.items():
        found = tau(posx.build(spec, DIMS), ends, params, features)
        assert_allclose(found[-1], values, rtol=1e-6, err_msg=spec)
    defined = {name for name in posx.ENCODINGS if posx.build(name, DIMS).acts_on("logit_scale")} | {"t5"}
    assert defined == {spec.partition("(")[0] for spec in wanted}


def test_the_number_of_keys_is_the_position_whatever_the_window():
    for encoding, params in ((LogLength(3), {}), (Ssmax(), {"s": np.ones(H, np.float32)})):
        whole = np.asarray(attention_weights(encoding, params, Q, K, POS, mask=posx.causal()))
        near = CAUSAL & (POS[:, None] - POS < 3)
        wanted = np.where(near, whole, 0)
        found = attention_weights(encoding, params, Q, K, POS, mask=posx.window(3))
        assert_allclose(found, wanted / wanted.sum(axis=-1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize("case", ["ssmax", "log_length"])
def test_equal_logits_stay_equal(case):
    w = attention_weights(CASES[case], params_of(CASES[case]), 0 * Q, K, POS, mask=posx.causal())
    assert_allclose(w, np.broadcast_to(CAUSAL / (POS[:, None] + 1), w.shape), atol=1e-6)


def _dims(train_len):
    return posx.Dims(model_dim=8, num_heads=2, head_dim=4, num_layers=1, train_len=train_len)
