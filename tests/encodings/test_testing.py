"""The checks of `posx.testing` see what breaks the contract: one small encoding for every way to do so."""

import dataclasses
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posx import attend, cli
from posx.encodings import Alibi, Chain, Deberta, Dims, Encoding, Learned, Relative, Rope, Shaw, build
from posx.encodings.base import as_float, at_least_float32
from posx.errors import ConfigError
from posx.testing import CHECKS, DIMS, SHOWS, check_encoding

encoding = dataclasses.dataclass(frozen=True)


def slopes(distance, gain=0.3):
    return -gain * jnp.abs(distance)[None, :]


@encoding
class FromPlaces(Encoding):
    """Turns by the place in the array, not by the position."""

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

    def curve(self, params, distance):
        return slopes(distance)


@encoding
class LooksAhead(Encoding):
    """A temperature by the last position of all."""

    shift_invariant = False

    def temperature(self, params, pos, features):
        return jnp.full(pos.shape, jnp.log(as_float(pos.max() + 2)))


@encoding
class CountsTokens(Encoding):
    """A temperature by the number of tokens, whatever their positions."""

    def temperature(self, params, pos, features):
        return jnp.full(pos.shape, np.log(1.0 + pos.shape[0]), as_float(0).dtype)


@encoding
class SaysItCountsTokens(Encoding):
    prefix_consistent = False

    def curve(self, params, distance):
        return slopes(distance)


@encoding
class ReachesFurther(Encoding):
    reach = 5

    def curve(self, params, distance):
        return slopes(jnp.clip(distance, -6, 6))


@encoding
class ReachesNothing(Encoding):
    reach = 5

    def curve(self, params, distance):
        return jnp.zeros((1, distance.shape[0]), distance.dtype)


@encoding
class FadesNot(Encoding):
    fades = True

    def curve(self, params, distance):
        return slopes(jnp.minimum(jnp.abs(distance), 100))


@encoding
class PunishesThePast(Encoding):
    """Of later keys it knows nothing, and does not say so."""

    def curve(self, params, distance):
        return slopes(jnp.maximum(distance, 0))


@encoding
class CachesWhatChanges(Encoding):
    """Keys meet vectors by distance as projected, so mapped ones cannot be cached in their place."""

    caches_mapped_keys = True

    def key(self, params, vectors, pos, features):
        return Rope(rotary_dim=6).key({}, vectors, pos, {})

    def relative(self, params, distance):
        wave = jnp.sin(as_float(distance))[:, None, None] * jnp.ones((1, 1, 6), as_float(0).dtype)
        return Relative(key=wave)


@encoding
class RunsOut(Encoding):
    """Says that its table has 40 rows, and has 30."""

    shift_invariant = False
    integer_positions = True
    max_position = 39

    def temperature(self, params, pos, features):
        return jnp.linspace(1.0, 2.0, 30, dtype=as_float(0).dtype).at[pos].get(mode="fill", fill_value=jnp.nan)


@encoding
class ClampsSilently(Encoding):
    """Its table has 40 rows; beyond them the last one is read without a word."""

    shift_invariant = False
    integer_positions = True
    max_position = 39

    def temperature(self, params, pos, features):
        return jnp.linspace(1.0, 2.0, 40, dtype=as_float(0).dtype)[pos]


@encoding
class ReadsATable(Encoding):
    """By distance, but does not say that positions must be whole."""

    def relative(self, params, distance):
        return Relative(
            bias=jnp.linspace(0.0, 1.0, 11, dtype=as_float(0).dtype)[jnp.clip(distance, -5, 5) + 5][:, None]
        )


@encoding
class NeedsRows(Encoding):
    """Less the mean score of the row, which a tile does not know."""

    def score(self, params, s, tile):
        return s * jax.nn.sigmoid(s.mean(axis=-1, keepdims=True))


@encoding
class SaysItNeedsRows(Encoding):
    tiling = "rows"

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
class MixesUnevenly(Encoding):
    """Not linear in the weights."""

    def mix(self, params, w, q_pos, k_pos):
        return jnp.broadcast_to((w**2).sum(axis=-1).T[:, :, None], (w.shape[1], w.shape[0], 6))


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
class CurveInBfloat16(Encoding):
    def curve(self, params, distance):
        return slopes(distance.astype(jnp.bfloat16), 0.25)


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

    def curve(self, params, distance):
        return -jnp.float32(0.5) * params["slope"] * jnp.abs(distance)


