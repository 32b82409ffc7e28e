"""Refusals when a class is defined or a value is built: one line that names the fault and the likely intention."""

import abc
import dataclasses
import functools
import inspect
import re
import textwrap
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posx
from posx.contract import ByDistance, acting_hooks
from posx.contract.fields import at_least, below
from posx.contract.shapes import hook_shapes
from posx.encodings import Chain, Encoding, Rope, Shaw
from posx.errors import ConfigError
from tests.encodings.cases import DIMS

NAMES = {"posx": posx, "dataclasses": dataclasses, "jax": jax, "jnp": jnp, "np": np, "ByDistance": ByDistance}
H, M = DIMS.num_heads, DIMS.model_dim


def made(body, decorator="@dataclasses.dataclass(frozen=True)", bases="posx.Encoding"):
    """The class Mine with this body, as a user's file would make it."""
    names = dict(NAMES)
    exec(f"{decorator}\nclass Mine({bases}):\n{textwrap.indent(textwrap.dedent(body), '    ')}", names)
    return names["Mine"]


ZERO_BY_DISTANCE = "return ByDistance(bias=jnp.zeros((4, distance.shape[0])))"
ZERO_BIAS = "return jnp.zeros((4, q_pos.shape[0], k_pos.shape[0]))"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        # A name that nothing would ever call.
        (
            f"def biass(self, params, q_pos, k_pos): {ZERO_BIAS}",
            r"^Mine\.biass\(params, q_pos, k_pos\) is no hook, .* Did you mean 'bias'\? The hooks are: em.* with _\.$",
        ),
        (f"def by_distanc(self, params, distance): {ZERO_BY_DISTANCE}", r"Did you mean 'by_distance'\?"),
        (
            f"def by_distances(self, p, r): {ZERO_BY_DISTANCE}",
            r"^Mine\.by_distances\(p, r\) is no hook, .* Did you mean 'by_distance'\?",
        ),
        # Hooks of an earlier contract.
        (f"def curve(self, params, distance): {ZERO_BY_DISTANCE}", r"^Mine\.curve\(params, distance\) is no hook"),
        ("def relative(self, params, distance): ...", r"is no hook, .* Did you mean 'by_distance'\?"),
        ("def temperature(self, params, pos, features): ...", r"temperature\(params, pos, features\) is no hook"),
        (
            f"def attention_mask(self, params, q_pos, k_pos): {ZERO_BIAS}",
            r"attention_mask\(params, q_pos, k_pos\) is no hook, .* Did you mean 'bias'\?",
        ),
        ("def penalty(self, params, tokens): ...", r"Mine\.penalty\(params, tokens\) is no hook"),
        ("def resolv(self, dims): return self", r"Mine\.resolv\(dims\) is no hook, .* Did you mean 'resolve'\?"),
        ("logit_scal = lambda self, params, q_pos: None", r"Did you mean 'logit_scale'\?"),
        ("@staticmethod\ndef scores(params, s, tile): return s", r"Did you mean 'score'\?"),
        # A fact that nothing would ever read.
        (
            "shift_invarient = False",
            r"^Mine\.shift_invarient is no fact of an encoding. Did you mean 'shift_invariant'\? The facts are: ",
        ),
        ("fade = True", r"Mine\.fade is no fact of an encoding. Did you mean 'fades'\?"),
        ("fade: bool = True", r"Did you mean 'fades'\?"),
        ("tilling = 'rows'", r"Did you mean 'tiling'\?"),
        ("max_positions = 512", r"Did you mean 'max_position'\?"),
        ("share = frozenset({'a'})", r"Did you mean 'shared'\?"),
        ("@property\ndef max_positions(self): return 512", r"Did you mean 'max_position'\?"),
        ("def integer_position(self): return True", r"Did you mean 'integer_positions'\?"),
        # A hook of another signature.
        (
            f"def by_distance(self, distance): {ZERO_BY_DISTANCE}",
            r"^Mine\.by_distance\(distance\) is called as by_distance\(params, distance\): it must take these param",
        ),
        ("def query(self, params, vectors, pos): return vectors", r"called as query\(params, vectors, pos, features\)"),
        ("def init(self, rng): return {}", r"Mine\.init\(rng\) is called as init\(rng, dims\)"),
        (
            f"def bias(self, params, k_pos, q_pos): {ZERO_BIAS}",
            r"^Mine\.bias\(params, k_pos, q_pos\) is called as bias\(params, q_pos, k_pos\): k_pos would r",
        ),
        ("def by_distance(self, params, distance, *, gain): ...", r"is called as by_distance\(params, distance\)"),
        # A value in the place of a method, and the other way round.
        (
            "bias: bool = True",
            r"^Mine\.bias must be a method bias\(params, q_pos, k_pos\), not True. Give a field",
        ),
        ("score = None", r"Mine\.score must be a method score\(params, s, tile\), not None"),
        ("key: float", r"Mine\.key belongs to every encoding. Give the field another name."),
        (
            "def shared(self): return frozenset()",
            r"Mine\.shared is a fact, not a method. Write @property",
        ),
        ("def shift_invariant(self): return False", r"Mine\.shift_invariant is a fact, not a method"),
        # A fact out of its domain.
        ("tiling = 'row'", r"^Mine\.tiling='row' must be 'any' or 'rows' or 'neighbours'$"),
        ("tiling = 'neighbour'", r"^Mine\.tiling='neighbour' must be 'any' or 'rows' or 'neighbours'$"),
        ("shift_invariant = 'no'", r"^Mine\.shift_invariant='no' must be True or False$"),
        ("fades = 1", r"Mine\.fades=1 must be True or False"),
        ("shared = 'a'", r"Mine\.shared='a' must be a frozenset of names"),
        ("reach = -1", r"Mine\.reach=-1 must be a whole number of tokens, at least 0, or None"),
        ("max_position = 8.5", r"Mine\.max_position=8\.5 must be a whole number"),
        ("planes = 2", r"Mine\.planes=2 must be a text"),
        (
            "history = {'bias': 1}",
            r"history={'bias': 1} must be tokens by hook, .*: features, query, key, value$",
        ),
        ("about = 3", r"^Mine\.about=3 must be posx\.About\(paper, beyond, lr_multiplier\) with a positive lr_mul"),
        ("about = posx.About(lr_multiplier=0)", r"lr_multiplier=0\) must be posx\.About\(.* with a positive lr_mult"),
    ],
)
def test_faulty_class_is_refused_when_it_is_defined(body, message):
    with pytest.raises(ConfigError, match=message) as caught:
        made(body)
    assert "\n" not in str(caught.value)


