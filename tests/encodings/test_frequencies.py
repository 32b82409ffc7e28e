"""Rules for RoPE's frequencies: golden numbers, identities, Hugging Face's dictionaries, and what specs may say."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.conformance import check_encoding
from posx.encodings import Rope, spec_text
from posx.encodings.angles import inverse_frequencies
from posx.encodings.frequencies import (
    RULES,
    Clip,
    DynamicNtk,
    Geometric,
    Linear,
    Llama3,
    Longrope,
    Mobius,
    Ntk,
    NtkByParts,
    Periodic,
    Proportional,
    Resonance,
    WholeTurns,
    Yarn,
)
from posx.encodings.hugging_face import layer_ropes, read_rope, rope_parameters
from posx.errors import ConfigError

DIMS = posx.Dims(model_dim=64, num_heads=4, head_dim=16, num_layers=2, train_len=64, num_kv_heads=2)
BASE, WIDTH = 10000.0, 16
PLAIN = inverse_frequencies(BASE, WIDTH)


def theta(rule, base=BASE, width=WIDTH, dims=DIMS):
    return rule.resolve(dims).frequencies(base, width)


def test_llama3_has_the_golden_frequencies():
    wanted = [1, 0.244385, 0.0130423, 0.00395285, 0.00125, 0.000395285, 0.000125, 3.95285e-05]
    assert_allclose(theta(Llama3()), wanted, rtol=4e-6)
    assert_allclose(theta(NtkByParts(factor=8, fast=4)), theta(Llama3()), rtol=1e-12)


def test_yarn_has_the_golden_frequencies():
    assert_allclose(theta(Yarn(factor=4), width=8), [1, 0.0625, 0.0025, 0.00025], rtol=1e-6)
    assert_allclose(theta(Yarn(factor=4, truncate=False), width=8), [1, 0.0255952, 0.0025, 0.00025], rtol=2e-6)


@pytest.mark.parametrize(
    ("width", "length", "first", "last"),
    [(128, 4096, 20, 46), (128, 8192, 25, 50), (64, 2048, 8, 21), (64, 128, 0, 11)],
)
def test_yarn_ramps_over_the_published_planes(width, length, first, last):
    ratio = theta(Yarn(factor=4, original_len=length), width=width) / inverse_frequencies(BASE, width)
    assert_array_equal(np.flatnonzero(ratio == 1)[-1], first)
    assert_allclose(ratio[last:], 0.25, rtol=1e-12)
    assert 0.25 < ratio[last - 1] < 1


def test_yarn_multiplies_logits_by_the_published_factors():
    """Applied once to each side; YaRN's logits then have its square."""
    for factor, wanted in ((4, 1.1386), (16, 1.2773), (32, 1.3466), (64, 1.4159), (128, 1.4852)):
        assert_allclose(Yarn(factor=factor).resolve(DIMS).magnitude, wanted, atol=5e-5)
    assert Yarn(factor=16, mscale=1, mscale_all_dim=1).resolve(DIMS).magnitude == 1
    assert_allclose(Yarn(factor=16, mscale=0.707, mscale_all_dim=1).resolve(DIMS).magnitude, 1.196 / 1.27726, rtol=1e-3)
    assert Yarn(factor=16, attention_factor=0.9, mscale=2, mscale_all_dim=1).resolve(DIMS).magnitude == 0.9
    x = np.random.default_rng(0).standard_normal((5, 4, 16), np.float32)
    scaled, plain = (
        posx.build({"name": "rope", "frequencies": {"name": "yarn", "factor": 1.0, **more}}, DIMS)
        for more in ({"attention_factor": 1.5}, {})
    )
    assert_allclose(scaled.query({}, x, jnp.arange(5), {}), 1.5 * plain.query({}, x, jnp.arange(5), {}), rtol=1e-5)


def test_dynamic_ntk_has_the_golden_bases():
    rule = DynamicNtk(factor=2).resolve(dataclasses.replace(DIMS, head_dim=8))
    for length, base in ((64, 10000), (65, 10418.8), (128, 43267.5), (256, 133905.2)):
        assert_allclose(rule.at_length(length).frequencies(BASE, 8), inverse_frequencies(base, 8), rtol=1e-5)
    assert_array_equal(rule.at_length(16).frequencies(BASE, 8), inverse_frequencies(BASE, 8))


