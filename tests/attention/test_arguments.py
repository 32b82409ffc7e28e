"""What `attend` takes: positions of every type that can be made right, encodings and parameters made for its sizes."""

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
from posx.encodings import Alibi, Chain, Dape, Encoding, Nope, Relative, Shaw, Tupe, Xpos
from posx.errors import ConfigError, UndefinedLength

B, T, H, G, D = 2, 9, 4, 2, 6
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((B, T, heads, D)).astype(np.float32) for heads in (H, G, G))
#: Differences of these wrap around in 8 bits, signed or not.
POS = np.arange(T, dtype=np.int32)[::-1] * 15
SHAW = {name: RNG.standard_normal((7, D)).astype(np.float32) for name in ("keys", "values")}
IN_ORDER = np.arange(T, dtype=np.int32)


def attend(encoding, params, pos, q=Q, k=K, v=V, k_pos=None, **options):
    k_pos = pos if k_pos is None else k_pos
    return posx.attend(encoding, params, q, k, v, q_pos=pos, k_pos=k_pos, **{"executor": "dense"} | options)


TYPES = [np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.int64, np.uint64, list, tuple]


def test_whole_numbers_of_every_type_are_the_same_positions():
    wanted = attend(Alibi(H), {}, POS)
    for kind in TYPES:
        given = kind(POS.tolist()) if kind in (list, tuple) else POS.astype(kind)
        assert_array_equal(attend(Alibi(H), {}, given), wanted, err_msg=str(kind))
    assert_array_equal(attend(Alibi(H), {}, jnp.asarray(POS, jnp.uint8)), wanted)
    run = jax.jit(functools.partial(attend, Shaw(3), SHAW))
    assert_allclose(run(POS.astype(np.uint8)), run(POS), atol=1e-6)


def test_float64_is_rounded_where_that_moves_no_whole_number():
    halves = POS / 2
    wanted = attend(Alibi(H), {}, halves.astype(np.float32))
    for given in (halves, halves.tolist()):
        assert_array_equal(attend(Alibi(H), {}, given), wanted)


def test_orders_and_documents_of_every_type_are_the_same():
    segment = (IN_ORDER > 4).astype(np.int32)
    where = {"q_idx": IN_ORDER, "k_idx": IN_ORDER, "q_segment": segment, "k_segment": segment}
    wanted = attend(Nope(), {}, POS, mask=posx.window(2), **where)
    narrow = {name: x.astype(np.uint8) for name, x in where.items()}
    assert_array_equal(attend(Nope(), {}, POS, mask=posx.window(2), **narrow), wanted)


