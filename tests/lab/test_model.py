"""The decoder around the encodings: initialisation, options, prefixes, decoding, and one step of training."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posx
from posx.encodings import Dims, Encoding
from posx.encodings.rates import Rate
from posx.encodings.shaw import Shaw
from posx.errors import ConfigError
from posx.lab.config import TrainConfig
from posx.lab.config.sections import ModelConfig
from posx.lab.generate import Sampling, generate
from posx.lab.layers import dropout, linear, sequential
from posx.lab.model import Model, make_model
from posx.lab.runs.load import Apply
from posx.lab.training.step import init_state, loss, make_optimizer, train_step
from tests.cheap import in_one_program
from tests.encodings.cases import ON_TEXT, first

VOCAB = 29
LENGTH = 16
SMALL = ModelConfig(num_layers=2, model_dim=24, num_heads=4, tied=True)


@dataclasses.dataclass(frozen=True)
class Gated(Encoding):
    """A toy that reads its input: a running sum of gates is subtracted between query and key, as FoX does."""

    def init(self, rng, dims):
        return {"gate": jax.random.normal(rng, (dims.model_dim, dims.num_heads), jnp.float32)}

    def features(self, params, x, pos, carry):
        gates = jax.nn.log_sigmoid(x.astype(jnp.float32) @ params["gate"])
        sums = jnp.cumsum(gates, axis=0) + (0.0 if carry is None else carry[None, :])
        return {"sum": sums}, sums[-1]

    def score(self, params, s, tile):
        return s + (tile.q_features["sum"][:, None] - tile.k_features["sum"][None, :]).transpose(2, 0, 1)


#: Every registered encoding of texts, those that act beyond their table, and the toy that has features.
SPECS = {
    **{name: name for name in ON_TEXT},
    "learned-clamp": {"name": "learned", "num_positions": 5, "beyond": "clamp"},
    "deberta-release": {"name": "deberta", "release_index": True, "max_distance": 5},
    "features": f"{__name__}:Gated",
}


def layers(spec) -> int:
    """As many as tell something of `spec`: two where layers share a part of the parameters, or keep features each."""
    return 2 if spec in ("transformer_xl", SPECS["features"]) else 1


def small(spec="alibi", **options) -> Model:
    return make_model(dataclasses.replace(SMALL, **options), spec, VOCAB, LENGTH)


@functools.cache
def start(model: Model, seed: int = 0):
    return model.init(jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model: Model, params, tokens, pos, idx=None, segment=None, dropout_rng=None):
    return model(params, tokens, pos, idx=idx, segment=segment, dropout_rng=dropout_rng)


def text(batch_size: int = 2, length: int = LENGTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (batch_size, length)).astype(np.int32)


def scattered(params, seed: int = 1):
    """Parameters moved away from their initial values, so that ones, zeros and small tables count as well."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: a + jnp.asarray(0.3 * rng.standard_normal(a.shape), a.dtype), params)


def position_free(params) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {name: leaf for name, leaf in named.items() if ".position" not in name and not name.startswith("shared")}


CALLS = {
    "logits": lambda model, params: model(params, text(), sequential(LENGTH)),
    "log_probs": lambda model, params: model.log_probs(params, text(), sequential(LENGTH - 1), None, "auto"),
    "cached": lambda model, params: model.decode(
        params, text()[:, :1], *jnp.zeros((2, 2, 1), jnp.int32), model.empty_cache(2, 4)
    ),
    "tabulated": lambda model, params: model.tabulated(params, LENGTH),
}


