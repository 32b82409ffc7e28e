"""Sampling with the cache gives what recomputing everything would give, for every encoding."""

import collections
import contextlib
import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posx
from posx.errors import ConfigError, NonFiniteError
from posx.lab.commands.results import text_pieces
from posx.lab.config.sections import ModelConfig
from posx.lab.data import BpeTokenizer, ByteTokenizer, train_bpe
from posx.lab.generate import Sampling, generate, prefill, sample
from posx.lab.layers import sequential
from posx.lab.model import make_model
from posx.lab.positions import Positions, parse_policy
from tests.cheap import in_one_program
from tests.encodings.cases import ON_TEXT, first
from tests.lab.test_model import SPECS, layers, logits_of, scattered
from tests.lab.test_model import start as initial

VOCAB, TRAIN_LEN = 23, 64
CONFIG = ModelConfig(num_layers=2, model_dim=24, num_heads=4, num_kv_heads=2)
GREEDY = Sampling(temperature=0)


def trained(spec, num_layers: int = 1):
    model = make_model(dataclasses.replace(CONFIG, num_layers=num_layers), spec, VOCAB, TRAIN_LEN)
    return model, scattered(initial(model))


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length)


def made(model, params, prompts, num_tokens, **options) -> np.ndarray:
    """[b, num_tokens]"""
    return np.stack(list(generate(model, params, prompts, num_tokens, **options)), axis=1)


def recomputed(model, params, start: np.ndarray, num_tokens: int) -> list[int]:
    """The most likely tokens, each from a forward pass over all before it, padded to one compiled length."""
    tokens = np.zeros(len(start) + num_tokens, np.int32)
    tokens[: len(start)] = start
    model = model.at_length(len(tokens))
    for n in range(len(start), len(tokens)):
        tokens[n] = int(jnp.argmax(logits_of(model, params, tokens[None], sequential(len(tokens)))[0, n - 1]))
    return tokens[len(start) :].tolist()


#: A table that ends, vectors by distance, a carry with a history, scores of whole rows, and both caches of keys.
GREEDILY = ("learned", "deberta", "selective_rope", "cope")


@pytest.mark.parametrize("name", first([*GREEDILY, "path", "canon", "dual_chunk"], GREEDILY))
def test_greedy_decoding_equals_recomputing(name):
    model, params = trained(SPECS[name], layers(SPECS[name]))
    starts = [prompt(11, seed) for seed in range(6)]
    wanted = [recomputed(model, params, start, 8) for start in starts]
    assert len(set(np.ravel(wanted))) > 2, "a model that repeats itself shows nothing"
    assert made(model, params, starts, 8, sampling=GREEDY, chunk=4).tolist() == wanted


#: Those with a history, a carry, and scores of whole rows.
CARRYING = [
    pytest.param(spec, marks=pytest.mark.slow) for spec in ("key_offset+cope", "selective_rope(drift=true)+fox", "path")
]