def test_missing_decorator_is_named_at_the_first_value():
    body = f"gain: float = 1.0\ndef by_distance(self, params, distance): {ZERO_BY_DISTANCE}"
    for arguments in ({}, {"gain": 2.0}):
        with pytest.raises(ConfigError, match=r"^Mine is no dataclass. Write @dataclasses\.dataclass"):
            made(body, decorator="")(**arguments)
    below = made("gain: float = 1.0", decorator="", bases="posx.encodings.Rope")
    with pytest.raises(ConfigError, match="Mine is no dataclass"):
        posx.build(below(), DIMS)
    with pytest.raises(ConfigError, match=r"Mine must be compared and hashed by its fields. .* without eq=False"):
        posx.build(made("gain: float = 1.0", decorator="@dataclasses.dataclass(frozen=True, eq=False)")(2.0), DIMS)


def test_mixin_counts_and_must_come_first():
    class Straight:
        def by_distance(self, params, distance):
            return ByDistance(bias=-jnp.abs(posx.as_float(distance))[None, :])

    @dataclasses.dataclass(frozen=True)
    class First(Straight, Encoding):
        pass

    assert acting_hooks(posx.build(First(), DIMS)) == ("by_distance",)
    with pytest.raises(ConfigError, match=r"Straight\.by_distance is hidden by Encoding.*Write class Last\(Straight, "):

        @dataclasses.dataclass(frozen=True)
        class Last(Encoding, Straight):
            pass


