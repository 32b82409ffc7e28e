"""Every choice of the architecture as one recorded value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from posx.contract.fields import at_least, at_most, below, problems_of
from posx.encodings import Dims, Encoding, Spec, build
from posx.errors import ConfigError

T = TypeVar("T")


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

    # Beyond the bounds a model is a slip of the finger, and its description alone would take minutes.
    num_layers: Annotated[int, at_least(1), at_most(4096)] = 4
    model_dim: Annotated[int, at_least(1), at_most(2**20)] = 128
    num_heads: Annotated[int, at_least(1), at_most(2**16)] = 4
    num_kv_heads: Annotated[int, at_least(0)] = 0
    mlp: Literal["gelu", "swiglu"] = "gelu"
    mlp_dim: Annotated[int, at_least(0)] = 0
    tied: bool = False
    dropout: Annotated[float, at_least(0), below(1)] = 0.0
    qk_norm: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "layer"] = "none"
    layer_policy: tuple[str, ...] = ("encoding",)

    def problems(self) -> list[str]:
        """Return the problems of these fields, one line each."""
        found = [f"model.{problem}" for problem in problems_of(self)]
        if not found and self.model_dim % self.num_heads:
            fits = [h for h in range(1, self.model_dim + 1) if self.model_dim % h == 0]
            near = min(fits, key=lambda h: abs(h - self.num_heads))
            found.append(
                f"model.model_dim={self.model_dim} is not divisible by num_heads={self.num_heads}; nearest: {near}"
            )
        if not found and self.num_heads % (self.num_kv_heads or self.num_heads):
            found.append(f"model.num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
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
        """Return the same with every size set."""
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
        """Return the sizes that encodings are resolved from. Raises ConfigError."""
        if problems := self.problems():
            raise ConfigError("; ".join(problems))
        head_dim = self.model_dim // self.num_heads
        return Dims(self.model_dim, self.num_heads, head_dim, self.num_layers, train_len, self.kv_heads)
