"""The checks of `posx.conformance` see what breaks the contract: one small encoding for every way to do so."""

import dataclasses
import functools
import itertools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posx
from posx import attend
from posx.conformance import CHECKS, DIMS, check_encoding
from posx.conformance.by_numpy import run_in_numpy
from posx.conformance.subject import drawn_params, variant
from posx.contract import ByDistance, as_float, at_least_float32, fact
from posx.encodings import Alibi, Chain, Deberta, Dims, Encoding, Learned, Rope, Shaw, build
from posx.encodings.rope import rotate
from posx.errors import ConfigError, UndefinedLength
from posx.lab import cli
from tests.cheap import in_one_program

encoding = dataclasses.dataclass(frozen=True)


def slopes(distance, gain=0.3):
    return ByDistance(bias=-gain * jnp.abs(as_float(distance))[None, :])


@encoding
class FromPlaces(Encoding):
    """Rotates by the index in the array, not by the position."""

    def query(self, params, vectors, pos, features):
        return Rope(rotary_dim=6).query({}, vectors, jnp.arange(pos.shape[0]), {})

    key = query


@encoding
class SeesTheStart(Encoding):
    """A bias by the key's position, so a shift is seen."""

    def bias(self, params, q_pos, k_pos):
        return jnp.broadcast_to(jnp.sqrt(as_float(k_pos + 1))[None, None, :], (1, q_pos.shape[0], k_pos.shape[0]))


@encoding
class SaysItSeesTheStart(Encoding):
    shift_invariant = False

    def by_distance(self, params, distance):
        return slopes(distance)


@encoding
class LooksAhead(Encoding):
    """A logit scale by the last position of all."""

    shift_invariant = False

    def logit_scale(self, params, pos, features):
        return jnp.full((1, *pos.shape), jnp.log(as_float(pos.max() + 2)))


@encoding
class CountsTokens(Encoding):
    """A logit scale by the number of tokens, whatever their positions."""

    def logit_scale(self, params, pos, features):
        return jnp.full((1, *pos.shape), np.log(1.0 + pos.shape[0]), as_float(0).dtype)


@encoding
class ReachesFurther(Encoding):
    reach = 5

    def by_distance(self, params, distance):
        return slopes(jnp.clip(distance, -6, 6))


@encoding
class ReachesNothing(Encoding):
    reach = 5

    def by_distance(self, params, distance):
        return ByDistance(bias=jnp.zeros((1, distance.shape[0]), as_float(0).dtype))


@encoding
class FadesNot(Encoding):
    fades = True

    def by_distance(self, params, distance):
        return slopes(jnp.minimum(jnp.abs(distance), 100))


@encoding
class PunishesThePast(Encoding):
    """It cannot tell later keys apart, and does not declare that."""

    def by_distance(self, params, distance):
        return slopes(jnp.maximum(distance, 0))


@encoding
class CachesWhatChanges(Encoding):
    """Keys are multiplied as projected, so the cache must not hold mapped ones in their place."""

    def key(self, params, vectors, pos, features):
        return Rope(rotary_dim=6).key({}, vectors, pos, {})

    def by_distance(self, params, distance):
        wave = jnp.sin(as_float(distance))[:, None, None] * jnp.ones((1, 1, 6), as_float(0).dtype)
        return ByDistance(key=wave)


@encoding
class RunsOut(Encoding):
    """Says that its table has 40 rows, and has 30."""

    shift_invariant = False
    integer_positions = True
    max_position = 39

    def logit_scale(self, params, pos, features):
        return jnp.linspace(1.0, 2.0, 30, dtype=as_float(0).dtype).at[pos].get(mode="fill", fill_value=jnp.nan)[None]


@encoding
class ClampsSilently(Encoding):
    """Its table has 40 rows; beyond them the last one is read without a word."""

    shift_invariant = False
    integer_positions = True
    max_position = 39

    def logit_scale(self, params, pos, features):
        return jnp.linspace(1.0, 2.0, 40, dtype=as_float(0).dtype)[pos][None]


