"""From a spec to a value and back: names, fields, types, sizes, and the one line that says what is wrong."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posx
from posx.contract import acting_hooks, require_resolved
from posx.encodings import Chain, encoding_name, from_spec, spec_of, spec_text
from posx.errors import ConfigError
from posx.lab.config import encoding_fields
from tests.cheap import in_one_program
from tests.encodings.cases import ACTING, CASES, DIMS, SPECS, STRUCTURAL, first

all_cases = pytest.mark.parametrize("case", CASES)


@all_cases
def test_built_values_survive_the_round_trip(case):
    encoding = CASES[case].at_length(0)
    again = posx.build(spec_of(encoding), DIMS)
    assert again == encoding
    assert hash(again) == hash(encoding)
    assert repr(again) == repr(encoding)
    assert posx.build(encoding, DIMS) == encoding
    assert posx.build(SPECS[case], DIMS) == encoding


@all_cases
def test_what_is_printed_can_be_typed(case):
    """With only the fields that were set: what is left to the sizes, or to the default, is not in the text."""
    asked = from_spec(SPECS[case])
    text = spec_text(SPECS[case])
    assert from_spec(text) == asked and spec_text(text) == text and "None" not in text
    assert posx.build(spec_text(CASES[case]), DIMS).at_length(32) == CASES[case]


@pytest.mark.parametrize("name", ["learned", "tupe"])
def test_the_length_of_a_table_is_no_setting(name):
    """`at_length` sets it. It tells values apart, but is neither printed nor accepted."""
    message = f"^encoding '{name}' has no field 'stretched_to'"
    for spec in (f"{name}(beyond=interpolate, stretched_to=100)", {"name": name, "stretched_to": 0}):
        with pytest.raises(ConfigError, match=message):
            posx.build(spec, DIMS)
    with pytest.raises(TypeError, match="stretched_to"):
        posx.ENCODINGS[name](stretched_to=100)
    table = posx.build(f"{name}(beyond=interpolate)", DIMS)
    long = table.at_length(100)
    assert long != table and long.max_position == 99 and long.at_length(16) == table.at_length(16)
    assert posx.build(long, DIMS) == long and pickle.loads(pickle.dumps(long)) == long == copy.deepcopy(long)
    printed = f"{spec_text(long)} {spec_of(long)} {long} {encoding_fields(spec_text(long))}"
    assert "stretched" not in printed and "100" not in printed


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("rope", "rope"), ({"name": "rope", "base": 10000.0}, "rope"),
        ({"name": "rope", "base": 5e5}, "rope(base=500000)"),
        (["rope", {"name": "t5", "num_buckets": "auto", "max_distance": 128}], "rope+t5(max_distance=128)"),
        ({"name": "chain", "parts": ("rope(base=50)", "alibi")}, "rope(base=50)+alibi"),
        ("tupe(untied=(0, 3))", "tupe(untied=(0, 3))"),
        ("dape", "dape"), ({"name": "dape", "base": {"name": "alibi"}}, "dape(base=alibi)"),
        ({"name": "dape", "base": ["rope", "alibi"], "kernel": 3}, "dape(base=rope+alibi, kernel=3)"),
    ],
)  # fmt: skip
def test_a_spec_is_printed_as_short_as_it_can_be(spec, text):
    assert spec_text(spec) == text


@all_cases
def test_values_pickle_and_copy(case):
    encoding = CASES[case]
    assert pickle.loads(pickle.dumps(encoding)) == encoding == copy.deepcopy(encoding)


def test_all_cases_are_different_values():
    assert len(set(CASES.values())) == len(CASES)


#: Arrays that start the same whatever the seed.
CONSTANT = (
    "norm_scale",
    "norm_bias",
    "omega",
    "b",
    "c",
    "multiplier",
    "shape",
    "scale",
    "loc",
    "delta",
    "z",
    "drift",
    "gate_bias",
    "alpha",
    "b_g",
    "b_l",
    "gamma",
)


@pytest.mark.parametrize("case", first(CASES, STRUCTURAL))
def test_params_follow_init_and_scope(case):
    encoding = CASES[case]
    params, other = (jax.device_get(encoding.init(jax.random.key(seed), DIMS)) for seed in (0, 1))
    assert encoding.shared <= params.keys()
    assert all(a.dtype == np.float32 for a in params.values())
    random = {name for name in params if (params[name] != other[name]).any()}
    constant = {*CONSTANT} | ({"table"} if case.startswith("cope") else set())
    assert random == {name for name in params if name.split(".")[-1] not in constant}


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("learned", {"table": 0.02}),
        ("shaw", {"keys": 64**-0.5, "values": 64**-0.5}),
        ("transformer_xl", {"u": 0.02, "v": 0.02, "w_r": 0.02}),
        ("t5", {"table": 512**-0.5}),
        ("tupe", {"table": 0.02, "u_q": 0.02, "u_k": 0.02}),
        ("deberta", {"table": 0.02, "w_k": 0.02, "w_q": 0.02}),
        ("dape", {"w_1": 48**-0.5, "b_1": 48**-0.5, "w_2": 96**-0.5}),  # uniform within the root of 3 of these
        ("inkling", {"w": 0.02, "bank": 0.02}),
        ("grape_a", {"u": 64**-0.5, "v": 64**-0.5}),
        ("darope", {"w": 0.1}),
        ("gape", {"w_g": 0.02, "w_l": 0.02}),
        ("selective_rope", {"down": 0.02, "up": 0.02, "kernel": 0.02}),
        ("accumulated_rope", {"steps": 512**-0.5}),
        ("canon", {"query": 12**-0.5, "key": 12**-0.5, "value": 12**-0.5}),
        ("path", {"down": 0.02, "up": 0.02, "kernel": 0.02, "u": 0.02}),
    ],
)
def test_initial_spread_is_the_published_one(name, std):
    dims = posx.Dims(model_dim=512, num_heads=8, head_dim=64, num_layers=2, train_len=256)
    params = jax.device_get(in_one_program(posx.build(name, dims).init, jax.random.key(0), dims))
    for key, wanted in std.items():
        tolerance = 4 / (2 * params[key].size) ** 0.5  # four standard errors of a standard deviation
        assert float(params[key].std()) == pytest.approx(wanted, rel=tolerance)


@pytest.mark.parametrize("name", posx.ENCODINGS)
def test_docstring_has_the_equation_and_the_paper(name):
    cls = posx.ENCODINGS[name]
    assert " = " in cls.__doc__ or "<-" in cls.__doc__
    assert "arXiv" in cls.__doc__
    paper = cls.about.paper
    assert paper.startswith(("arXiv ", "https://", "github.com/")) and paper.removeprefix("arXiv ") in cls.__doc__
    assert cls.about.beyond


@pytest.mark.parametrize("name", posx.ENCODINGS)
def test_fields_are_open_only_until_resolved(name):
    cls = posx.ENCODINGS[name]
    open_fields = [field.name for field in dataclasses.fields(cls) if field.default is None]
    if open_fields:
        with pytest.raises(ConfigError, match=rf"^{cls.__name__}\.{open_fields[0]} is not set"):
            require_resolved(cls())
    resolved = posx.build({"name": name, **dict.fromkeys(open_fields, "auto")}, DIMS)
    require_resolved(resolved)
    assert resolved == cls().resolve(DIMS) == resolved.resolve(DIMS)


def test_unresolved_value_is_refused_by_attend():
    q = jnp.ones((1, 2, 4, 6))
    pos = np.arange(2, dtype=np.int32)
    for name, cls in posx.ENCODINGS.items():
        if all(field.default is not None for field in dataclasses.fields(cls)):
            continue
        unresolved = posx.ENCODINGS[name]()
        with pytest.raises(ConfigError, match="is not set. Call resolve"):
            posx.attend(unresolved, {}, q, q, q, pos)
        with pytest.raises(ConfigError, match="is not set. Call resolve"):
            posx.attend(Chain((unresolved,)), {}, q, q, q, pos)


def test_defaults_follow_the_training_length():
    def built(name, length):
        return posx.build(name, dataclasses.replace(DIMS, train_len=length))

    for length, size in ((16, (8, 8)), (48, (22, 24)), (64, (30, 32)), (96, (32, 48)), (512, (32, 256))):
        t5 = built("t5", length)
        assert (t5.num_buckets, t5.max_distance) == size
        assert set(np.asarray(t5.bucket(jnp.arange(length, dtype=jnp.float32)))) == set(range(t5.num_buckets))
    assert (built("t5", 512).num_buckets, built("t5", 512).max_distance) == (32, 256)
    assert [built("shaw", n).max_distance for n in (8, 64)] == [4, 16]
    assert built("deberta", 64).max_distance == 64
    assert built("learned", 64).num_positions == built("tupe", 64).num_positions == 64
    assert built("alibi", 64).num_heads == DIMS.num_heads
    assert built("rope", 64).rotary_dim == DIMS.head_dim
    assert [built("cope", n).num_positions for n in (1, 48, 512)] == [2, 48, 64]
    assert [built("inkling", n).extent for n in (64, 4096)] == [64, 1024]
    assert built("grape_a", 64).num_heads == DIMS.num_heads


@pytest.mark.parametrize("length", [1, 2, 3, 100])
@pytest.mark.parametrize("name", posx.ENCODINGS)
def test_every_training_length_builds(name, length):
    dims = dataclasses.replace(DIMS, train_len=length)
    posx.build(name, dims)  # which calls `init` and every hook by shape
    if name == "t5":
        posx.build({"name": "t5", "bidirectional": True}, dims)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rpoe", r"encoding 'rpoe' is unknown. Did you mean 'rope'\? The encodings are: nope, .*alibi, "),
        ({"name": "alibi2"}, r"Did you mean 'alibi'\?"),
        (
            {"name": "rope", "bass": 5.0},
            r"encoding 'rope' has no field 'bass'. Did you mean 'base'\? The fields are: base",
        ),
        ({"name": "nope", "base": 1.0}, r"encoding 'nope' has no field 'base'. The fields are: none"),
        ({"base": 5.0}, r"has no name. The encodings are: nope"),
        ({"name": "rope", "base": "large"}, r"encoding\.base=large: not a number"),
        ({"name": "t5", "num_buckets": 8.5}, r"encoding\.num_buckets=8\.5: not a whole number"),
        ({"name": "t5", "num_buckets": True}, r"encoding\.num_buckets=True: not a whole number"),
        ({"name": "t5", "bidirectional": 1}, r"encoding\.bidirectional=1: not true or false"),
        ({"name": "rope", "layout": "interleave"}, r"rope: layout='interleave' is unknown; allowed: half_split"),
        ({"name": "rope", "base": 1.0}, r"rope: base=1\.0 must be above 1"),
        ({"name": "rope", "rotary_dim": 3}, r"rope: rotary_dim=3 must be even and at least 2"),
        ({"name": "rope", "rotary_dim": 8}, r"rope: rotary_dim=8 is more than head_dim=6"),
        ({"name": "sinusoidal", "layout": "x"}, r"sinusoidal: layout='x' is unknown"),
        ({"name": "sinusoidal", "exponent": "c"}, r"sinusoidal: exponent='c' is unknown"),
        ({"name": "sinusoidal", "base": 0.5}, r"sinusoidal: base=0\.5"),
        ({"name": "learned", "beyond": "wrap"}, r"learned: beyond='wrap' is unknown; allowed: error, clamp"),
        ({"name": "learned", "num_positions": 0}, r"learned: num_positions=0"),
        ({"name": "tupe", "beyond": "wrap"}, r"tupe: beyond='wrap'"),
        ({"name": "shaw", "max_distance": -1}, r"shaw: max_distance=-1"),
        ({"name": "transformer_xl", "clamp_len": -2}, r"transformer_xl: clamp_len=-2"),
        ({"name": "transformer_xl", "base": 1}, r"transformer_xl: base=1\.0"),
        ({"name": "t5", "num_buckets": 7, "max_distance": 20}, r"t5: num_buckets=7 must be even"),
        ({"name": "t5", "num_buckets": 2, "max_distance": 9, "bidirectional": True}, r"t5: .* at least 4"),
        ({"name": "t5", "num_buckets": 32, "max_distance": 16}, r"t5: max_distance=16 must be above 16"),
        ({"name": "deberta", "terms": ()}, r"deberta: terms=\(\) must name some of c2p, p2c"),
        ("deberta(terms=(c2p, c2p))", r"deberta: terms=\('c2p', 'c2p'\) must name some of .*each only once"),
        ("bam(learned=(shape, scale, shape))", r"bam: learned=.* must name some of .*each only once"),
        ("grape_a(gates=(key, key))", r"grape_a: gates=.* must name some of query, key, and each only once"),
        ("kerple(form=square)", r"kerple: form='square' is unknown; allowed: log, power"),
        ("bam(learned=(width,))", r"bam: learned=\('width',\) must name some of shape, scale, loc"),
        ("bam(initial_scale=-1)", r"bam: initial_scale=-1\.0 must be at least 0"),
        ("sandwich(width=7)", r"sandwich: width=7 must be even"),
        ("sandwich(first=2)", r"sandwich: first=2 is unknown; allowed: 0, 1"),
        ("sandwich(base=1)", r"sandwich: base=1\.0 must be above 1"),
        ("fire(threshold=0.5)", r"fire: threshold=0\.5 must be at least 1"),
        ("fire(width=0)", r"fire: width=0 must be at least 1"),
        ("dynamic_bias(depth=0)", r"dynamic_bias: depth=0 must be at least 1"),
        ("nape(slopes=square)", r"nape: slopes='square' is unknown; allowed: linear, exponential"),
        ("nape(alibi_heads=-1)", r"nape: alibi_heads=-1 must be at least 0"),
        ("nape(alibi_heads=5)", r"nape: alibi_heads=5 must be at most num_heads=4"),
        ("log_length(train_len=1)", r"log_length: train_len=1 must be at least 2"),
        ("ssmax(plain_heads=-1)", r"ssmax: plain_heads=-1 must be at least 0"),
        ("ssmax(plain_heads=4)", r"ssmax: plain_heads=4 must be below num_heads=4"),
        ("llama4_temperature(floor_scale=0)", r"llama4_temperature: floor_scale=0 must be at least 1"),
        ("llama4_temperature(attn_scale=-1)", r"llama4_temperature: attn_scale=-1\.0 must be at least 0"),
        ("adaptive_temperature(plain_heads=4)", r"adaptive_temperature: plain_heads=4 must be below num_heads=4"),
        ("adaptive_temperature(gamma_range=-1)", r"adaptive_temperature: gamma_range=-1\.0 must be at least 0"),
        ({"name": "deberta", "terms": ("c2p", "p2p")}, r"deberta: terms=.* must name some of c2p, p2c"),
        ({"name": "deberta", "max_distance": 0}, r"deberta: max_distance=0"),
        ({"name": "deberta", "log_buckets": 5}, r"deberta: log_buckets=5"),
        ({"name": "deberta", "log_buckets": 8, "max_distance": 5}, r"deberta: log_buckets=8 needs max_distance .* 6"),
        ({"name": "pope", "base": 1.0}, r"pope: base=1\.0 must be above 1"),
        ({"name": "pope", "delta_start": "one"}, r"pope: delta_start='one' is unknown; allowed: zero, uniform"),
        ({"name": "fope", "base": 1.0}, r"fope: base=1\.0 must be above 1"),
        ({"name": "fope", "gain": -0.1}, r"fope: gain=-0\.1 must be at least 0"),
        ({"name": "fope", "original_len": 0}, r"fope: original_len=0 must be at least 1"),
        ({"name": "fope", "dropped": "kept"}, r"fope: dropped='kept' is unknown; allowed: doubled, plain"),
        ({"name": "fope", "seed": -1}, r"fope: seed=-1 must be at least 0"),
        ({"name": "darope", "original_len": 0}, r"darope: original_len=0 must be at least 1"),
        ({"name": "darope", "content_std": -1.0}, r"darope: content_std=-1\.0 must be at least 0"),
        ({"name": "gape", "original_len": 0}, r"gape: original_len=0 must be at least 1"),
        ("dual_chunk(chunk=5, window=4)", r"dual_chunk: chunk=5 must be at most window=4"),
        ({"name": "fox", "gate_scale": 0.0}, r"fox: gate_scale=0\.0 must be above 0"),
        ({"name": "selective_rope", "base": 1.0}, r"selective_rope: base=1\.0 must be above 1"),
        ({"name": "selective_rope", "rank": 0}, r"selective_rope: rank=0 must be at least 1"),
        ({"name": "selective_rope", "kernel": 1}, r"selective_rope: kernel=1 must be at least 2"),
        ({"name": "key_offset", "share": 0.0}, r"key_offset: share=0\.0 must be above 0"),
        ({"name": "key_offset", "share": 1.5}, r"key_offset: share=1\.5 must be at most 1"),
        ({"name": "canon", "kernel": 1}, r"canon: kernel=1 must be at least 2"),
        (["rope", "canon"], r"Canon\(kernel=4\) reads earlier .* must come before Rope"),
        (["rope", "key_offset"], r"KeyOffset\(share=0\.5\) reads earlier .* must come before Rope"),
        ({"name": "alibi", "num_heads": 0}, r"alibi: num_heads=0"),
        ([], r"a chain needs at least one encoding"),
        (3, r"an encoding is a name, a mapping or a list, not int"),
        ("no_such_package.module:Thing", r"cannot be imported"),
        ("posx.errors:ConfigError", r"is not a frozen dataclass that derives from posx\.Encoding"),
    ],
)
def test_a_wrong_spec_is_one_line_that_names_the_cause(spec, message):
    with pytest.raises(ConfigError, match=message) as caught:
        posx.build(spec, DIMS)
    assert "\n" not in str(caught.value)


def test_odd_widths_are_refused_by_what_needs_pairs():
    dims = dataclasses.replace(DIMS, model_dim=13, head_dim=5)
    for name in ("sinusoidal", "transformer_xl", "rope", "fope", "darope", "selective_rope", "accumulated_rope"):
        with pytest.raises(ConfigError, match="even"):
            posx.build(name, dims)
    assert posx.build({"name": "rope", "rotary_dim": 4}, dims).rotary_dim == 4


def test_sizes_are_checked():
    with pytest.raises(ConfigError, match="train_len=0"):
        dataclasses.replace(DIMS, train_len=0)
    with pytest.raises(ConfigError, match="num_kv_heads=3 does not divide num_heads=4"):
        dataclasses.replace(DIMS, num_kv_heads=3)


def test_text_from_a_command_line_is_read_as_the_field():
    assert posx.build({"name": "rope", "base": "5e5"}, DIMS) == posx.build({"name": "rope", "base": 500000}, DIMS)
    assert posx.build({"name": "t5", "num_buckets": "8"}, DIMS).num_buckets == 8
    assert posx.build({"name": "deberta", "terms": ["c2p"]}, DIMS).terms == ("c2p",)
    assert posx.build({"name": "shaw", "max_distance": None}, DIMS) == posx.build("shaw", DIMS)


@dataclasses.dataclass(frozen=True)
class Mine(posx.Encoding):
    """A user's own encoding, found by module and class."""

    strength: float = 1.0


def test_a_class_of_ones_own_is_named_by_its_place():
    name = f"{__name__}:Mine"
    encoding = posx.build({"name": name, "strength": 2}, DIMS)
    assert encoding == Mine(2.0)
    assert encoding_name(encoding) == name
    assert encoding_name(posx.build(["rope", name], DIMS)) == f"rope+{name}"
    assert posx.build(spec_of(encoding), DIMS) == encoding


@pytest.mark.parametrize("name", posx.ENCODINGS)
def test_encoding_acts_on_its_hooks(name):
    assert acting_hooks(posx.build(name, DIMS)) == ACTING[name]


def test_a_text_is_a_spec():
    spelt = posx.build("rope(base=500.0, layout=interleaved) + t5(num_buckets=8, max_distance=20)", DIMS)
    listed = [
        {"name": "rope", "base": 500.0, "layout": "interleaved"},
        {"name": "t5", "num_buckets": 8, "max_distance": 20},
    ]
    assert spelt == posx.build(listed, DIMS)
    with pytest.raises(ConfigError, match="Did you mean 'rope'"):
        posx.build("alibi + rop", DIMS)
    with pytest.raises(ConfigError, match="at 'alibi': this is no encoding"):
        posx.build("rope alibi", DIMS)
