"""Nothing of the network gives the base; everything of it sees one pair, or a key and its neighbours."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.contract import ByDistance, Composite, acting_hooks, as_float
from posx.encodings import T5, Alibi, Chain, Dape, Learned, Nope, Rope
from posx.encodings.rates import Rate, encoding_rates
from posx.errors import ConfigError
from tests.cheap import in_one_program
from tests.encodings.cases import DIMS, params_of
from tests.encodings.probes import attention_weights, plain_logits, vectors

T, H, D = 9, 4, 6
POS, CAUSAL = np.arange(T, dtype=np.int32), np.tril(np.ones((T, T), bool))
Q, K = vectors(T, H, D), vectors(T, H, D, seed=1)


def weights(encoding, params, q=Q, k=K):
    return np.asarray(attention_weights(encoding, params, q, k, POS, mask=posx.causal()))


def log_weights(*args):
    return np.log(np.where(CAUSAL, weights(*args), 1))


def of_base(params):
    return {name.removeprefix("base."): a for name, a in params.items() if name.startswith("base.")}


@pytest.mark.parametrize(
    "base", ["rope+t5(num_buckets=8, max_distance=20)", "shaw(max_distance=3, values=False)", "cope"]
)
def test_a_zero_last_layer_is_the_base(base):
    encoding = posx.build({"name": "dape", "base": base}, DIMS)
    params = params_of(encoding)
    params["w_2"] = 0 * params["w_2"]
    wanted = weights(encoding.base, of_base(params))
    assert_allclose(weights(encoding, params), wanted, rtol=0, atol=1e-6)
    assert np.abs(weights(encoding, params_of(encoding)) - wanted).max() > 0.1


def changed_by_one_key(kernel, j=3):
    """Logits of the last query by key, up to one number, that differ if the j-th key's vector is another."""
    encoding = Dape(Alibi(H), kernel=kernel)
    params, other = params_of(encoding), K.copy()
    other[j] += 0.5
    moved = (log_weights(encoding, params, Q, other) - log_weights(encoding, params))[:, -1]
    return np.flatnonzero(np.abs(moved - moved[:, :1]).max(axis=0) > 1e-4)


def test_dape_v1_sees_one_pair_and_v2_its_neighbours():
    assert changed_by_one_key(1).tolist() == [3]
    assert changed_by_one_key(3).tolist() == [1, 2, 3, 4, 5]


def test_a_convolution_of_its_middle_alone_is_version_1():
    wide, narrow = Dape(Alibi(H), kernel=3), Dape(Alibi(H))
    params = params_of(narrow)
    padded = params | {name: np.pad(params[name], ((1, 1), (0, 0), (0, 0))) for name in ("w_1", "w_2")}
    assert_allclose(weights(wide, padded), weights(narrow, params), rtol=0, atol=1e-6)


def test_dape_v2_sees_no_later_key_but_needs_whole_rows():
    encoding, other = Dape(Alibi(H), kernel=3), K.copy()
    other[5:] += 3
    params = params_of(encoding)
    assert_allclose(weights(encoding, params, Q, other)[:, :5], weights(encoding, params)[:, :5], rtol=0, atol=0)
    assert (encoding.tiling, Dape(Alibi(H)).tiling) == ("neighbours", "any")


def test_dape_heads_permute_with_the_network():
    encoding, order = Dape(Nope()), np.array([2, 0, 3, 1])
    params = params_of(encoding)
    turned = params | {"w_1": params["w_1"][:, order], "w_2": params["w_2"][:, :, order]}
    wanted = weights(encoding, params)[order]
    assert_allclose(weights(encoding, turned, Q[:, order], K[:, order]), wanted, rtol=0, atol=1e-6)
    assert np.abs(weights(encoding, params, Q[:, order], K[:, order]) - wanted).max() > 0.1


def test_a_map_before_it_in_a_chain_is_a_map_of_its_base():
    within = Dape(Chain((Rope(rotary_dim=D), Alibi(H))))
    params = params_of(within)
    chained = Chain((Rope(rotary_dim=D), Dape(Alibi(H))))
    renamed = {f"1.{name}": a for name, a in params.items()}
    assert_allclose(weights(chained, renamed), weights(within, params), rtol=0, atol=1e-6)


def test_a_bias_beside_it_counts_once():
    """With the network at zero: the other ALiBi and that of the base."""
    chain = posx.build("alibi+dape(base=alibi)", DIMS)
    params = params_of(chain)
    params["1.w_2"] = 0 * params["1.w_2"]
    wanted = weights(posx.build("alibi+alibi", DIMS), {})
    assert_allclose(weights(chain, params), wanted, rtol=0, atol=1e-6)