@encoding
class ReadsATable(Encoding):
    """By distance, but does not say that positions must be whole."""

    def by_distance(self, params, distance):
        table = jnp.linspace(0.0, 1.0, 11, dtype=as_float(0).dtype)
        return ByDistance(scaled=table[jnp.clip(distance, -5, 5) + 5][None])


@encoding
class NeedsRows(Encoding):
    """Less the mean score of the row, which a tile does not know."""

    def score(self, params, s, tile):
        return s * jax.nn.sigmoid(s.mean(axis=-1, keepdims=True))


@encoding
class ReadsOtherKeys(Encoding):
    """A score that depends on the number of keys in a tile."""

    def score(self, params, s, tile):
        return s * jnp.log(as_float(2 + s.shape[-1]))


@encoding
class SaysItNeedsRows(Encoding):
    tiling = "rows"

    def score(self, params, s, tile):
        return jnp.tanh(s)


@encoding
class SaysItReadsNeighbours(Encoding):
    tiling = "neighbours"

    def score(self, params, s, tile):
        return jnp.tanh(s)


@jax.custom_vjp
def _double(x):
    return 2 * x


_double.defvjp(lambda x: (2 * x, None), lambda _, grad: (3 * grad,))


@encoding
class WrongGradient(Encoding):
    def query(self, params, vectors, pos, features):
        return _double(vectors)