@pytest.mark.parametrize("call", CALLS)
def test_parameters_of_another_model_are_refused_by_name(call):
    """BAM and KERPLE have two arrays [h] each, so that leaves taken in order would fit."""
    other = (
        "missing: shared.encoding_0.a, shared.encoding_0.p; unknown: shared.encoding_0.scale, shared.encoding_0.shape"
    )
    bam = start(small("bam"))
    lacking = bam | {"shared": {"encoding_0": {"shape": np.ones(SMALL.num_heads, np.float32)}}}
    for spec, params, message in (
        ("kerple", bam, f"{other}. Give"),
        ("bam", lacking, "missing: shared.encoding_0.scale. Give"),
        ("nope", bam, "unknown: shared.encoding_0.scale, shared.encoding_0.shape. Give"),
        ("bam", bam | {"final_norm": np.ones(1, np.float32)}, "parameter 'final_norm' is [1], not [24]. Give"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            CALLS[call](small(spec), params)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", first(SPECS))
def test_encodings_start_from_the_same_weights(name):
    spec = SPECS[name]
    mine, other = (position_free(start(small(s))) for s in (spec, "nope"))
    assert mine.keys() == other.keys() and len(mine) == 2 + 2 * 8
    for name in mine:
        np.testing.assert_array_equal(mine[name], other[name], err_msg=name)


def test_another_seed_gives_other_weights():
    one, other = (start(small("nope"), seed)["embedding"] for seed in (0, 4))
    assert not np.array_equal(one, other)


def test_shared_parameters_exist_once_others_in_each_layer():
    params = start(small("transformer_xl", num_layers=3))
    encoding = posx.build("transformer_xl", SMALL.dims(LENGTH))
    names = set(encoding.init(jax.random.key(0), SMALL.dims(LENGTH)))
    assert encoding.shared and names - encoding.shared
    assert params["shared"].keys() == {"encoding_0"} and params["shared"]["encoding_0"].keys() == encoding.shared
    for layer in params["layers"].values():
        assert layer["attention"]["position"].keys() == names - encoding.shared


def test_two_encodings_keep_two_sets_of_shared_parameters():
    model = small("t5", layer_policy=("encoding", "tupe"), num_layers=4)
    assert [type(e).__name__ for e in model.encodings] == ["T5", "Tupe", "T5", "Tupe"]
    assert start(model)["shared"].keys() == {"encoding_0", "encoding_1"}


def test_layer_policy_cycles_and_decides_the_layer():
    model = small("rope", layer_policy=("encoding", "encoding", "nope"), num_layers=5)
    assert [type(e).__name__ for e in model.encodings] == ["Rope", "Rope", "Nope", "Rope", "Rope"]
    assert model.distinct == (model.encodings[0], model.encodings[2])
    params, tokens, pos = start(model), text(), sequential(LENGTH)
    everywhere, nowhere = small("rope", num_layers=5), small("nope", num_layers=5)
    outputs = [np.asarray(logits_of(m, params, tokens, pos)) for m in (model, everywhere, nowhere)]
    assert not np.allclose(outputs[0], outputs[1]) and not np.allclose(outputs[0], outputs[2])


def test_mask_policy_cycles_and_hides_tokens():
    model = small("rope", mask_policy=("window(size=4, sinks=2)",), num_layers=1)
    params, tokens, pos = start(model), text(), sequential(LENGTH)
    plain = np.asarray(logits_of(model, params, tokens, pos))
    for place, moved in ((0, range(LENGTH)), (1, range(1, LENGTH)), (5, range(5, 9)), (12, range(12, LENGTH))):
        changed = tokens.copy()
        changed[:, place] = (changed[:, place] + 1) % VOCAB
        differs = np.abs(np.asarray(logits_of(model, params, changed, pos)) - plain).max(axis=(0, 2)) > 1e-6
        assert list(np.flatnonzero(differs)) == list(moved), place
    wide = small("rope", mask_policy=(f"window(size={LENGTH})",))
    np.testing.assert_allclose(
        logits_of(wide, params2 := start(wide), tokens, pos), logits_of(small("rope"), params2, tokens, pos), atol=1e-6
    )
    pattern = small("rope", mask_policy=("window(size=4)", "causal"), num_layers=3).config.masks
    assert pattern == (posx.window(4), posx.causal(), posx.window(4))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["rope+learned_sinks", "self_extend(window=4, group=0)"])
def test_windows_and_sinks_are_those_of_the_text_in_the_cache(spec):
    """The sinks of a left-padded prompt are its own first tokens, not the first slots."""
    model = small(spec, mask_policy=("window(size=4, sinks=2)", "causal"))
    params = scattered(start(model))
    prompts = [np.asarray(text())[0, :11], np.asarray(text())[1, :3]]
    found = np.stack(list(generate(model, params, prompts, 9, sampling=Sampling(temperature=0), chunk=4)))
    for row, prompt in enumerate(prompts):
        whole = np.concatenate([prompt, found[:, row]])
        logits = logits_of(model, params, jnp.asarray(whole[None]), sequential(len(whole)))
        np.testing.assert_array_equal(np.argmax(logits[0, len(prompt) - 1 : -1], axis=-1), found[:, row])


@pytest.mark.parametrize(
    ("masks", "problem"),
    [(("window",), "size must be at least 1"), (("windw(size=3)",), "mask 'windw(size=3)' is unknown")],
)
def test_wrong_masks_are_refused(masks, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        small("rope", mask_policy=masks)


def test_absolute_encoding_is_added_once_for_all_layers():
    params = start(small("sinusoidal"))
    tokens, pos = text(), sequential(LENGTH)
    everywhere = logits_of(small("sinusoidal"), params, tokens, pos)
    first_only = logits_of(small("sinusoidal", layer_policy=("encoding", "nope")), params, tokens, pos)
    np.testing.assert_array_equal(everywhere, first_only)


def test_grouped_queries_equal_full_heads_with_repeated_weights():
    grouped, full = small("rope", num_kv_heads=2), small("rope")
    params = start(grouped)
    d = SMALL.model_dim // SMALL.num_heads

    def repeat(path, leaf):
        if path[-1].key not in ("key", "value"):
            return leaf
        return jnp.repeat(leaf.reshape(-1, 2, d), 2, axis=1).reshape(SMALL.model_dim, -1)

    wide = jax.tree_util.tree_map_with_path(repeat, params)
    assert jax.tree.map(jnp.shape, wide) == jax.tree.map(jnp.shape, start(full))
    outputs = [np.asarray(logits_of(m, p, text(), sequential(LENGTH))) for m, p in ((grouped, params), (full, wide))]
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-5)


def test_gradient_products_use_the_forward_operand_type():
    x, w, grad = (np.random.default_rng(n).standard_normal(shape).astype(np.float32) for n, shape in
                  enumerate([(9, 5), (5, 7), (9, 7)]))  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        y, pull_back = jax.vjp(functools.partial(linear, dtype=dtype), x, w)
        rounded = [np.asarray(jnp.asarray(a, dtype), np.float64) for a in (x, w, grad)]
        wanted = rounded[0] @ rounded[1], rounded[2] @ rounded[1].T, rounded[0].T @ rounded[2]
        for found, exact in zip((y, *pull_back(grad)), wanted, strict=True):
            assert found.dtype == jnp.float32
            np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


def test_hessian_vector_products_of_the_whole_model():
    """Forward mode over the gradient, against how the slope of the loss along a direction changes along it."""
    model = small("t5", num_layers=1)
    params, tokens = start(model), text(length=LENGTH + 1)
    direction = jax.tree.map(lambda a: 0.1 * a, scattered(jax.tree.map(jnp.zeros_like, params)))

    def dot(a, b):
        return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))

    @jax.jit
    def slope_and_bend(params):
        grad = jax.grad(lambda params: loss(model, params, tokens, None, "dense"))
        slope, bend = jax.jvp(lambda params: dot(grad(params), direction), (params,), (direction,))
        return slope, bend

    up, down = (slope_and_bend(jax.tree.map(lambda a, b: a + s * b, params, direction))[0] for s in (0.01, -0.01))  # noqa: B023
    bend = slope_and_bend(params)[1]
    assert abs(bend) > 0.1
    np.testing.assert_allclose(bend, (up - down) / 0.02, rtol=1e-2)