CALLS = itertools.count()


@encoding
class Counts(Encoding):
    """Not a pure function."""

    def curve(self, params, distance):
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
class SaysTwoThings(Encoding):
    """A bias that is not that of its curve: one executor reads the one, one the other."""

    def acts_on(self, hook):
        return super().acts_on(hook)

    def curve(self, params, distance):
        return slopes(distance)

    def bias(self, params, q_pos, k_pos):
        return jnp.zeros((1, q_pos.shape[0], k_pos.shape[0]), as_float(0).dtype)


@encoding
class Raises(Encoding):
    """Only where there is one query."""

    def bias(self, params, q_pos, k_pos):
        if q_pos.shape[0] == 1:
            raise IndexError("no neighbour\nof one token")
        return as_float(q_pos[:, None] - k_pos[None, :])[None] / 10


@encoding
class ResolvesOnAndOn(Encoding):
    gain: int = 1

    def resolve(self, dims):
        return dataclasses.replace(self, gain=self.gain + 1)


@encoding
class CachesWhatItReads(Encoding):
    """Nothing is mapped here, but a chain's other parts may map the keys that this one reads."""

    caches_mapped_keys = True

    def score(self, params, s, tile):
        return s + jnp.tanh(tile.k.sum(axis=-1)).T[:, None].astype(s.dtype)


@encoding
class CachesWhatMeetsVectors(Encoding):
    caches_mapped_keys = True

    def relative(self, params, distance):
        return Relative(key=jnp.cos(as_float(distance))[:, None, None] * jnp.ones((1, 1, DIMS.head_dim)))


#: What breaks the contract, the check that must see it, and what it says.
BROKEN = [
    (FromPlaces(), "positions", "slots in another order: outputs differs by"),
    (FromPlaces(), "decode", "keys cached as projected, token by token differs by"),
    (SeesTheStart(), "shift_invariant", "moved by 1: outputs differs by"),
    (SaysItSeesTheStart(), "shift_invariant", "declared False, but if all positions move: nothing changes"),
    (LooksAhead(), "prefix_consistent", "if later tokens move too: outputs differs by"),
    (CountsTokens(), "prefix_consistent", "without later tokens: outputs differs by"),
    (CountsTokens(), "decode", "token by token differs by"),
    (SaysItCountsTokens(), "prefix_consistent", "declared False, but if later tokens change or go: nothing changes"),
    (ReachesFurther(), "reach", "curve beyond 5 in the past differs by 0.3"),
    (ReachesNothing(), "reach", "reach = 5, but nearer too curve: nothing changes"),
    (FadesNot(), "fades", "declared True, but the curve is the same at 4096 and 8388608"),
    (PunishesThePast(), "causal_only", "declared False, but all later keys get the same, near or far"),
    (CachesWhatChanges(), "decode", "keys cached as mapped, token by token differs by"),
    (CachesWhatItReads(), "decode", "caches_mapped_keys is declared True, but keys are read as projected"),
    (CachesWhatMeetsVectors(), "decode", "caches_mapped_keys is declared True, but keys are read as projected"),
    (RunsOut(), "positions", "outputs are not finite at some position"),
    (ClampsSilently(), "positions", "under jit position 40 is served, but max_position = 39: give NaN there"),
    (ReadsATable(), "eager", "raises TypeError: Indexer must have integer or boolean type"),
    (NeedsRows(), "tiles", "causal: outputs differs by"),
    (SaysItNeedsRows(), "tiling", "tiling = 'rows', but in small tiles: nothing changes"),
    (WrongGradient(), "gradients", "dense slope along a direction in q differs by"),
    (MixesUnevenly(), "tiles", "causal: outputs differs by"),
    (PlainAngles(), "float32", "positions moved by 32768: outputs differs by"),
    (CurveInBfloat16(), "hooks", "curve gives bfloat16 for float32 vectors, not float32"),
    (MixesTypes(), "hooks", "under strict rank and type promotion: MixesTypes().curve(params, [7]) raises"),
    (Counts(), "eager", "outside jit: ['curve'] differs by"),
    (Forgets(), "decode", "keys cached as projected, token by token differs by"),
    (SaysTwoThings(), "strips", "causal: outputs differs by"),
    (Raises(), "decode", "raises IndexError: no neighbour"),
    (ResolvesOnAndOn(), "value", "resolving a resolved value changes it"),
]