def test_ntk_keeps_the_fastest_plane_and_divides_the_slowest():
    ratio = theta(Ntk(factor=8), width=64) / inverse_frequencies(BASE, 64)
    assert_allclose(ratio[[0, -1]], [1, 1 / 8], rtol=1e-12)
    assert_allclose(theta(Ntk(factor=8), width=64), inverse_frequencies(85550.4, 64), rtol=1e-5)
    with pytest.raises(ConfigError, match="at least 4 rotated channels"):
        theta(Ntk(factor=2), width=2)


def test_longrope_switches_beyond_the_original_length():
    short, long = tuple(range(1, 9)), tuple(range(11, 19))
    rule = Longrope(short_factors=short, long_factors=long, factor=32, original_len=4096).resolve(DIMS)
    assert_allclose(rule.at_length(4096).frequencies(BASE, WIDTH), PLAIN / short)
    assert_allclose(rule.at_length(4097).frequencies(BASE, WIDTH), PLAIN / long)
    assert_allclose(rule.magnitude, 1.1902, atol=5e-5)
    with pytest.raises(ConfigError, match="short_factors has 8 numbers, but 4 planes rotate"):
        rule.frequencies(BASE, 8)


def test_whole_turns_stops_the_planes_without_a_turn():
    found = theta(WholeTurns(), width=32)
    assert (found > 0).sum() == 5
    assert_array_equal(found[:5], inverse_frequencies(BASE, 32)[:5])
    hard = theta(Clip(planes=11, hard=True), width=32)
    assert_array_equal(hard, found)
    soft = theta(Clip(planes=11), width=32)
    assert_array_equal(soft[:5], found[:5])
    assert soft[5] == inverse_frequencies(BASE, 32)[5] and soft[-1] == 0 and (np.diff(soft) < 0).all()


def test_resonance_makes_wavelengths_whole():
    waves = 2 * np.pi / theta(Resonance(), width=64)
    assert_allclose(waves, np.round(2 * np.pi / inverse_frequencies(BASE, 64)), rtol=1e-12)
    stopped = theta(Resonance(of=WholeTurns()), width=32)
    assert (stopped[5:] == 0).all() and (stopped[:5] > 0).all()


def test_mobius_turns_each_plane_by_an_odd_half_turn():
    rule = Mobius(share=0.5).resolve(DIMS)
    found = rule.frequencies(BASE, 32)
    assert found.shape == (2, 16)
    assert_allclose(np.cos(64 * found[0]), -1)
    assert_array_equal(found[1], inverse_frequencies(BASE, 32))
    kernel = [np.cos(m * found[0]).mean() for m in (0, 1, 2, 32, 64)]
    assert_allclose(kernel, [1, 0.6369, 0, 0, -1], atol=5e-5)


def rotate_ones(pos, periods):
    """Return vectors of ones at positions, [t, 4, 16], rotated by whole turns in some numbers of tokens."""
    rope = posx.build(f"rope(frequencies=periodic(periods={periods}))", DIMS)
    return np.asarray(rope.query({}, jnp.ones((len(pos), 4, 16)), jnp.asarray(pos), {}))


def test_periodic_planes_are_rotated_as_by_a_table():
    """Row i mod m of a table with m rows for each plane, the construction of the paper."""
    pos = np.array([*range(20), 500, 10**6 + 1, 2**24 + 1, 2**31 - 1])
    found = rotate_ones(pos, (2, 3, 1)).reshape(len(pos), 4, 2, 8)
    for plane, period in enumerate([2, 3, 1, 2, 3, 1, 2, 3]):
        table = np.exp(2j * np.pi * np.arange(period) / period) * (1 + 1j)
        wanted = table[pos % period][:, None]
        assert_allclose(found[:, :, 0, plane] + 1j * found[:, :, 1, plane], np.tile(wanted, 4), atol=3e-6)


def test_periodic_logits_repeat_after_the_common_period():
    vectors = rotate_ones(range(24), (2, 3, 4))
    logits = np.einsum("hd,shd->hs", vectors[0], vectors)
    assert_allclose(logits[:, :12], logits[:, 12:], atol=1e-4)
    for period in (2, 3, 4, 6):
        assert np.abs(logits[:, : 24 - period] - logits[:, period:]).max() > 1