def test_qk_norm_removes_the_scale_of_queries_and_keys():
    tokens, pos = text(), sequential(LENGTH)

    def change(model) -> float:
        params = start(model)
        larger = jax.tree_util.tree_map_with_path(lambda p, x: 30 * x if p[-1].key in ("query", "key") else x, params)
        return float(jnp.abs(logits_of(model, params, tokens, pos) - logits_of(model, larger, tokens, pos)).max())

    assert change(small("alibi", qk_norm=True)) < 1e-4
    assert change(small("alibi")) > 1e-2


def test_swiglu_has_as_many_weights_as_gelu():
    def sizes(**options) -> dict[str, int]:
        config = ModelConfig(num_layers=1, model_dim=96, num_heads=4, **{"tied": True} | options)
        params = make_model(config, "nope", VOCAB, LENGTH).abstract()
        return {k: sum(leaf.size for leaf in jax.tree.leaves(v)) for k, v in params.items()}

    gelu, swiglu, untied = sizes(), sizes(mlp="swiglu"), sizes(tied=False)
    assert gelu == swiglu
    assert untied["unembedding"] == untied["embedding"] and "unembedding" not in gelu


def test_swiglu_multiplies_by_its_gate():
    model = small("nope", mlp="swiglu", num_layers=1)
    params = start(model)
    closed = jax.tree_util.tree_map_with_path(lambda p, x: 0 * x if p[-1].key == "gate" else x, params)
    no_mlp = jax.tree_util.tree_map_with_path(lambda p, x: 0 * x if p[-1].key == "down" else x, params)
    outputs = [np.asarray(logits_of(model, p, text(), sequential(LENGTH))) for p in (params, closed, no_mlp)]
    np.testing.assert_array_equal(outputs[1], outputs[2])
    assert not np.allclose(outputs[0], outputs[1])