@encoding
class PlainAngles(Encoding):
    """Position times frequency in float32."""

    def query(self, params, vectors, pos, features):
        angles = as_float(pos)[:, None] * as_float(10_000.0 ** (-np.arange(3) / 3))[None, :]
        cos, sin = (f(angles).astype(vectors.dtype)[:, None, :] for f in (jnp.cos, jnp.sin))
        a, b = jnp.split(vectors, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    key = query


@encoding
class BiasInBfloat16(Encoding):
    def by_distance(self, params, distance):
        return ByDistance(bias=-0.25 * jnp.abs(distance.astype(jnp.bfloat16))[None, :])


@encoding
class ScalesInFloat32(Encoding):
    def init(self, rng, dims):
        return {"a": jnp.ones(dims.num_heads)}

    def score(self, params, s, tile):
        return s * params["a"].astype(jnp.float32)[:, None, None]


@encoding
class MixesTypes(Encoding):
    """Right, but by silent promotion."""

    def init(self, rng, dims):
        return {"slope": jnp.ones((dims.num_heads, 1))}

    def by_distance(self, params, distance):
        return ByDistance(bias=-jnp.float32(0.5) * params["slope"] * jnp.abs(as_float(distance)))


CALLS = itertools.count()


@encoding
class Counts(Encoding):
    """Not a pure function."""

    def by_distance(self, params, distance):
        return slopes(distance, 0.1 * (1 + next(CALLS)))


@encoding
class Forgets(Encoding):
    """A running sum of gates that starts anew with every chunk."""

    def init(self, rng, dims):
        return {"gate": jax.random.normal(rng, (dims.model_dim, dims.num_heads), jnp.float32)}

    def features(self, params, x, pos, carry):
        gates = jax.nn.log_sigmoid(x @ params["gate"].astype(x.dtype))
        return {"sum": jnp.cumsum(gates, axis=0)}, gates[-1]

    def score(self, params, s, tile):
        sums = tile.q_features["sum"][:, None] - tile.k_features["sum"][None, :]
        return s + sums.transpose(2, 0, 1).astype(s.dtype)


@encoding
class ComparesDistances(Encoding):
    """A bias relative to the mean of the distances that it is given together: a table of them has another mean."""

    def by_distance(self, params, distance):
        r = jnp.abs(as_float(distance))
        return ByDistance(bias=(-r / (1 + r.mean()))[None, :])


@encoding
class Raises(Encoding):
    """Only where there is one query."""

    def bias(self, params, q_pos, k_pos):
        if q_pos.shape[0] == 1:
            raise IndexError("no neighbour\nof one token")
        return as_float(q_pos[:, None] - k_pos[None, :])[None] / 10


@encoding
class OutputsSomething(Encoding):
    def output(self, params, vectors, pos, features):
        return vectors + jnp.ones((), vectors.dtype)


@encoding
class CachesNoValue(Encoding):
    """Its values depend on how many tokens are mapped at once."""

    def value(self, params, vectors, pos, features):
        return vectors * jnp.asarray(vectors.shape[0], vectors.dtype)


@encoding
class ResolvesOnAndOn(Encoding):
    gain: int = 1

    def resolve(self, dims):
        return dataclasses.replace(self, gain=self.gain + 1)


@encoding
class CachesWhatItReads(Encoding):
    """It maps no keys, but other parts of a chain may map the keys that it reads."""

    def score(self, params, s, tile):
        return s + jnp.tanh(tile.k.sum(axis=-1)).T[:, None].astype(s.dtype)


@encoding
class CachesWhatItMultiplies(Encoding):
    def by_distance(self, params, distance):
        return ByDistance(key=jnp.cos(as_float(distance))[:, None, None] * jnp.ones((1, 1, DIMS.head_dim)))


@encoding
class HasAnIdleArray(Encoding):
    def init(self, rng, dims):
        return {"slope": jnp.ones(dims.num_heads), "idle": jnp.ones(3)}

    def by_distance(self, params, distance):
        return ByDistance(bias=-params["slope"][:, None] * jnp.abs(as_float(distance))[None])


@encoding
class CarriesItsLevel(Encoding):
    """A token reads the sum of all tokens before it, of the documents before its own too."""

    def features(self, params, x, pos, carry):
        sums = jnp.cumsum(as_float(x[:, 0])) + (0 if carry is None else carry)
        return {"sums": sums}, sums[-1]

    def query(self, params, vectors, pos, features):
        return vectors * jnp.tanh(features["sums"])[:, None, None].astype(vectors.dtype)


READS_RAW_KEYS = "and a chain's cache may hold mapped keys. Declare reads_raw_keys = True."

#: An encoding that breaks the contract, the check that must see it, and a text of its message.
BROKEN = [
    (FromPlaces(), "positions", "slots in another order: outputs off by"),
    (FromPlaces(), "decode", "vectors as projected, token by token: outputs off by"),
    (SeesTheStart(), "shift_invariant", "absolute positions, declare shift_invariant = False."),
    (SaysItSeesTheStart(), "shift_invariant", "but adding a constant to all positions changes nothing"),
    (LooksAhead(), "prefix", "if later tokens move too: outputs off by"),
    (CountsTokens(), "prefix", "without later tokens: outputs off by"),
    (CountsTokens(), "decode", "token by token: outputs off by"),
    (ReachesFurther(), "reach", "reach = 5, but bias still changes beyond it in the past off by 0.3"),
    (ReachesNothing(), "reach", "reach = 5, but bias is already constant at shorter distances (largest change 0)"),
    (FadesNot(), "fades", "fades = True, but the bias is equal at distances 4096 and 8388608"),
    (PunishesThePast(), "causal_only", "causal_only = False, but later keys at all distances get the same terms"),
    (CachesWhatChanges(), "decode", "vectors as cached, token by token: outputs off by"),
    (CachesWhatItReads(), "decode", READS_RAW_KEYS),
    (CachesWhatItMultiplies(), "decode", READS_RAW_KEYS),
    (RunsOut(), "positions", "outputs at some position are NaN or infinite"),
    (ClampsSilently(), "positions", "max_position = 39, but under jit outputs at 40 are finite. Return NaN there."),
    (ReadsATable(), "eager", "raises TypeError: Indexer must have integer or boolean type"),
    (NeedsRows(), "tiles", "causal mask: outputs off by"),
    (SaysItNeedsRows(), "tiling", "tiling = 'rows', but outputs in small tiles are the same"),
    (ReadsOtherKeys(), "tiling", "scores depend on other keys of the tile. Declare tiling = 'rows' or 'neighbours'."),
    (SaysItReadsNeighbours(), "padding", "tiling = 'neighbours', but empty slots between tokens change nothing"),
    (HasAnIdleArray(), "gradients", "dense: no output depends on params.idle, its gradient is 0"),
    (CarriesItsLevel(), "packing", "let outputs depend on its differences alone"),
    (WrongGradient(), "gradients", "dense: slope along a direction in q off by"),
    (PlainAngles(), "float32", "positions moved by 32768: outputs off by"),
    (BiasInBfloat16(), "hooks", "by_distance returns bfloat16 for float32 vectors, not float32"),
    (MixesTypes(), "hooks", "under strict rank and type promotion: MixesTypes().by_distance(params, [7]) raises"),
    (Counts(), "eager", "outside jit: by_distance.bias off by"),
    (Forgets(), "decode", "vectors as projected, token by token: outputs off by"),
    (ComparesDistances(), "strips", "causal mask: outputs off by"),
    (Raises(), "decode", "raises IndexError: no neighbour"),
    (OutputsSomething(), "padding", "dense: outputs of empty slots are not 0"),
    (CachesNoValue(), "decode", "token by token: outputs off by"),
    (ResolvesOnAndOn(), "value", "resolve changes a value that is already resolved"),
]


#: Other ways to fail a check that an encoding above them fails too.
AGAIN = (
    SaysItSeesTheStart, CountsTokens, ReachesNothing, CachesWhatItMultiplies, ClampsSilently, BiasInBfloat16, Counts,
    CachesNoValue, Raises, OutputsSomething,
)  # fmt: skip


@pytest.mark.parametrize(
    ("broken", "check", "says"),
    [pytest.param(*case, marks=pytest.mark.slow if isinstance(case[0], AGAIN) else ()) for case in BROKEN],
    ids=[f"{type(broken).__name__}-{check}" for broken, check, _ in BROKEN],
)
def test_broken_encoding_fails_its_check(broken, check, says):
    report = check_encoding(broken, only=[check])
    assert report.failures == (check,), str(report)
    assert says in report.outcomes[0].detail, str(report)
    assert "\n" not in str(report.outcomes[0])


def test_every_check_is_seen_to_fail():
    tested_below = {"reference", "fused", "packing", "bfloat16"}
    assert {check for _, check, _ in BROKEN} | tested_below == set(CHECKS)


@encoding
class SeesNeighbours(Encoding):
    """Keys are mixed with what stands beside them, so neighbours count: in a pack, or in no order."""

    def key(self, params, vectors, pos, features):
        return vectors + jnp.roll(vectors, 1, axis=0)


@encoding
class CountsSlots(Encoding):
    """A running count that takes empty slots for tokens."""

    def features(self, params, x, pos, carry):
        rank = (0.0 if carry is None else carry) + jnp.cumsum(jnp.ones(x.shape[0]))
        return {"rank": rank}, rank[-1]

    def score(self, params, s, tile):
        return s + jnp.cos(tile.k_features["rank"])[None, None, :]


def test_neighbouring_slots_are_seen_in_packs_and_in_padding():
    report = check_encoding(SeesNeighbours(), only=["packing", "prefix"])
    assert report.failures == ("packing", "prefix"), str(report)
    assert check_encoding(CountsSlots(), only=["padding"]).failures == ("padding",)


@encoding
class RoundsOnTheWay(Encoding):
    """Right to float32, and in bfloat16 of 8 bits less than due."""

    def query(self, params, vectors, pos, features):
        return (vectors.astype(jnp.float8_e4m3fn) if vectors.dtype == jnp.bfloat16 else vectors).astype(vectors.dtype)


def test_excessive_rounding_in_bfloat16_is_seen():
    report = check_encoding(RoundsOnTheWay(), only=["bfloat16", "fused"])
    assert report.failures == ("bfloat16",) and "dense: outputs off by" in str(report), str(report)


def test_reference_and_kernel_are_compared_with_the_formula(monkeypatch):
    def alibi(params, x, project, pos, visible, gain=1.0):
        q, k, v = project(x)
        k, v = (np.repeat(a, 2, axis=1) for a in (k, v))
        s = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        s = s - gain * np.abs(pos[:, None] - pos[None, :]) * 0.25 ** np.arange(1, 5)[:, None, None]
        w = np.where(visible, np.exp(s), 0)
        return np.einsum("hqk,khd->qhd", w / np.maximum(w.sum(axis=-1, keepdims=True), 1e-300), v)

    for gain, failed in ((1.0, ()), (1.001, ("reference",))):
        report = check_encoding("alibi", reference=functools.partial(alibi, gain=gain), only=["reference"])
        assert report.failures == failed, str(report)
    monkeypatch.setattr(sys.modules["posx.attention.fused"], "content_free_bias", lambda *_: None)
    report = check_encoding("alibi", only=["fused"])
    assert report.failures == ("fused",) and "one call: outputs off by" in str(report), str(report)


@encoding
class Sharpens(Encoding):
    """A logit scale that each query's own content sets, head by head."""

    def init(self, rng, dims):
        return {"w": jax.random.normal(rng, (dims.model_dim, dims.num_heads), jnp.float32)}

    def features(self, params, x, pos, carry):
        return {"scale": 1 + jax.nn.sigmoid(at_least_float32(x) @ params["w"])}, carry

    def logit_scale(self, params, pos, features):
        return features["scale"].T


def test_logit_scale_reads_its_own_features():
    def by_hand(params, x, project, pos, visible):
        q, k, v = project(x)
        scale = 1 + 1 / (1 + np.exp(-x @ params["w"]))
        k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
        s = scale.T[:, :, None] * np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        w = np.where(visible, np.exp(s), 0)
        return np.einsum("hqk,khd->qhd", w / np.maximum(w.sum(axis=-1, keepdims=True), 1e-300), v)

    checks = ["hooks", "reference", "tiles", "gradients", "padding", "decode", "shift_invariant", "prefix"]
    report = check_encoding(Sharpens(), reference=by_hand, only=checks)
    assert report.ok and all(line.status == "ok" for line in report.outcomes), str(report)


@pytest.mark.parametrize("parts", [(Sharpens(),), (Sharpens(), Deberta(4))], ids=["alone", "with a constant one"])
def test_shared_positions_serve_logit_scales_of_each_sequence(parts):
    dims = Dims(model_dim=12, num_heads=4, head_dim=6, num_layers=2, train_len=32, num_kv_heads=2)
    encoding = build(parts, dims)
    params, pos = encoding.init(jax.random.key(0), dims), jnp.arange(9, dtype=jnp.int32)
    shapes = [(3, 9, 4, 6), (3, 9, 2, 6), (3, 9, 2, 6), (3, 9, 12)]
    *qkv, x = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes))
    sides = pos, jnp.broadcast_to(pos, (3, 9))
    once, each = (in_one_program(attend, encoding, params, *qkv, where, x=x) for where in sides)
    np.testing.assert_allclose(once, each, atol=1e-6)