def test_heads_share_the_frequencies_of_their_key_head():
    rope = posx.build("rope(frequencies=mobius(share=0.5))", DIMS)
    x = np.random.default_rng(0).standard_normal((3, 4, 16), np.float32)
    odd, plain = (Rope(rotary_dim=16, frequencies=rule) for rule in (Mobius(1.0, 64, 2), Geometric()))
    pos = jnp.asarray([3, 70, 200])
    found = rope.query({}, x, pos, {})
    assert_array_equal(found[:, :2], odd.query({}, x, pos, {})[:, :2])
    assert_array_equal(found[:, 2:], plain.query({}, x, pos, {})[:, 2:])


@pytest.mark.parametrize("name", [name for name in RULES if name != "periodic"])  # it is not near RoPE
def test_a_factor_of_one_is_rope(name):
    fields = {"factor": 1.0} if "factor" in RULES[name].__dataclass_fields__ else {}
    fields |= {"share": 0.0} if name == "mobius" else {"original_len": 10**6} if name == "whole_turns" else {}
    fields |= {"short_factors": (1,) * 8, "long_factors": (1,) * 8} if name == "longrope" else {}
    rule = RULES[name](**fields).resolve(DIMS).at_length(64)
    if name == "resonance":
        return assert_allclose(rule.frequencies(BASE, WIDTH), PLAIN, rtol=0.1)
    assert rule.magnitude == 1
    assert_allclose(np.broadcast_to(PLAIN, rule.frequencies(BASE, WIDTH).shape), rule.frequencies(BASE, WIDTH))


def test_identities_tie_the_rules_to_each_other():
    assert_allclose(theta(Linear(factor=4)) * 4, PLAIN)
    assert_allclose(theta(NtkByParts(factor=4, slow=0, fast=1e-9)), PLAIN)
    assert_allclose(theta(NtkByParts(factor=4, slow=1e8, fast=1e9)), PLAIN / 4)
    assert_allclose(theta(Yarn(factor=4, ramp="turns")), theta(NtkByParts(factor=4)))
    assert_allclose(theta(DynamicNtk(factor=1).resolve(DIMS).at_length(256)), theta(Ntk(factor=4)))
    assert_allclose(theta(Longrope((4.0,) * 8, (4.0,) * 8)), theta(Linear(factor=4)))
    assert (theta(Proportional(share=0.0)) == 0).all()
    nested = theta(Proportional(share=0.5))
    assert_array_equal(nested[:4], PLAIN[:4])
    assert (nested[4:] == 0).all()