@pytest.mark.parametrize(
    ("broken", "check", "says"), BROKEN, ids=[f"{type(e).__name__}-{check}" for e, check, _ in BROKEN]
)
def test_a_check_fails_where_its_fact_does_not_hold(broken, check, says):
    report = check_encoding(broken, only=[check])
    assert report.failed == (check,), str(report)
    assert says in report.outcomes[0].detail, str(report)
    assert "\n" not in str(report.outcomes[0])


def test_every_check_is_seen_to_fail():
    tested_below = {"reference", "fused", "packing", "padding", "bfloat16"}
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


def test_neighbours_in_the_array_are_seen_in_packs_and_in_padding():
    report = check_encoding(SeesNeighbours(), only=["packing", "prefix_consistent"])
    assert report.failed == ("packing", "prefix_consistent"), str(report)
    assert check_encoding(CountsSlots(), only=["padding"]).failed == ("padding",)


@encoding
class RoundsOnTheWay(Encoding):
    """Right to float32, and in bfloat16 of 8 bits less than due."""

    def query(self, params, vectors, pos, features):
        return (vectors.astype(jnp.float8_e4m3fn) if vectors.dtype == jnp.bfloat16 else vectors).astype(vectors.dtype)


def test_what_is_rounded_too_much_in_bfloat16_is_seen():
    report = check_encoding(RoundsOnTheWay(), only=["bfloat16", "fused"])
    assert report.failed == ("bfloat16",) and "dense: outputs differs by" in str(report), str(report)


def test_a_reference_is_compared_with_and_the_kernel_with_the_formula(monkeypatch):
    def alibi(params, x, project, pos, visible, gain=1.0):
        q, k, v = project(x)
        k, v = (np.repeat(a, 2, axis=1) for a in (k, v))
        s = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        s = s - gain * np.abs(pos[:, None] - pos[None, :]) * 0.25 ** np.arange(1, 5)[:, None, None]
        w = np.where(visible, np.exp(s), 0)
        return np.einsum("hqk,khd->qhd", w / np.maximum(w.sum(axis=-1, keepdims=True), 1e-300), v)

    for gain, failed in ((1.0, ()), (1.001, ("reference",))):
        report = check_encoding("alibi", reference=functools.partial(alibi, gain=gain), only=["reference"])
        assert report.failed == failed, str(report)
    monkeypatch.setattr(sys.modules["posx.attention.fused"], "score_bias", lambda *_: None)
    report = check_encoding("alibi", only=["fused"])
    assert report.failed == ("fused",) and "one call: [0] differs by" in str(report), str(report)


@encoding
class Sharpens(Encoding):
    """A temperature that each query's own content sets, head by head."""

    def init(self, rng, dims):
        return {"w": jax.random.normal(rng, (dims.model_dim, dims.num_heads), jnp.float32)}

    def features(self, params, x, pos, carry):
        return {"heat": 1 + jax.nn.sigmoid(at_least_float32(x) @ params["w"])}, carry

    def temperature(self, params, pos, features):
        return features["heat"].T


def test_a_temperature_reads_what_its_token_keeps():
    def by_hand(params, x, project, pos, visible):
        q, k, v = project(x)
        heat = 1 + 1 / (1 + np.exp(-x @ params["w"]))
        k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
        s = heat.T[:, :, None] * np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        w = np.where(visible, np.exp(s), 0)
        return np.einsum("hqk,khd->qhd", w / np.maximum(w.sum(axis=-1, keepdims=True), 1e-300), v)

    checks = ["hooks", "reference", "tiles", "gradients", "padding", "decode", "shift_invariant", "prefix_consistent"]
    report = check_encoding(Sharpens(), reference=by_hand, only=checks)
    assert report.ok and all(line.status == "ok" for line in report.outcomes), str(report)


