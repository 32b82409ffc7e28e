"""What `attend` takes: positions of the two types it knows, encodings and parameters made for its sizes."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.contract import ByDistance, position_shape
from posx.encodings import Alibi, Chain, Dape, Encoding, Nope, Rope, Shaw, Tupe, Xpos
from posx.errors import ConfigError, UndefinedLength
from tests.cheap import in_one_program
from tests.encodings.cases import ACTING

B, T, H, G, D = 2, 9, 4, 2, 6
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((B, T, heads, D)).astype(np.float32) for heads in (H, G, G))
#: Differences of these would wrap around in 8 bits, signed or not.
POS = np.arange(T, dtype=np.int32)[::-1] * 15
SHAW = {name: RNG.standard_normal((7, D)).astype(np.float32) for name in ("keys", "values")}
IN_ORDER = np.arange(T, dtype=np.int32)


def attend(encoding, params, slots, k_slots=None, q=Q, k=K, v=V, **options):
    return posx.attend(encoding, params, q, k, v, slots, k_slots, **{"executor": "dense"} | options)


def test_positions_of_both_types_and_libraries_are_the_same():
    wanted = attend(Alibi(H), {}, POS)
    for given in (jnp.asarray(POS), np.float32(POS), jnp.float32(POS), np.stack([POS, POS]), POS[None]):
        assert_array_equal(attend(Alibi(H), {}, given), wanted)
    run = jax.jit(functools.partial(attend, Alibi(H), {}))
    for given in (POS, np.float32(POS)):
        assert_allclose(run(given), wanted, atol=1e-6)


KINDS = (bool, "int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64", "float16", jnp.bfloat16, "float64")
NO_ARRAY = r"q_pos is no array: give \[t\] or \[b, t\] of int32 or float32"
REFUSED = {
    **{
        str(np.dtype(kind)): (POS.astype(kind), f"q_pos is {np.dtype(kind)}: it must be int32 or float32")
        for kind in KINDS
    },
    "nothing": (None, NO_ARRAY),
    "list": (POS.tolist(), NO_ARRAY),
    "text": (np.array(["a"] * T), "q_pos is <U1"),
    "rows of another batch": (
        np.stack([POS] * 3),
        r"q_pos has shape \(3, 9\), but vectors \[b, t, h, d\] have 9 tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_positions_of_other_types_are_refused(case):
    """Known, traced, and where 64-bit types are on: conversions could wrap around or round."""
    given, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        attend(Nope(), {}, given)
    assert "\n" not in str(caught.value)
    if case in map(str, map(np.dtype, KINDS)):
        with jax.enable_x64(True), pytest.raises(ValueError, match=message):
            jax.eval_shape(functools.partial(attend, Nope(), {}), jax.ShapeDtypeStruct((T,), given.dtype))


def test_both_sides_count_in_one_type():
    with pytest.raises(
        ValueError, match="positions are int32 for queries but float32 for keys: give both the same type."
    ):
        attend(Nope(), {}, POS, np.float32(POS))


@pytest.mark.parametrize("field", ["idx", "segment"])
def test_orders_and_documents_must_be_int32(field):
    sides = [posx.Slots(POS, **{field: given}) for given in (IN_ORDER, np.float32(IN_ORDER), IN_ORDER.astype(np.int64))]
    for kind, other in zip(("float32", "int64"), sides[1:], strict=True):
        with pytest.raises(ValueError, match=rf"q_{field} is {kind}: it must be int32\. Write q_{field}\.astype"):
            attend(Nope(), {}, other, sides[0])
    with pytest.raises(ValueError, match=rf"k_{field} has shape \(3,\), but vectors \[b, t, h, d\] have 9 tokens"):
        attend(Nope(), {}, sides[0], posx.Slots(POS, **{field: IN_ORDER[:3]}))


def test_vectors_in_float64_are_served_in_float64():
    wanted = attend(Alibi(H), {}, POS)
    with jax.enable_x64(True):
        q, k, v = map(np.float64, (Q, K, V))
        slots = posx.Slots(POS, IN_ORDER)
        found = jax.jit(lambda pos: attend(Alibi(H), {}, slots._replace(pos=pos), slots, q, k, v))(POS)
        assert found.dtype == np.float64
        assert_allclose(found, wanted, atol=1e-6)
        narrow = attend(Alibi(H), {}, np.float32(POS), None, q, k, v)
        assert narrow.dtype == np.float64
        assert_allclose(narrow, found, atol=1e-12)


def test_jax_arrays_are_known_unless_they_are_traced():
    """They are served from tables of distances, and held to the same limit; also under `jit`, closed over."""

    def kinds_of_work(pos):
        text = jax.jit(lambda q: attend(Shaw(3), SHAW, pos, None, q, q, q, executor="blockwise")).lower(Q).as_text()
        return [text.count(f"stablehlo.{kind}") for kind in ("gather", "while", "case", "dot_general")]

    assert kinds_of_work(jnp.asarray(IN_ORDER)) == kinds_of_work(IN_ORDER) != kinds_of_work(IN_ORDER * 2)
    with pytest.raises(UndefinedLength, match="defined for positions 0 to 3, but got 0 to 8"):
        attend(Tupe(4), {}, jnp.asarray(IN_ORDER))


@dataclasses.dataclass(frozen=True)
class Odd(Encoding):
    """A user's encoding whose `hook` gives zeros of `shape`, where "q", "k" and "n" are as many as there are."""

    hook: str
    shape: tuple[Any, ...]

    def acts_on(self, hook):
        return hook == self.hook.partition(".")[0]

    def _zeros(self, **sizes):
        return jnp.zeros([sizes.get(n, n) for n in self.shape])

    def query(self, params, vectors, pos, features):
        return self._zeros(q=len(pos))

    def key(self, params, vectors, pos, features):
        return self._zeros(k=len(pos))

    def decay(self, params):
        return self._zeros()

    def logit_scale(self, params, pos, features):
        return self._zeros(q=len(pos))

    def by_distance(self, params, distance):
        return ByDistance(**{self.hook.partition(".")[2]: self._zeros(n=len(distance))})

    def bias(self, params, q_pos, k_pos):
        return self._zeros(q=len(q_pos), k=len(k_pos))

    def token_bias(self, params, pos, features):
        return self._zeros(q=len(pos))

    def score(self, params, s, tile):
        return self._zeros(q=len(tile.q_pos), k=len(tile.k_pos))