def test_other_members_of_a_class_are_left_alone():
    class Described:
        def describe(self):
            return f"{type(self).__name__} at {self.values}"

    T = TypeVar("T")

    @dataclasses.dataclass(frozen=True)
    class Sizes:
        far: int = 3

    @dataclasses.dataclass(frozen=True, slots=True)
    class Rich(Described, Encoding, Generic[T]):
        """Fields, constants, helpers, properties, class and static methods with names not far from the contract's."""

        values: bool = True
        max_positions: int = 512
        max_distance: int = 16
        share: float = 0.5
        sizes: Sizes = Sizes()
        table_name: str = "table"
        shift_invariant: ClassVar[bool] = True
        LIMIT = 7
        ufunc = np.abs

        @property
        def keys(self):
            return ("a", "b")

        @functools.cached_property
        def slopes(self):
            return np.ones(H)

        @property
        def max_position(self):
            return self.max_positions - 1

        @classmethod
        def small(cls):
            return cls(max_positions=20)

        @staticmethod
        def bucket(distance):
            return jnp.abs(distance)

        def rows(self, distance):
            return jnp.clip(distance, 0, self.max_distance)

        def spread_out(self, params):
            return params

        def _helper(self, params, distance):
            return -self.bucket(distance)

        def by_distance(self, params, r, gain=1.0):  # other names are fine unless they swap two arguments
            return ByDistance(bias=gain * self._helper(params, posx.as_float(r))[None, :])

        def bias(self, *arguments):
            return jnp.zeros((1, *(pos.shape[0] for pos in arguments[1:])))

    assert posx.build(Rich.small(), DIMS).max_position == 19

    @dataclasses.dataclass(frozen=True)
    class Middle(Encoding, abc.ABC):
        @abc.abstractmethod
        def describe(self): ...

    @dataclasses.dataclass(frozen=True)
    class Below(Middle):
        def describe(self):
            return "a class below a class of one's own"

        def _shifted(self, by, params, vectors, pos, features):
            return vectors + by

        key = query = functools.partialmethod(_shifted, 1.0)

    assert Below().acts_on("key")