@pytest.mark.parametrize("spec", ["rope", "sinusoidal", *CARRYING])
def test_prompts_of_unequal_length_equal_each_alone(spec):
    model, params = trained(spec)
    prompts = [prompt(length, seed) for seed, length in enumerate((1, 13, 6))]
    together = made(model, params, prompts, 6, sampling=GREEDY, chunk=4)
    for row, start in zip(together, prompts, strict=True):
        assert row.tolist() == recomputed(model, params, start, 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", first(["rope", "t5", "fox", "cope", "dape", "path", "learned"], ("fox",)))
def test_a_row_does_not_depend_on_its_batch(name):
    """Neither on the other prompts, nor on their number, nor on the number of tokens asked for."""
    model, params = trained(name)
    first, short, long = prompt(7, 0), prompt(2, 1), prompt(19, 2)
    for sampling in (GREEDY, Sampling(temperature=2.0)):
        tokens = made(model, params, [first, long], 8, sampling=sampling)[0].tolist()
        assert len(set(tokens)) > 1
        assert made(model, params, [first, short], 5, sampling=sampling)[0].tolist() == tokens[:5]
        assert made(model, params, [first], 3, sampling=sampling)[0].tolist() == tokens[:3]


def test_rows_of_one_prompt_draw_different_tokens():
    model, params = trained("rope")
    one, other = made(model, params, [prompt(7)] * 2, 16)
    assert one.tolist() != other.tolist()


def test_a_seed_of_each_prompt_goes_with_it_to_any_batch():
    model, params = trained("rope")
    prompts, sampling = [prompt(5)] * 3, Sampling(temperature=1.0)
    found = made(model, params, prompts, 6, sampling=sampling, seed=[4, 5, 4])
    assert (found[0] == found[2]).all() and (found[0] != found[1]).any()
    (alone,) = made(model, params, prompts[:1], 6, sampling=sampling, seed=[5])
    assert (alone == found[1]).all()
    with pytest.raises(ConfigError, match="seed has 1 entries for 3 prompts"):
        made(model, params, prompts, 6, sampling=sampling, seed=[5])


def test_an_encoding_set_for_a_length_refuses_unequal_prompts():
    model, params = trained({"name": "learned", "num_positions": 12, "beyond": "interpolate"})
    with pytest.raises(ConfigError, match="2 different lengths"):
        next(generate(model, params, [prompt(3), prompt(11)], 9))
    assert made(model, params, [prompt(11)] * 2, 2, sampling=GREEDY).shape == (2, 2)


@contextlib.contextmanager
def compilations():
    """Collect the seconds of each compilation inside the block, of single operations too."""
    found: list[float] = []

    def listen(event: str, seconds: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


#: A table that `at_length` stretches for each length, and one that is read by distance.
STRETCHED = {"name": "learned", "num_positions": 20, "beyond": "interpolate"}


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["rope", STRETCHED, "shaw"], ids=str)
def test_many_lengths_need_at_most_eight_programs(spec):
    model, params = trained(spec)
    lengths = [(prompt, new) for prompt in (1, 21, 64, 300) for new in (1, 3, 6)]
    with compilations() as found:
        texts = {size: made(model, params, [prompt(size[0])], size[1], sampling=GREEDY)[0] for size in lengths}
    assert len(found) <= 8
    gc.collect()
    arrays = len(jax.live_arrays())
    with compilations() as found:
        for count in (30, 31):
            made(model, params, [prompt(count)], count, sampling=GREEDY)
    gc.collect()
    assert not found and len(jax.live_arrays()) <= arrays
    for size in ((1, 6), (21, 3)):
        assert texts[size].tolist() == recomputed(model, params, prompt(size[0]), size[1])


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["rope", STRETCHED], ids=str)
def test_memory_stays_flat_over_200_lengths(spec):
    model, params = trained(spec)

    def make(counts) -> int:
        """Return the number of objects and arrays that are left."""
        for count in counts:
            made(model, params, [prompt(count)], 1 + count % 7)
        gc.collect()
        return len(gc.get_objects()) + len(jax.live_arrays())

    with compilations() as found:
        before = make([*range(1, 20), *range(500, 520)])
        after = make(range(20, 200))
    assert len(found) <= 8
    assert after - before < 1000, "each length leaves objects behind"


def test_prefill_refuses_a_cache_that_is_too_small():
    model, params = trained("rope")
    tokens = prompt(11)[None].astype(np.int32)
    _, cache = prefill(model, params, tokens, model.empty_cache(1, 16), chunk=4)
    with pytest.raises(ConfigError, match="4 more tokens do not fit into the cache: 12 of its 14 slots"):
        prefill(model, params, tokens[:, :4], cache._replace(pos=cache.pos[:, :14], idx=cache.idx[:, :14]), chunk=4)


@pytest.mark.parametrize("row", [[5, 6, -1, -1], [5, -1, 6, 7], [-1, -1, -1, -1]])
def test_prefill_refuses_padding_after_a_token(row):
    """Their logits would be of other texts."""
    model, params = trained("rope")
    with pytest.raises(ConfigError, match="pad prompts on the left|at least one token a row"):
        prefill(model, params, np.array([row, [5, 6, 7, 8]]), model.empty_cache(2, 16), chunk=4)


def test_prefill_refuses_a_cache_with_tokens():
    model, params = trained("rope")
    tokens = prompt(4)[None]
    _, cache = prefill(model, params, tokens, model.empty_cache(1, 16), chunk=4)
    with pytest.raises(ConfigError, match="idx must grow from token to token"):
        prefill(model, params, tokens, cache, chunk=4)
    with pytest.raises(ConfigError, match="tokens have 1 rows, but the cache has 2"):
        prefill(model, params, tokens, model.empty_cache(2, 16), chunk=4)


def test_prompts_that_are_no_token_ids_are_refused():
    model, params = trained("rope")
    for prompts, which in (
        (prompt(3), r"prompts\[0\]: \[\] of int64"),
        ("text", r"prompts\[0\]: a text"),
        ([[1, 2], [0.5]], r"prompts\[1\]: \[1\] of float64"),
        ([[1, 2], [[3]]], r"prompts\[1\]: \[1, 1\] of int64"),
    ):
        with pytest.raises(ConfigError, match=f"{which} cannot be token ids. Give whole numbers \\[t\\]"):
            next(generate(model, params, prompts, 1))
    with pytest.raises(ConfigError, match="chunk=0"):
        next(generate(model, params, [[1]], 1, chunk=0))
    for tokens, chunk in (([[], []], 4), ([[1], [2]], 0)):
        with pytest.raises(ConfigError, match="give at least one token a row"):
            prefill(model, params, np.array(tokens, int), model.empty_cache(2, 4), chunk)