#: The shape that a hook returns, and the required one in letters and in numbers.
HOOKS = {
    "query of other heads": (Odd("query", ("q", 2, D)), "[3, 2, 6]", "[q, h, *] = [3, 4, *]"),
    "key of query heads": (Odd("key", ("k", H, D)), "[5, 4, 6]", "[k, g, *] = [5, 2, *]"),
    "decay by other channels": (Odd("decay", (1, 5)), "[1, 5]", "[h or 1, d'] = [4 or 1, 6]"),
    "logit scale by token": (Odd("logit_scale", ("q", H)), "[3, 4]", "[h or 1, q] = [4 or 1, 3]"),
    "logit scale without heads": (Odd("logit_scale", ("q",)), "[3]", "[h or 1, q] = [4 or 1, 3]"),
    "distance bias of other heads": (Odd("by_distance.bias", (3, "n")), "[3, 7]", "[h or 1, n] = [4 or 1, 7]"),
    "distance bias turned": (Odd("by_distance.bias", ("n", H)), "[7, 4]", "[h or 1, n] = [4 or 1, 7]"),
    "scaled bias turned": (Odd("by_distance.scaled", ("n", H)), "[7, 4]", "[h or 1, n] = [4 or 1, 7]"),
    "vectors of other heads": (Odd("by_distance.query", ("n", G, D)), "[7, 2, 6]", "[n, h or 1, d] = [7, 4 or 1, 6]"),
    "vectors of another width": (Odd("by_distance.query", ("n", 1, 5)), "[7, 1, 5]", "[n, h or 1, d] = [7, 4 or 1, 6]"),
    "values of another width": (Odd("by_distance.value", ("n", 1, 5)), "[7, 1, 5]", "[n, h or 1, d] = [7, 4 or 1, 6]"),
    "bias turned": (Odd("bias", (H, "k", "q")), "[4, 5, 3]", "[h or 1, q, k] = [4 or 1, 3, 5]"),
    "bias of key heads": (Odd("bias", (G, "q", "k")), "[2, 3, 5]", "[h or 1, q, k] = [4 or 1, 3, 5]"),
    "token bias of other heads": (Odd("token_bias", ("q", 2, 1)), "[3, 2, 1]", "[q, h or 1, *] = [3, 4 or 1, *]"),
    "score for one head": (Odd("score", (1, "q", "k")), "[1, 3, 5]", "[h, q, k] = [4, 3, 5]"),
}  # fmt: skip


