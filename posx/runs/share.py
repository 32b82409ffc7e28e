"""What one device of a mesh has of a run, on paper: bytes in memory, and bytes it sends in a step."""

from __future__ import annotations

import dataclasses

import jax

from posx.config import RunConfig
from posx.cross_entropy import LARGEST_LOGITS
from posx.machine.devices import DATA, MODEL
from posx.model import Model
from posx.progress import size
from posx.training.layout import spec

#: Of a layer, sums over `MODEL` of activations [rows, m]: forward after `out` and `down`; backward before `query`,
#: `key`, `value` and `up`, one more before `gate`; and where layers are computed again, after `out` again. Counted in
#: the programs that XLA's CPU backend makes of the step; accelerators may join those of `query`, `key` and `value`.
SUMS = 6


@dataclasses.dataclass(frozen=True)
class Share:
    """Bytes of one device.

    state: of its part of weights, gradients and two moments; gathered: weights of other devices while they are used: of
    all layers, or of one and its gradients where `model.remat` is "layer" (XLA's CPU backend keeps all the same);
    activations: kept for the backward pass, and logits. moved_weights, moved_activations: sent by it in one step, by
    rings.
    """

    state: float
    gathered: float
    activations: float
    moved_weights: float
    moved_activations: float

    def __str__(self) -> str:
        memory = self.state + self.gathered + self.activations
        return (
            f"{size(memory)} on each device ({size(self.state)} of weights, gradients and moments, "
            f"{size(self.gathered)} of weights gathered, {size(self.activations)} of activations), which sends "
            f"{size(self.moved_weights + self.moved_activations)} a step ({size(self.moved_weights)} of weights and "
            f"gradients, {size(self.moved_activations)} of activations)"
        )


def share(run: RunConfig, model: Model, data: int, heads: int) -> Share:
    """Of a run in parts on `data` x `heads` devices.

    The gradients of what is cut over `DATA` count as summed on all of its devices, as XLA's CPU backend does it; where
    XLA scatters the sums, half of that is sent.
    """
    train, config, dims = run.train, model.config, model.dims
    own = whole = largest = 0.0
    for path, leaf in jax.tree_util.tree_flatten_with_path(model.abstract())[0]:
        cut = spec(path, leaf.shape, {DATA: data, MODEL: heads})
        size = 4.0 * leaf.size / (heads if MODEL in cut else 1)
        own += size / (data if DATA in cut else 1)
        whole += size
        largest = max(largest, size)
    again = config.remat == "layer"
    tables = 4.0 * model.vocab_size * dims.model_dim / heads
    layer = (whole - tables * (1 if config.tied else 2)) / config.num_layers
    gathered = (largest + 2 * layer if again else whole) if data > 1 else 0.0
    passes = train.accumulation * ((2 if again else 1) + 2)  # forward, again, and twice for the gradients
    sums = config.num_layers * (SUMS + (config.mlp == "swiglu") + again) + 2
    rows = 4.0 * train.batch_size * train.length / data * dims.model_dim
    return Share(
        state=4 * own,
        gathered=gathered,
        activations=_activations(run, model, data, heads),
        moved_weights=passes * whole * (data - 1) / data,
        moved_activations=2 * sums * rows * (heads - 1) / heads,
    )


def _activations(run: RunConfig, model: Model, data: int, heads: int) -> float:
    """Float32, of one part of a batch."""
    config, dims = model.config, model.dims
    tokens = run.train.batch_size // run.train.accumulation * run.train.length / data
    inside = (4 if config.mlp == "gelu" else 6) * config.hidden_dim + 4 * dims.num_heads * dims.head_dim
    layer = inside / heads + (9 if config.dropout else 6) * config.model_dim
    kept = layer + config.num_layers * config.model_dim if config.remat == "layer" else config.num_layers * layer
    return 4 * (tokens * kept + 2 * min(tokens * model.vocab_size, LARGEST_LOGITS))
