"""Position policies: the laws of their draws, and that training, scores and generation have the drawn positions."""

import dataclasses
import functools
import math
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posx.encodings import Dims, build
from posx.errors import ConfigError, UndefinedLength
from posx.lab import lm_eval
from posx.lab.config import RunConfig, TrainConfig, base_config, run_config
from posx.lab.config.sections import ModelConfig
from posx.lab.generate import Sampling, generate
from posx.lab.model import make_model
from posx.lab.positions import Positions, parse_policy
from posx.lab.results.facts import run_facts
from posx.lab.runs.checks import check_run, unused_settings
from posx.lab.runs.describe import is_defined
from posx.lab.runs.exchange import transformers_config
from posx.lab.runs.load import Apply
from posx.lab.runs.scores import model_scores
from posx.lab.training.step import init_state, loss, train_step
from tests.encodings.cases import ON_TEXT

L, ROWS, VOCAB = 8, 4, 11
SIZES = ModelConfig(num_layers=1, model_dim=8, num_heads=2)


def draws(text, seed=0):
    return Positions(parse_policy(text), seed)


def tokens():
    return np.random.default_rng(0).integers(0, VOCAB, (ROWS, L + 1)).astype(np.int32)


def rough(model):
    """Parameters in which every array, of the encoding too, says something."""
    params = model.init(jax.random.key(0))
    return jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), params)


def chi_square(counts):
    """Pearson's statistic of equal chances, less its mean, in standard deviations."""
    free = len(counts) - 1
    expected = np.sum(counts) / len(counts)
    return (np.sum((np.array(counts) - expected) ** 2) / expected - free) / math.sqrt(2 * free)


def test_offsets_are_uniform_and_independent_by_row_and_step():
    policy, rows = draws("offset(longest=12)"), jnp.arange(200)
    pos = np.stack([policy.train(step, rows, L) for step in range(10)])
    assert pos.dtype == np.int32 and (np.diff(pos, axis=-1) == 1).all()
    offsets = pos[..., 0]
    assert set(offsets.ravel()) == {0, 1, 2, 3, 4}, "from 0 to N - t"
    assert abs(chi_square(np.unique(offsets, return_counts=True)[1])) < 4
    for a, b in ((offsets[:, :-1], offsets[:, 1:]), (offsets[:-1], offsets[1:])):
        pairs = np.bincount((5 * a + b).ravel(), minlength=25)
        assert abs(chi_square(pairs)) < 4, "neighbouring rows, and one row at the next step"


def test_random_positions_are_sorted_subsets_all_equally_likely():
    policy = draws("randomised(longest=6)")
    pos = np.asarray(jax.vmap(lambda step: policy.train(step, jnp.arange(ROWS), 3))(jnp.arange(2000)))
    subsets = list(combinations(range(6), 3))  # in rising order, without repetition
    found = [subsets.index(tuple(row)) for row in pos.tolist()]
    assert abs(chi_square(np.bincount(found, minlength=len(subsets)))) < 4
    assert (draws("randomised(longest=6)").train(0, jnp.arange(ROWS), 6) == jnp.arange(6)).all()


@pytest.mark.parametrize("text", ["offset(longest=40)", "randomised(longest=40)"])
def test_draws_depend_on_seed_step_and_row_alone(text):
    policy, rows = draws(text), jnp.arange(ROWS)
    whole = policy.train(7, rows, L)
    for part in (slice(0, 1), slice(1, 3), slice(3, 4)):
        own = jnp.broadcast_to(whole, (ROWS, L))[part]
        np.testing.assert_array_equal(jnp.broadcast_to(policy.train(7, rows[part], L), own.shape), own)
    traced = jax.jit(lambda step, rows: policy.train(step, rows, L))(7, rows)
    np.testing.assert_array_equal(traced, whole)
    for other in (policy.train(8, rows, L), draws(text, seed=1).train(7, rows, L)):
        assert (other != whole).any()


def test_measured_positions_are_fixed_for_a_seed_and_length():
    policy = draws("randomised(longest=40)")
    pos = policy.measure(20)
    assert (np.diff(pos) > 0).all() and 0 <= pos[0] and pos[-1] < 40
    np.testing.assert_array_equal(draws("randomised(longest=40)").measure(20), pos)
    assert (pos != draws("randomised(longest=40)", seed=1).measure(20)).any()
    assert policy.measure(40).tolist() == list(range(40))
    with pytest.raises(UndefinedLength, match="too few positions for 41"):
        policy.measure(41)
    assert draws("sequential").measure(9) is draws("offset(longest=40)").measure(900) is None


def test_training_without_a_policy_compiles_the_same_program():
    model, state = make_model(SIZES, "rope", VOCAB, L), None
    texts = []
    for seed in (0, 1):  # a seed is part of a program that draws
        config = TrainConfig(length=L, batch_size=ROWS, seed=seed)
        state = jax.eval_shape(functools.partial(init_state, model, config))
        with jax.numpy_dtype_promotion("standard"):  # Optax promotes types
            texts.append(train_step.lower(model, config, state, tokens()).as_text())
    assert texts[0] == texts[1] and "threefry" not in texts[0]