@pytest.mark.parametrize("mask", [posx.causal(), posx.window(3), posx.window(2, sinks=1)], ids=str)
def test_a_padded_row_attends_as_it_does_alone(mask):
    """Under the arrival orders of `prefill`: the sinks of a row are its own first tokens."""
    model, params = trained("nope")
    tokens = np.array([[-1, -1, *prompt(3)], prompt(5, 1)], np.int32)
    orders = [
        np.asarray(prefill(model, params, rows, model.empty_cache(len(rows), 5), chunk=5)[1].idx)
        for rows in (tokens, tokens[:1, 2:])
    ]
    assert orders[0].tolist() == [[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]]
    q, k, v = (jax.random.normal(key, (1, 5, 4, 6)) for key in jax.random.split(jax.random.key(0), 3))
    encoding, pos = posx.build("nope", CONFIG.dims(TRAIN_LEN)), np.int32([[0, 0, 0, 1, 2]])
    run = functools.partial(in_one_program, posx.attend, encoding, {}, mask=mask)
    padded = run(q, k, v, posx.Slots(pos, orders[0][:1]))
    wanted = run(*(x[:, 2:] for x in (q, k, v)), sequential(3))
    np.testing.assert_allclose(padded[:, 2:], wanted, rtol=1e-5, atol=1e-6)


def test_chunked_prefill_gives_the_logits_of_the_full_pass():
    model, params = trained("t5")
    tokens = np.stack([prompt(13, 1), prompt(13, 2)]).astype(np.int32)
    wanted = logits_of(model, params, tokens, sequential(13))[:, -1]
    for chunk in (1, 5, 13, 64):
        found, cache = prefill(model, params, tokens, model.empty_cache(2, 20), chunk)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        assert sorted(np.asarray(cache.pos[0])[np.asarray(cache.idx[0]) >= 0]) == list(range(13))


LOGITS = jnp.log(jnp.array([[0.5, 0.05, 0.3, 0.15]]))


def counts(sampling: Sampling, draws: int = 4000) -> dict[int, float]:
    drawn = jax.vmap(lambda rng: sample(LOGITS, sampling, rng)[0])(jax.random.split(jax.random.key(0), draws))
    return {token: n / draws for token, n in collections.Counter(np.asarray(drawn).tolist()).items()}


def test_temperature_one_samples_the_distribution_itself():
    found = counts(Sampling())
    assert found == {token: pytest.approx(p, abs=0.03) for token, p in enumerate((0.5, 0.05, 0.3, 0.15))}


def test_temperature_sharpens_and_zero_takes_the_most_likely():
    assert counts(Sampling(temperature=0)) == {0: 1.0}
    half = np.array([0.5, 0.05, 0.3, 0.15]) ** 2
    found = counts(Sampling(temperature=0.5))
    assert [found[n] for n in range(4)] == pytest.approx((half / half.sum()).tolist(), abs=0.03)


def test_top_k_keeps_the_k_most_likely_in_proportion():
    assert counts(Sampling(top_k=1)) == {0: 1.0}
    assert counts(Sampling(top_k=2)) == {0: pytest.approx(0.625, abs=0.03), 2: pytest.approx(0.375, abs=0.03)}
    assert counts(Sampling(top_k=99)) == counts(Sampling())


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1.2e-38, 1e-38, 1e-45])
def test_tiny_temperatures_take_the_most_likely(temperature):
    logits = jnp.array([[1.0, 5.0, 9.0, -3.0], [1e4, -1e4, 0.0, 5e3]])
    for options in ({}, {"top_k": 2}):
        sampling = Sampling(temperature, **options)
        drawn = jax.vmap(lambda rng: sample(logits, sampling, rng))(jax.random.split(jax.random.key(0), 20))  # noqa: B023
        assert np.unique(drawn, axis=0).tolist() == [[2, 0]]


def test_a_temperature_past_float32_samples_uniformly():
    assert set(counts(Sampling(temperature=1e39, top_k=2))) == {0, 2}
    assert set(counts(Sampling(temperature=1e39))) == {0, 1, 2, 3}


def test_logits_that_are_not_finite_end_the_text():
    model, params = trained("rope")
    broken = params | {"final_norm": params["final_norm"].at[0].set(jnp.nan)}
    for sampling in (GREEDY, Sampling()):
        with pytest.raises(NonFiniteError, match="new token 1 of prompt 0: the model's logits are NaN"):
            next(generate(model, broken, [prompt(3)], 2, sampling=sampling))


