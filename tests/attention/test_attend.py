"""`attend`: heads, documents, empty slots, masks, executors, and one line for every argument that does not fit."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx import attention
from posx.attention.arguments import as_slots
from posx.attention.blockwise import Tiling, blockwise
from posx.attention.fused import fused
from posx.contract import abstract_params
from posx.contract.shapes import tile_shapes
from posx.encodings import Alibi, Chain, Deberta, Encoding, Learned, Nope, Rope, Shaw, Sinusoidal, TransformerXL
from posx.errors import ConfigError
from posx.lab.config import base_config, run_config
from posx.lab.runs.checks import check_run
from posx.machine.platforms import trace_platform
from tests.cheap import in_one_program

B, T, H, D = 2, 11, 4, 6
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((B, T, H, D)).astype(np.float32) for _ in range(3))
POS = np.arange(T, dtype=np.int32)
SHAW = {name: RNG.standard_normal((7, D)).astype(np.float32) for name in ("keys", "values")}
XL = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in (("u", (H, D)), ("v", (H, D)))}
XL["w_r"] = RNG.standard_normal((8, H, D)).astype(np.float32)
#: One encoding per way into the formula: token maps, bias, content term with value term, content term with a map.
ENCODINGS = {"rope": Rope(rotary_dim=D), "alibi": Alibi(H), "shaw": Shaw(3), "transformer_xl": TransformerXL()}
PARAMS = {"rope": {}, "alibi": {}, "shaw": SHAW, "transformer_xl": XL}
ways = pytest.mark.parametrize("name", ENCODINGS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    for name, query_block, key_block in (("small_tiles", 4, 5), ("even_tiles", 2, 4)):
        run = functools.partial(blockwise, tiling=Tiling(query_block, key_block))
        monkeypatch.setitem(attention.EXECUTORS, name, run)


@functools.partial(jax.jit, static_argnames=("encoding", "mask", "executor"))
def compiled(encoding, params, q, k, v, q_slots, k_slots, *, mask, executor):
    return posx.attend(encoding, params, q, k, v, q_slots, k_slots, mask=mask, executor=executor)


def complete(slots, length):
    """Return positions or slots with every optional array given, so that most calls share one compiled function."""
    pos, idx, segment = as_slots(slots)
    idx = np.arange(length, dtype=np.int32) if idx is None else idx
    return posx.Slots(pos, idx, np.zeros(length, np.int32) if segment is None else segment)


def attend(name, q=Q, k=K, v=V, q_slots=POS, k_slots=None, mask=posx.causal(), executor="dense"):
    sides = complete(q_slots, q.shape[1]), complete(q_slots if k_slots is None else k_slots, k.shape[1])
    return np.asarray(compiled(ENCODINGS[name], PARAMS[name], q, k, v, *sides, mask=mask, executor=executor))


@ways
@pytest.mark.parametrize("num_kv_heads", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_key_head_serves_a_group_of_query_heads(name, num_kv_heads):
    k, v = K[:, :, :num_kv_heads], V[:, :, :num_kv_heads]
    all_k, all_v = (np.repeat(a, H // num_kv_heads, axis=2) for a in (k, v))
    for executor in ("dense", "small_tiles"):
        assert_allclose(attend(name, k=k, v=v, executor=executor), attend(name, k=all_k, v=all_v), atol=1e-6)


@ways
def test_packed_documents_are_separate_sequences(name):
    first = 4
    pos = np.concatenate([POS[:first], POS[: T - first]])
    segment = (np.arange(T) >= first).astype(np.int32)
    apart = [attend(name, Q[:, s], K[:, s], V[:, s], pos[s]) for s in (slice(0, first), slice(first, T))]
    for executor in ("dense", "small_tiles"):
        packed = attend(name, executor=executor, q_slots=posx.Slots(pos, segment=segment))
        assert_allclose(packed, np.concatenate(apart, axis=1), atol=1e-5)


@pytest.mark.parametrize("name", ["alibi", "shaw"])
def test_documents_in_order_have_the_same_gradients_in_tiles(name):
    """Given no arrival orders, tiles of the future are never looked at, those of other documents are passed over."""
    segment = np.repeat(np.arange(3), (3, 4, 4)).astype(np.int32)
    pos = np.concatenate([POS[:3], POS[:4], POS[:4]])
    cotangent = RNG.standard_normal(Q.shape).astype(np.float32)

    @functools.partial(jax.jit, static_argnames="executor")
    @functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, None), axis_size=B)
    def run(params, q, k, v, executor):
        def loss(params, q, k, v):
            qkv, slots = (a[None] for a in (q, k, v)), posx.Slots(pos, segment=segment)
            o = posx.attend(ENCODINGS[name], params, *qkv, slots, mask=posx.window(3), executor=executor)
            return jnp.sum(o * cotangent[:1])

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(params, q, k, v)

    params = {n: np.stack([a, 2 * a]) for n, a in PARAMS[name].items()}
    tiles, dense = (run(params, Q, K[:, :, :2], V[:, :, :2], executor) for executor in ("even_tiles", "dense"))
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=1e-4), tiles, dense)


@ways
def test_left_padding_changes_nothing_but_the_padding(name):
    padding = 3
    padded = [np.concatenate([100 + a[:, :padding], a], axis=1) for a in (Q, K, V)]
    pos, idx = (np.concatenate([np.full(padding, fill, np.int32), POS]) for fill in (0, -1))
    for executor in ("dense", "small_tiles"):
        o = attend(name, *padded, executor=executor, q_slots=posx.Slots(pos, idx))
        assert_array_equal(o[:, :padding], 0)
        assert_allclose(o[:, padding:], attend(name), atol=1e-5)


@ways
def test_slots_may_lie_in_any_order(name):
    order = np.random.default_rng(1).permutation(T)
    for executor in ("dense", "small_tiles"):
        o = attend(name, k=K[:, order], v=V[:, order], k_slots=posx.Slots(POS[order], POS[order]), executor=executor)
        assert_allclose(o, attend(name), atol=1e-5)


@pytest.mark.parametrize("mask", [posx.full(), posx.window(3), posx.window(2, sinks=2), posx.window(100)], ids=str)
def test_executors_agree_under_every_mask(mask):
    """Given arrival orders, and in order, where tiles that cannot hold a visible pair are passed over."""
    dense = attend("shaw", mask=mask, executor="dense")
    assert_allclose(attend("shaw", mask=mask, executor="small_tiles"), dense, atol=1e-5)
    run = jax.jit(lambda *qkv: posx.attend(ENCODINGS["shaw"], SHAW, *qkv, POS, mask=mask, executor="even_tiles"))
    assert_allclose(run(Q, K, V), dense, atol=1e-5)
    if mask == posx.window(100):
        assert_allclose(dense, attend("shaw"), atol=1e-6)
    else:
        assert np.abs(dense - attend("shaw")).max() > 0.1


def test_positions_and_orders_may_differ_between_sequences():
    pos = np.stack([POS, 2 * POS + 5])
    idx = np.stack([POS, np.where(POS < 4, -1, POS)])
    both = attend("shaw", q_slots=posx.Slots(pos, idx))
    for b in range(B):
        one = attend("shaw", Q[b : b + 1], K[b : b + 1], V[b : b + 1], posx.Slots(pos[b], idx[b]))
        assert_allclose(both[b : b + 1], one, atol=1e-6)


def shaw_gradients(executor):
    def loss(params, q, k, v):
        o = posx.attend(Shaw(3), params, q, k, v, POS, executor=executor)
        return (o * jnp.arange(1.0, D + 1)[None, None, None]).sum()

    return jax.device_get(jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(SHAW, Q, K, V))


@functools.cache
def shaw_in_dense():
    return shaw_gradients("dense")


@pytest.mark.parametrize("blocks", [(1, 1), (3, 11), (256, 512)])
def test_any_tiling_gives_the_same_gradients(blocks, monkeypatch):
    def run(*args, **known):
        return blockwise(*args, **known, tiling=Tiling(blocks[0], blocks[1]))

    monkeypatch.setitem(attention.EXECUTORS, "tiles", run)

    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=1e-4), shaw_gradients("tiles"), shaw_in_dense())


def test_bfloat16_gradients_are_summed_over_tiles_in_float32(monkeypatch):
    """Value j is seen by every query i >= j with weight 1 / (i + 1); a sum over them in bfloat16 would stall early."""

    def run(*args, **known):
        return blockwise(*args, **known, tiling=Tiling(1, 64))

    monkeypatch.setitem(attention.EXECUTORS, "single_queries", run)
    length, ones = 512, jnp.ones((1, 512, 1, D), jnp.bfloat16)
    pos = jnp.arange(length, dtype=jnp.int32)

    @jax.jit
    def value_grad(v):
        def loss(v):
            o = posx.attend(Nope(), {}, ones, ones, v, pos, executor="single_queries")
            return o.astype(jnp.float32).sum()

        return jax.grad(loss)(v)

    wanted = [np.sum(1 / np.arange(j + 1.0, length + 1)) for j in range(length)]
    assert_allclose(np.float64(value_grad(ones)[0, :, 0, 0]), wanted, rtol=2.0**-7)


def test_auto_takes_tiles_in_order_and_dense_for_few_scores():
    def choose(num_queries, num_keys, in_order):
        return attention.choose_executor(Shaw(3), SHAW, posx.causal(), (num_queries, num_keys), in_order)

    assert choose(8, 8, in_order=True) == "blockwise"
    assert choose(1024, 1024, in_order=False) == "dense"
    assert choose(1025, 1024, in_order=False) == "blockwise"
    assert choose(1, 10**6, in_order=False) == "dense"


def test_auto_takes_the_fastest_kernel_of_a_gpu():
    """The vendor's reads the biases of all pairs, posx's own a strip of them and vectors of a small reach."""

    def choose(name, dtype="bfloat16", width=64, **call):
        dims = posx.Dims(width, 1, width, 1, 64)
        encoding = posx.build(name, dims)
        given = dict(mask=posx.causal(), sizes=(64, 64), in_order=True, tile=tile_shapes(encoding, dims, dtype))
        return attention.choose_executor(encoding, abstract_params(encoding, dims), **given | call)

    with trace_platform("cuda"):
        assert [choose(name) for name in ("rope", "xpos")] == ["fused"] * 2
        served = "alibi", "t5", "fox", "learned_sinks", "shaw", "grape_a", "gape"
        assert [choose(name) for name in served] == ["kernel"] * 7
        assert [choose(name) for name in ("transformer_xl", "cope", "fire")] == ["blockwise"] * 3
        assert choose("shaw", mask=posx.full()) == choose("shaw", offset=None) == "blockwise"
        assert choose("rope", segments=True) == choose("rope", "float32") == "kernel"
        assert choose("rope", width=256) == choose("t5", in_order=False, sizes=(2048, 2048)) == "blockwise"
        assert choose("alibi", offset=None) == "fused" and choose("fox", offset=None) == "kernel"
        assert choose("t5", offset=None) == "blockwise"  # cuDNN's gradient of its bias is wrong
    assert choose("rope") == choose("t5") == "blockwise"


@pytest.mark.parametrize("slab", [T * T, 4 * T], ids=["one slab", "slabs of 4 queries"])
@pytest.mark.parametrize("mask", [posx.causal(), posx.window(3), posx.full()], ids=str)
def test_the_fused_kernel_agrees_under_every_mask_it_serves(mask, slab, monkeypatch):
    """Its gradients: `check_gradients` of the contract."""
    monkeypatch.setitem(attention.EXECUTORS, "fused", functools.partial(fused, slab_pairs=slab))

    def run(executor):
        call = functools.partial(posx.attend, ENCODINGS["alibi"], {}, q_slots=POS, mask=mask, executor=executor)
        return jax.jit(call)(Q, K[:, :, :2], V[:, :, :2])

    assert_allclose(run("fused"), run("dense"), atol=1e-5)


def test_a_config_that_asks_the_kernel_for_too_much_is_refused():
    config = base_config("shaw")
    config.train.executor = "fused"
    with pytest.raises(
        ConfigError,
        match=r"^train.executor='fused' cannot serve Shaw\(.*acts on by_distance\.query, by_distance\.value",
    ):
        check_run(run_config(config))


def test_the_fused_kernel_says_what_it_cannot_serve():
    for name, slots, mask, why in (
        ("shaw", POS, posx.causal(), r"Shaw acts on by_distance\.query, by_distance\.value"),
        ("rope", posx.Slots(POS, segment=POS), posx.causal(), "whole sequences in order, without idx and segment"),
        ("rope", POS, posx.window(3, sinks=1), "the kernel does not support the sinks of a mask"),
    ):
        with pytest.raises(ValueError, match=f"executor 'fused' cannot serve this call: .*{why}"):
            posx.attend(ENCODINGS[name], PARAMS[name], Q, K, V, slots, mask=mask, executor="fused")


def test_large_logits_do_not_overflow():
    q = 1e4 * Q
    for executor in ("dense", "small_tiles"):
        o = attend("rope", q, q, V, executor=executor, mask=posx.window(1))
        assert_allclose(o, V, atol=1e-6)
    assert_allclose(attend("rope", q, q, executor="small_tiles"), attend("rope", q, q), atol=1e-4)


@dataclasses.dataclass(frozen=True)
class Low(Encoding):
    """A user's bias that is the same for all pairs."""

    def init(self, rng, dims):
        return {"level": jnp.zeros(())}

    def by_distance(self, params, distance):
        return posx.ByDistance(bias=jnp.full((1, len(distance)), params["level"]))