def reference(params, config: ModelConfig, tokens) -> np.ndarray:
    """Logits of one layer without positions, in float64; biases of zero stand for none."""
    layer = params["layers"]["layer_00"]
    erf = np.vectorize(math.erf)

    def norm(x, parts, name):
        x = x - x.mean(-1, keepdims=True) if config.norm == "layer" else x
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * parts[name] + parts.get(
            f"{name}_bias", 0
        )

    def product(x, parts, name):
        return x @ parts[name] + parts.get(f"{name}_bias", 0)

    def gelu(x, exact):
        inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + (erf(x / np.sqrt(2)) if exact else np.tanh(inner)))

    def attention(x):
        q, k, v = (
            product(x, layer["attention"], name).reshape(*x.shape[:2], 4, -1) for name in ("query", "key", "value")
        )
        s = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        w = np.exp(np.where(np.tri(x.shape[1], dtype=bool), s, -np.inf))
        o = np.einsum("bhqk,bkhd->bqhd", w / w.sum(-1, keepdims=True), v)
        return product(o.reshape(x.shape), layer["attention"], "out")

    def mlp(x):
        up = product(x, layer["mlp"], "up")
        gated = (
            gelu(product(x, layer["mlp"], "gate"), False) * up if config.gated else gelu(up, config.mlp == "gelu_exact")
        )
        return product(gated, layer["mlp"], "down")

    def after(y, name):
        return norm(y, layer, f"{name}_post_norm") if config.post_norm else y

    x = params["embedding"][tokens] * np.sqrt(params["embedding"].shape[1])
    x = norm(x, params, "embedding_norm") if config.embedding_norm else x
    y = x + after(attention(norm(x, layer, "attention_norm")), "attention")
    x = y + after(mlp(norm(x if config.parallel else y, layer, "mlp_norm")), "mlp")
    return norm(x, params, "final_norm") @ params["embedding"].T


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "layer", "biases": "all", "mlp": "gelu_exact", "parallel": True},
        {"norm": "layer", "biases": "all", "embedding_norm": True},
        {"mlp": "geglu", "post_norm": True, "biases": "qkv"},
        {"norm": "layer", "biases": "none"},
    ],
    ids=["gpt_neox", "bloom", "gemma", "mpt"],
)
def test_architectures_equal_a_reference(options):
    model = small("nope", num_layers=1, **options)
    params = scattered(start(model))
    wanted = reference(jax.tree.map(lambda x: np.asarray(x, np.float64), params), model.config, text())
    np.testing.assert_allclose(logits_of(model, params, text(), sequential(LENGTH)), wanted, rtol=1e-3, atol=1e-3)