BUILT = [
    # Shapes.
    (
        "def by_distance(self, params, distance): return ByDistance(bias=jnp.zeros((distance.shape[0], 4)))",
        r"^Mine\(\)\.by_distance\.bias gives \[7, 4\], but \[h or 1, n\] = \[4 or 1, 7\] is expected "
        r"\(q has 4 heads of 6, k and v 2 of 6 and 6; q = 3, k = 5, n = 7\)\.$",
    ),
    (
        "def by_distance(self, params, distance): ByDistance(bias=-jnp.abs(distance))",
        r"Mine\(\)\.by_distance must give ByDistance\(bias=\.\.\., \.\.\.\), not None\.$",
    ),
    (
        "def by_distance(self, params, distance): return ByDistance(bias=-jnp.abs(distance)[None])",
        r"Mine\(\)\.by_distance\.bias gives \[1, 7\] of int32, but \[h or 1, n\]",
    ),
    (
        "def bias(self, params, q_pos, k_pos): return jnp.zeros((4, k_pos.shape[0], q_pos.shape[0]))",
        r"Mine\(\)\.bias gives \[4, 5, 3\], but \[h or 1, q, k\] = \[4 or 1, 3, 5\] is expected",
    ),
    (
        "def bias(self, params, q_pos, k_pos): return (q_pos[:, None] - k_pos[None])[None]",
        r"Mine\(\)\.bias gives \[1, 3, 5\] of int32, but \[h or 1, q, k\]",
    ),
    (
        "def logit_scale(self, params, pos, features): return jnp.ones((3, 4))",
        r"Mine\(\)\.logit_scale gives \[3, 4\], but \[h or 1, q\] = \[4 or 1, 3\] is expected",
    ),
    (
        "def logit_scale(self, params, pos, features): return jnp.ones(3)",
        r"Mine\(\)\.logit_scale gives \[3\], but \[h or 1, q\] = \[4 or 1, 3\] is expected",
    ),
    (
        "def token_bias(self, params, pos, features): return jnp.ones((4, 3))",
        r"Mine\(\)\.token_bias gives \[4, 3\], but \[q, h or 1, \*\] = \[3, 4 or 1, \*\] is expected",
    ),
    (
        "def decay(self, params): return jnp.ones((1, 5))",
        r"Mine\(\)\.decay gives \[1, 5\], but \[h or 1, d'\] = \[4 or 1, 6\] is expected",
    ),
    (
        "def query(self, params, vectors, pos, features): return vectors[0]",
        r"Mine\(\)\.query gives \[4, 6\], but \[q, h, \*\] = \[3, 4, \*\]",
    ),
    (
        "def key(self, params, vectors, pos, features): return jnp.concatenate([vectors, vectors], axis=-1)",
        r"^Mine\(\)\.key: queries are 6 wide and keys 12 wide, but they are multiplied. Give both the same",
    ),
    (
        "def by_distance(self, params, distance): return jnp.zeros((distance.shape[0], 4, 6))",
        r"must give ByDistance\(.*, not \[7, 4, 6\]\.$",
    ),
    ("def by_distance(self, params, distance): return ByDistance()", r"Mine\(\)\.by_distance must give ByDistance"),
    (
        "def by_distance(self, params, distance): return ByDistance(value=jnp.zeros((distance.shape[0], 4, 3)))",
        r"Mine\(\)\.by_distance\.value gives \[7, 4, 3\], but \[n, h or 1, d\] = \[7, 4 or 1, 6\] is expected",
    ),
    (
        "def by_distance(self, params, distance): return ByDistance(query=jnp.zeros((4, distance.shape[0], 6)))",
        r"Mine\(\)\.by_distance\.query gives \[4, 7, 6\], but \[n, h or 1, d\] = \[7, 4 or 1, 6\] is expected",
    ),
    (
        "def by_distance(self, params, distance): return ByDistance(key=jnp.zeros((distance.shape[0], 2, 6)))",
        r"Mine\(\)\.by_distance\.key gives \[7, 2, 6\], but \[n, h or 1, d\] = \[7, 4 or 1, 6\] is expected",
    ),
    (
        "def by_distance(self, params, distance): return ByDistance(scaled=jnp.zeros((distance.shape[0], 4)))",
        r"Mine\(\)\.by_distance\.scaled gives \[7, 4\], but \[h or 1, n\] = \[4 or 1, 7\]",
    ),
    (
        "def score(self, params, s, tile): return s.sum(axis=0)",
        r"Mine\(\)\.score gives \[3, 5\], but \[h, q, k\] = \[4, 3, 5\]",
    ),
    ("def embed(self, params, x, pos): return x[:, :2]", r"Mine\(\)\.embed gives \[3, 2\], but \[q, m\] = \[3, 12\]"),
    (
        "def features(self, params, x, pos, carry): return {'a': x}",
        r"Mine\(\)\.features must give \({name: ",
    ),
    (
        "def features(self, params, x, pos, carry): return {'a': x[0]}, None",
        r"Mine\(\)\.features gives 'a' \[12\], ",
    ),
    (
        "def features(self, params, x, pos, carry): return {'a': x}, x",
        r"Mine\(\)\.features: the carry changes from .*so a cache cannot hold it",
    ),
    # Parameters.
    (
        "def init(self, rng, dims): return [jnp.ones(3)]",
        r"Mine\(\)\.init must give a dict of arrays by name, not a list",
    ),
    ("def init(self, rng, dims): return {'a': jnp.arange(3)}", r"arrays of floats, but 'a' is \[3\] of int32"),
    (
        "shared = frozenset({'tabel'})\ndef init(self, rng, dims): return {'table': jnp.ones(3)}",
        r"^Mine\(\)\.shared names 'tabel', which init does not give. Did you mean 'table'\? It gives: table\.$",
    ),
    (
        "def init(self, rng, dims): return {'a': jnp.ones(4)}\n"
        "def by_distance(self, params, distance): return ByDistance(params['b'][:, None] * distance[None])",
        r"^Mine\(\)\.by_distance\(params, \[7\]\) reads 'b', which is not there; params has: a \(q has 4 heads",
    ),
    # What the user's own code raises, where it raises it.
    (
        "def by_distance(self, params, distance): return ByDistance(jnp.ones((4, 1)) @ posx.as_float(distance))",
        r"^Mine\(\)\.by_distance\(params, \[7\]\) raises TypeError: dot_general requires",
    ),
    (
        "def init(self, rng, dims): return {'a': jnp.ones(dims.heads)}",
        r"Mine\(\)\.init\(rng, dims\) raises Attr",
    ),
    ("def resolve(self, dims): return 1 / 0", r"^Mine\.resolve raises ZeroDivisionError: division by zero$"),
    ("def resolve(self, dims): pass", r"^Mine\.resolve must return the value, not None$"),
    # Values that cannot be values.
    (
        "table: tuple = dataclasses.field(default_factory=list)",
        r"^Mine\.table holds a list, but values are",
    ),
    (
        "gain: float = dataclasses.field(default=1.0, compare=False)",
        r"Mine\.gain has compare=False",
    ),
    ("gain: float | None = None", r"^Mine\.gain is not set"),
    ("@property\ndef tiling(self): return 'row'", r"^Mine\.tiling='row' must be 'any' or 'rows' or 'neighbours'$"),
    ("@property\ndef about(self): return 3", r"^Mine\.about=3 must be posx\.About\("),
    (
        "history = {'key': 1}",
        r"^Mine\(\)\.history names key, which this encoding does not define. Remove it\.$",
    ),
    ("@property\ndef reach(self): return 2.5", r"^Mine\.reach=2\.5 must be a whole number of tokens"),
]