@pytest.mark.parametrize("executor", ["dense", "even_tiles", "small_tiles"])
def test_differences_of_scores_count_however_low_scores_are(executor):
    """Far below zero all of them round to one value, so that the weights are equal."""
    slots = posx.Slots(POS, POS) if executor == "small_tiles" else POS

    @jax.jit
    def run(level, v):
        return posx.attend(Low(), {"level": level}, Q, K, v, slots, executor=executor)

    means = np.cumsum(V, axis=1) / np.arange(1, T + 1)[:, None, None]
    of_a_sum = np.cumsum(1 / np.arange(1.0, T + 1)[::-1])[::-1]  # by value j: 1 / (i + 1) of every query i >= j
    for level in (-1e29, -3e30, -1e38, -np.inf):
        o, pull_back = jax.vjp(functools.partial(run, level), V)
        assert_allclose(o, means, atol=1e-6)
        assert_allclose(pull_back(jnp.ones_like(o))[0][0, :, 0, 0], of_a_sum, rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class Near(Encoding):
    """A user's bias that hides what lies three tokens back or more."""

    def by_distance(self, params, distance):
        return posx.ByDistance(bias=jnp.where(distance < 3, 0, -jnp.inf)[None])


@pytest.mark.parametrize("executor", ["dense", "even_tiles", "fused"])
def test_a_bias_of_minus_infinity_hides_a_pair(executor):
    def run(encoding, mask):
        call = functools.partial(posx.attend, encoding, {}, q_slots=POS, mask=mask, executor=executor)
        return jax.jit(call)(Q, K, V)

    assert_allclose(run(Near(), posx.causal()), run(Nope(), posx.window(3)), atol=1e-6)


@dataclasses.dataclass(frozen=True)
class Early(Encoding):
    """A user's bias that hides all pairs of this text, through the other hook."""

    shift_invariant = False

    def bias(self, params, q_pos, k_pos):
        return jnp.where(q_pos[:, None] + k_pos[None, :] < 2 * T, -jnp.inf, 0)[None]


@dataclasses.dataclass(frozen=True)
class Scaled(Encoding):
    """A user's bias inside the scale that hides all pairs."""

    def by_distance(self, params, distance):
        return posx.ByDistance(scaled=jnp.full((1, len(distance)), -jnp.inf))


@pytest.mark.parametrize("executor", ["dense", "even_tiles", "fused", "slabs"])
def test_pairs_that_are_masked_twice_show_no_later_key(executor, monkeypatch):
    """A pair that is masked once is as low. All that a query sees is masked, so that the weights are equal."""
    monkeypatch.setitem(attention.EXECUTORS, "slabs", functools.partial(fused, slab_pairs=T * 4))
    means = np.cumsum(V, axis=1) / np.arange(1, T + 1)[:, None, None]
    for parts in ((Near(), Early()), *([] if executor in ("fused", "slabs") else [(Near(), Early(), Scaled())])):
        run = jax.jit(functools.partial(posx.attend, Chain(parts), {}, q_slots=POS, executor=executor))
        assert_allclose(run(Q, K, V), means, atol=1e-6)


def test_large_scores_have_the_gradients_of_their_softmax():
    """Two equal keys share a weight at any score, also where a log-sum-exp would round ln 2 away."""
    k = np.repeat(K[:, :1], T, axis=1)
    for executor in ("dense", "even_tiles"):
        run = jax.jit(lambda v, e=executor: posx.attend(Nope(), {}, 1e8 * Q, k, v, POS, executor=e))
        o, pull_back = jax.vjp(run, V)
        assert_allclose(pull_back(jnp.ones_like(o))[0][0, -1, 0, 0], 1 / T, rtol=1e-5)


def test_the_fused_kernel_adds_biases_in_float32(monkeypatch):
    """Biases near -1000 differ by less than bfloat16 tells apart. Operands stay narrow here as they do on a GPU."""
    monkeypatch.setattr(importlib.import_module("posx.attention.attend"), "operand_dtype", lambda dtype: dtype)
    slots = np.where(POS == T - 1, POS + 2000, POS), POS
    q, v = (jnp.asarray(a, jnp.bfloat16) for a in (0 * Q, V))
    o = jax.jit(lambda q, v: posx.attend(Alibi(H), {}, q, q, v, *slots, executor="fused"))(q, v)
    monkeypatch.undo()
    wanted = jax.jit(lambda q, v: posx.attend(Alibi(H), {}, q, q, v, *slots, executor="dense"))(0 * Q, np.float32(v))
    assert_allclose(np.float32(o), wanted, atol=0.02)


@pytest.mark.parametrize("encoding", [Shaw(3), Learned(20), Deberta(4), Chain((Nope(), Shaw(3)))], ids=str)
def test_tables_refuse_positions_between_tokens(encoding):
    pos = POS.astype(np.float32)
    with pytest.raises(ValueError, match="reads a table, so positions must be integers, not float32"):
        posx.attend(encoding, {}, Q, K, V, pos)


def test_the_others_take_positions_between_tokens():
    for name in ("rope", "alibi", "transformer_xl"):
        at_halves = attend(name, q_slots=POS / np.float32(2))
        at_tokens = attend(name, q_slots=POS.astype(np.float32))
        assert_allclose(at_tokens, attend(name), atol=1e-5)
        assert np.abs(at_halves - attend(name)).max() > 1e-2
    assert Sinusoidal().integer_positions is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"executor": "fast"}, r"executor 'fast' is unknown; allowed: dense, blockwise, kernel, fused"),
        ({"q": Q[0]}, r"q \(11, 4, 6\), k .* must have the shapes \[b, q, h, d\]"),
        ({"v": V[:, :5]}, r"must have the shapes \[b, q, h, d\], \[b, k, g, d\], \[b, k, g, d]."),
        ({"k": K[:1], "v": V[:1]}, r"must have the shapes \[b, q, h, d\]"),
        ({"k": K[:, :, :3], "v": V[:, :, :3]}, r"3 key/value heads do not divide 4 query heads"),
        ({"q_slots": POS[:5]}, r"q_pos has shape \(5,\), but vectors \[b, t, h, d\] have 11 tokens"),
        ({"k_slots": POS[None, None]}, r"k_pos has shape \(1, 1, 11\)"),
        ({"q_slots": posx.Slots(POS, segment=POS)}, "give it for both queries and keys, or for neither."),
        ({"q_slots": posx.Slots(POS, POS)}, "give it for both queries and keys, or for neither."),
        ({"q": Q[:, :5], "q_slots": POS[:5]}, "5 queries attend to 11 keys: give idx, the arrival orders, of both."),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        posx.attend(Nope(), {}, **{"q": Q, "k": K, "v": V, "q_slots": POS, "k_slots": POS} | change)


