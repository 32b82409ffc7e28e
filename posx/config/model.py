"""Every choice of the architecture as one recorded value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from posx.encodings import Dims, Encoding, Spec, build
from posx.errors import ConfigError

T = TypeVar("T")

MLPS = ("gelu", "swiglu")
DTYPES = ("float32", "bfloat16")
REMATS = ("none", "layer")


#: Beyond these a model is a slip of the finger, and its description alone would take minutes.
LARGEST = {"num_layers": 4096, "model_dim": 2**20, "num_heads": 2**16}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Every choice of the architecture; 0 leaves a size to its rule.

    `tied` embeddings are a strong path from token to token beside attention, so extrapolation failures show less.
    `num_kv_heads` 0: as many as heads. `mlp_dim` 0: 4m for GELU, 8m/3 for SwiGLU (the same number of weights).
    `dtype` is the type of the operands of the forward matrix products; parameters and all else stay float32.
    `remat` "layer" keeps only the input of every layer for the backward pass and computes the rest of it again: memory
    of about one layer instead of all, for a third more work. XLA's CPU backend merges the two and keeps all (0.10.2).
    `layer_policy` is cycled over the layers; "encoding" stands for the run's encoding, other words are
    specs of their own: nope, rope(base=50)+alibi.
    """

    num_layers: int = 4
    model_dim: int = 128
    num_heads: int = 4
    num_kv_heads: int = 0
    mlp: str = "gelu"
    mlp_dim: int = 0
    tied: bool = False
    dropout: float = 0.0
    qk_norm: bool = False
    dtype: str = "float32"
    remat: str = "none"
    layer_policy: tuple[str, ...] = ("encoding",)

    def problems(self) -> list[str]:
        """What is wrong with these fields, one line each."""
        found = []
        for name in ("num_layers", "model_dim", "num_heads"):
            if not 1 <= getattr(self, name) <= LARGEST[name]:
                found.append(f"model.{name}={getattr(self, name)} must be at least 1 and at most {LARGEST[name]:,}")
        for name in ("num_kv_heads", "mlp_dim"):
            if getattr(self, name) < 0:
                found.append(f"model.{name}={getattr(self, name)} must not be negative")
        if not found and self.model_dim % self.num_heads:
            fits = [h for h in range(1, self.model_dim + 1) if self.model_dim % h == 0]
            near = min(fits, key=lambda h: abs(h - self.num_heads))
            found.append(
                f"model.model_dim={self.model_dim} is not divisible by num_heads={self.num_heads}; nearest: {near}"
            )
        if not found and self.num_heads % (self.num_kv_heads or self.num_heads):
            found.append(f"model.num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        for name, allowed in (("mlp", MLPS), ("dtype", DTYPES), ("remat", REMATS)):
            if getattr(self, name) not in allowed:
                found.append(f"model.{name}={getattr(self, name)!r} is unknown; allowed: {', '.join(allowed)}")
        if not 0 <= self.dropout < 1:
            found.append(f"model.dropout={self.dropout} must be in [0, 1)")
        if not self.layer_policy:
            found.append("model.layer_policy is empty; the default is ('encoding',)")
        never = dict.fromkeys(name for name in self.layer_policy if name not in self.layer_policy[: self.num_layers])
        if not found and never:
            found.append(
                f"model.layer_policy={','.join(self.layer_policy)}: {' and '.join(never)} would be in none of the "
                f"{self.num_layers} layers. Shorten the pattern, or raise model.num_layers"
            )
        return found

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def hidden_dim(self) -> int:
        return self.mlp_dim or (4 * self.model_dim if self.mlp == "gelu" else 8 * self.model_dim // 3)

    def resolved(self) -> ModelConfig:
        """The same with the sizes set that are left to their rules."""
        return dataclasses.replace(self, num_kv_heads=self.kv_heads, mlp_dim=self.hidden_dim)

    def layers(self, encoding: Spec) -> tuple[Spec, ...]:
        """Return the spec of each layer of a run of `encoding`."""
        return self._cycled([encoding if name == "encoding" else name for name in self.layer_policy])

    def encodings(self, encoding: Spec, train_len: int) -> tuple[Encoding, ...]:
        """Return the resolved encoding of each layer. Raises ConfigError for sizes and specs that do not fit."""
        dims = self.dims(train_len)
        return self._cycled([build(encoding if name == "encoding" else name, dims) for name in self.layer_policy])

    def _cycled(self, cycle: Sequence[T]) -> tuple[T, ...]:
        return tuple(cycle[n % len(cycle)] for n in range(self.num_layers))

    def dims(self, train_len: int) -> Dims:
        """The sizes encodings are resolved against. Raises ConfigError."""
        if problems := self.problems():
            raise ConfigError("; ".join(problems))
        head_dim = self.model_dim // self.num_heads
        return Dims(self.model_dim, self.num_heads, head_dim, self.num_layers, train_len, self.kv_heads)