def test_positions_times_factor_have_the_angles_of_rope():
    x = np.random.default_rng(0).standard_normal((4, 4, 16), np.float32)
    pos = jnp.asarray([0, 5, 17, 400])
    found, plain = (posx.build(spec, DIMS) for spec in ("rope(frequencies=linear(factor=8))", "rope"))
    assert_allclose(found.query({}, x, 8 * pos, {}), plain.query({}, x, pos, {}), atol=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        "rope(frequencies=yarn(factor=8))",
        "rope(base=500000, frequencies=llama3)+log_length",
        "rope(frequencies=resonance(of=yarn(factor=2)))",
        "xpos(rope=rope(frequencies=whole_turns))",
        "rope(frequencies=longrope(short_factors=(1, 2), long_factors=(3, 4)))",
    ],
)
def test_specs_spell_rules(text):
    value = posx.encodings.from_spec(text)
    assert spec_text(value) == text
    assert posx.encodings.from_spec(posx.encodings.spec_of(value)) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rope(frequencies=yarm)", "frequency rule 'yarm' is unknown. Did you mean 'yarn'"),
        ("rope(frequencies=alibi)", "frequency rule 'alibi' is unknown"),
        ("yarn(factor=2)", "'yarn' is a rule for RoPE's frequencies. Write rope(frequencies=yarn)"),
        ("rope(frequencies=yarn)", "frequency rule 'yarn' needs factor. Write yarn(factor=...)"),
        ("rope(frequencies=yarn(scale=2))", "frequency rule 'yarn' has no field 'scale'"),
        ("rope(frequencies=yarn(factor=0.5))", "factor=0.5 must be at least 1"),
        ("rope(frequencies=yarn+linear)", "a frequency rule is a name or a mapping, not list"),
        ("rope(frequencies=4)", "a frequency rule is a name or a mapping, not int"),
        ("rope(frequencies=ntk_by_parts(factor=2, slow=40))", "slow=40.0 must be below fast=32.0"),
        (
            "rope(frequencies=llama3(low_freq_factor=4))",
            "llama3: low_freq_factor=4.0 must be below high_freq_factor=4.0",
        ),
        ("rope(frequencies=clip(planes=99))", "planes=99 is more than the 8 planes"),
        ("rope(base=500, frequencies=periodic(periods=(2,)))", "base=500.0 has no effect on periodic. Leave it out"),
        ("rope(base=500, frequencies=resonance(of=periodic(periods=(2,))))", "base=500.0 has no effect on resonance"),
        ("rope(frequencies=periodic(periods=(2, 0)))", "periods=(2, 0) must be at least 1"),
        ("rope(rotary_dim=2, frequencies=periodic(periods=(2, 3)))", "periods has 2 numbers. Name 1 to 1"),
        ("rope(frequencies=longrope)", "short_factors has 0 numbers, but 8 planes rotate"),
    ],
)
def test_wrong_rules_are_refused_with_words(text, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        posx.build(text, DIMS)


@dataclasses.dataclass(frozen=True)
class Half(posx.FrequencyRule):
    def frequencies(self, base, width):
        return inverse_frequencies(base, width) / 2


@dataclasses.dataclass(frozen=True)
class Misspelt(posx.FrequencyRule):
    def freqs(self, base, width):
        return inverse_frequencies(base, width)


@dataclasses.dataclass(frozen=True)
class Traced(posx.FrequencyRule):
    def frequencies(self, base, width):
        return jnp.ones(width // 2)


def test_own_rules_are_named_by_their_module():
    own = posx.build(f"rope(frequencies={__name__}:Half)", DIMS)
    x = np.random.default_rng(0).standard_normal((4, 4, 16), np.float32)
    halved = posx.build("rope(frequencies=linear(factor=2))", DIMS)
    assert_allclose(own.query({}, x, jnp.arange(4), {}), halved.query({}, x, jnp.arange(4), {}), rtol=1e-6)
    for name, problem in (("Misspelt", "does not define frequencies"), ("Traced", "must return a NumPy array of 8")):
        with pytest.raises(ConfigError, match=problem):
            posx.build(f"rope(frequencies={__name__}:{name})", DIMS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        "yarn(factor=2)",
        "dynamic_ntk(factor=2)",
        "mobius(share=0.5)",
        "whole_turns",
        "periodic(periods=(2, 3, 1))",
        "resonance(of=ntk(factor=2))",
        "longrope(short_factors=(1, 1, 2), long_factors=(2, 3, 4), factor=2)",
    ],
)
def test_rules_keep_the_contract(rule):
    """At the length that the checks have: decoding equals the full forward pass for dynamic rules too."""
    rope = posx.encodings.from_spec(f"rope(frequencies={rule})")
    for length in (8, 64):
        report = check_encoding(rope.resolve(posx.conformance.DIMS).at_length(length))
        assert report.ok, report


def test_a_changing_rule_forgets_longer_texts():
    """The outputs of a text do not depend on the texts before it."""
    rope = posx.build("rope(frequencies=dynamic_ntk(factor=2))", DIMS)
    x = np.random.default_rng(0).standard_normal((64, 4, 16), np.float32)
    run = jax.jit(lambda value, x: value.query({}, x, jnp.arange(64), {}), static_argnums=0)
    first, longer, again = (run(rope.at_length(length), x) for length in (64, 256, 64))
    assert_array_equal(first, again)
    assert np.abs(first - longer).max() > 0.1


#: Configs as Hugging Face has them, and the spec of posx.
CONFIGS = [
    ({"rope_type": "default", "rope_theta": 5e5}, "rope(base=500000)"),
    ({"type": "linear", "factor": 2.0}, "rope(frequencies=linear(factor=2))"),
    ({"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.5},
     "rope(rotary_dim=8, frequencies=dynamic_ntk(factor=2, original_len=256))"),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16},
     "rope(frequencies=yarn(factor=4, original_len=64, fast=16))"),
    ({"rope_type": "yarn", "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.0},
     "rope(frequencies=yarn(factor=4, original_len=64, mscale=0.7, mscale_all_dim=1))"),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "attention_factor": 1.3},
     "rope(frequencies=yarn(factor=2, original_len=128, attention_factor=1.3))"),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 64}, "rope(frequencies=llama3(original_len=64))"),
    ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
      "original_max_position_embeddings": 64},
     "rope(frequencies=longrope(short_factors=(1, 1, 1, 1, 1, 1, 1, 1), "
     "long_factors=(2, 2, 2, 2, 2, 2, 2, 2), factor=4, original_len=64))"),
    ({"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
     "rope(base=1000000, frequencies=proportional(share=0.25))"),
]  # fmt: skip