def test_facts_and_names_are_those_of_the_base():
    around = posx.build({"name": "dape", "base": {"name": "t5", "max_distance": 20}}, DIMS)
    assert around.base == posx.build("t5(max_distance=20)", DIMS)
    params = around.init(jax.random.key(0), DIMS)
    assert params.keys() == {"base.table", "w_1", "b_1", "w_2"} and params["w_1"].shape == (1, 8, 32)
    assert around.shared == {"base.table"} and around.decayed == {"w_1", "w_2"}
    with pytest.raises(ConfigError, match="^T5.* is for causal masks"):
        attention_weights(around, params, Q, K, POS, mask=posx.full())
    learned = Dape(Learned(20, "interpolate"))
    assert (learned.max_position, learned.integer_positions, learned.shift_invariant) == (19, True, False)
    assert learned.at_length(50).max_position == 49
    assert learned.init(jax.random.key(0), DIMS)["w_1"].shape == (1, 4, 32)
    assert not Dape(Alibi(H)).fades and not Dape(Rope(rotary_dim=D)).reads_raw_keys
    assert acting_hooks(Dape(Rope(rotary_dim=D))) == ("query", "key", "score")
    with pytest.raises(ConfigError, match=r"^Alibi\.num_heads is not set"):
        weights(Dape(Alibi()), params)
    for fields, message in (({"kernel": 2}, "kernel=2 must be odd"), ({"width": 0}, "width=0 must be at least 1")):
        with pytest.raises(ConfigError, match=f"^dape: {message}"):
            Dape(**fields)


def test_the_base_is_trained_at_its_own_rate():
    own = dataclasses.dataclass(frozen=True)(type("Fast", (T5,), {"about": posx.About(lr_multiplier=7.0)}))
    rates = dict(encoding_rates(Dape(own(8, 20)), DIMS))
    assert rates == {"base.table": Rate(7.0), "b_1": Rate(), "w_1": Rate(decays=True), "w_2": Rate(decays=True)}


@pytest.mark.peers
def test_the_last_row_is_that_of_the_released_convolution():
    """Two Conv2d as the release has them, on scores whose upper triangle is 0. Its other rows see the hidden layer of
    the key after the query's own, which is not 0, and the last row does not: there they differ."""
    import torch

    encoding = Dape(Nope(), kernel=3)
    params = params_of(encoding)
    first, second = (torch.nn.Conv2d(*size, (1, 3), padding=(0, 1)) for size in ((H, 32), (32, H)))
    for layer, n in ((first, 1), (second, 2)):
        layer.weight.data = torch.tensor(params[f"w_{n}"].transpose(2, 1, 0)[:, :, None].copy())
    first.bias.data, second.bias.data = torch.tensor(params["b_1"]), torch.ones(H)
    scores = torch.tensor(plain_logits(Q, K).astype(np.float32))
    released = scores + second(torch.nn.functional.leaky_relu(first(torch.tril(scores))))
    wanted = torch.softmax(torch.where(torch.tensor(CAUSAL), released, -torch.inf), -1).detach().numpy()
    found = weights(encoding, params)
    assert_allclose(found[:, -1], wanted[:, -1], rtol=0, atol=1e-5)
    assert np.abs(found - wanted)[:, :-1].max() > 0.1


@dataclasses.dataclass(frozen=True)
class Around(Composite):
    base: posx.Encoding

    def named_parts(self):
        return {"base": self.base}


def test_composite_has_its_own_hooks_called():
    @dataclasses.dataclass(frozen=True)
    class Warm(Around):
        def logit_scale(self, params, pos, features):
            return jnp.full((1, *pos.shape), 3.0, as_float(0).dtype)

    given = Warm(Alibi(H))
    assert acting_hooks(given) == ("logit_scale", "by_distance") and given.fades
    w = attention_weights(given, {}, Q, K, POS, mask=posx.causal())
    assert_allclose(w, attention_weights(Alibi(H), {}, 3 * Q, K, POS, mask=posx.causal()), atol=1e-5)


@pytest.mark.parametrize("hook", ["bias", "by_distance"])
@pytest.mark.parametrize("executor", ["dense", "blockwise"])
def test_composite_own_hook_replaces_that_of_the_base(hook, executor):
    hooks = {
        "bias": lambda self, params, q_pos, k_pos: jnp.zeros((1, len(q_pos), len(k_pos))),
        "by_distance": lambda self, params, distance: ByDistance(bias=jnp.zeros((1, len(distance)))),
    }
    base = {"bias": posx.build("fire", DIMS), "by_distance": Alibi(H)}[hook]
    flat = dataclasses.dataclass(frozen=True)(type("Flat", (Around,), {hook: hooks[hook]}))(base)
    params = flat.init(jax.random.key(0), DIMS)
    found, plain = (
        in_one_program(posx.attend, encoding, given, Q[None], K[None], K[None], POS, executor=executor)
        for encoding, given in ((flat, params), (Nope(), {}))
    )
    assert_allclose(found, plain, rtol=0, atol=1e-6)
