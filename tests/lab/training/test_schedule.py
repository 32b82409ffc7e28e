"""The learning rate of every update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posx.lab.config import TrainConfig
from posx.lab.config.sections import ModelConfig
from posx.lab.model import make_model
from posx.lab.training.step import learning_rate, make_optimizer


def rates(**settings) -> np.ndarray:
    """The rate of each update, as many as `steps`."""
    config = TrainConfig(learning_rate=8.0, final_learning_rate=0.3, **settings)
    return np.array([learning_rate(config)(n) for n in range(config.steps)])


def test_rates_rise_to_the_peak_and_fall_to_the_final_rate():
    found = rates(steps=8, warmup_steps=4)
    assert found[:4].tolist() == [2, 4, 6, 8] and found[-1] == np.float32(0.3)
    np.testing.assert_allclose(found[5], (8 + 0.3) / 2, rtol=1e-6)
    assert (np.diff(found[3:]) < 0).all()


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_rates_without_warm_up_start_at_the_peak(warmup_steps):
    found = rates(steps=5, warmup_steps=warmup_steps)
    assert found[0] == 8 and found[-1] == np.float32(0.3) and (np.diff(found) < 0).all()


def test_rates_of_one_update_and_of_warm_up_alone():
    assert rates(steps=1, warmup_steps=0).tolist() == [8]
    assert rates(steps=3, warmup_steps=4).tolist() == [2, 4, 6]


@pytest.mark.slow
def test_the_first_and_the_last_update_move_by_their_rates():
    config = TrainConfig(learning_rate=8.0, final_learning_rate=0.5, steps=8, warmup_steps=4, weight_decay=0.0)
    optimizer = make_optimizer(config, make_model(ModelConfig(num_layers=1, model_dim=8, num_heads=1), "nope", 5, 16))
    params = {"embedding": jnp.ones((5, 8), jnp.float32)}
    state, moved = optimizer.init(params), []
    with jax.numpy_dtype_promotion("standard"):  # Optax does not hold to the strict one
        for _ in range(config.steps):
            updates, state = optimizer.update(params, state, params)  # equal gradients, of which Adam's step is 1
            moved.append(float(-updates["embedding"][0, 0]))
    np.testing.assert_allclose(moved[:4], [2, 4, 6, 8], rtol=1e-3)
    np.testing.assert_allclose(moved[-1], 0.5, rtol=1e-3)