@pytest.mark.parametrize("positions", ["consecutive", "random"])
def test_a_bias_of_both_positions_keeps_the_distance_table(positions, monkeypatch):
    """At consecutive positions FIRE is evaluated pair by pair, and ALiBi once, at all distances that tiles meet."""
    dims = posx.Dims(model_dim=H * D, num_heads=H, head_dim=D, num_layers=1, train_len=T)
    encoding, evaluated, by_distance = posx.build("fire+alibi", dims), [], Alibi.by_distance
    start = encoding.init(jax.random.key(0), dims)
    params = {name: a + RNG.standard_normal(a.shape).astype(np.float32) for name, a in start.items()}
    pos = POS if positions == "consecutive" else np.sort(RNG.permutation(3 * T)[:T]).astype(np.int32)
    run = functools.partial(in_one_program, posx.attend)
    dense = run(encoding, params, Q, K, V, pos, executor="dense")
    for part, own in ((encoding.parts[:1], params), (encoding.parts[1:], {})):
        assert np.abs(dense - run(Chain(part), own, Q, K, V, pos, executor="dense")).max() > 0.05

    def counted(self, params, distance):
        evaluated.append(len(distance))
        return by_distance(self, params, distance)

    monkeypatch.setattr(Alibi, "by_distance", counted)
    assert_allclose(run(encoding, params, Q, K, V, pos, executor="even_tiles"), dense, atol=1e-5)
    table, tile = T + 1 + 4, 2 * 4  # whole blocks of 2 queries, and one block of 4 keys ahead
    assert (table in evaluated, tile in evaluated) == ((True, False) if positions == "consecutive" else (False, True))