def test_bfloat16_stays_close_and_parameters_stay_float32():
    model, exact = small("rope", dtype="bfloat16", num_layers=1), small("rope", num_layers=1)
    params = start(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits, wanted = (np.asarray(logits_of(m, params, text(), sequential(LENGTH))) for m in (model, exact))
    assert logits.dtype == np.float32
    assert 0 < np.abs(logits - wanted).max() < 0.02 * np.abs(wanted).max()


def test_dropout_acts_only_with_a_key_and_keeps_the_mean():
    model = small("alibi", dropout=0.4, num_layers=1)
    params, tokens, pos = start(model), text(), sequential(LENGTH)
    plain = logits_of(model, params, tokens, pos)
    np.testing.assert_array_equal(plain, logits_of(small("alibi", num_layers=1), params, tokens, pos))
    keys = [jax.random.split(jax.random.key(n), len(tokens)) for n in (0, 0, 1)]
    dropped = [logits_of(model, params, tokens, pos, dropout_rng=rng) for rng in keys]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    alone = logits_of(model, params, tokens[1:], pos, dropout_rng=keys[0][1:])
    np.testing.assert_allclose(alone, dropped[0][1:], rtol=1e-4, atol=1e-5, err_msg="a row draws by its own key")
    assert not np.allclose(dropped[0], dropped[2]) and not np.allclose(dropped[0], plain)
    kept = np.asarray(dropout(jnp.ones((400, 10)), 0.4, jax.random.split(jax.random.key(0), 4)))
    np.testing.assert_allclose(np.unique(kept), [0, 1 / 0.6], rtol=1e-6)
    assert abs(kept.mean() - 1) < 0.05


@functools.partial(jax.jit, static_argnums=0)
def cached_logits_of(model: Model, params, tokens, pos, idx, cache):
    return model.decode(params, tokens, pos, idx, cache)


def decode(model, params, tokens, pos, idx, chunk):
    """Logits of all tokens [b, t], `chunk` of them at a time through the cache."""
    cache = model.empty_cache(tokens.shape[0], LENGTH + 3)
    logits = []
    for start_at in range(0, tokens.shape[1], chunk):
        part = slice(start_at, start_at + chunk)
        new, cache = cached_logits_of(model, params, tokens[:, part], pos[:, part], idx[:, part], cache)
        logits.append(new)
    assert int(cache.filled) == tokens.shape[1]
    return np.concatenate(logits, axis=1)


@pytest.mark.parametrize("name", first(SPECS, ("shaw", "fox")))
def test_prefixes_decoding_and_padding_agree_with_the_full_pass(name):
    """One test for all of them, so that each program is compiled once an encoding."""
    spec = SPECS[name]
    model, short = small(spec, num_kv_heads=2, num_layers=layers(spec)), 11
    params, tokens, pos = scattered(start(model)), text(), sequential(LENGTH)

    def assert_equal(found, wanted, what):
        np.testing.assert_allclose(found, wanted, rtol=5e-4, atol=5e-4, err_msg=what)

    place = np.broadcast_to(pos, tokens.shape)
    whole = np.asarray(logits_of(model, params, tokens, place, idx=place))
    part = np.asarray(logits_of(model, params, tokens[:, :short], sequential(short)))
    assert_equal(whole[:, :short], part, "a prefix sees what follows, or how much")
    changed = tokens.copy()
    changed[:, 9] = (changed[:, 9] + 1) % VOCAB
    other = np.asarray(logits_of(model, params, changed, place, idx=place))
    assert_equal(whole[:, :9], other[:, :9], "a token sees a later one")
    assert np.abs(whole[:, 9:] - other[:, 9:]).max() > 1e-2

    for chunk in (1, 8):
        assert_equal(decode(model, params, tokens, place, place, chunk), whole, f"decoding in chunks of {chunk}")

    padding = LENGTH - short
    padded = np.pad(tokens[:, :short], ((0, 0), (padding, 0)), constant_values=3)
    padded_pos, idx = np.maximum(place - padding, 0), np.where(place < padding, -1, place)
    found = np.asarray(logits_of(model, params, padded, padded_pos, idx=idx))
    assert_equal(found[:, padding:], part, "left padding")
    found = decode(model, params, padded, padded_pos, idx, chunk=8)
    assert_equal(found[:, padding:], part, "left padding with the cache")


def test_nothing_leaks_out_of_padding_into_text_or_cache():
    """Even where the padding's own vectors are NaN: its keys, its values, and what it adds to a running sum."""
    model, short = small(SPECS["features"], num_kv_heads=2, tied=False), 11
    params, padding = scattered(start(model)), LENGTH - short
    tokens = np.pad(text()[:, :short] % (VOCAB - 1), ((0, 0), (padding, 0)), constant_values=VOCAB - 1)
    place = np.broadcast_to(sequential(LENGTH), tokens.shape)
    pos, idx = np.maximum(place - padding, 0), np.where(place < padding, -1, place)
    spoiled = params | {"embedding": params["embedding"].at[-1].set(jnp.nan)}
    wanted = np.asarray(logits_of(model, params, tokens, pos, idx=idx))[:, padding:]
    for found in (logits_of(model, spoiled, tokens, pos, idx=idx), decode(model, spoiled, tokens, pos, idx, chunk=8)):
        np.testing.assert_allclose(found[:, padding:], wanted, rtol=5e-4, atol=5e-4)


def test_a_full_cache_is_an_error():
    """Also under `jit`, where the number of filled slots is not known: NaN, and NaN from then on."""
    model = small("rope", num_layers=1)
    params, tokens, pos = start(model), text(1, 6), sequential(6)[None]
    cache = model.empty_cache(1, 4)
    _, cache = cached_logits_of(model, params, tokens[:, :4], pos[:, :4], pos[:, :4], cache)
    for n in (4, 5):
        new = (tokens[:, n : n + 1], pos[:, n : n + 1], pos[:, n : n + 1])
        with pytest.raises(ConfigError, match="4 of its 4 slots are filled.*at least 5 slots"):
            model.decode(params, *new, cache._replace(filled=jnp.int32(4)))
        logits, cache = cached_logits_of(model, params, *new, cache)
        assert np.isnan(logits).all()


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_token_ids_outside_the_vocabulary_are_errors(wrong):
    """NaN under `jit`, where they are not known, instead of those of another token."""
    model, pos = small("rope", num_layers=1), sequential(3)
    params, tokens = start(model), np.array([[1, 2, wrong, 3]], np.int32)
    for call in (lambda: model(params, tokens[:, :3], pos), lambda: model.log_probs(params, tokens, pos, None, "auto")):
        with pytest.raises(ConfigError, match=f"token ids go from .*{wrong}.* 0 to {VOCAB - 1} are allowed"):
            call()
    logits = np.asarray(logits_of(model, params, tokens[:, :3], pos))[0]
    assert np.isnan(logits[2]).all()
    found = jax.jit(lambda tokens: model.log_probs(params, tokens, pos[:2], None, "dense"))(tokens[:, :3])[0]
    assert np.isfinite(found[0]) and np.isnan(found[1])


TAKES_TOKENS = {
    "logits": lambda model, params, ids: model(params, ids, sequential(3)),
    "log_probs": lambda model, params, ids: model.log_probs(params, ids, sequential(2), None, "auto"),
    "cached": lambda model, params, ids: model.decode(params, ids, *[sequential(3)] * 2, model.empty_cache(2, 4))[0],
    "load": lambda model, params, ids: Apply(model)(params, ids),
}


@pytest.mark.parametrize("call", TAKES_TOKENS)
def test_token_ids_may_be_lists_and_must_be_a_batch(call):
    model, ids = small("rope", num_layers=1), text(2, 3)
    found = functools.partial(TAKES_TOKENS[call], model, start(model))
    np.testing.assert_array_equal(in_one_program(found, ids.tolist()), in_one_program(found, ids))
    for wrong in (ids[0], ids[None], 3, "text", [[1, 2, 3], [4]], ids * 1.0, ids > 3, None, jax.random.key(0)):
        with pytest.raises(ConfigError, match=r"^tokens: .* cannot be token ids. Give whole numbers \[b, t") as caught:
            found(wrong)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="float32 cannot be token ids"):
        jax.jit(found)(jnp.asarray(ids, jnp.float32))


