"""Chains: the order of maps, sums and products of terms, declared facts, and names of parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.conformance import check_encoding
from posx.contract import HOOKS, MAPS, ByDistance, Chain, Composite, Encoding, Tabulated, Tile, acting_hooks
from posx.contract.facts import FACTS
from posx.encodings import T5, Alibi, Deberta, Learned, Nope, Rope, Shaw, Sinusoidal, Tupe
from tests.encodings.cases import CASES, DIMS, params_of
from tests.encodings.probes import attention_weights, plain_logits, softmax, vectors

T, H, D = 7, 4, 6
POS = np.arange(T, dtype=np.int32)
jit_attend = jax.jit(posx.attend, static_argnums=0)
Q, K = vectors(T, H, D), vectors(T, H, D, seed=1)


@dataclasses.dataclass(frozen=True)
class Affine(Encoding):
    """x -> a x + b wherever vectors are mapped, and fixed numbers everywhere else."""

    a: float
    b: float

    def embed(self, params, x, pos):
        return self.a * x + self.b

    def query(self, params, vectors, pos, features):
        return self.a * vectors + self.b

    key = value = output = query

    def decay(self, params):
        return jnp.full((1, D), self.a)

    def logit_scale(self, params, pos, features):
        return jnp.full((1, *pos.shape), self.a, jnp.float32)

    def by_distance(self, params, distance):
        n = distance.shape[0]
        return ByDistance(bias=jnp.full((1, n), self.a), query=jnp.full((n, 1, D), self.b), value=None)

    def bias(self, params, q_pos, k_pos):
        return jnp.full((1, q_pos.shape[0], k_pos.shape[0]), self.b, jnp.float32)

    def score(self, params, s, tile):
        return self.a * s + self.b

    def token_bias(self, params, pos, features):
        return jnp.full((*pos.shape, 1, 1), self.b)

    def sink(self, params):
        return jnp.full(1, self.b)


FIRST, SECOND = Affine(2.0, 1.0), Affine(3.0, 5.0)
BOTH = Chain((FIRST, SECOND))


@pytest.mark.parametrize("hook", MAPS)
def test_token_maps_apply_the_first_part_first(hook):
    """Outputs are mapped by the last part first."""
    x = jnp.ones((1, 1, D))
    wanted = 2 * (3 * x + 5) + 1 if hook == "output" else 3 * (2 * x + 1) + 5
    assert_array_equal(getattr(BOTH, hook)({}, x, POS[:1], {}), wanted)
    assert_array_equal(BOTH.embed({}, x[0], POS[:1]), 3 * (2 * x[0] + 1) + 5)


def test_logit_scales_multiply_biases_add_scores_compose():
    pos = jnp.asarray(POS)
    assert_array_equal(BOTH.logit_scale({}, pos, {}), np.full((1, T), 6.0))
    assert_array_equal(BOTH.decay({}), np.full((1, D), 5.0))
    assert_array_equal(BOTH.bias({}, pos, pos), np.full((1, T, T), 6.0))
    assert_array_equal(BOTH.token_bias({}, pos, {}), np.broadcast_to([1.0, 5.0], (T, 1, 2)))
    assert_allclose(BOTH.sink({}), [np.log(np.exp(1) + np.exp(5))], rtol=1e-6)
    ones = jnp.ones((T, H, D))
    tile = Tile(ones, ones, ones, ones, {}, {}, pos, pos, jnp.ones((1, T, 1)), jnp.ones((T, T), bool))
    assert_array_equal(BOTH.score({}, jnp.ones((H, T, T)), tile), np.full((H, T, T), 3.0 * (2 + 1) + 5))


def test_terms_by_distance_add_one_by_one():
    """A term that only some parts give is the sum of theirs, and a term that no part gives stays None."""
    found = Chain((*BOTH.parts, Alibi(H))).by_distance({}, jnp.asarray(POS))
    assert_array_equal(found.bias, 5.0 + Alibi(H).by_distance({}, jnp.asarray(POS)).bias)
    assert_array_equal(found.query, np.full((T, 1, D), 6.0))
    assert found.scaled is found.key is found.value is None


def test_chain_of_one_or_with_nope_changes_nothing():
    for case in ("shaw", "t5"):
        encoding, params = CASES[case], params_of(CASES[case])
        k, pos = jnp.asarray(K), jnp.asarray(POS)
        alone = jit_attend(encoding, params, Q[None], k[None], k[None], pos)
        for n, chain in enumerate((Chain((encoding,)), Chain((Nope(), encoding)))):
            renamed = {f"{n}.{name}": a for name, a in params.items()}
            chained = jit_attend(chain, renamed, Q[None], k[None], k[None], pos)
            assert_allclose(chained, alone, rtol=0, atol=1e-6)


def test_bias_of_a_chain_adds_to_its_maps():
    chain = posx.build(["rope", "alibi"], DIMS)
    turned_q, turned_k = (Rope(rotary_dim=D).query({}, x, jnp.asarray(POS), {}) for x in (Q, K))
    r = jnp.asarray(POS[:, None] - POS[None, :])
    bias = Alibi(H).by_distance({}, r.ravel()).bias.reshape(H, T, T)
    wanted = softmax(plain_logits(turned_q, turned_k) + bias)
    assert_allclose(attention_weights(chain, {}, Q, K, POS), wanted, atol=1e-5)


def test_declared_facts_follow_from_the_parts():
    chain = Chain((Rope(rotary_dim=D), Alibi(H)))
    assert chain.shift_invariant and not chain.reads_raw_keys
    assert (chain.tiling, chain.integer_positions, chain.max_position) == ("any", False, None)
    assert acting_hooks(chain) == ("query", "key", "by_distance")
    tables = Chain((Learned(30), Tupe(20), Shaw(3)))
    assert not tables.shift_invariant and Chain((Alibi(H), Deberta(5))).reads_raw_keys
    assert (tables.integer_positions, tables.max_position) == (True, 19)
    assert tables.shared == {"0.table", *(f"1.{name}" for name in Tupe(20).shared)}
    rows = dataclasses.make_dataclass("Rows", [], bases=(Nope,), frozen=True, namespace={"tiling": "rows"})
    assert Chain((Alibi(H), rows())).tiling == "rows"
    assert Chain((Alibi(H), posx.build("dape(kernel=3)", DIMS), rows())).tiling == "neighbours"
    for other in (T5(8, 20, head_dim=D), Tupe(8)):
        assert acting_hooks(Chain((other, Alibi(H))), ("by_distance", "bias")) == ("by_distance",)
    assert acting_hooks(Chain((Affine(1.0, 0.0), Alibi(H))), ("by_distance", "bias")) == ("by_distance", "bias")
    assert posx.build("key_offset+path", DIMS).history == {"features": 2, "key": 1}
    papers, beyond = zip(*(part.about[:2] for part in (Alibi(H), Shaw(3))), strict=True)
    assert Chain((Alibi(H), Alibi(H), Shaw(3))).about == posx.About(", ".join(papers), "; ".join(beyond))
    reaches = [Chain(parts).reach for parts in ((Shaw(3), Deberta(5)), (Shaw(3), Alibi(H)), (Rope(), Shaw(3)))]
    assert reaches == [5, None, 3]


@pytest.mark.parametrize(
    ("spec", "invariant"),
    [
        ("rope+rope(base=500)", True),
        ("transformer_xl+rope", True),
        pytest.param("xpos+rope", True, marks=pytest.mark.slow),
        ("rope+transformer_xl", False),  # u meets keys turned, queries not
        ("rope+pope", False),
        ("rope(layout=interleaved)+rope", False),
        pytest.param("rope(rotary_dim=4)+rope", False, marks=pytest.mark.slow),
    ],
)
def test_maps_that_rotate_other_planes_do_not_commute(spec, invariant):
    """What is declared is so, and its negation is not."""
    found = posx.conformance.check_encoding(spec, only=["shift_invariant"])
    assert not found.failures and posx.build(spec, posx.conformance.DIMS).shift_invariant == invariant


@pytest.mark.parametrize("rotary", ["rope", "selective_rope", pytest.param("fope", marks=pytest.mark.slow)])
def test_channels_that_a_part_appends_are_not_rotated(rotary):
    """TUPE's products of positions stand beside those of content, whether they come first or last."""
    x, dims, weights = vectors(T, DIMS.model_dim)[None], dataclasses.replace(DIMS, num_kv_heads=None), []
    own = {}
    for n, name in enumerate(("tupe", rotary)):
        shapes = jax.eval_shape(lambda name=name: posx.build(name, dims).init(jax.random.key(0), dims))
        own[name] = {key: 0.5 * vectors(a.size, seed=n).reshape(a.shape) for key, a in shapes.items()}
    for order in (("tupe", rotary), (rotary, "tupe")):
        chain = posx.build("+".join(order), dims)
        params = {f"{order.index(name)}.{key}": a for name in order for key, a in own[name].items()}
        v = jnp.eye(T)[None, :, None]
        o = jit_attend(chain, params, Q[None], K[None], jnp.repeat(v, H, axis=2), POS, x=x)
        weights.append(np.asarray(o))
    assert_allclose(*weights, atol=1e-6)
    assert np.abs(weights[0] - weights[0][:, ::-1]).max() > 0.01


