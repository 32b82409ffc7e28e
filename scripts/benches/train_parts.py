"""What both sides of the training bench share: sizes, batches, and a model in training."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from posx.config.model import ModelConfig
from posx.data.corpus import stdlib_files

VOCAB = 257
LEARNING_RATE = 1e-3
#: The libraries of a report by the words of --contestants. Those of x-transformers begin with PEER.
OURS, PEER = "posx", "x-transformers"
ONE_DEVICE, PINNED, BASELINE = "posx, one device", "posx, pinned processes", "posx, baseline"
FORMS = {"eager": PEER, "flash": f"{PEER}, flash", "compiled": f"{PEER}, compiled",
         "flash_compiled": f"{PEER}, flash compiled"}  # fmt: skip
LIBRARIES = {OURS: OURS, "one_device": ONE_DEVICE, "pinned": PINNED, "baseline": BASELINE} | FORMS


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model and of one step: `batch` windows of `length` tokens; `dtype` of posx's forward products."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int
    dtype: str = "float32"

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(num_layers=self.layers, model_dim=self.width, num_heads=self.heads, dtype=self.dtype)

    def at_length(self, length: int) -> Shape:
        """Windows of another length, as many tokens a step."""
        return dataclasses.replace(self, length=length, batch=max(self.tokens // length, 1))

    def __str__(self) -> str:
        return f"{self.layers} layers, width {self.width}, {self.heads} heads, {self.batch} windows of {self.length}"


SHAPES = {"small": Shape(4, 128, 4, 32, 128), "medium": Shape(6, 256, 8, 8, 512), "tiny": Shape(1, 32, 2, 2, 16)}


@dataclasses.dataclass
class Contestant:
    """One model in training: `advance(n, count)` returns the losses of the next steps, from number n on, without
    waiting; `wait()` waits for all work."""

    library: str
    encoding: str
    parameters: int
    advance: Callable[[int, int], list[Any]]
    wait: Callable[[], Any]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    losses: list[Any] = dataclasses.field(default_factory=list)

    def run(self, steps: int) -> float:
        """Seconds for that many further steps."""
        start = time.perf_counter()
        self.losses += self.advance(len(self.losses), steps)
        self.wait()
        return time.perf_counter() - start


def text_batches(shape: Shape, count: int = 64) -> list[np.ndarray]:
    """Windows int32 [batch, length + 1] of the interpreter's own source code, the same for everyone."""
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in stdlib_files().paths[:60]), np.uint8)
    starts = np.random.default_rng(0).integers(len(text) - shape.length, size=(count, shape.batch, 1))
    return list(text[starts + np.arange(shape.length + 1)].astype(np.int32))
