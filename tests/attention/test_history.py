"""Hooks that look back: what stood before a token in its document, in any order of the slots, out of a cache too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx import attention
from posx.conformance import DIMS, check_encoding
from posx.encodings import Chain, Encoding
from posx.errors import ConfigError
from posx.lab.config.sections import ModelConfig
from posx.lab.generate import prefill
from posx.lab.model import Model
from tests.cheap import in_one_program

LAGS = 0.7, -0.5, 0.3


def lagged(windows):
    """own + 0.7 of the first before + -0.5 of the second ..., windows [t, 1 + n, ...]."""
    wide = windows.astype(jnp.result_type(float))
    return sum(w * wide[:, n] for n, w in enumerate((1.0, *LAGS)[: windows.shape[1]]))


@dataclasses.dataclass(frozen=True)
class Lagged(Encoding):
    """Vectors and the layer's input are mixed with those before them, and features are added to keys."""

    history = {"features": 3, "query": 1, "key": 2, "value": 3}

    def init(self, rng, dims):
        return {"w": jax.random.normal(rng, (dims.model_dim, dims.head_dim))}

    def features(self, params, x, pos, carry):
        return {"kept": jnp.tanh(lagged(x) @ params["w"])}, carry

    def query(self, params, vectors, pos, features):
        return lagged(vectors).astype(vectors.dtype)

    def key(self, params, vectors, pos, features):
        return (lagged(vectors) + features["kept"][:, None]).astype(vectors.dtype)

    value = query


@dataclasses.dataclass(frozen=True)
class RawLagged(Lagged):
    reads_raw_keys = True