def refused_hook(encoding, message):
    for given in (encoding, Chain((Nope(), encoding))):
        with pytest.raises(ConfigError, match=rf"{message}.*\(q has 4 heads of 6, k and v 2 of 6 and 6; ") as caught:
            attend(given, {}, POS)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", HOOKS)
def test_results_of_hooks_must_have_their_shape(case):
    encoding, given, wanted = HOOKS[case]
    refused_hook(encoding, re.escape(f".{encoding.hook} gives {given}, but {wanted} is expected"))


def test_queries_and_keys_must_have_one_width():
    message = r"\.key: queries are 6 wide and keys 8 wide, but they are multiplied. Give both"
    refused_hook(Odd("key", ("k", G, 8)), message)


@pytest.mark.parametrize("hook", ["by_distance.bias", "by_distance.scaled", "bias", "logit_scale"])
def test_values_that_all_heads_share_may_have_one_head(hook):
    shape = {"bias": (1, "q", "k"), "logit_scale": (1, "q")}.get(hook, (1, "n"))
    assert attend(posx.build(Odd(hook, shape), XL), {}, POS).shape == Q.shape


XL = posx.Dims(model_dim=24, num_heads=H, head_dim=D, num_layers=1, train_len=16, num_kv_heads=G)
OTHER = posx.Dims(model_dim=24, num_heads=H, head_dim=4, num_layers=1, train_len=16)
ONE = posx.Dims(model_dim=24, num_heads=1, head_dim=24, num_layers=1, train_len=16)


def built(name, dims):
    encoding = posx.build(name, dims)
    shapes = jax.eval_shape(lambda: encoding.init(jax.random.key(0), dims))
    return encoding, {name: 0.1 * RNG.standard_normal(a.shape).astype(a.dtype) for name, a in shapes.items()}