def test_check_that_does_not_apply_is_not_ok():
    report = check_encoding(Shaw(3), only=["fused", "reference", "fades", "tiling", "reach"])
    assert [line.status for line in report.outcomes] == ["-", "-", "-", "ok", "-"] and report.ok
    fused = next(str(line) for line in report.outcomes if line.name == "fused")
    by_content = "by_distance.query, by_distance.value"
    why = f"Shaw acts on {by_content}, which the kernel does not support"
    assert fused == f"fused              -      {CHECKS['fused'][1]}: {why}"


@pytest.mark.parametrize(
    ("encoding", "name", "default", "hint"),
    [
        (Shaw(3), "reach", None, "but nothing changes from 3 tokens on. Attention is faster with reach = 3."),
        (Alibi(), "fades", False, "falls at these parameters. Attention is faster with fades = True, if it always"),
    ],
)
def test_check_names_a_promise_that_would_be_faster(encoding, name, default, hint):
    report = check_encoding(variant(encoding, **{name: default}), only=[name])
    assert hint in str(report) and report.ok
    assert hint not in str(check_encoding(encoding, only=[name]))


def test_silent_promotion_fails_one_check_only():
    report = check_encoding(MixesTypes(), only=["hooks", "tiles", "gradients", "float32"])
    assert report.failures == ("hooks",), str(report)
    assert "Write the missing axes, for example with a[None, :]" in str(report)
    scaled = str(check_encoding(ScalesInFloat32(), only=["hooks"]))
    assert "posx.as_float(x) for distances, x.astype(s.dtype) for vectors" in scaled