def sizes(parameters):
    return {
        "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256, "rope_parameters": parameters
    }  # fmt: skip


@pytest.mark.parametrize(("parameters", "text"), CONFIGS)
def test_hugging_face_dictionaries_are_read_and_written(parameters, text):
    (rope,) = layer_ropes(sizes(parameters)).values()
    assert spec_text(rope) == text
    assert read_rope(rope_parameters(rope, 16), 16, 256) == rope


def test_each_number_of_rotated_channels_is_written():
    """A share of the channels is rounded down: 44 (30 / 44) is below 30."""
    for width in range(4, 130, 2):
        for rotated in range(2, width, 2):
            assert read_rope(rope_parameters(Rope(rotary_dim=rotated), width), width, 256).rotary_dim == rotated


def test_older_and_nested_dictionaries_are_read():
    older = sizes(None) | {"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 1e5}
    assert spec_text(layer_ropes(older)[""]) == "rope(base=100000, frequencies=linear(factor=4))"
    nested = sizes({
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    })  # fmt: skip
    found = {kind: spec_text(rope) for kind, rope in layer_ropes(nested).items()}
    assert found == {
        "full_attention": "rope(base=1000000, frequencies=linear(factor=8))",
        "sliding_attention": "rope",
    }


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (sizes({"rope_type": "linaer", "factor": 2}), "rope_type='linaer' is unknown. Did you mean 'linear'"),
        (sizes({"rope_type": "linear"}), "no 'factor'"),
        (sizes({"rope_type": "default", "sections": [1, 2]}), "key 'sections', which posx does not know"),
        ({"hidden_size": 64}, "no 'num_attention_heads'"),
    ],
)
def test_dictionaries_that_do_not_fit_are_refused(config, problem):
    with pytest.raises(ConfigError, match=problem):
        layer_ropes(config)


def test_sections_of_a_text_are_rope_with_a_notice(capsys):
    config = sizes({"rope_type": "default", "mrope_section": [1, 2], "mrope_interleaved": True})
    assert layer_ropes(config) == layer_ropes(sizes({"rope_type": "default"}))
    assert "mrope_section is read as rope, which is exact for texts" in "".join(capsys.readouterr())


def test_rules_that_hugging_face_lacks_are_not_written():
    lacking = WholeTurns(), Periodic((2,)), Yarn(2.0, ramp="turns"), Proportional(0.5)
    for rope in (Rope(layout="interleaved"), *(Rope(rotary_dim=8, frequencies=rule) for rule in lacking)):
        with pytest.raises(ConfigError, match="Hugging Face has"):
            rope_parameters(rope, 16)


@pytest.mark.peers
@pytest.mark.parametrize(
    "parameters", [given for given, _ in CONFIGS if given.get("rope_type", "default") != "default"]
)
@pytest.mark.parametrize("length", [50, 200, 300])
def test_rules_equal_those_of_transformers(parameters, length):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    asked = {"factor": None} if parameters["rope_type"] in ("yarn", "longrope") else {}
    known = {"rope_theta": 1e4} | asked | parameters
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=256, head_dim=16, rope_parameters=known
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", length)
    rope = read_rope(parameters, 16, 256).at_length(length)
    assert_allclose(rope.frequencies.frequencies(rope.base, rope.rotary_dim or 16), wanted, rtol=1e-5)
    assert math.isclose(rope.frequencies.resolve(DIMS).magnitude, factor, rel_tol=1e-6)