def test_a_cache_of_another_batch_size_is_refused():
    model = small("rope", num_layers=1)
    with pytest.raises(ConfigError, match="tokens have 2 rows, but the cache has 3"):
        model.decode(start(model), text(2, 3), *[sequential(3)] * 2, model.empty_cache(3, 4))


def test_documents_in_one_row_do_not_see_each_other():
    model = small("rope")
    params, tokens = scattered(start(model)), text(1, 9)
    segment = np.array([[0] * 4 + [1] * 5], np.int32)
    pos = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]], np.int32)
    packed = logits_of(model, params, tokens, pos, segment=segment)
    np.testing.assert_allclose(
        packed[:, 4:], logits_of(model, params, tokens[:, 4:], sequential(5)), rtol=2e-4, atol=2e-4
    )


def test_both_modes_of_nnx_give_the_same_model():
    model = small("transformer_xl")
    tokens = text(length=LENGTH + 1)
    made = []
    for graph in (True, False):
        with nnx.set_graph_mode(graph):
            params = model.init(jax.random.key(0))
            call = functools.partial(loss, model, batch=tokens, dropout_rng=None, executor="dense")
            made.append((params, float(jax.jit(call)(params))))
    (params, found), (others, wanted) = made
    jax.tree.map(np.testing.assert_array_equal, params, others)
    assert jax.tree.structure(params) == jax.tree.structure(others)
    assert found == wanted


@pytest.fixture
def standard_promotion():
    """For what calls Optax, which does not hold to the strict one."""
    with jax.numpy_dtype_promotion("standard"):
        yield


optax_user = pytest.mark.usefixtures("standard_promotion")
TRAIN = TrainConfig(length=LENGTH, batch_size=8, steps=20, warmup_steps=2, learning_rate=3e-3)


def windows(seed: int = 0) -> np.ndarray:
    return text(TRAIN.batch_size, LENGTH + 1, seed)


@optax_user
@pytest.mark.parametrize("name", first(SPECS, ("shaw", "selective_rope")))
def test_a_few_steps_lower_the_loss(name):
    spec = SPECS[name]
    model = small(spec, num_layers=layers(spec))
    state = init_state(model, TRAIN)
    before = jax.tree.map(np.asarray, state["params"])
    losses = []
    for _ in range(6):
        state, metrics = train_step(model, TRAIN, state, windows())
        losses.append(float(metrics["loss"]))
    assert int(state["step"]) == 6 and losses[-1] < losses[0] - 0.02
    still = [
        jax.tree_util.keystr(path)
        for (path, a), b in zip(
            jax.tree_util.tree_flatten_with_path(before)[0], jax.tree.leaves(state["params"]), strict=True
        )
        if np.array_equal(a, b)
    ]
    assert not still, f"these parameters got no gradient: {still}"


@pytest.mark.slow
@optax_user
def test_accumulated_parts_equal_the_whole_batch():
    model = small("rope", num_layers=1)
    results = []
    for parts in (1, 4):
        config = dataclasses.replace(TRAIN, accumulation=parts, warmup_steps=0)
        results.append(train_step(model, config, init_state(model, config), windows()))
    (whole, a), (summed, b) = results
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-6)
    np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-5)
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), whole["params"], summed["params"])
    assert max(jax.tree.leaves(moved)) < 0.05 * TRAIN.learning_rate