@pytest.mark.parametrize("tokens", [[3, -1], [3, VOCAB], [3.0]])
def test_prompts_outside_the_vocabulary_are_refused(tokens):
    model, params = trained("rope")
    with pytest.raises(ConfigError, match="token"):
        next(generate(model, params, [np.array(tokens)], 2))


@pytest.mark.parametrize("values", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}])
def test_senseless_sampling_is_refused(values):
    with pytest.raises(ConfigError, match="negative"):
        Sampling(**values)


def test_seeds_decide_what_is_sampled():
    model, params = trained("alibi")
    first, again, other = (made(model, params, [prompt(5)], 24, seed=seed)[0].tolist() for seed in (0, 0, 1))
    assert first == again != other
    assert len(set(first)) > 4


@pytest.mark.parametrize("name", ["learned", "tupe"])
def test_past_a_table_the_largest_usable_count_is_named(name):
    model, params = trained({"name": name, "num_positions": 20})
    start = prompt(11)
    with pytest.raises(ConfigError, match=r"num_tokens=11 after a prompt of 11 tokens.* at most 10 new tokens"):
        next(generate(model, params, [prompt(3), start], 11, sampling=GREEDY))
    tokens = made(model, params, [start], 10, sampling=GREEDY)[0].tolist()
    assert tokens[:9] == recomputed(model, params, start, 9)
    with pytest.raises(ConfigError, match="Shorten the prompt to at most 20 tokens"):
        next(generate(model, params, [prompt(30)], 1))
    assert len(made(model, params, [prompt(20)], 1)[0]) == 1


@pytest.mark.parametrize("name", ["learned", "tupe"])
def test_an_interpolated_table_goes_on(name):
    model, params = trained({"name": name, "num_positions": 20, "beyond": "interpolate"})
    start = prompt(11)
    assert made(model, params, [start], 30, sampling=GREEDY)[0].tolist() == recomputed(model, params, start, 30)


@pytest.mark.parametrize(("prompts", "num_tokens"), [([], 3), ([np.zeros(0, int)], 3), ([np.zeros(2, int)], 0)])
def test_nothing_to_start_from_or_to_make_is_refused(prompts, num_tokens):
    model, params = trained("nope")
    with pytest.raises(ConfigError, match="at least one"):
        next(generate(model, params, prompts, num_tokens))


@pytest.mark.parametrize(
    ("spec", "policy"), [("axial", "sequential"), ("mrope(sections=(1, 1, 1))", "grid"), ("rope", "grid")]
)
def test_positions_with_other_axes_are_refused(spec, policy):
    model = make_model(CONFIG, spec, VOCAB, TRAIN_LEN)
    with pytest.raises(ConfigError, match=rf"reads positions with axes=\d, but positions={policy} has axes=\d\. Pass"):
        next(generate(model, {}, [prompt(4)], 5, positions=Positions(parse_policy(policy))))


def llama_like() -> BpeTokenizer:
    """SentencePiece's conventions: "▁" for a space, one before the text, bytes for characters that have no token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {f"<0x{n:02X}>": n for n in range(256)} | {"<unk>": 256, "▁": 257, "a": 258, "b": 259, "</s>": 260}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return BpeTokenizer(tokenizer.to_str())


BYTES = [*"漢 é".encode(), 0xE2, 0x41, *"é".encode(), 0xE2]


@pytest.mark.parametrize(
    ("tokenizer", "new", "wanted"),
    [
        (llama_like(), [257, 258, 0xC3, 0xA9, 257, 259], " aé b"),
        (llama_like(), [*"é".encode(), 0x41, *"é".encode(), 258], "éAéa"),
        (llama_like(), BYTES, "\ufffd" * len(BYTES)),
        (ByteTokenizer(), BYTES, "漢 é\ufffdAé\ufffd"),
        (train_bpe(["漢 é" * 9, "ab"], 300), None, "漢 é ab漢"),
    ],
    ids=["metaspace", "byte fallback", "broken bytes", "bytes", "bpe"],
)
def test_pieces_are_the_difference_of_decoded_texts(tokenizer, new, wanted):
    prompt = [tokenizer.eos, *tokenizer.encode("ab")]
    new = tokenizer.encode(wanted).tolist() if new is None else new
    assert "".join(text_pieces(tokenizer, prompt, new)) == wanted
    assert tokenizer.decode([*prompt, *new]) == "ab" + wanted


def test_every_registered_encoding_is_covered():
    assert set(ON_TEXT) <= set(SPECS)
