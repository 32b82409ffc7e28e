"""What a run is said to take, beside what XLA says of its step."""

import jax
import pytest

from posx.lab.config import base_config, run_config
from posx.lab.runs.describe import TRAINING_MEMORY, expected_cost, make_run_model
from posx.lab.training.step import init_state, train_step


@pytest.mark.parametrize(("mlp", "dropout", "vocab_size"), [("gelu", 0.0, 4096), ("swiglu", 0.1, 257)])
def test_the_memory_of_a_step(mlp, dropout, vocab_size):
    config = base_config("nope")
    config.model.update(num_layers=1, model_dim=64, mlp=mlp, dropout=dropout)
    config.train.length = 32
    if vocab_size > 257:
        config.data.update(tokenizer="bpe", vocab_size=vocab_size)
    run = run_config(config)
    model = make_run_model(run, vocab_size)
    state = jax.eval_shape(lambda: init_state(model, run.train))
    tokens = jax.ShapeDtypeStruct((run.train.batch_size, run.train.length + 1), "int32")
    with jax.numpy_dtype_promotion("standard"):
        found = train_step.lower(model, run.train, state, tokens).compile().memory_analysis()
    taken = found.temp_size_in_bytes + found.argument_size_in_bytes
    assert expected_cost(run).memory - TRAINING_MEMORY == pytest.approx(taken, rel=0.17)
