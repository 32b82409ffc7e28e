"""AdamW with warm-up, cosine decay and clipping, all from Optax; position parameters at their encodings' own rates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from posx.config import TrainConfig
from posx.encodings.rates import Rate, Rates, rates_of_layers
from posx.model import Model, layer_name, shared_name

Path = tuple[str, ...]


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Return the learning rate of the update after n others, for n = 0 to `steps` - 1.

    Linear: learning_rate / warmup_steps at the first update, learning_rate at update `warmup_steps`; then half a
    cosine, to exactly `final_learning_rate` at the last update. 0 `warmup_steps` count as 1, and a run of no more
    updates than that has no cosine.
    """
    peak, final, warmup = config.learning_rate, config.final_learning_rate, max(config.warmup_steps, 1)

    def rate(n: Any) -> jax.Array:
        update = jnp.asarray(n, jnp.float32) + 1
        done = jnp.clip((update - warmup) / max(config.steps - warmup, 1), 0, 1)
        cosine = final + (peak - final) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return jnp.where(update < warmup, peak * update / warmup, cosine).astype(jnp.float32)

    return rate


def make_optimizer(config: TrainConfig, model: Model, rates: Rates | None = None) -> optax.GradientTransformation:
    """The optimizer of `model`, whose position parameters are trained at `rates`, or at what today's classes say.

    A multiplier acts on Adam's step. Clipping comes before, weight decay after, at the model's learning rate for all.
    """
    if rates is None:
        rates = rates_of_layers(model.encodings, model.dims, config.position_lr_multiplier)
    positions = _positions(model, rates)

    def decayed(params: Any) -> Any:
        """True for what weight decay acts on: the matrices, and what encodings say of their own."""

        def one(path: tuple[Any, ...], leaf: Any) -> bool:
            rate = _rate(positions, path)
            return leaf.ndim == 2 if rate is None else rate.decays

        return jax.tree_util.tree_map_with_path(one, params)

    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        def one(path: tuple[Any, ...], step: jax.Array) -> jax.Array:
            rate = _rate(positions, path)
            return step if rate is None or rate.lr_multiplier == 1 else rate.lr_multiplier * step

        steps, state = adam.update(grads, state, params)
        return jax.tree_util.tree_map_with_path(one, steps), state

    # AdamW, whose state checkpoints hold, with the multipliers between its first and its second part.
    adamw = optax.chain(
        optax.GradientTransformation(adam.init, update),
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale_by_learning_rate(learning_rate(config)),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def _positions(model: Model, rates: Rates) -> dict[Path, Rate]:
    """The rate of each position parameter by its path; what is shared has that of the first layer it serves."""
    found: dict[Path, Rate] = {}
    for n, (encoding, own) in enumerate(zip(model.encodings, rates, strict=False)):
        once, layer = ("shared", shared_name(model.distinct.index(encoding))), ("layers", layer_name(n))
        for name, rate in own:
            found.setdefault((*(once if name in encoding.shared else (*layer, "attention", "position")), name), rate)
    return found


def _rate(positions: dict[Path, Rate], path: tuple[Any, ...]) -> Rate | None:
    """The rate of what lies at `path`, None for what belongs to no encoding."""
    names = tuple(key.key for key in path)
    return positions.get(names, Rate() if {"position", "shared"} & {*names} else None)