@pytest.mark.parametrize("parts", [(Sharpens(),), (Sharpens(), Deberta(4))], ids=["alone", "beside a constant one"])
def test_positions_that_all_sequences_share_serve_a_temperature_that_is_their_own(parts):
    dims = Dims(model_dim=12, num_heads=4, head_dim=6, num_layers=2, train_len=32, num_kv_heads=2)
    encoding = build(parts, dims)
    params, pos = encoding.init(jax.random.key(0), dims), jnp.arange(9)
    shapes = [(3, 9, 4, 6), (3, 9, 2, 6), (3, 9, 2, 6), (3, 9, 12)]
    *qkv, x = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes))
    once, each = (
        attend(encoding, params, *qkv, q_pos=where, k_pos=where, x=x) for where in (pos, jnp.broadcast_to(pos, (3, 9)))
    )
    np.testing.assert_allclose(once, each, atol=1e-6)


def test_what_does_not_apply_is_not_called_ok():
    report = check_encoding(Shaw(3), only=["fused", "reference", "fades", "tiling", "reach"])
    assert [line.status for line in report.outcomes] == ["-", "-", "-", "ok", "-"] and report.ok
    fused = next(str(line) for line in report.outcomes if line.name == "fused")
    assert (
        fused == f"fused              -      {SHOWS['fused']}: Shaw acts on relative, which the kernel has no place for"
    )


def test_silent_promotion_fails_one_check_and_no_other():
    report = check_encoding(MixesTypes(), only=["hooks", "tiles", "gradients", "float32"])
    assert report.failed == ("hooks",), str(report)
    assert "write the missing axes, for example with a[None, :]" in str(report)
    scaled = str(check_encoding(ScalesInFloat32(), only=["hooks"]))
    assert "cast to the type of the vectors that the hook is given, for example with .astype(s.dtype)" in scaled


def test_each_check_has_a_phrase_of_its_own():
    assert SHOWS.keys() == CHECKS.keys() and len(set(SHOWS.values())) == len(CHECKS)
    assert str(check_encoding("nope", only=["eager"])).endswith(f"eager              ok     {SHOWS['eager']}")


def test_what_cannot_be_checked_is_one_line():
    with pytest.raises(ConfigError, match=r"no check is called 'decoding'; did you mean 'decode'\? known: hooks, "):
        check_encoding("nope", only=["decoding"])
    with pytest.raises(ConfigError, match="defined for positions 0 to 9, but the checks need those to 29"):
        check_encoding(Learned(10), only=["hooks"])
    with pytest.raises(
        ConfigError, match=r"^Alibi\(num_heads=3\)\.curve gives \[3, 7\] where \[h or 1, n\] = \[4 or 1, 7\]"
    ):
        check_encoding(Alibi(3), only=["hooks"])


def test_chains_are_checked_like_any_other_value():
    chain = Chain((Rope(rotary_dim=4), Deberta(5, ("c2p",)), SeesTheStart()))
    assert check_encoding(chain, only=["shift_invariant", "reach"]).failed == ("shift_invariant",)


def test_the_command_prints_a_line_for_each_check_and_exits_1_where_one_fails(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    name = f"{__name__}:SaysItCountsTokens"
    for only, code in (("hooks,value,reach", 0), ("prefix_consistent,value", 1)):
        assert cli.main(["check", name, f"--only={only}"]) == code
        printed = capsys.readouterr()
        last = ["all is well: 2 passed, 1 had nothing to check"] if code == 0 else []
        assert printed.out.splitlines()[len(only.split(",")) :] == last
    assert printed.err == "posx: 1 of 2 checks failed: prefix_consistent\n"
    assert f"prefix_consistent  FAILED {SHOWS['prefix_consistent']}: declared False, but if" in printed.out
    for words, says in (
        (["check"], "posx: name the encoding first: posx check alibi"),
        (["check", "alibi", "--only=tile", "--dry_run"], "no check is called 'tile'; did you mean 'tiles'?"),
        (["check", "alibii"], "unknown encoding 'alibii'; did you mean 'alibi'?"),
        (["check", "alibi", "--num_heads=5"], "num_kv_heads=2 does not divide num_heads=5"),
        (["check", "alibi", "rope"], "stray word 'rope'"),
    ):
        assert cli.main(words) == 2
        assert says in capsys.readouterr().err
    assert cli.main(["check", "learned", "--train_len=64", "--dry_run"]) == 0
    assert "would check Learned(num_positions=64" in capsys.readouterr().out
