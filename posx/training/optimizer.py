"""AdamW with warm-up, cosine decay and clipping, all from Optax."""

from __future__ import annotations

from typing import Any

import jax
import optax

from posx.config import TrainConfig


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up from 0, then cosine to `final_learning_rate` at the last step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.final_learning_rate,
    )


def decayed(params: dict[str, Any]) -> dict[str, Any]:
    """True for what weight decay acts on: the matrices, but nothing that belongs to a position encoding."""

    def is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
        names = {getattr(key, "key", None) for key in path}
        return leaf.ndim == 2 and not names & {"position", "shared"}

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config), b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay, mask=decayed
        ),
    )