@pytest.mark.parametrize(
    "name", [name if name == "alibi" else pytest.param(name, marks=pytest.mark.slow) for name in ON_TEXT]
)
def test_every_encoding_takes_positions_of_one_program(name):
    table = hasattr(build(name, Dims(8, 2, 4, 1, L)), "num_positions") and name != "cope"
    model = make_model(SIZES, f"{name}(num_positions=40)" if table else name, VOCAB, L)
    params, rows = rough(model), jnp.arange(ROWS)
    offset = draws("offset(longest=40)").train(0, rows, L)
    chosen = draws("randomised(longest=40)").train(0, rows, L)
    pos = np.stack([np.broadcast_to(one, (ROWS, L)) for one in (offset, chosen, np.arange(L, dtype=np.int32))])
    losses = {e: jax.jit(functools.partial(loss, model, params, tokens(), None, e)) for e in ("auto", "dense")}
    found, wanted = ([float(run(one)) for one in pos] for run in losses.values())
    np.testing.assert_allclose(found, wanted, rtol=2e-5)
    invariant = all(encoding.shift_invariant for encoding in model.encodings)
    assert (found[0] == pytest.approx(found[2], rel=2e-5)) == invariant


def test_divided_batches_train_at_the_same_positions():
    model = make_model(SIZES, "learned(num_positions=40)", VOCAB, L)
    config = TrainConfig(
        length=L, batch_size=ROWS, steps=2, warmup_steps=0, accumulation=2, positions="offset(longest=40)"
    )
    state = jax.jit(functools.partial(init_state, model, config))()
    pos = draws("offset(longest=40)").train(0, jnp.arange(ROWS), L)
    wanted = jax.jit(functools.partial(loss, model, batch=tokens(), dropout_rng=None, executor="dense"))(
        state["params"], pos=pos
    )
    with jax.numpy_dtype_promotion("standard"):  # Optax promotes types
        state, metrics = train_step(model, config, state, tokens())
    assert float(metrics["loss"]) == pytest.approx(float(wanted), rel=1e-5)
    moments = state["opt_state"][1][0].mu["shared"]["encoding_0"]["table"]
    assert set(np.flatnonzero(np.abs(moments).sum(axis=1))) == set(np.unique(pos))


def test_offsets_train_a_table_beyond_the_training_length():
    run = checked("learned(num_positions=40)", "offset(longest=40)")
    model = make_model(run.model, "learned(num_positions=40)", VOCAB, run.train.length)
    assert is_defined(model, 40) and not is_defined(model, 41)
    scores = model_scores(model, model.init(jax.random.key(0)), positions=run.train.token_positions)
    wide = np.random.default_rng(1).integers(0, VOCAB, (2, 41)).astype(np.int32)
    assert scores(wide).shape == (2, 40)  # at 0 to 39
    with pytest.raises(UndefinedLength):
        scores(np.pad(wide, ((0, 0), (0, 1))))