def test_each_check_has_its_own_phrase():
    assert len({shows for _, shows in CHECKS.values()}) == len(CHECKS)
    assert str(check_encoding("nope", only=["eager"])).endswith(f"eager              ok     {CHECKS['eager'][1]}")


def test_unusable_request_is_one_line():
    with pytest.raises(
        ConfigError, match=r"only=decoding: no check has this name. Did you mean 'decode'\? The checks are: "
    ):
        check_encoding("nope", only=["decoding"])
    with pytest.raises(ConfigError, match="defined for positions 0 to 9, but the checks need positions up to 29"):
        check_encoding(Learned(10), only=["hooks"])
    given = r"^Alibi\(num_heads=3, .*\)\.by_distance\.bias gives \[3, 7\], but \[h or 1, n\] = \[4 or 1, 7\]"
    with pytest.raises(ConfigError, match=given):
        check_encoding(Alibi(3), only=["hooks"])


def test_chain_is_checked_like_any_other_value():
    chain = Chain((Rope(rotary_dim=4), Deberta(5, ("c2p",)), SeesTheStart()))
    assert check_encoding(chain, only=["shift_invariant", "reach"]).failures == ("shift_invariant",)


def test_command_prints_a_line_per_check_and_exits_1_on_failure(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    name = f"{__name__}:CountsTokens"
    for only, code in (("hooks,value,reach", 0), ("prefix,value", 1)):
        assert cli.main(["check", name, f"--only={only}"]) == code
        printed = capsys.readouterr()
        last = [f"all is well with {name}: 2 passed, 1 had nothing to check"] if code == 0 else []
        assert printed.out.splitlines()[len(only.split(",")) :] == last
    assert printed.err == "posx: 1 of 2 checks failed: prefix\n"
    assert f"prefix             FAILED {CHECKS['prefix'][1]}: without later tokens: outputs off by" in printed.out
    for words, says in (
        (["check"], "posx: no encoding is named. Name one: posx check alibi"),
        (["check", "alibi", "--only=tile", "--dry_run"], "only=tile: no check has this name. Did you mean 'tiles'?"),
        (["check", "alibii"], "encoding 'alibii' is unknown. Did you mean 'alibi'?"),
        (["check", "alibi", "--params=small", "--dry_run"], "params=small is unknown; allowed: large, init"),
        (["check", "alibi", "--num_heads=5"], "num_kv_heads=2 does not divide num_heads=5"),
        (["check", "alibi", "rope"], "word 'rope' belongs to no flag"),
    ):
        assert cli.main(words) == 2
        assert says in capsys.readouterr().err
    assert cli.main(["check", "learned", "--train_len=64", "--dry_run"]) == 0
    assert "would check Learned(num_positions=64" in capsys.readouterr().out


@encoding
class LearnedBase(Encoding):
    """RoPE whose base is learned, within a factor of e of 10,000, valid to `limit` tokens."""

    limit: int = 65_536
    exact: bool = True
    head_dim: int | None = None

    planes = "half_split"
    max_position = fact(lambda self: self.limit - 1)

    def init(self, rng, dims):
        return {"a": jnp.zeros(1)}

    def query(self, params, vectors, pos, features):
        exponents = as_float(-np.arange(0, self.head_dim, 2) / self.head_dim)
        w = jnp.exp(exponents * (np.log(10_000) + jnp.tanh(params["a"])))
        angle = posx.angles(pos, w) if self.exact else as_float(pos)[:, None] * w[None, :]
        angle = jnp.where(pos[:, None] < self.limit, angle, jnp.nan)
        return rotate(vectors, jnp.sin(angle), jnp.cos(angle))

    key = query


def test_learned_base_keeps_float32_with_exact_angles():
    far = 2**25
    assert check_encoding(LearnedBase(far), only=["float32"]).ok
    report = check_encoding(LearnedBase(far, exact=False), only=["float32"])
    assert report.failures == ("float32",) and "positions moved by 32768: outputs off by" in str(report)


@pytest.mark.slow
def test_learned_base_of_the_tutorial_keeps_the_contract(tmp_path, monkeypatch):
    """In bfloat16 too: its gradient's terms cancel, so that it is off by more than 4 units, which others are within."""
    page = Path(__file__).parents[2] / "docs/tutorials/own_encoding.md"
    code = re.search(r"%%writefile (my_rotation)\.py\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / f"{code[1]}.py").write_text(code[2], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    report = check_encoding(f"{code[1]}:LearnedBase")
    assert report.ok, str(report)


@jax.custom_vjp
def _same(x):
    return x


_same.defvjp(lambda x: (x, None), lambda _, grad: (grad.astype(jnp.float8_e4m3fn).astype(grad.dtype),))


@encoding
class RoundsOnTheWayBack(Encoding):
    """Outputs are right. In bfloat16 gradients have 4 bits less than due."""

    def query(self, params, vectors, pos, features):
        return _same(vectors) if vectors.dtype == jnp.bfloat16 else vectors


@pytest.mark.slow
def test_excessive_rounding_of_gradients_is_seen():
    report = check_encoding(RoundsOnTheWayBack(), only=["bfloat16"])
    assert report.failures == ("bfloat16",), str(report)
    assert "dense: gradient of q is off by 0.0" in report.outcomes[0].detail, str(report)


@encoding
class BelowOne(Encoding):
    """Undefined for parameters that training does not reach."""

    def init(self, rng, dims):
        return {"a": jnp.full(dims.num_heads, 0.5, jnp.float32)}

    def by_distance(self, params, distance):
        a = params["a"]
        rate = jnp.where((a > 0) & (a < 1), a, jnp.nan)
        return ByDistance(bias=-rate[:, None] * as_float(jnp.abs(distance))[None, :])


def test_parameters_of_the_checks_can_be_realistic():
    for params, failed in (("large", ("positions",)), ("init", ()), ({"a": np.linspace(0.1, 0.9, 4)}, ())):
        report = check_encoding(BelowOne(), only=["positions"], params=params)
        assert report.failures == failed, str(report)
    drawn = drawn_params(BelowOne(), DIMS, "init")["a"]
    assert (drawn != 0.5).all() and np.abs(drawn - 0.5).max() < 0.25
    zeros = drawn_params(build("kerple", DIMS), DIMS, "init")
    assert all(np.abs(a).min() > 0 for a in zeros.values())
    for params, says in (
        ("small", "params=small is unknown; allowed: large, init"),
        ({"a": np.ones(3)}, r"parameter 'a' is \[3\], not \[4\]"),
        ({"b": np.ones(4)}, "missing: a; unknown: b"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_encoding(BelowOne(), only=["positions"], params=params)


def test_limit_is_stated_by_the_last_position():
    report = check_encoding(LearnedBase(40), only=["positions", "shift_invariant"])
    assert report.ok and "largest difference" in report.outcomes[1].detail, str(report)
    value = build(LearnedBase(40), DIMS)
    q = jnp.ones((1, 41, 4, 6))
    pos = np.arange(41, dtype=np.int32)
    with pytest.raises(UndefinedLength, match="defined for positions 0 to 39, but got 0 to 40"):
        attend(value, {"a": jnp.zeros(1)}, q, q, q, pos)
    traced = jax.jit(lambda pos: attend(value, {"a": jnp.zeros(1)}, q, q, q, pos))(pos)
    assert np.isnan(traced[0, 40]).all() and np.isfinite(traced[0, :40]).all()


@pytest.mark.slow
def test_numpy_computes_what_jax_computes():
    """Loops and branches are followed. JAX computes what NumPy computes otherwise, such as quotients of integers."""

    def function(x, n):
        products = jnp.einsum("abc,adc->dba", x, x[:, ::-1])
        halves = jax.lax.div(n, 2) + jnp.cumsum(n)
        branch = jax.lax.cond(n.sum() > 0, jnp.sin, jnp.cos, products)
        looped = jax.lax.fori_loop(0, 3, lambda i, y: y * 2 + i, jax.nn.softplus(x[0, 0]))
        return {"branch": branch, "halves": halves, "looped": jnp.where(looped > 60, -looped, looped).max(axis=0)}

    given = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32), np.array([-3, 5, 1], np.int32)
    found, wanted = run_in_numpy(function, *given), jax.jit(function)(*given)
    assert found["halves"].tolist() == [-4, 4, 3]
    for name, x in wanted.items():
        assert isinstance(found[name], np.ndarray) and found[name].dtype == x.dtype
        np.testing.assert_allclose(found[name], x, atol=1e-6, err_msg=name)
