"""A trained model as a function of tokens in NumPy, on all devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from posx.errors import UndefinedLength
from posx.lab import cross_entropy
from posx.lab.model import Model
from posx.lab.positions import Positions
from posx.lab.runs.describe import is_defined
from posx.lab.training.layout import Layout, whole_program
from posx.lab.training.step import flops_per_token
from posx.machine.devices import DATA, map_devices, mesh, replicate, shard_rows, worthwhile_devices
from posx.machine.platforms import product_precision


class Way(NamedTuple):
    """The way in which a model scores tokens.

    Attributes:
      executor: of attention, see `posx.attend`.
      precision: of products of float32 numbers.
      score: maps logits [b, t, v] and targets [b, t] to arrays [b, t].
    """

    executor: str = "auto"
    precision: str = "highest"
    score: Callable[[jax.Array, jax.Array], Any] = cross_entropy.log_probs


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def score_rows(model: Model, way: Way, num_devices: int, params: Any, tokens: jax.Array, pos: Any = None) -> Any:
    """Return scores with the rows sharded over devices, or over the mesh that is set around the call.

    pos: positions [t], None for 0 to t - 1, which are then known while the program is traced.
    """

    def one(whole: tuple[Any, Any], tokens: jax.Array) -> Any:
        params, pos = whole
        inputs, targets = (tokens, None) if tokens.ndim == 2 else (tokens[:, 0], tokens[:, 1])
        with product_precision(way.precision):
            return model.log_probs(params, inputs, pos, None, way.executor, way.score, targets)

    return map_devices(one, num_devices, PartitionSpec(DATA))((params, pos), tokens)


def model_scores(
    model: Model, params: Any, way: Way = Way(), layout: Layout = Layout(), positions: Positions = Positions()
) -> Callable[[np.ndarray], Any]:
    """Return the model as a function of tokens [b, t + 1] to scores [b, t], by default log-probabilities.

    If tokens are inputs and targets, [b, 2, t], it scores the targets at the places of the inputs.
    Sharded parameters stay sharded, and every process that holds a shard must call the result. Windows are sharded over
    `DATA`. If they are fewer than devices, the tokens of each window are sharded instead. Raises UndefinedLength for
    windows that the model does not serve.

    Args:
      model: the model.
      params: its parameters.
      way: how it scores tokens.
      layout: the devices.
      positions: of the run that it is measured for.
    """
    on = functools.cache(functools.partial(replicate, params))

    def scores(tokens: np.ndarray) -> Any:
        length = _length(tokens)
        at_length = model.at_length(length)
        if not is_defined(model, length):
            raise UndefinedLength(f"defined up to position {at_length.max_position}, but {length} tokens are requested")
        pos = positions.measure(length)
        if layout.is_global:
            return _score_together(at_length, way, layout, params, tokens, pos)
        devices = worthwhile_devices(len(tokens) * length * flops_per_token(model, length, windows=False) / 3)
        if len(tokens) < devices:  # few windows, long ones: blocks of their queries are sharded
            with jax.set_mesh(mesh(devices)):
                return jax.device_get(score_rows(at_length, way, 1, on(devices), replicate(tokens, devices), pos))
        rows = shard_rows(_pad_rows(tokens, -len(tokens) % devices), devices)
        return _first_rows(score_rows(at_length, way, devices, on(devices), rows, pos), len(tokens))

    return scores


def hidden_scores(scores: Callable[[np.ndarray], Any], mask_id: int) -> Callable[..., Any]:
    """Return `model_scores` as a function of tokens [b, t + 1] and `hidden` bool [b, t + 1], as `Measured` calls it.

    The model reads the id of <mask> at hidden places. Entry (b, i) is of token i + 1, so the first token is not read.
    """

    def log_probs(tokens: np.ndarray, hidden: np.ndarray) -> Any:
        return scores(np.stack([np.where(hidden, mask_id, tokens), tokens], axis=1)[:, :, 1:])

    return log_probs


def _length(tokens: Any) -> int:
    return tokens.shape[-1] - (tokens.ndim == 2)


def _pad_rows(tokens: np.ndarray, count: int) -> np.ndarray:
    return np.pad(tokens, [(0, count), *[(0, 0)] * (tokens.ndim - 1)])


def _first_rows(scores: Any, count: int) -> Any:
    return jax.tree.map(lambda x: np.asarray(x)[:count], scores)


def _score_together(model: Model, way: Way, layout: Layout, params: Any, tokens: np.ndarray, pos: Any) -> Any:
    """Return scores by all devices of a layout, with the rows sharded, or the tokens of few rows."""
    rows = layout.mesh.shape[DATA]
    padded = _pad_rows(tokens, -len(tokens) % rows if len(tokens) >= rows else 0)
    with jax.set_mesh(layout.mesh):
        return _first_rows(whole_program(layout, score_rows, model, way, 1)(params, padded, pos), len(tokens))