@pytest.mark.slow
@optax_user
def test_dropout_differs_between_steps_and_rows():
    model = small("nope", dropout=0.5, num_layers=1)
    config = dataclasses.replace(TRAIN, learning_rate=1e-30, final_learning_rate=0.0)
    rows = np.repeat(windows()[:1], TRAIN.batch_size, axis=0)
    state = init_state(model, config)
    losses = []
    for _ in range(2):
        state, metrics = train_step(model, config, state, rows)
        losses.append(float(metrics["loss"]))
    again = train_step(model, config, init_state(model, config), rows)[1]["loss"]
    assert losses[0] == float(again) != losses[1]
    halves = dataclasses.replace(config, accumulation=2)
    again = train_step(model, halves, init_state(model, halves), rows)[1]["loss"]
    assert float(again) == pytest.approx(losses[0], rel=1e-5), "a row draws what it draws in a whole batch"
    one = dataclasses.replace(config, batch_size=4)
    first = float(train_step(model, one, init_state(model, one), rows[:4])[1]["loss"])
    assert losses[0] != pytest.approx(first, abs=1e-5), "all rows drew the same mask"


@dataclasses.dataclass(frozen=True)
class Rated(Encoding):
    """A toy with a table that learns five times as fast, is shared, and of which weight decay acts on one part."""

    about = posx.About(lr_multiplier=5)
    shared = decayed = frozenset({"table"})

    def init(self, rng, dims):
        return {"table": jnp.ones((4, dims.num_heads)), "gain": jnp.ones((2, dims.num_heads))}

    def by_distance(self, params, distance):
        near = params["table"][jnp.clip(distance, 0, 3)].T
        return posx.ByDistance(bias=near * params["gain"].sum(0)[:, None])


def steps(encoding, grad, rates=None, **settings):
    """What the first step adds to ones, where every gradient is `grad`."""
    model = small(encoding, qk_norm=True)
    ones = jax.tree.map(lambda x: jnp.ones(x.shape), model.abstract())
    config = dataclasses.replace(TRAIN, warmup_steps=0, **settings)
    optimizer = make_optimizer(config, model, rates)
    with jax.numpy_dtype_promotion("standard"):  # Optax promotes types
        step = jax.jit(lambda x: optimizer.update(jax.tree.map(lambda x: grad * x, x), optimizer.init(x), x)[0])
        return step(ones)


def test_weight_decay_acts_on_matrices_and_named_position_arrays():
    found = steps("transformer_xl", 0.0)
    layer = found["layers"]["layer_00"]
    decayed = [layer["attention"][name] for name in ("query", "key", "value", "out")] + [found["embedding"]]
    assert all((x < 0).all() for x in decayed)
    spared = [layer["attention_norm"], layer["attention"]["query_norm"], found["final_norm"], found["shared"]]
    assert not any(x.any() for x in jax.tree.leaves([*spared, layer["attention"]["position"]]))
    found = steps(Rated(), 0.0)
    np.testing.assert_allclose(found["shared"]["encoding_0"]["table"], found["embedding"][0, 0], rtol=1e-6)
    assert not found["layers"]["layer_01"]["attention"]["position"]["gain"].any()


@pytest.mark.parametrize(
    ("settings", "factors"),
    [({}, (1, 5)), ({"position_lr_multiplier": 3.0}, (3, 3)), ({"position_lr_multiplier": 1.0}, (1, 1))],
)
def test_each_part_of_a_chain_learns_at_its_own_multiple(settings, factors):
    found = steps(["shaw", Rated()], 1.0, weight_decay=0.0, **settings)
    usual = -TRAIN.learning_rate
    for layer in found["layers"].values():
        own = layer["attention"].pop("position")
        shaw = factors[0] * (Shaw.about.lr_multiplier if not settings else 1)
        np.testing.assert_allclose(own["0.keys"], shaw * usual, rtol=1e-5)
        np.testing.assert_allclose(own["1.gain"], factors[1] * usual, rtol=1e-5)
    np.testing.assert_allclose(found.pop("shared")["encoding_0"]["1.table"], factors[1] * usual, rtol=1e-5)
    for x in jax.tree.leaves(found):
        np.testing.assert_allclose(x, usual, rtol=1e-5)


def test_stored_run_keeps_its_rates_when_classes_change():
    found = steps(Rated(), 1.0, rates=((("table", Rate(7.0)),), ()), weight_decay=0.0)
    np.testing.assert_allclose(found["shared"]["encoding_0"]["table"], -7 * TRAIN.learning_rate, rtol=1e-5)
    gains = [layer["attention"]["position"]["gain"] for layer in found["layers"].values()]
    np.testing.assert_allclose(gains, -TRAIN.learning_rate, rtol=1e-5)