MISFITS = {
    "alibi of one head": (*built("alibi", ONE), r"^Alibi\(.*\) was built for num_heads=1, but q has 4 heads"),
    "alibi in a chain": (*built(["rope", "alibi"], ONE), r"^Alibi\(.*\) was built for num_heads=1"),
    "t5 of one head": (*built("t5", ONE), r"^T5\(.*parameter 'table' is \[8, 1\], not \[8, 4\]"),
    "tupe of narrow heads": (*built("tupe", OTHER), r"parameter 'u_k' is \[24, 4, 4\], not \[\*, 2, 6\]"),
    "shaw of narrow heads": (*built("shaw", OTHER), r"parameter 'keys' is \[17, 4\], not \[17, 6\]"),
    "another table": (Shaw(2), SHAW, r"parameter 'keys' is \[7, 6\], not \[5, 6\]"),
    "rope of wide heads": (
        *built("rope", ONE),
        r"^Rope\(.*rotary_dim=24, .*\)\.query does not fit: q has 4 heads of 6, k and v 2 of 6 and 6\. Build the "
        r"encoding for these sizes: posx\.build\(spec, posx\.Dims\(num_heads=4, head_dim=6, num_kv_heads=2, \.\.\.\)",
    ),
    "no parameters": (
        built("t5", XL)[0], {}, r"^T5\(.*: missing: table\. Give all that init\(rng, dims\) returns, with the shared",
    ),
    "half of them": (
        built("transformer_xl", XL)[0], {"w_r": jnp.zeros((24, H, D))}, r"^TransformerXL\(.*: missing: u, v\. Give all",
    ),
    "none in a chain": (Chain((Nope(), Shaw(3))), {}, r"^Chain\(.*: missing: 1\.keys, 1\.values\. Give all"),
    "bam without parameters": (built("bam", XL)[0], {}, r"^Bam\(.*: missing: scale, shape\. Give all"),
    "bam with half of them": (built("bam", XL)[0], {"shape": jnp.ones(H)}, r"^Bam\(.*: missing: scale\. Give all"),
    "another encoding's": (
        built("kerple", XL)[0], built("bam", XL)[1], r"^Kerple\(.*: missing: a, p; unknown: scale, shape\. Give all"
    ),
    "more than there are": (Alibi(H), {"table": jnp.ones(H)}, r"^Alibi\(.*: unknown: table\. Give all"),
    "the chain's for a part": (
        Shaw(3), {f"0.{name}": x for name, x in SHAW.items()},
        r"^Shaw\(.*: missing: keys, values; unknown: 0\.keys, 0\.values\. Give all",
    ),
}  # fmt: skip


def test_a_spec_in_place_of_a_value_is_one_line():
    message = r"={} is no encoding's value\. Give posx\.build\({}, dims\) instead\.$"
    for spec in ("alibi", {"name": "rope"}, Alibi):
        with pytest.raises(ConfigError, match="^attend: encoding" + message.format(*[re.escape(repr(spec))] * 2)):
            attend(spec, {}, IN_ORDER)
    with pytest.raises(ConfigError, match=r"^Chain: parts\[1\]" + message.format("'rope'", "'rope'")):
        Chain((Nope(), "rope"))
    for outer, where in ((Dape, "Dape: base"), (Xpos, "Xpos: rope")):
        with pytest.raises(ConfigError, match=f"^{where}" + message.format("'alibi'", "'alibi'")):
            outer("alibi")
    for call, given in (("token_map", ("key", {}, K, IN_ORDER, {})), ("batch_features", ({}, K[:, :, 0], IN_ORDER))):
        with pytest.raises(ConfigError, match=f"^{call}: encoding" + message.format("'fox'", "'fox'")):
            getattr(posx.attention, call)("fox", *given)


@pytest.mark.parametrize("case", MISFITS)
def test_an_encoding_made_for_other_sizes_is_refused(case):
    encoding, params, message = MISFITS[case]
    with pytest.raises(ConfigError, match=message) as caught:
        attend(encoding, params, IN_ORDER)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_registered_encodings_fit_the_sizes_they_are_made_for():
    for name in posx.ENCODINGS:
        encoding, params = built(name, XL)
        x = np.zeros((*Q.shape[:2], XL.model_dim), np.float32) if encoding.acts_on("features") else None
        pos = jax.ShapeDtypeStruct((T, *position_shape(encoding)), np.int32)
        jax.eval_shape(functools.partial(attend, encoding, x=x), params, pos)


KEEPING = [name for name, hooks in ACTING.items() if "features" in hooks]


@pytest.mark.parametrize("name", KEEPING)
def test_features_of_another_shape_or_name_are_refused(name):
    """One head in place of all of them would be broadcast, and so would one number in place of a vector."""
    encoding, params = built(name, XL)
    x = RNG.standard_normal((B, T, XL.model_dim)).astype(np.float32)
    kept, _ = in_one_program(posx.attention.batch_features, encoding, params, x, IN_ORDER)
    run = functools.partial(attend, encoding, params, IN_ORDER)
    jax.eval_shape(lambda kept: run(features=(kept, kept)), kept)
    for feature, array in kept.items():
        wanted = rf"\[b, t, {', '.join(map(str, array.shape[2:]))}\] for q has 4 heads of 6"
        for axis in range(2, array.ndim):
            fewer = kept | {feature: array.take(np.array([0]), axis=axis)}
            for side, sides in (("q", (fewer, kept)), ("k", (kept, fewer))):
                with pytest.raises(ConfigError, match=rf"^{side}_features\['{feature}'\] is .*{wanted}"):
                    run(features=sides)
    other = {f"{feature}_": array for feature, array in kept.items()}
    with pytest.raises(ConfigError, match="^k_features lacks '.*'; it has .*_. Give the result of batch_features"):
        run(features=(kept, other))