REFUSED = {
    "bool": (POS > 0, "q_pos is bool: positions are int32 or float32"),
    "float16": (POS.astype(np.float16), "q_pos is float16"),
    "bfloat16": (POS.astype(jnp.bfloat16), "q_pos is bfloat16"),
    "nothing": (None, "q_pos has shape"),
    "text": (["a"] * T, "q_pos is <U1"),
    "ragged": ([[0], [1, 2]], "q_pos is no array of numbers"),
    "too large": (POS.astype(np.int64) + 2**31, "q_pos goes from 2147483648 to .*, which int32 does not hold"),
    "too large unsigned": (POS.astype(np.uint64) + np.uint64(2**63), "which int32 does not hold"),
    "whole, but not in float32": (POS + (2.0**24 + 1), "q_pos holds 16777.*, which float32 does not: give .* int32"),
    "rows of another batch": (np.stack([POS] * 3), r"q_pos has shape \(3, 9\), but there are 9 tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_positions_that_would_come_out_wrong_are_refused(case):
    given, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        attend(Nope(), {}, given)
    assert "\n" not in str(caught.value)


def test_traced_values_that_may_not_fit_are_refused():
    with pytest.raises(ValueError, match="q_pos is uint32, whose values are not known here: give int32"):
        jax.eval_shape(functools.partial(attend, Nope(), {}), jax.ShapeDtypeStruct((T,), np.uint32))


def test_both_sides_count_in_one_type():
    with pytest.raises(ValueError, match="q_pos is int32 but k_pos float32: give both as int32 or both as float32"):
        attend(Nope(), {}, POS, k_pos=POS.astype(np.float32))
    with pytest.raises(ValueError, match="q_idx must be whole numbers, int32, not float32"):
        attend(Nope(), {}, POS, q_idx=IN_ORDER.astype(np.float32), k_idx=IN_ORDER)
    with pytest.raises(ValueError, match=r"k_idx has shape \(3,\), but there are 9 tokens"):
        attend(Nope(), {}, POS, q_idx=IN_ORDER, k_idx=IN_ORDER[:3])


def test_64_bit_positions_are_served_in_float64():
    wanted = attend(Alibi(H), {}, POS)
    with jax.enable_x64(True):
        q, k, v = map(np.float64, (Q, K, V))
        idx = {"q_idx": IN_ORDER, "k_idx": np.arange(T)}
        run = jax.jit(lambda pos: attend(Alibi(H), {}, pos, q, k, v, k_pos=POS, **idx))
        far = jax.jit(lambda pos: attend(Alibi(H), {}, pos + 2**33, q, k, v))
        for found in (run(POS.astype(np.int64)), run(POS.astype(np.uint32)), far(POS.astype(np.int64))):
            assert found.dtype == np.float64
            assert_allclose(found, wanted, atol=1e-6)


def test_jax_arrays_are_known_where_they_are_not_traced():
    """Served from tables of distances, and held to the same limit; also under `jit`, closed over."""

    def kinds_of_work(pos):
        text = jax.jit(lambda q: attend(Shaw(3), SHAW, pos, q, q, q, executor="blockwise")).lower(Q).as_text()
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
        return hook == self.hook

    def _zeros(self, **sizes):
        return jnp.zeros([sizes.get(n, n) for n in self.shape])

    def query(self, params, vectors, pos, features):
        return self._zeros(q=len(pos))

    def key(self, params, vectors, pos, features):
        return self._zeros(k=len(pos))

    def value(self, params, vectors, pos, features):
        return self._zeros(k=len(pos))

    def output(self, params, vectors, pos, features):
        return self._zeros(q=len(pos))

    def temperature(self, params, pos, features):
        return self._zeros(q=len(pos))

    def curve(self, params, distance):
        return self._zeros(n=len(distance))

    def bias(self, params, q_pos, k_pos):
        if self.hook == "curve":
            return super().bias(params, q_pos, k_pos)
        return self._zeros(q=len(q_pos), k=len(k_pos))

    def relative(self, params, distance):
        return Relative(query=self._zeros(n=len(distance)))

    def score(self, params, s, tile):
        return self._zeros(q=len(tile.q_pos), k=len(tile.k_pos))

    def mix(self, params, w, q_pos, k_pos):
        return self._zeros(q=len(q_pos))


HOOKS = {
    "query of other heads": (
        Odd("query", ("q", 2, D)),
        r"\.query gives \[3, 2, 6\] where \[q, h, \*\] = \[3, 4, \*\] is wanted",
    ),
    "key of query heads": (
        Odd("key", ("k", H, D)),
        r"\.key gives \[5, 4, 6\] where \[k, g, \*\] = \[5, 2, \*\] is wanted",
    ),
    "key of another width": (
        Odd("key", ("k", G, 8)),
        r"\.key: queries are 6 wide and keys 8 wide, but they meet in a product; give both",
    ),
    "value without tokens": (
        Odd("value", (G, D)),
        r"\.value gives \[2, 6\] where \[k, g, \*\] = \[5, 2, \*\] is wanted",
    ),
    "value of another width": (
        Odd("value", ("k", G, 3)),
        r"\.output must give \[q, h, d\], d = 6 as values come in, not \[3, 4, 3\]",
    ),
    "output of other heads": (
        Odd("output", ("q", 1, D)),
        r"\.output gives \[3, 1, 6\] where \[q, h, \*\] = \[3, 4, \*\] is wanted",
    ),
    "temperature by token": (
        Odd("temperature", ("q", H)),
        r"\.temperature gives \[3, 4\] where \[h or 1, q\] or \[q\] = \[4 or 1, 3\] or \[3\] is wanted",
    ),
    "curve of other heads": (
        Odd("curve", (3, "n")),
        r"\.curve gives \[3, 7\] where \[h or 1, n\] = \[4 or 1, 7\] is wanted",
    ),
    "curve turned": (
        Odd("curve", ("n", H)),
        r"\.curve gives \[7, 4\] where \[h or 1, n\] = \[4 or 1, 7\] is wanted",
    ),
    "bias turned": (
        Odd("bias", (H, "k", "q")),
        r"\.bias gives \[4, 5, 3\] where \[h or 1, q, k\] = \[4 or 1, 3, 5\] is wanted",
    ),
    "bias of key heads": (
        Odd("bias", (G, "q", "k")),
        r"\.bias gives \[2, 3, 5\] where \[h or 1, q, k\] = \[4 or 1, 3, 5\] is wanted",
    ),
    "relative of other heads": (
        Odd("relative", ("n", G, D)),
        r"\.relative\.query gives \[7, 2, 6\] where \[n, h or 1, d\] = \[7, 4 or 1, 6\] is wanted",
    ),
    "relative of another width": (
        Odd("relative", ("n", 1, 5)),
        r"\.relative\.query gives \[7, 1, 5\] where \[n, h or 1, d\] = \[7, 4 or 1, 6\] is wanted",
    ),
    "score for one head": (
        Odd("score", (1, "q", "k")),
        r"\.score gives \[1, 3, 5\] where \[h, q, k\] = \[4, 3, 5\] is wanted",
    ),
    "mix heads first": (
        Odd("mix", (H, "q", D)),
        r"\.mix gives \[4, 3, 6\] where \[q, h, d\] = \[3, 4, 6\] is wanted",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOOKS)
def test_what_a_hook_gives_must_fit(case):
    encoding, message = HOOKS[case]
    for given in (encoding, Chain((Nope(), encoding))):
        with pytest.raises(ConfigError, match=rf"{message}.*\(q has 4 heads of 6, k and v 2 of 6 and 6; ") as caught:
            attend(given, {}, POS)
        assert "\n" not in str(caught.value)


def test_what_heads_share_may_have_one():
    alone, one = Odd("temperature", ("q",)), Odd("temperature", (1, "q"))
    for encoding in (Odd("curve", (1, "n")), Odd("bias", (1, "q", "k")), alone, one):
        assert attend(posx.build(encoding, XL), {}, POS).shape == Q.shape


XL = posx.Dims(model_dim=24, num_heads=H, head_dim=D, num_layers=1, train_len=16, num_kv_heads=G)
OTHER = posx.Dims(model_dim=24, num_heads=H, head_dim=4, num_layers=1, train_len=16)
ONE = posx.Dims(model_dim=24, num_heads=1, head_dim=24, num_layers=1, train_len=16)


def built(name, dims):
    encoding = posx.build(name, dims)
    return encoding, encoding.init(jax.random.key(0), dims)


MISFITS = {
    "alibi of one head": (*built("alibi", ONE), r"^Alibi\(num_heads=1\) was built for num_heads=1, but q has 4 heads"),
    "alibi in a chain": (*built(["rope", "alibi"], ONE), r"^Alibi\(num_heads=1\) was built for num_heads=1"),
    "t5 of one head": (*built("t5", ONE), r"^T5\(.*parameter 'table' is \[8, 1\], not \[8, 4\]"),
    "tupe of narrow heads": (*built("tupe", OTHER), r"parameter 'u_k' is \[24, 4, 4\], not \[\*, 2, 6\]"),
    "shaw of narrow heads": (*built("shaw", OTHER), r"parameter 'keys' is \[17, 4\], not \[17, 6\]"),
    "another table": (Shaw(2), SHAW, r"parameter 'keys' is \[7, 6\], not \[5, 6\]"),
    "rope of wide heads": (
        *built("rope", ONE), r"^Rope\(.*rotary_dim=24\)\.query\(params, \[3, 4, 6\], .* \(q has 4 heads of 6, "
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
    for inner, where in ((Dape("alibi"), "Dape: base"), (Xpos("alibi", 8.0, D), "Xpos: rope")):
        with pytest.raises(ConfigError, match=f"^{where}" + message.format("'alibi'", "'alibi'")):
            attend(inner, {}, IN_ORDER)
    for call in (posx.attention.token_map, posx.attention.batch_features):
        with pytest.raises(ConfigError, match=f"^{call.__name__}: encoding" + message.format("'fox'", "'fox'")):
            call("fox", "key", {}, K, IN_ORDER, {})


@pytest.mark.parametrize("case", MISFITS)
def test_an_encoding_made_for_other_sizes_is_refused(case):
    encoding, params, message = MISFITS[case]
    with pytest.raises(ConfigError, match=message) as caught:
        attend(encoding, params, IN_ORDER)
    assert "\n" not in str(caught.value)


def test_every_registered_encoding_fits_the_sizes_it_was_made_for():
    for name in posx.ENCODINGS:
        encoding, params = built(name, XL)
        x = np.zeros((*Q.shape[:2], XL.model_dim), np.float32) if encoding.acts_on("features") else None
        jax.eval_shape(functools.partial(attend, encoding, x=x), params, jax.ShapeDtypeStruct((T,), np.int32))


KEEPING = [name for name in posx.ENCODINGS if built(name, XL)[0].acts_on("features")]


@pytest.mark.parametrize("name", KEEPING)
def test_features_of_another_shape_or_name_are_refused(name):
    """One head in place of all of them would be broadcast, and so would one number in place of a vector."""
    encoding, params = built(name, XL)
    x = RNG.standard_normal((B, T, XL.model_dim)).astype(np.float32)
    kept, _ = posx.attention.batch_features(encoding, params, x, IN_ORDER)
    run = functools.partial(attend, encoding, params, IN_ORDER)
    jax.eval_shape(lambda kept: run(q_features=kept, k_features=kept), kept)
    for feature, array in kept.items():
        wanted = rf"\[b, t, {', '.join(map(str, array.shape[2:]))}\] where q has 4 heads of 6"
        for axis in range(2, array.ndim):
            fewer = kept | {feature: array.take(np.array([0]), axis=axis)}
            for side, sides in (("q", (fewer, kept)), ("k", (kept, fewer))):
                with pytest.raises(ConfigError, match=rf"^{side}_features\['{feature}'\] is .*{wanted}"):
                    run(**dict(zip(("q_features", "k_features"), sides, strict=True)))
    other = {f"{feature}_": array for feature, array in kept.items()}
    with pytest.raises(ConfigError, match="^k_features lacks '.*', it has .*_. Give what batch_features returns"):
        run(q_features=kept, k_features=other)


@pytest.mark.parametrize("name", KEEPING)
def test_x_for_sides_at_other_positions_is_refused(name):
    encoding, params = built(name, XL)
    run = functools.partial(attend, encoding, params, x=np.zeros((B, T, XL.model_dim), np.float32))
    with pytest.raises(ValueError, match="^q_pos and k_pos differ, but .* computes the features of both sides from x"):
        run(IN_ORDER, k_pos=IN_ORDER + 1)
    documents = (IN_ORDER > 3).astype(np.int32)
    with pytest.raises(ValueError, match="^q_segment and k_segment differ"):
        run(IN_ORDER, q_segment=documents, k_segment=0 * documents)
    empty = np.where(IN_ORDER < 2, -1, IN_ORDER)
    idx = {"q_idx": empty, "k_idx": empty}
    jax.eval_shape(lambda q: run(IN_ORDER, q=q, k_pos=np.where(empty < 0, 7, IN_ORDER), **idx), Q)


def test_sizes_are_asked_once():
    calls = []

    @dataclasses.dataclass(frozen=True)
    class Counting(Encoding):
        def curve(self, params, distance):
            calls.append(distance.shape)
            return jnp.zeros((1, len(distance)))

    jax.eval_shape(functools.partial(attend, Counting(), {}), jax.ShapeDtypeStruct((T,), np.int32))
    first = len(calls)
    jax.eval_shape(functools.partial(attend, Counting(), {}), jax.ShapeDtypeStruct((T,), np.int32))
    assert len(calls) - first < first


def test_vectors_of_whole_numbers_are_refused():
    """Their outputs would be rounded."""
    encoding = posx.build("nope", posx.Dims(model_dim=16, num_heads=2, head_dim=8, num_layers=1, train_len=8))
    q = np.ones((1, 4, 2, 8), int)
    with pytest.raises(ValueError, match="q is int64: vectors must be floats"):
        posx.attend(encoding, {}, q, q, q, q_pos=np.arange(4), k_pos=np.arange(4))