def test_initialisation_follows_the_recipe():
    config = ModelConfig(num_layers=8, model_dim=256, num_heads=4, mlp_dim=512, tied=False)
    params = make_model(config, "nope", 500, LENGTH).init(jax.random.key(0))
    layer = params["layers"]["layer_03"]
    wanted = {
        "embedding": (params["embedding"], 0.02), "unembedding": (params["unembedding"], 0.02),
        "query": (layer["attention"]["query"], 256**-0.5), "up": (layer["mlp"]["up"], 256**-0.5),
        "out": (layer["attention"]["out"], 256**-0.5 / 4), "down": (layer["mlp"]["down"], 512**-0.5 / 4),
    }  # fmt: skip
    for name, (leaf, std) in wanted.items():
        np.testing.assert_allclose(np.std(leaf), std, rtol=0.02, err_msg=name)


@optax_user
def test_golden_loss():
    model = small("transformer_xl", qk_norm=True)
    state = init_state(model, TRAIN)
    losses = []
    for step in range(3):
        state, metrics = train_step(model, TRAIN, state, windows(step))
        losses.append(float(metrics["loss"]))
    golden = GOLDEN
    np.testing.assert_allclose(
        losses, golden, rtol=2e-4,
        err_msg="initialisation, model or optimizer changed what a run computes. Was this intended? If so, say so in "
        "the commit and replace the golden numbers; results from before and after must not be put side by side.",
    )  # fmt: skip


GOLDEN = [3.3753557, 3.3787610, 3.3721817]


def test_dims_belong_to_the_model():
    assert small().dims == Dims(24, 4, 6, 2, LENGTH, 4)
    assert small(num_kv_heads=2).dims.num_kv_heads == 2


def test_positions_of_another_length_are_refused():
    """They would cut the batch into other sequences."""
    model = make_model(ModelConfig(num_layers=1, model_dim=16, num_heads=2), "alibi", 50, 16)
    params, tokens = model.init(jax.random.key(0)), np.arange(24, dtype=np.int32).reshape(2, 12)
    for count in (3, 4, 6, 8, 24):
        with pytest.raises(ValueError, match=rf"pos has shape \({count},\), but vectors \[b, t, h, d\] have 12 tokens"):
            model(params, tokens, sequential(count))
    with pytest.raises(ValueError, match=r"but vectors \[b, t, h, d\] have 11 tokens"):
        model.log_probs(params, tokens, sequential(12), None, "auto")


def test_cached_takes_positions_that_all_rows_share():
    model = make_model(ModelConfig(num_layers=2, model_dim=16, num_heads=2), "rope", 50, 16)
    params, tokens = model.init(jax.random.key(0)), np.arange(12, dtype=np.int32).reshape(2, 6)
    whole = logits_of(model, params, tokens, sequential(6))
    for shared in (sequential(6), sequential(6)[None]):
        logits, cache = cached_logits_of(model, params, tokens, shared, shared, model.empty_cache(2, 8))
        np.testing.assert_allclose(logits, whole, atol=1e-5)
        np.testing.assert_array_equal(cache.idx[:, :6], np.broadcast_to(np.arange(6), (2, 6)))


ORDERS = ([[0, 1, 2, -1], [4]], [[0, 1, 2, 3], [0]], [[0, 1, 1, 2], [3]], [[-1, -1, -1, 0], [0]])


@pytest.mark.slow
@pytest.mark.parametrize("orders", ORDERS)
def test_cached_refuses_orders_that_do_not_go_on(orders):
    model = make_model(ModelConfig(num_layers=1, model_dim=16, num_heads=2), "alibi", 50, 16)
    params, cache = model.init(jax.random.key(0)), model.empty_cache(1, 8)
    with pytest.raises(ConfigError, match="idx must grow"):
        for idx in map(np.int32, orders):
            _, cache = model.decode(params, np.ones((1, len(idx)), int), np.maximum(idx, 0), idx, cache)


@dataclasses.dataclass(frozen=True)
class LogDecay(Encoding):
    """An encoding of a user, whose array has JAX's default type."""

    def init(self, rng, dims):
        return {"a": jnp.zeros(dims.num_heads)}

    def by_distance(self, params, distance):
        fall = jnp.log1p(jnp.abs(posx.as_float(distance)))
        return posx.ByDistance(bias=-posx.as_float(jax.nn.softplus(params["a"]))[:, None] * fall[None])


def test_own_parameters_stay_float32_with_64_bit_types():
    model = make_model(ModelConfig(num_layers=1, model_dim=16, num_heads=2), LogDecay(), 50, 16)
    with jax.enable_x64(True):
        assert {leaf.dtype for leaf in jax.tree.leaves(model.abstract())} == {jnp.dtype(jnp.float32)}