@pytest.mark.parametrize(("body", "message"), BUILT)
def test_faulty_value_is_refused_when_it_is_built(body, message):
    cls = made(body)
    with pytest.raises(ConfigError, match=message) as caught:
        posx.build(cls(), DIMS)
    assert "\n" not in str(caught.value)


@dataclasses.dataclass(frozen=True)
class Ranged(Encoding):
    """Fields of every kind that has a declared range."""

    window: Annotated[int, "tokens", at_least(1)] | None = None
    share: Annotated[float, at_least(0), below(1)] = 0.5
    form: Literal["log", "power"] = "log"
    sides: tuple[Literal["query", "key"], ...] = ()
    spans: tuple[Annotated[int, "tokens", at_least(1)], ...] = ()

    def resolve(self, dims):
        return self.fill_open(window=dims.train_len)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0}, r"window=0 must be at least 1"),
        ({"share": 1.0}, r"share=1\.0 must be below 1"),
        ({"share": -0.5}, r"share=-0\.5 must be at least 0"),
        ({"form": "square"}, r"form='square' is unknown; allowed: log, power"),
        ({"sides": ("key", "value")}, r"sides=\('key', 'value'\) must name some of query, key, and each only once"),
        ({"sides": ("key", "key")}, r"sides=\('key', 'key'\) must name some of query, key, and each only once"),
        ({"spans": (3, 0)}, r"spans=\(3, 0\) must be at least 1"),
    ],
)
def test_field_out_of_its_declared_range_is_refused(fields, message):
    for value in (Ranged(), posx.build(Ranged(), DIMS)):
        with pytest.raises(ConfigError, match=f"^ranged: {message}$"):
            dataclasses.replace(value, **fields)
    with pytest.raises(ConfigError, match=f"^ranged: {message}$"):
        Ranged(**fields)
    with pytest.raises(ConfigError, match=f"ranged: {message}$") as caught:
        posx.build({"name": f"{__name__}:Ranged", **fields}, DIMS)
    assert "\n" not in str(caught.value)


def test_type_that_cannot_be_looked_up_checks_nothing():
    names = {"posx": posx, "dataclasses": dataclasses}
    body = "@dataclasses.dataclass(frozen=True)\nclass Mine(posx.Encoding):\n    kind: Unknown = 3\n"
    exec(compile(f"from __future__ import annotations\n{body}", "mine.py", "exec"), names)
    assert names["Mine"]().kind == 3


def test_text_in_place_of_a_number_is_out_of_its_range():
    with pytest.raises(ConfigError, match="^rope: base='x' must be above 1$"):
        Rope(base="x")


def test_field_inside_its_declared_range_is_taken():
    fields = {"window": 1, "share": 0.0, "form": "power", "sides": ("key", "query"), "spans": (1, 2)}
    assert posx.build({"name": f"{__name__}:Ranged", **fields}, DIMS) == Ranged(**fields)
    assert posx.build(Ranged(), DIMS).window == DIMS.train_len


def test_chain_parts_are_checked_alone_and_together():
    wide = made("def embed(self, params, x, pos): return jnp.concatenate([x, x], axis=-1)")
    with pytest.raises(ConfigError, match=r"^Mine\(\)\.embed gives \[3, 24\]"):
        posx.build([wide(), "rope"], DIMS)
    more = made(
        "def query(self, params, vectors, pos, features): return jnp.tile(vectors, 2)", bases="posx.encodings.Rope"
    )
    with pytest.raises(ConfigError, match=r"^Chain\(.*\)\.query: queries are 12 wide and keys 6"):
        hook_shapes(Chain((Rope(rotary_dim=4), more(rotary_dim=4))), DIMS)
    with pytest.raises(ConfigError, match=r"^Rope\(.* maps the channels of a head, but"):
        hook_shapes(Chain((more(rotary_dim=4), Rope(rotary_dim=4))), DIMS)


def test_missing_field_is_one_line():
    name = f"{__name__}:Needy"
    with pytest.raises(ConfigError, match=rf"^encoding '{name}' needs gain\. Write {name}\(gain=\.\.\.\)\.$"):
        posx.build(name, DIMS)
    assert posx.build({"name": name, "gain": 2.0}, DIMS) == Needy(2.0)