@pytest.mark.parametrize("name", KEEPING)
def test_x_for_sides_at_other_positions_is_refused(name):
    encoding, params = built(name, XL)
    run = functools.partial(attend, encoding, params, x=np.zeros((B, T, XL.model_dim), np.float32))
    message = "^{} differs between queries and keys, but .* computes the features of both sides from x. Give"
    with pytest.raises(ValueError, match=message.format("pos")):
        run(IN_ORDER, IN_ORDER + 1)
    documents = (IN_ORDER > 3).astype(np.int32)
    with pytest.raises(ValueError, match=message.format("segment")):
        run(*(posx.Slots(IN_ORDER, segment=segment) for segment in (documents, 0 * documents)))
    empty = np.where(IN_ORDER < 2, -1, IN_ORDER)
    sides = [posx.Slots(pos, empty) for pos in (IN_ORDER, np.where(empty < 0, 7, IN_ORDER))]
    jax.eval_shape(lambda q: run(*sides, q=q), Q)


def test_sizes_are_asked_once():
    calls = []

    @dataclasses.dataclass(frozen=True)
    class Counting(Encoding):
        def by_distance(self, params, distance):
            calls.append(distance.shape)
            return ByDistance(bias=jnp.zeros((1, len(distance))))

    jax.eval_shape(functools.partial(attend, Counting(), {}), jax.ShapeDtypeStruct((T,), np.int32))
    first = len(calls)
    jax.eval_shape(functools.partial(attend, Counting(), {}), jax.ShapeDtypeStruct((T,), np.int32))
    assert len(calls) - first < first


@pytest.mark.parametrize("executor", [*posx.attention.EXECUTORS, "auto"])
@pytest.mark.parametrize("case", [(0, 3, 3), (2, 0, 0), (2, 0, 3), (2, 3, 0)], ids=str)
def test_calls_without_tokens_return_zeros(case, executor):
    """case: sequences, queries, keys."""
    b, num_queries, num_keys = case
    q, k, v = (np.ones((b, t, h, 4), np.float16) for t, h in ((num_queries, 4), (num_keys, 2), (num_keys, 2)))
    q_pos, k_pos = (np.arange(t, dtype=np.int32) for t in (num_queries, num_keys))
    sides = (q_pos, None) if num_queries == num_keys else (posx.Slots(q_pos, q_pos), posx.Slots(k_pos, k_pos))
    for encoding in (Nope(), Rope(rotary_dim=4), Shaw(1)):
        params = {"keys": np.ones((3, 4)), "values": np.ones((3, 4))} if isinstance(encoding, Shaw) else {}
        call = functools.partial(posx.attend, encoding, params, executor=executor)
        o, pull_back = jax.vjp(lambda q, k, v, call=call: call(q, k, v, *sides), q, k, v)
        assert (o.shape, o.dtype) == (q.shape, q.dtype) and not o.any()
        assert [(x.shape, bool(x.any())) for x in pull_back(o)] == [(x.shape, False) for x in (q, k, v)]


def test_vectors_of_whole_numbers_are_refused():
    """Their outputs would be rounded."""
    encoding = posx.build("nope", posx.Dims(model_dim=16, num_heads=2, head_dim=8, num_layers=1, train_len=8))
    q = np.ones((1, 4, 2, 8), int)
    with pytest.raises(ValueError, match="q is int64: vectors must be floats"):
        posx.attend(encoding, {}, q, q, q, np.arange(4, dtype=np.int32))