@pytest.mark.parametrize("scale", ["ssmax", "adaptive_temperature", "ssmax+log_length"])
def test_logit_scale_of_each_head_multiplies_logits_of_a_chain(scale):
    x = vectors(T, DIMS.model_dim)
    factor = posx.build(scale, DIMS)
    chain, own = Chain((Rope(rotary_dim=D), factor)), params_of(factor)
    features = factor.features(own, jnp.asarray(x), POS, None)[0]
    tau = np.broadcast_to(factor.logit_scale(own, jnp.asarray(POS), features), (H, T))
    params = {f"1.{name}": a for name, a in own.items()}
    v = jnp.repeat(jnp.eye(T)[None, :, None], H, axis=2)
    o = jit_attend(chain, params, Q[None], K[None], v, POS, x=x[None])
    turned = (Rope(rotary_dim=D).query({}, vectors, jnp.asarray(POS), {}) for vectors in (Q, K))
    logits = np.where(np.tri(T, dtype=bool), tau[:, :, None] * plain_logits(*turned), -np.inf)
    assert_allclose(o[0].swapaxes(0, 1), softmax(logits), atol=1e-5)


def test_resolve_at_length_and_init_reach_every_part():
    chain = posx.build(["alibi", {"name": "learned", "beyond": "interpolate"}, "tupe"], DIMS)
    assert chain.parts == (Alibi(H), Learned(32, "interpolate"), Tupe(32))
    assert chain.at_length(64).parts[1].stretched_to == 64
    assert chain.at_length(64).parts[2] == Tupe(32)
    names = jax.eval_shape(lambda: chain.init(jax.random.key(0), DIMS))
    assert {name.split(".")[0] for name in names} == {"1", "2"}
    twice = Chain((Learned(4), Learned(4))).init(jax.random.key(0), DIMS)
    assert not np.array_equal(twice["0.table"], twice["1.table"])