@pytest.mark.slow
def test_scores_and_loaded_models_have_the_measured_positions():
    model, positions = make_model(SIZES, "rope", VOCAB, L), draws("randomised(longest=40)", seed=3)
    params = rough(model)
    pos = positions.measure(L)
    wanted = model.log_probs(params, tokens(), pos, None, "dense")
    np.testing.assert_allclose(model_scores(model, params, positions=positions)(tokens()), wanted, atol=1e-5)
    read = tokens()[:, :-1]
    logits = jax.jit(lambda read: Apply(model, positions)(params, read))(read)
    np.testing.assert_allclose(logits, model(params, read, pos), atol=1e-5)
    assert np.abs(logits - Apply(model)(params, read)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rope", "transformer_xl"])
def test_generated_text_has_the_positions_of_its_whole_length(name):
    model, positions = make_model(SIZES, name, VOCAB, L), draws("randomised(longest=400)")
    params, prompt = rough(model), np.array([1, 2, 3, 4], np.int32)
    how = {"sampling": Sampling(temperature=0), "chunk": 3, "positions": positions}
    new = [int(ids[0]) for ids in generate(model, params, [prompt], 4, **how)]
    whole = np.array([[*prompt, *new]])
    logits = model(params, whole[:, :-1].astype(np.int32), positions.measure(8)[:-1])
    assert new == logits[0, 3:].argmax(axis=-1).tolist()
    with pytest.raises(ConfigError, match="2 different lengths: these random positions"):
        next(generate(model, params, [prompt, prompt[:2]], 4, **how))
    with pytest.raises(ConfigError, match="at most 396 new tokens"):
        next(generate(model, params, [prompt], 397, **how))


@pytest.mark.slow
def test_the_harness_has_the_positions_of_its_windows(monkeypatch):
    model, positions = make_model(SIZES, "rope", VOCAB, L), draws("randomised(longest=40)")
    params = rough(model)
    monkeypatch.setattr(lm_eval, "load", lambda run: (Apply(model, positions), params, None))
    ids = [1, 2, 3, 4, 5]
    ((total, _),) = lm_eval.Harness("run", max_length=32)._loglikelihood_tokens([(None, ids[:3], ids[3:])])
    wanted = model.log_probs(params, np.array([ids], np.int32), positions.measure(32)[:4], None, "dense")
    assert total == pytest.approx(float(wanted[0, 2:].sum()), abs=1e-5)
    with pytest.raises(ConfigError, match="max_length=41"):
        lm_eval.Harness("run", max_length=41)


def test_random_positions_have_no_form_in_hugging_face_models():
    shape = {"model.mlp": "swiglu", "eval.lengths": (16, 32)}
    assert transformers_config(checked("rope", "offset(longest=64)", **shape))["model_type"] == "llama"
    with pytest.raises(ConfigError, match="randomised.longest=64. draws positions"):
        transformers_config(checked("rope", "randomised(longest=64)", **shape))


def checked(encoding, positions, **settings):
    config = base_config(encoding)
    config.train.length, config.train.positions = 16, positions
    config.eval.lengths = (16, 32)
    config.update_from_flattened_dict(settings)
    return check_run(run_config(config))


def test_runs_are_told_apart_by_their_policies():
    plain, spelled = checked("rope", "sequential"), checked("rope", "offset( longest = 64 )")
    assert spelled.hash == checked("rope", "offset(longest=64)").hash
    assert "train.positions" not in plain.settings, "runs of today keep their names"
    hashes = {checked("rope", text).hash for text in ("offset(longest=65)", "randomised(longest=64)")}
    assert len(hashes | {plain.hash, spelled.hash}) == 4
    assert spelled.differences(plain) == ["train.positions: 'offset(longest=64)' -> None"]
    assert RunConfig.from_json(spelled.to_json()).train.positions == "offset(longest=64)"
    labels = [run_facts({"settings": run.settings, "encoding": "rope", "train_len": 16}) for run in (plain, spelled)]
    assert [label["method"] for label in labels] == ["rope", "rope at offset(longest=64)"]


@pytest.mark.parametrize(
    ("encoding", "positions", "settings", "wanted"),
    [
        ("rope", "ofset(longest=64)", {}, "positions: position policy 'ofset' is unknown. Did you mean 'offset'"),
        ("rope", "offset(512)", {}, "positions: position policy 'offset(512)' cannot be read. The policies are"),
        ("rope", "offset", {}, "has no longest. Give offset(longest=512)"),
        ("rope", "offset(longest=0)", {}, "longest=0 must be at least 1"),
        ("rope", "randomised(longest=1e9)", {}, "longest=1000000000 must be at most 16,777,216"),
        ("rope", "offset(long=3)", {}, "no field 'long'"),
        ("rope", "sequential(longest=64)", {}, "no field 'longest'"),
        ("rope", "offset(longest=15)", {}, "train.positions=offset(longest=15): it has 15 positions for the 16 tokens"),
        ("rope", "randomised(longest=31)", {}, "randomised(longest=31): eval.lengths has 32"),
        ("learned", "offset(longest=64)", {}, "has positions 0 to 63. Give it a size of 64"),
        ("rope+alibi", "offset(longest=64)", {"train.executor": "kernel"}, "known positions that count up by one"),
        ("alibi", "randomised(longest=64)", {"eval.executor": "kernel"}, "known positions that count up by one"),
        ("axial", "sequential", {}, "2 axes, but train.positions=sequential gives 1. Use --config.train.positions"),
        ("mrope", "grid", {"eval.lengths": (16, 64)}, "3 axes, but train.positions=grid gives 2. Choose another"),
        ("rope", "grid", {"eval.lengths": (16, 64)}, "with 1 axis, but train.positions=grid gives 2. Put it on both"),
        ("axial", "grid", {}, "eval.lengths: train.positions=grid needs a square number of tokens, and 32 is none."),
        ("nope", "grid", {"train.length": 15, "eval.lengths": (16,)}, "and 15 is none. Give 9 or 16."),
        ("axial(inner=learned(num_positions=3))", "grid", {"eval.lengths": (16,)}, "positions 0 to 3. Leave its size"),
    ],
)  # fmt: skip
def test_unfit_policies_are_one_line(encoding, positions, settings, wanted):
    with pytest.raises(ConfigError) as error:
        checked(encoding, positions, **settings)
    assert wanted in str(error.value) and "\n" not in str(error.value)


def test_offsets_are_unused_if_encodings_see_distances_alone():
    for encoding, unused in (("rope+t5", True), ("rope+sinusoidal", False)):
        assert ("train.positions" in unused_settings(checked(encoding, "offset(longest=64)"))) == unused


def test_offsets_are_measured_by_the_kernel_too():
    run = checked("alibi", "offset(longest=64)", **{"eval.executor": "kernel"})
    assert run.eval.executor == "kernel"


def test_a_run_without_protocols_is_checked():
    """As `config.json` may hold one. Its longest length is 0."""
    run = run_config(base_config("rope"))
    run = dataclasses.replace(run, eval=dataclasses.replace(run.eval, protocols=()))
    assert check_run(run).eval.protocols == ()
