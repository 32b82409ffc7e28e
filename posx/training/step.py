"""One step of training as a pure function of state and tokens."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from posx.config import TrainConfig
from posx.model import Model
from posx.positions import sequential
from posx.training.optimizer import make_optimizer

State = dict[str, Any]


def init_state(model: Model, config: TrainConfig) -> State:
    """{"params", "opt_state", "step"} at step 0, a pure function of the seed."""
    params = model.init(jax.random.key(config.seed))
    return {"params": params, "opt_state": make_optimizer(config).init(params), "step": jnp.zeros((), jnp.int32)}


def token_log_probs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Log-probabilities (nats, float32) of targets [b, t] under logits [b, t, v]."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def loss(model: Model, params: State, tokens: jax.Array, dropout_rng: jax.Array, executor: str) -> jax.Array:
    """Mean NLL (nats/token) of tokens [b, t + 1]; every window starts at position 0."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    pos = sequential(inputs.shape[1])
    rng = dropout_rng if model.config.dropout > 0 else None
    return -token_log_probs(model(params, inputs, pos, dropout_rng=rng, executor=executor), targets).mean()


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2,))
def train_step(
    model: Model, config: TrainConfig, state: State, tokens: jax.Array
) -> tuple[State, dict[str, jax.Array]]:
    """The state after one update on tokens [b, t + 1], and {"loss", "grad_norm"}; `grad_norm` is before clipping.

    With accumulation a, the batch is cut into a equal parts whose gradients are averaged: one part in memory at a time.
    """
    params = state["params"]
    # The third key of the seed: the first two made the parameters.
    rng = jax.random.fold_in(jax.random.split(jax.random.key(config.seed), 3)[2], state["step"])

    def part(n: jax.Array, rows: jax.Array) -> tuple[jax.Array, Any]:
        call = functools.partial(
            loss, model, tokens=rows, dropout_rng=jax.random.fold_in(rng, n), executor=config.executor
        )
        return jax.value_and_grad(call)(params)

    if config.accumulation == 1:
        value, grads = part(jnp.zeros((), jnp.int32), tokens)
    else:
        parts = tokens.reshape(config.accumulation, -1, tokens.shape[1])
        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))

        def add(total: Any, numbered: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, part(*numbered)), None

        total, _ = jax.lax.scan(add, zero, (jnp.arange(config.accumulation), parts))
        value, grads = jax.tree.map(lambda x: x / config.accumulation, total)
    updates, opt_state = make_optimizer(config).update(grads, state["opt_state"], params)
    new = {"params": optax.apply_updates(params, updates), "opt_state": opt_state, "step": state["step"] + 1}
    return new, {"loss": value, "grad_norm": optax.tree.norm(grads)}