def test_part_ten_is_not_part_one():
    eleven = Chain(tuple(Learned(1) for _ in range(11)))
    params = {f"{n}.table": np.full((1, 4), 2.0**n, np.float32) for n in range(11)}
    assert_array_equal(eleven.embed(params, jnp.zeros((1, 4)), jnp.zeros(1, jnp.int32)), np.full((1, 4), 2.0**11 - 1))


def test_chains_nest():
    flat = Chain((Rope(rotary_dim=D), Alibi(H), T5(8, 20, head_dim=D)))
    nested = Chain((Chain((Rope(rotary_dim=D), Alibi(H))), Chain((T5(8, 20, head_dim=D),))))
    table = vectors(8, H, seed=5)
    wanted, found = (
        attention_weights(encoding, {name: table}, Q, K, POS, mask=posx.causal())
        for encoding, name in ((flat, "2.table"), (nested, "1.0.table"))
    )
    assert_allclose(found, wanted, atol=1e-6)
    assert nested.shared == {"1.0.table"}


def test_embeddings_and_logit_terms_chain_in_any_order():
    forward, backward = (Chain(parts) for parts in ((Sinusoidal(), Alibi(H)), (Alibi(H), Sinusoidal())))
    x = vectors(T, DIMS.model_dim)
    assert_array_equal(forward.embed({}, x, jnp.asarray(POS)), Sinusoidal().embed({}, x, jnp.asarray(POS)))
    assert_array_equal(
        attention_weights(forward, {}, Q, K, POS), attention_weights(backward, {}, Q, K, POS)
    )  # fmt: skip