def by_hand(params, x, project, pos, visible):
    """One query after the other, in float64."""

    def lagged(a, n):
        rows = [np.flatnonzero(seen[: i + 1])[::-1][: n + 1] for i, seen in enumerate(visible)]
        return np.stack([sum((w * a[t] for w, t in zip((1, *LAGS), row)), 0 * a[0]) for row in rows])  # noqa: B905

    q, k, v = project(x)
    k = lagged(k, 2) + np.tanh(lagged(x, 3) @ params["w"])[:, None]
    q, v = lagged(q, 1), lagged(v, 3)
    group, o = q.shape[1] // k.shape[1], np.zeros((*q.shape[:2], v.shape[-1]))
    for i, h in np.ndindex(q.shape[:2]):
        seen = np.flatnonzero(visible[i])
        if len(seen):
            w = np.exp(k[seen, h // group] @ q[i, h] / np.sqrt(q.shape[-1]))
            o[i, h] = w / w.sum() @ v[seen, h // group]
    return o


@pytest.mark.parametrize(
    ("cls", "checks"),
    [
        (Lagged, ("reference", "decode")),
        pytest.param(RawLagged, ("decode",), marks=pytest.mark.slow),
        pytest.param(Lagged, ("gradients", "packing"), marks=pytest.mark.slow),
    ],
)
def test_the_contract_holds(cls, checks):
    report = check_encoding(cls(), reference=by_hand, only=checks)
    assert report.ok, str(report)


def test_earlier_tokens_go_by_arrival_and_by_document():
    x = np.arange(1.0, 7.0, dtype=np.float32)[None, :, None]
    idx, segment = np.array([40, -1, 10, 30, -1, 20]), np.array([1, 0, 0, 1, 0, 0])
    windows, last = in_one_program(attention.with_previous_tokens, Lagged(), "key", x, idx)
    assert_allclose(windows[0, [0, 2, 3, 5], :, 0], [[1, 4, 6], [3, 0, 0], [4, 6, 3], [6, 3, 0]])
    assert_allclose(last[0, :, 0], [4, 1])
    windows, _ = in_one_program(attention.with_previous_tokens, Lagged(), "key", x, idx, segment)
    assert_allclose(windows[0, [0, 2, 3, 5], :, 0], [[1, 4, 0], [3, 0, 0], [4, 0, 0], [6, 3, 0]])
    windows, last = in_one_program(
        attention.with_previous_tokens, Lagged(), "key", x, None, None, np.array([[[-2.0], [-1.0]]], np.float32)
    )
    assert_allclose(windows[0, :3, :, 0], [[1, -1, -2], [2, 1, -1], [3, 2, 1]])
    assert_allclose(last[0, :, 0], [5, 6])


@pytest.mark.parametrize(
    "spec", [Lagged(), pytest.param(Chain((RawLagged(), posx.encodings.ENCODINGS["rope"]())), marks=pytest.mark.slow)]
)
def test_a_model_decodes_what_it_gives_for_the_whole(spec):
    config = ModelConfig(num_layers=1, model_dim=16, num_heads=2)
    model = Model(config, (posx.build(spec, config.dims(16)),), 11, config.dims(16))
    params = model.init(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 11, (2, 8)).astype(np.int32)
    whole = jax.jit(model)(params, tokens, np.arange(8, dtype=np.int32))
    for chunk in (1, 4):
        found, _ = prefill(model, params, tokens, model.empty_cache(2, 12), chunk=chunk)
        assert_allclose(found, whole[:, -1], atol=1e-5)
    padded = np.pad(tokens[:, :5], ((0, 0), (3, 0)), constant_values=-1)  # chunks of the same size, empty slots first
    found, _ = prefill(model, params, padded, model.empty_cache(2, 12), chunk=4)
    assert_allclose(found, whole[:, 4], atol=1e-5)


@pytest.mark.parametrize("name", ["key_offset", "selective_rope(drift=true)", "fox"])
def test_documents_may_restart_their_order_or_be_interleaved(name):
    """Packed one after the other with idx from 0 in each, and interleaved: as each document alone."""
    encoding, rng = posx.build(name, DIMS), np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: encoding.init(jax.random.key(0), DIMS))
    params = {n: rng.standard_normal(a.shape).astype(np.float32) for n, a in shapes.items()}
    given = [rng.standard_normal((1, 8, *s)).astype(np.float32) for s in ((4, 6), (2, 6), (2, 6), (12,))]

    @jax.jit
    def run(q, k, v, x, *slots):
        x = x if encoding.acts_on("features") else None
        return posx.attend(encoding, params, q, k, v, posx.Slots(*slots), x=x)

    halves = [[a[:, part] for a in given] for part in (slice(0, 4), slice(4, 8))]
    order = np.arange(4, dtype=np.int32)
    wanted = [run(*half, order, order, 0 * order) for half in halves]
    restarted = run(*given, np.tile(order, 2), np.tile(order, 2), np.repeat(np.int32([3, 1]), 4))
    assert_allclose(restarted, np.concatenate(wanted, axis=1), atol=1e-5)
    if not encoding.acts_on("features"):
        mixed = np.argsort(np.tile(order, 2), kind="stable").astype(np.int32)
        found = run(*(a[:, mixed] for a in given), np.tile(order, 2)[mixed], np.arange(8, dtype=np.int32), mixed // 4)
        assert_allclose(found, np.concatenate(wanted, axis=1)[:, mixed], atol=1e-5)
        found = run(*(a[:, mixed] for a in given), np.tile(order, 2)[mixed], None, mixed // 4)
        assert_allclose(found, np.concatenate(wanted, axis=1)[:, mixed], atol=1e-5)


def test_slots_known_to_be_out_of_order_are_refused():
    fox, cope, rng = posx.build("fox", DIMS), posx.build("cope", DIMS), np.random.default_rng(0)
    params = fox.init(jax.random.key(0), DIMS)
    q, k, v, x = (rng.standard_normal((1, 5, *s)).astype(np.float32) for s in ((4, 6), (2, 6), (2, 6), (12,)))
    pos = np.arange(5, dtype=np.int32)

    def attend(encoding, idx, k_idx=None, segment=None, **more):
        own = params if encoding is fox else {"table": np.zeros((32, 6), np.float32)}
        sides = (posx.Slots(pos, np.int32(given), segment) for given in (idx, idx if k_idx is None else k_idx))
        return in_one_program(posx.attend, encoding, own, q, k, v, *sides, **more)

    attend(fox, [-1, -1, 0, 1, 5], x=x)
    for idx, k_idx in (([0, -1, 1, 2, 3], None), ([1, 0, 2, 3, 4], None), ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4])):
        with pytest.raises(ValueError, match="Fox carries features from token to token. Give"):
            attend(fox, idx, k_idx, x=x)
    attend(cope, [0, -1, 1, 2, 3])
    with pytest.raises(ValueError, match="Cope visits the keys"):
        attend(cope, [1, 0, 2, 3, 4])
    in_turn, one_by_one = np.int32([3, 3, 1, 1, 2]), np.int32([3, 1, 3, 1, 2])
    for encoding, more in ((fox, {"x": x}), (cope, {})):
        attend(encoding, range(5), segment=in_turn, **more)
        with pytest.raises(ValueError, match="[Gg]ive the (tokens|keys) of a document one after the other"):
            attend(encoding, range(5), segment=one_by_one, **more)


def test_features_of_other_tokens_are_refused():
    """They would be broadcast: one token's gates to all."""
    fox, rng = posx.build("fox", DIMS), np.random.default_rng(0)
    params = fox.init(jax.random.key(0), DIMS)
    q, k, v, x = (rng.standard_normal((2, 5, *s)).astype(np.float32) for s in ((4, 6), (2, 6), (2, 6), (12,)))
    order = np.arange(5, dtype=np.int32)

    def attend(slots=order, **given):
        return in_one_program(posx.attend, fox, params, q, k, v, slots, **given)

    shared, own = attend(order[None], x=x), attend(x=x)
    assert_allclose(shared, own, atol=1e-6)
    sums = in_one_program(posx.attention.batch_features, fox, params, x, order)[0]
    slots = posx.Slots(order[None], order)
    assert_allclose(attend(slots, features=(sums, sums)), own, atol=1e-6)
    for part in (x[:, :1], x[:1], np.concatenate([x, x], axis=1)):
        with pytest.raises(ValueError, match=r"x \(.* must be \[b, t, m\], with the tokens of q"):
            attend(x=part)
    with pytest.raises(ValueError, match=r"k_features\['log_f'\] .* does not fit k"):
        attend(slots, features=(sums, jax.tree.map(lambda a: a[:, :1], sums)))
    with pytest.raises(ValueError, match="x and features. Give"):
        attend(slots, x=x, features=(sums, sums))
    sides = posx.Slots(order[:3], order[:3]), posx.Slots(order, order)
    with pytest.raises(ValueError, match=r"x \(2, 3, 12\) must be \[b, t, m\], with the tokens of q"):
        posx.attend(fox, params, q[:, :3], k, v, *sides, x=x[:, :3])


def test_tiling_of_neighbours_refuses_empty_slots_between():
    rng, order = np.random.default_rng(0), np.int32([0, 1, -1, 2, 3])
    q, k, v = (rng.standard_normal((1, 5, heads, 6)).astype(np.float32) for heads in (4, 2, 2))
    slots = posx.Slots(order, order)
    for spec, refused in (("dape(base=alibi)", False), ("dape(base=alibi, kernel=3)", True), ("alibi+dape", False)):
        encoding = posx.build(spec, DIMS)
        assert (encoding.tiling == "neighbours") == refused
        params = encoding.init(jax.random.key(0), DIMS)
        if refused:
            with pytest.raises(ValueError, match="in order of arrival, with no empty slots between"):
                posx.attend(encoding, params, q, k, v, slots)
        else:
            in_one_program(posx.attend, encoding, params, q, k, v, slots)


def test_a_chain_has_raw_vectors_for_one_that_looks_back():
    rope = posx.encodings.ENCODINGS["rope"]()
    assert Chain((Lagged(), rope)).history == Lagged.history
    with pytest.raises(ConfigError, match="must come before Rope"):
        Chain((rope, Lagged()))
    with pytest.raises(ConfigError, match="one of them"):
        Chain((Lagged(), Lagged()))
    values = type("Values", (Lagged,), {"history": {"value": 3}, "__annotations__": {}})()
    with pytest.raises(ConfigError, match=r"Values\(\) reads earlier vectors .* must come before RotatedValues"):
        Chain((posx.encodings.ENCODINGS["rotated_values"](), values))


@pytest.mark.parametrize("history", [{"output": 1}, {"embed": 1}, {"key": 0}, {"key": True}, ("key",), {"bias": 2}])
def test_a_history_with_wrong_hooks_or_counts_is_refused(history):
    with pytest.raises(ConfigError, match="tokens by hook, such as"):
        type("Odd", (Encoding,), {"history": history, "__annotations__": {}})


def test_queries_that_look_back_need_windows_if_cut():
    encoding, rng = posx.build(Lagged(), DIMS), np.random.default_rng(0)
    params = encoding.init(jax.random.key(0), DIMS)
    q, k, v, x = (rng.standard_normal((2, 5, *s)).astype(np.float32) for s in ((4, 6), (2, 6), (2, 6), (12,)))
    pos = np.arange(5, dtype=np.int32)
    run, slots = jax.jit(posx.attend, static_argnums=0), posx.Slots(pos, pos)
    wanted = run(encoding, params, q, k, v, pos, x=x)
    features, _ = in_one_program(attention.batch_features, encoding, params, x, slots)

    def last(q):
        late = {name: a[:, 3:] for name, a in features.items()}
        sides = posx.Slots(pos[3:], pos[3:]), slots
        return run(encoding, params, q[:, 3:], k, v, *sides, features=(late, features))

    assert_allclose(
        last(in_one_program(attention.with_previous_tokens, encoding, "query", q, pos)[0]), wanted[:, 3:], atol=1e-6
    )
    with pytest.raises(ValueError, match=r"Lagged maps a query .* Give windows \[b, q, 2, h, d\] of these queries"):
        last(q)


def test_a_history_of_a_hook_not_defined_is_refused_by_build():
    @dataclasses.dataclass(frozen=True)
    class Idle(Encoding):
        history = {"key": 1}

    with pytest.raises(ConfigError, match="history names key, which this encoding does not define"):
        posx.build(Idle(), DIMS)
