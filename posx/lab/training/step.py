"""One step of training as a pure function of state and tokens, and several in one call.

The optimizer is AdamW with warm-up, cosine decay and clipping, all from Optax. Position parameters have their
encodings' own rates.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from posx.attention.masks import Mask
from posx.encodings.rates import Rate, Rates, layer_rates
from posx.lab.config import TrainConfig
from posx.lab.data.batches import Weighted
from posx.lab.data.masking import Masked
from posx.lab.model import Model, layer_name, shared_name
from posx.machine.devices import DATA, map_devices
from posx.machine.platforms import product_precision

State = dict[str, Any]
Metrics = dict[str, jax.Array]
Batch = jax.Array | Weighted | Masked


def init_state(model: Model, config: TrainConfig) -> State:
    """Return {"params", "opt_state", "step"} at step 0, a pure function of the seed."""
    params = model.init(jax.random.key(config.seed))
    return {"params": params, "opt_state": make_optimizer(config, model).init(params), "step": jnp.zeros((), jnp.int32)}


def loss(
    model: Model, params: State, batch: Batch, dropout_rng: jax.Array | None, executor: str, pos: Any = None
) -> jax.Array:
    """Return the mean NLL (nats/token) of the targets of a batch.

    Args:
      model: the model.
      params: its parameters.
      batch: tokens [b, t + 1], with weights [b, t] of the targets or without. Or inputs, targets and weights [b, t].
      dropout_rng: keys [b], None for no dropout.
      executor: of attention.
      pos: positions [t] or [b, t], None for 0 to t - 1.
    """
    if isinstance(batch, Masked):
        tokens, targets, weights = batch
    else:
        (tokens, weights), targets = batch if isinstance(batch, Weighted) else (batch, None), None
    log_probs = model.log_probs(params, tokens, pos, dropout_rng, executor, targets=targets)
    return -(log_probs if weights is None else log_probs * weights).mean()


@functools.partial(jax.jit, static_argnames=("model", "config", "num_devices", "rates"), donate_argnames=("state",))
def train_step(
    model: Model, config: TrainConfig, state: State, batch: Batch, num_devices: int = 1, rates: Rates | None = None
) -> tuple[State, Metrics]:
    """Return the state after one update on a batch of b rows, and {"loss", "grad_norm"}, the norm before clipping.

    Position parameters are trained at `rates`, or at the rates of `config` and the encodings' classes. With
    accumulation a, gradients of a equal parts of the batch are averaged, with one part in memory at a time. Rows are
    sharded over `num_devices`, which divide the rows of a part. Devices synchronise once.
    """
    params, numbered = state["params"], (jnp.arange(jax.tree.leaves(batch)[0].shape[0]), batch)

    def average(whole: tuple[Any, jax.Array], numbered: tuple[jax.Array, Batch]) -> tuple[jax.Array, Any]:
        result = _gradients(model, config, whole, numbered)
        if num_devices == 1:
            return result
        flat, joined = ravel_pytree(result)  # one array, so that devices synchronise once
        return joined(jax.lax.pmean(flat, DATA))

    value, grads = map_devices(average, num_devices)((params, state["step"]), numbered)
    with jax.named_scope("optimizer"):
        updates, opt_state = make_optimizer(config, model, rates).update(grads, state["opt_state"], params)
        new = {"params": optax.apply_updates(params, updates), "opt_state": opt_state, "step": state["step"] + 1}
        return new, {"loss": value, "grad_norm": optax.tree.norm(grads)}


def _gradients(
    model: Model, config: TrainConfig, whole: tuple[Any, jax.Array], numbered: tuple[jax.Array, Batch]
) -> tuple[jax.Array, Any]:
    """Return loss and gradients of some rows: whole = (params, step), numbered = (numbers [r], those rows)."""
    params, step = whole

    def part(numbers: jax.Array, rows: Batch) -> tuple[jax.Array, Any]:
        rng = None
        if model.config.dropout > 0:  # else the seed is no part of the program, and all seeds share one
            # The third key of the seed: the first two made the parameters. A row draws the same on any device.
            rng = jax.random.fold_in(jax.random.split(jax.random.key(config.seed), 3)[2], step)
            rng = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, numbers)
        pos = config.token_positions.train(step, numbers, config.length)
        call = functools.partial(loss, model, batch=rows, dropout_rng=rng, executor=config.executor, pos=pos)
        with product_precision(config.precision):
            return jax.value_and_grad(call)(params)

    if config.accumulation == 1:
        return part(*numbered)
    # Every a-th row makes a part, so that of sharded rows each device holds some of every part.
    parts = jax.tree.map(lambda x: x.reshape(-1, config.accumulation, *x.shape[1:]).swapaxes(0, 1), numbered)
    zero = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(lambda total, rows: (jax.tree.map(jnp.add, total, part(*rows)), None), zero, parts)
    return jax.tree.map(lambda x: x / config.accumulation, total)


@functools.partial(jax.jit, static_argnames=("model", "config", "num_devices", "rates"), donate_argnames=("state",))
def train_steps(
    model: Model, config: TrainConfig, state: State, batches: Batch, count: jax.Array, num_devices: int = 1,
    rates: Rates | None = None,
) -> tuple[State, Metrics]:  # fmt: skip
    """Return the state after updates on the first `count` of n batches of b rows, and metrics [n].

    `count` is no part of the compiled program. So the same code computes every step, bit for bit, wherever log lines,
    checkpoints or a kill divide a run.
    """

    def one(n: jax.Array, carry: tuple[State, Metrics]) -> tuple[State, Metrics]:
        batch = jax.tree.map(lambda leaf: leaf[n], batches)
        state, metrics = train_step(model, config, carry[0], batch, num_devices, rates)
        return state, {name: carry[1][name].at[n].set(value) for name, value in metrics.items()}

    zeros = {name: jnp.zeros(jax.tree.leaves(batches)[0].shape[0], jnp.float32) for name in ("loss", "grad_norm")}
    return jax.lax.fori_loop(0, count, one, (state, zeros))


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
        rates = layer_rates(model.encodings, model.dims, config.position_lr_multiplier)
    positions = _positions(model, rates)

    def rate(path: tuple[Any, ...]) -> Rate | None:
        """Return the rate of the parameter at `path`, None if it belongs to no encoding."""
        names = tuple(key.key for key in path)
        return positions.get(names, Rate() if {"position", "shared"} & {*names} else None)

    def decays(path: tuple[Any, ...], leaf: Any) -> bool:
        """Return whether weight decay acts on a parameter: on matrices, and as encodings say of their own."""
        own = rate(path)
        return leaf.ndim == 2 if own is None else own.decays

    def scale(path: tuple[Any, ...], step: jax.Array) -> jax.Array:
        own = rate(path)
        return step if own is None or own.lr_multiplier == 1 else own.lr_multiplier * step

    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        steps, state = adam.update(grads, state, params)
        return jax.tree_util.tree_map_with_path(scale, steps), state

    # AdamW, whose state checkpoints hold, with the multipliers between its first and its second part.
    adamw = optax.chain(
        optax.GradientTransformation(adam.init, update),
        optax.add_decayed_weights(config.weight_decay, lambda params: jax.tree_util.tree_map_with_path(decays, params)),
        optax.scale_by_learning_rate(learning_rate(config)),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def _positions(model: Model, rates: Rates) -> dict[tuple[str, ...], Rate]:
    """Return the rate of each position parameter by its path. Layers share parameters at the rate of the first."""
    position_rates: dict[tuple[str, ...], Rate] = {}
    for n, (encoding, own) in enumerate(zip(model.encodings, rates, strict=True)):
        once, layer = ("shared", shared_name(model.distinct.index(encoding))), ("layers", layer_name(n))
        for name, rate in own:
            position_rates.setdefault(
                (*(once if name in encoding.shared else (*layer, "attention", "position")), name), rate
            )
    return position_rates


def flops_per_token(model: Model, length: int, windows: bool = True) -> float:
    """Count the useful floating-point operations per token of one training step.

    These are 6 per matmul weight, and 12 h d in each layer for each key that a query sees. On average these
    are (L + 1) / 2 under a causal mask, fewer with a window, and L without a mask. A row of tokens counts as one
    document. Recomputation does not count. Nor does the encoding, whose cost shows as a lower MFU.
    Source: PaLM (arXiv 2204.02311) appendix B, for visible pairs alone.

    Args:
      model: the model.
      length: L, in tokens.
      windows: whether windows hide keys. False is for estimates of time. CPU executors skip only whole tiles outside a
        window, and mask all others: at 4,096 tokens a window of 64 saved no time.
    """
    config, dims = model.config, model.dims
    projections = dims.model_dim * dims.head_dim * (2 * dims.num_heads + 2 * config.kv_heads)
    mlp = (3 if config.gated else 2) * dims.model_dim * config.hidden_dim
    weights = config.num_layers * (projections + mlp) + dims.model_dim * model.vocab_size
    masks = config.masks if windows else [Mask(mask.causal) for mask in config.masks]
    keys = sum(_mean_keys(mask, length) for mask in masks)
    return 6.0 * weights + 12.0 * dims.num_heads * dims.head_dim * keys


def _mean_keys(mask: Mask, length: int) -> float:
    """Return the keys that a query sees, on average over a text of `length` tokens."""
    if not mask.causal:
        return length
    size = min(mask.window or length, length)
    beyond = length - size  # queries that see a full window and 1, 2, ... earlier tokens, at most all sinks
    sinks = min(mask.sinks, beyond)
    pairs = size * (size + 1) / 2 + beyond * size + sinks * (sinks + 1) / 2 + (beyond - sinks) * sinks
    return pairs / length
