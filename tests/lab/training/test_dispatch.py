"""Several steps in one call on the device: cut anywhere, the numbers are the same."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from posx.lab.config import TrainConfig
from posx.lab.config.sections import ModelConfig
from posx.lab.model import make_model
from posx.lab.training.loop import dispatches
from posx.lab.training.step import init_state, train_step, train_steps

VOCAB, STEPS = 29, 7
CONFIG = TrainConfig(length=16, batch_size=4, steps=STEPS, warmup_steps=2)
MODEL = make_model(ModelConfig(num_layers=1, model_dim=16, num_heads=2, dropout=0.2), "t5", VOCAB, 16)
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (STEPS, 4, 17)).astype(np.int32)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax does not hold to the strict one."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def made_in(counts: tuple[int, ...], size: int):
    """State and losses after all steps, `counts` of them at a time, in calls that have room for `size`."""
    state, losses, start = init_state(MODEL, CONFIG), [], 0
    for count in counts:
        block = np.full((size, *TOKENS.shape[1:]), 3, np.int32)
        block[:count] = TOKENS[start : start + count]
        state, metrics = train_steps(MODEL, CONFIG, state, block, count)
        losses += metrics["loss"][:count].tolist()
        assert not np.any(metrics["loss"][count:]), "a step that was not asked for"
        start += count
    return state, losses


@pytest.mark.slow
def test_steps_in_one_call_are_the_steps_one_by_one():
    state, losses = init_state(MODEL, CONFIG), []
    for tokens in TOKENS:
        state, metrics = train_step(MODEL, CONFIG, state, tokens)
        losses.append(float(metrics["loss"]))
    together, found = made_in((7,), 8)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), together, state)
    assert int(together["step"]) == STEPS


@pytest.mark.slow
def test_where_a_run_is_cut_changes_no_bit():
    wanted = made_in((7,), 8)
    for counts, size in (((4, 3), 8), ((1,) * 7, 8), ((2, 5), 8), ((3, 3, 1), 3)):
        found = made_in(counts, size)
        assert found[1] == wanted[1]
        jax.tree.map(np.testing.assert_array_equal, found[0], wanted[0])


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_seeds_share_a_program_unless_it_draws(dropout):
    model = dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, dropout=dropout))
    state = jax.eval_shape(lambda: init_state(model, CONFIG))
    programs = {
        train_step.lower(model, dataclasses.replace(CONFIG, seed=seed), state, TOKENS[0]).as_text() for seed in (0, 1)
    }
    assert len(programs) == (2 if dropout else 1)


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("start", [0, 4, 23])
def test_dispatches_stop_at_every_log_line_and_checkpoint(size, start):
    config = dataclasses.replace(
        CONFIG, steps=50, dispatch_steps=size, log_steps=4, checkpoint_steps=10, stop_check_steps=7
    )
    parts = list(dispatches(config, start))
    assert list(itertools.chain(*parts)) == list(range(start, 50))
    assert all(1 <= len(part) <= size for part in parts) and len(parts[0]) == 1
    ends = {part.stop for part in parts}
    assert ends >= {step for step in range(start + 1, 51) if any(step % n == 0 for n in (4, 7, 10, 50))}
    assert size == 1 or len(parts) < 50 - start