def test_content_terms_add():
    """Vectors by distance add, and DeBERTa's logit scale acts on all products with queries and keys."""
    deberta, shaw = Deberta(5, ("c2p",)), Shaw(3, values=False)
    p_deberta, p_shaw = params_of(deberta), params_of(shaw)
    chain = Chain((deberta, shaw))
    params = {f"0.{n}": a for n, a in p_deberta.items()} | {f"1.{n}": a for n, a in p_shaw.items()}
    logits = [np.log(attention_weights(e, p, Q, K, POS)) for e, p in ((deberta, p_deberta), (shaw, p_shaw))]
    wanted = softmax(logits[0] + 2**-0.5 * (logits[1] - plain_logits(Q, K)))
    assert_allclose(attention_weights(chain, params, Q, K, POS), wanted, atol=1e-4)


INSIDE, OUTSIDE = Deberta(5, ("c2p",)), T5(8, 20, bidirectional=True, scaled=False, head_dim=D)


@pytest.mark.parametrize(
    ("inner", "other"),
    [
        *[("transformer_xl", INSIDE), ("tupe", OUTSIDE)],
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("transformer_xl", OUTSIDE), ("tupe", INSIDE))),
    ],
)
def test_logit_scale_acts_on_all_terms_inside_the_scale(inner, other):
    """Transformer-XL's (q + v) . W_R R and TUPE's (p U_Q) . (p U_K) stand under sqrt(d) with the product they join."""
    dims = dataclasses.replace(DIMS, num_kv_heads=None)
    parts = posx.build(inner, dims), other
    logits, scales, params = [], [], {}
    for n, part in enumerate(parts):
        shapes = jax.eval_shape(lambda part=part: part.init(jax.random.key(0), dims))
        own = {name: 0.5 * vectors(*a.shape, seed=n) for name, a in shapes.items()}
        params |= {f"{n}.{name}": a for name, a in own.items()}
        logits.append(np.log(attention_weights(part, own, Q, K, POS)))
        scale = part.logit_scale(own, POS, {})
        scales.append(1.0 if scale is None else scale[0, 0])
    added = logits[1] - scales[1] * plain_logits(Q, K)  # DeBERTa's inside the scale, T5's outside
    wanted = scales[1] * logits[0] + (scales[0] if isinstance(other, Deberta) else 1.0) * added
    assert_allclose(attention_weights(Chain(parts), params, Q, K, POS), softmax(wanted), atol=1e-5)


@pytest.mark.parametrize("spec", ["fire+alibi", "t5+alibi"])
def test_chain_fades_if_a_part_does(spec):
    """FIRE's bias depends on more than distance; T5's is constant from some distance on, and then ALiBi's falls."""
    report = check_encoding(spec, DIMS, only=("fades",))
    assert report.ok, report
    assert posx.build(spec, DIMS).fades


def test_composite_passes_on_every_hook_and_fact():
    """A hook or fact that is new in the contract, and forgotten there, would be dropped without a word."""
    assert FACTS.keys() == {name for name, kind in Encoding.__annotations__.items() if "ClassVar" in str(kind)}
    assert {"acts_on", *HOOKS, *FACTS} <= vars(Composite).keys()
    assert "init" in vars(Composite) and issubclass(Chain, Composite) and issubclass(Tabulated, Composite)
    assert not vars(Chain).keys() & {*HOOKS, *FACTS}
