"""Sampling with the cache gives what recomputing everything would give, for every encoding."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posx
from posx.config.model import ModelConfig
from posx.errors import ConfigError
from posx.generate import Sampling, generate, prefill, sample
from posx.model import make_model
from posx.positions import sequential
from tests.encodings.cases import first
from tests.test_model import SPECS, layers, logits_of, scattered
from tests.test_model import start as initial

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


@pytest.mark.parametrize("name", first(SPECS))
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
    with pytest.raises(ConfigError, match=r"at most 10 new tokens"):
        next(generate(model, params, [prompt(3), start], 11, sampling=GREEDY))
    tokens = made(model, params, [start], 10, sampling=GREEDY)[0].tolist()
    assert tokens[:9] == recomputed(model, params, start, 9)
    with pytest.raises(ConfigError, match=r"at most 0 new tokens"):
        next(generate(model, params, [prompt(30)], 1))


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


def test_every_registered_encoding_is_covered():
    assert set(posx.ENCODINGS) <= set(SPECS)
