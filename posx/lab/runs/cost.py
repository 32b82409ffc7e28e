"""The expected cost of an evaluation on this machine: operations, memory and time of each pass over the text."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from posx.lab.config import EvalConfig, RunConfig
from posx.lab.cross_entropy import LARGEST_LOGITS
from posx.lab.data.store import cache_folder
from posx.lab.machine.ceiling import machine_ceiling
from posx.lab.runs.describe import count
from posx.machine.devices import worthwhile_devices
from posx.machine.platforms import is_on_cpu

if TYPE_CHECKING:
    from posx.lab.model import Model

#: Seconds from the start of a process until it has read the weights, and those that compile the program of one length.
STARTING, COMPILING = 5.0, 3.0
#: The fraction of the speed of matrix products at which evaluation works. Measured on 2 cores, for RoPE at widths 256
#: and 576 and windows of 256 to 16,384 tokens: 0.66 to 0.87.
EVALUATION_SHARE = 0.75
#: Bytes of an idle process with the compiled programs of a few lengths. Measured at widths 64 to 576: 0.39 to 0.59e9.
EVALUATION_MEMORY = 400e6


@dataclasses.dataclass(frozen=True)
class Pass:
    """The expected cost of scoring windows.

    Attributes:
      windows: their number.
      batch: windows in one call of the model.
      flops: of the forward passes, the padding of the last batch included. Layers with windows count as causal ones.
      memory: bytes of the process.
    """

    windows: int
    batch: int
    flops: float
    memory: float

    def seconds(self, per_flop: float, finished: int | None = None) -> float:
        """Return the expected seconds until some windows are finished, or all. The program is compiled first.

        per_flop: seconds of one operation.
        """
        if finished == 0:
            return 0.0
        batches = -(-self.windows // self.batch)
        part = 1.0 if finished is None else -(-finished // self.batch) / batches
        return COMPILING + part * self.flops * per_flop


def pass_cost(model: Model, config: EvalConfig, length: int, windows: int) -> Pass:
    """Return the cost of a pass of `model` over windows of `length` tokens."""
    from posx.lab.training.step import flops_per_token

    batch = max(1, config.batch_tokens // length)
    flops = batch * length * flops_per_token(model, length, windows=False) / 3
    return Pass(windows, batch, -(-windows // batch) * flops, _memory(model, batch * length, flops))


def _memory(model: Model, tokens: int, flops: float) -> float:
    """Return the bytes that a process holds to score `tokens` tokens, work of `flops`, at a time.

    XLA's CPU backend keeps the input of every layer to the end. Rules that remap positions take up to a fifth more.
    """
    config, dims = model.config, model.dims
    inside = max((2 if config.gated else 1) * config.hidden_dim, 4 * dims.num_heads * dims.head_dim)
    layers = tokens * ((config.num_layers + 1) * config.model_dim + inside)
    logits = min(tokens * model.vocab_size, LARGEST_LOGITS)
    copies = max(
        2, worthwhile_devices(flops) if is_on_cpu() else 1
    )  # CPU devices share a memory. There are two while weights are read
    return EVALUATION_MEMORY + 4.0 * (copies * count(model) + layers + logits)


def evaluation_speed(run: RunConfig, keep: bool = True) -> float:
    """Return the expected FLOP/s of evaluation without an encoding, on all devices of this machine together.

    The matrix products of this machine are measured, unless they were within the hour. `keep` stores the measurement.
    """
    return EVALUATION_SHARE * machine_ceiling(cache_folder(run.data) / "machine", run.model.dtype, keep)
