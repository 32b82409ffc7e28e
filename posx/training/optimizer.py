"""AdamW with warm-up, cosine decay and clipping, all from Optax; position parameters at their encodings' own rates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from posx.config import TrainConfig
from posx.encodings.rates import Rate, Rates, rates_of_layers
from posx.model import Model, layer_name, shared_name


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Return the learning rate of the update after n others, for n = 0 to `steps` - 1.

    It rises linearly from learning_rate / warmup_steps at the first update to learning_rate at update `warmup_steps`.
    Then it falls along half a cosine, to exactly `final_learning_rate` at the last update. 0 `warmup_steps` count as 1,
    and a run of no more updates than that has no cosine.
    """
    peak, final, warmup = config.learning_rate, config.final_learning_rate, max(config.warmup_steps, 1)

    def rate(n: Any) -> jax.Array:
        update = jnp.asarray(n, jnp.float32) + 1
        done = jnp.clip((update - warmup) / max(config.steps - warmup, 1), 0, 1)
        cosine = final + (peak - final) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return jnp.where(update < warmup, peak * update / warmup, cosine).astype(jnp.float32)

    return rate


def make_optimizer(config: TrainConfig, model: Model, rates: Rates | None = None) -> optax.GradientTransformation:
    """Make the optimizer of `model`, whose position parameters are trained at `rates`, or at their classes' rates.

    A multiplier acts on Adam's step. Clipping comes before, weight decay after, at the model's learning rate for all.
    """
    if rates is None:
        rates = rates_of_layers(model.encodings, model.dims, config.position_lr_multiplier)
    positions = _positions(model, rates)

    def rate(path: tuple[Any, ...]) -> Rate | None:
        """Return the rate of the parameter at `path`, None if it belongs to no encoding."""
        names = tuple(key.key for key in path)
        return positions.get(names, Rate() if {"position", "shared"} & {*names} else None)

    def decays(path: tuple[Any, ...], leaf: Any) -> bool:
        """Return whether weight decay acts on a parameter: on matrices, and as encodings say of their own."""
        own = rate(path)
        return leaf.ndim == 2 if own is None else own.decays

    def scaled(path: tuple[Any, ...], step: jax.Array) -> jax.Array:
        own = rate(path)
        return step if own is None or own.lr_multiplier == 1 else own.lr_multiplier * step

    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        steps, state = adam.update(grads, state, params)
        return jax.tree_util.tree_map_with_path(scaled, steps), state

    # AdamW, whose state checkpoints hold, with the multipliers between its first and its second part.
    adamw = optax.chain(
        optax.GradientTransformation(adam.init, update),
        optax.add_decayed_weights(config.weight_decay, lambda params: jax.tree_util.tree_map_with_path(decays, params)),
        optax.scale_by_learning_rate(learning_rate(config)),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def _positions(model: Model, rates: Rates) -> dict[tuple[str, ...], Rate]:
    """Return the rate of each position parameter by its path. Layers share parameters at the rate of the first."""
    found: dict[tuple[str, ...], Rate] = {}
    for n, (encoding, own) in enumerate(zip(model.encodings, rates, strict=True)):
        once, layer = ("shared", shared_name(model.distinct.index(encoding))), ("layers", layer_name(n))
        for name, rate in own:
            found.setdefault((*(once if name in encoding.shared else (*layer, "attention", "position")), name), rate)
    return found