@pytest.mark.slow
def test_keys_of_the_cache_give_the_outputs_of_raw_keys():
    """RoPE maps keys before they are stored; Shaw reads raw queries, and adds vectors to values."""
    encoding, params = Chain((Rope(rotary_dim=D), Shaw(3))), {f"1.{name}": x for name, x in SHAW.items()}
    mapped = attention.token_map(encoding, "key", params, K, POS, {})
    slots = posx.Slots(POS, POS)
    for q, q_slots in ((Q, slots), (Q[:, -2:], posx.Slots(POS[-2:], POS[-2:]))):
        for executor in ("dense", "small_tiles"):
            run = functools.partial(posx.attend, encoding, params, q, v=V, k_slots=slots, executor=executor)
            found = run(k=mapped, q_slots=q_slots, cached=True)
            assert_allclose(found, run(k=K, q_slots=q_slots), atol=1e-5)
            assert np.abs(found - run(k=mapped, q_slots=q_slots)).max() > 0.01


@pytest.mark.parametrize("name", ["rope", "alibi", "transformer_xl"])
def test_weights_are_those_that_sum_the_values(name):
    mask = posx.attention.window(4)
    call = jax.jit(lambda q, k: attention.attention_weights(ENCODINGS[name], PARAMS[name], q, k, POS, mask=mask))
    w, visible = call(Q, K[:, :, :2])
    assert w.shape == (B, H, T, T) and not np.asarray(w)[:, :, ~np.asarray(visible)[0]].any()
    assert_array_equal(visible[0], np.tri(T, dtype=bool) & ~np.tri(T, k=-4, dtype=bool))
    assert_allclose(w.sum(axis=-1), 1, rtol=1e-5)
    summed = np.einsum("bhqk,bkhd->bqhd", w, np.repeat(V[:, :, :2], 2, axis=2))
    assert_allclose(attend(name, k=K[:, :, :2], v=V[:, :, :2], mask=mask), summed, rtol=1e-4, atol=1e-5)