@dataclasses.dataclass(frozen=True)
class Needy(Encoding):
    gain: float


RECORDS = (posx.Tile, posx.ByDistance, posx.Dims, posx.About, posx.Slots)


@pytest.mark.parametrize("record", RECORDS)
def test_help_of_a_record_says_each_field(record):
    listed = inspect.getdoc(record).partition("Attributes:\n")[2]
    fields = dict(re.findall(r"^  (\w+): (.*)", listed, re.MULTILINE))
    assert list(fields) == list(getattr(record, "_fields", record.__annotations__))
    if record in (posx.Tile, posx.ByDistance):
        assert all(re.match(r"\{name: \[|\[", text) for text in fields.values()), fields
    for text in fields.values():  # letters of the contract, and no batch axis
        for axis in re.split(", | or ", ", ".join(re.findall(r"\[([^\]]*)\]", text))):
            assert axis in ("", "1", "...", "q", "k", "h", "d", "d'", "n", "t"), text


def test_help_of_a_tile_states_the_shapes_that_score_is_given():
    build = functools.partial(posx.build, made("def score(self, params, s, tile): return s + tile.q")())
    wide = dataclasses.replace(DIMS, num_heads=4, head_dim=6, num_kv_heads=2)
    with pytest.raises(ConfigError) as caught:
        build(wide)
    shapes = {"q": 3, "k": 5, "h": 4, "d": 6, "d'": 6, "1": 1}
    listed = inspect.getdoc(posx.Tile).partition("Attributes:\n")[2]
    for name, letters in re.findall(r"^  (\w+): \[([^\]]*)\]", listed, re.MULTILINE):
        axes = [[shapes[letter] for letter in axis.split(" or ")] for axis in letters.split(", ")]
        given = [int(size) for size in re.search(rf"tile\.{name} \[([\d, ]*)\]", str(caught.value))[1].split(", ")]
        assert len(given) == len(axes) and all(map(list.__contains__, axes, given)), name
    assert "tile.q_features {}" in str(caught.value) and "\n" not in str(caught.value)


def test_hooks_are_traced_once_for_equal_values_and_sizes():
    traced = []

    @dataclasses.dataclass(frozen=True)
    class Counting(Encoding):
        gain: float = 1.0

        def by_distance(self, params, distance):
            traced.append(self.gain)
            return ByDistance(bias=-self.gain * jnp.abs(posx.as_float(distance))[None, :])

    for gain in (1.0, 2.0, 1.0, 2.0):
        posx.build(Counting(gain), DIMS)
    assert traced == [1.0, 2.0]
    posx.build(Counting(), dataclasses.replace(DIMS, num_heads=2))
    assert traced == [1.0, 2.0, 1.0]


def test_no_two_axes_of_a_check_have_one_size():
    for dims in (DIMS, posx.Dims(3, 4, 5, 1, 8), posx.Dims(8, 8, 8, 1, 8, num_kv_heads=4)):
        called = hook_shapes(Chain((Rope(rotary_dim=2), Shaw(2))), dims)
        tokens = {called[hook][0][at].shape[0] for hook, at in (("query", 1), ("key", 1), ("by_distance", 0))}
        others = {1, dims.num_heads, dims.num_kv_heads, dims.head_dim, dims.model_dim}
        assert len(tokens) == 3 and not tokens & others


CLI_FAULTS = {
    "Misspelt": (
        "def biass(self, params, q_pos, k_pos): return None",
        "Misspelt.biass(params, q_pos, k_pos) is no ",
    ),
    "Turned": (
        "def by_distance(self, params, distance): return posx.ByDistance(bias=distance[:, None] / 2)",
        "by_distance.bias gives [6, 1], but [h or 1, n] = [4 or 1, 6]",
    ),
}


@pytest.mark.parametrize("name", CLI_FAULTS)
def test_command_line_prints_the_same_single_line(name, tmp_path, monkeypatch, capsys):
    from posx.lab import cli

    body, message = CLI_FAULTS[name]
    module = f"bad_{name.lower()}"
    (tmp_path / f"{module}.py").write_text(
        f"import dataclasses, posx\n@dataclasses.dataclass(frozen=True)\nclass {name}(posx.Encoding):\n    {body}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = f"configs/quick.py:{module}:{name}"
    assert cli.main(["train", "--config", config, "--workdir", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert message in printed.err and not (tmp_path / "run").exists()
