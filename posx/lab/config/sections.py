"""The sections of a config: typed frozen values, whose defaults are those of every config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from posx.attention.masks import Mask
from posx.contract.fields import above, at_least, at_most, below, field_problems
from posx.encodings import Dims, Encoding, Spec, build
from posx.errors import ConfigError, join_problems
from posx.evaluation.settings import EvalConfig
from posx.lab.config.data import DataConfig
from posx.lab.config.mask_texts import mask_text, parse_mask
from posx.lab.positions import Positions, parse_policy

T = TypeVar("T")

#: The encodings of the classic surveys, which a sweep compares unless it says which.
CLASSIC = (
    "nope", "sinusoidal", "learned", "shaw", "transformer_xl", "t5", "tupe", "deberta", "rope", "alibi",
)  # fmt: skip

#: The settings that the lists of a sweep stand for.
LISTS = {"train_lens": "train.length", "encodings": "encoding", "seeds": "train.seed"}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Every choice of the architecture; 0 leaves a size to its rule.

    Attributes:
      num_layers: layers of the decoder.
      model_dim: m, the width.
      num_heads: query heads.
      num_kv_heads: key/value heads; 0 for as many as query heads.
      head_dim: channels of a head; 0 for the width over the heads.
      vocab_size: rows of the embeddings; 0 for those of the tokenizer. A model may have more rows.
      mlp: gelu and geglu have the tanh form of GELU, gelu_exact the form with erf.
      mlp_dim: hidden units; 0 for 4m with GELU, 8m/3 with SwiGLU and GeGLU (the same number of weights).
      tied: inputs and outputs share embeddings. This is a strong path from token to token beside attention, so
        extrapolation failures show less.
      dropout: probability.
      qk_norm: a norm of the queries and keys of each head.
      norm: rms divides by the root mean square, layer subtracts the mean first.
      norm_eps: added to mean squares.
      biases: learned vectors added to queries, keys and values (qkv), or to every product and norm (all).
      parallel: attention and MLP read the same input.
      post_norm: a norm after each of both, as in Gemma 3.
      embedding_norm: a norm after the embeddings, as in BLOOM.
      dtype: of the operands of matrix products and of activations between them. Parameters, sums and the residual
        stream stay float32.
      remat: "layer" keeps only the input of every layer for the backward pass and computes the rest again. That takes
        the memory of about one layer instead of all, for a third more work. XLA's CPU backend merges the two and keeps
        all (0.10.2).
      layer_policy: cycled over the layers. "encoding" stands for the run's encoding, other words are specs of their
        own: nope, rope(base=50)+alibi.
      mask_policy: cycled too: causal, window(size=512), or window(size=512, sinks=4), whose first 4 tokens of the text
        stay visible. full, without a mask, is for `train.objective` masked. () stands for the one that fits the
        objective.
    """

    # Beyond the bounds a model is a slip of the finger, and its description alone would take minutes.
    num_layers: Annotated[int, at_least(1), at_most(4096)] = 4
    model_dim: Annotated[int, at_least(1), at_most(2**20)] = 128
    num_heads: Annotated[int, at_least(1), at_most(2**16)] = 4
    num_kv_heads: Annotated[int, at_least(0)] = 0
    head_dim: Annotated[int, at_least(0), at_most(2**20)] = 0
    vocab_size: Annotated[int, at_least(0), at_most(2**31 - 1)] = 0
    mlp: Literal["gelu", "gelu_exact", "swiglu", "geglu"] = "gelu"
    mlp_dim: Annotated[int, at_least(0)] = 0
    tied: bool = False
    dropout: Annotated[float, at_least(0), below(1)] = 0.0
    qk_norm: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: Annotated[float, above(0)] = 1e-6
    biases: Literal["none", "qkv", "all"] = "none"
    parallel: bool = False
    post_norm: bool = False
    embedding_norm: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "layer"] = "none"
    layer_policy: tuple[str, ...] = ("encoding",)
    mask_policy: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        """Return the problems of these fields, one line each."""
        problems = [f"model.{problem}" for problem in field_problems(self)]
        if not problems and not self.head_dim and self.model_dim % self.num_heads:
            fits = [h for h in range(1, self.model_dim + 1) if self.model_dim % h == 0]
            near = min(fits, key=lambda h: abs(h - self.num_heads))
            problems.append(
                f"model.model_dim={self.model_dim} is not divisible by num_heads={self.num_heads}. Nearest: {near}."
            )
        if not problems and self.num_heads % (self.num_kv_heads or self.num_heads):
            problems.append(
                f"model.num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}. Choose a "
                "divisor of it."
            )
        if not self.layer_policy:
            problems.append("model.layer_policy is empty. The default is ('encoding',).")
        for text in self.mask_policy:
            try:
                parse_mask(text)
            except ConfigError as error:
                problems.append(f"model.mask_policy: {error}")
        for policy in ("layer_policy", "mask_policy"):
            pattern = getattr(self, policy)
            never = dict.fromkeys(name for name in pattern if name not in pattern[: self.num_layers])
            if not problems and never:
                problems.append(
                    f"model.{policy}={','.join(pattern)}: {' and '.join(never)} would be in none of the "
                    f"{self.num_layers} layers. Shorten the pattern, or raise model.num_layers."
                )
        return problems

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies two products."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def hidden_dim(self) -> int:
        return self.mlp_dim or (8 * self.model_dim // 3 if self.gated else 4 * self.model_dim)

    def resolve(self, objective: str) -> ModelConfig:
        """Return the same with every size set, and with the masks of the objective if none is named."""
        head_dim = self.head_dim or self.model_dim // self.num_heads
        masks = shortest_cycle(tuple(map(mask_text, self.masks)))
        masks = ("full",) if objective == "masked" and not self.mask_policy else masks
        return dataclasses.replace(
            self, num_kv_heads=self.kv_heads, head_dim=head_dim, mlp_dim=self.hidden_dim, mask_policy=masks
        )

    def layers(self, encoding: Spec) -> tuple[Spec, ...]:
        """Return the spec of each layer of a run of `encoding`."""
        return tuple(encoding if word == "encoding" else word for word in self.words)

    @property
    def words(self) -> tuple[str, ...]:
        """The word of each layer in `layer_policy`."""
        return tuple(self.layer_policy[n % len(self.layer_policy)] for n in range(self.num_layers))

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The mask of each layer."""
        cycle = tuple(map(parse_mask, self.mask_policy or ("causal",)))
        return tuple(cycle[n % len(cycle)] for n in range(self.num_layers))

    def require_causal(self, what: str) -> None:
        """Raise ConfigError if the model predicts masked tokens from both sides, for which `what` has no meaning."""
        if not all(mask.causal for mask in self.masks):
            raise ConfigError(
                f"{what} needs a model of next tokens, but this one was trained with train.objective=masked. Use posx "
                "evaluate, or posx.load for its logits."
            )

    def encodings(self, encoding: Spec, train_len: int) -> tuple[Encoding, ...]:
        """Return the resolved encoding of each layer. Raises ConfigError for sizes and specs that do not fit."""
        dims = self.dims(train_len)
        return tuple(build(spec, dims) for spec in self.layers(encoding))

    def dims(self, train_len: int) -> Dims:
        """Return the sizes that encodings are resolved from. Raises ConfigError."""
        if problems := self.problems():
            raise ConfigError(join_problems(problems))
        head_dim = self.head_dim or self.model_dim // self.num_heads
        return Dims(self.model_dim, self.num_heads, head_dim, self.num_layers, train_len, self.kv_heads)


def shortest_cycle(layers: tuple[T, ...]) -> tuple[T, ...]:
    """Return the shortest sequence that repeats to `layers`, with its last round cut short."""
    sizes = range(1, len(layers) + 1)
    return layers[: next(n for n in sizes if all(one == layers[i % n] for i, one in enumerate(layers)))]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run. Durations are in steps.

    Attributes:
      length: L, tokens of a window.
      batch_size: windows of a step.
      steps: optimiser steps.
      seed: of parameters, batches, hidden tokens, dropout and positions.
      objective: next_token predicts each token from those before it. masked hides 15 % of the tokens and predicts them
        from both sides, see docs/guides/masked.md.
      positions: the policy of positions: sequential, offset(longest=512), randomised(longest=512), grid.
      learning_rate: after warm-up.
      final_learning_rate: at the last step.
      position_lr_multiplier: every parameter of an encoding learns at so many times the learning rate; 0 leaves it to
        the encoding (`Encoding.about`).
      warmup_steps: of a linear rise.
      beta1, beta2: of AdamW.
      weight_decay: of AdamW.
      clip_norm: the largest norm of the gradient.
      accumulation: equal parts of a batch whose gradients are averaged.
      executor: of attention, see `posx.attend`.
      precision: of products of float32 numbers on an accelerator. "default" is its own, which rounds their operands.
      dispatch_steps: steps that run in one call on the device, fewer before a log line or a checkpoint. The number
        changes speed alone. The memory of a call is not freed between its steps, and an accelerator does not wait for
        Python.
      log_steps: between log lines.
      checkpoint_steps: between checkpoints.
      keep_checkpoints: the newest ones that are kept.
      stop_check_steps: on a task, between measurements of items of the training length, drawn apart from those of
        training and evaluation. Training ends as soon as all of them are answered right. 0 measures nothing.
    """

    length: Annotated[int, at_least(2)] = 64
    batch_size: Annotated[int, at_least(1)] = 64
    steps: Annotated[int, at_least(1)] = 1200
    seed: Annotated[int, at_least(0), below(2**32)] = 0
    objective: Literal["next_token", "masked"] = "next_token"
    positions: str = "sequential"
    learning_rate: Annotated[float, above(0)] = 2e-3
    final_learning_rate: Annotated[float, at_least(0)] = 2e-4
    position_lr_multiplier: Annotated[float, at_least(0)] = 0.0
    warmup_steps: Annotated[int, at_least(0)] = 60
    beta1: Annotated[float, at_least(0), below(1)] = 0.9
    beta2: Annotated[float, at_least(0), below(1)] = 0.98
    weight_decay: Annotated[float, at_least(0)] = 0.1
    clip_norm: Annotated[float, above(0)] = 1.0
    accumulation: Annotated[int, at_least(1)] = 1
    executor: Literal["auto", "dense", "blockwise", "kernel", "fused"] = "auto"
    precision: Literal["default", "highest"] = "default"
    dispatch_steps: Annotated[int, at_least(1)] = 16
    log_steps: Annotated[int, at_least(1)] = 20
    checkpoint_steps: Annotated[int, at_least(1)] = 200
    keep_checkpoints: Annotated[int, at_least(1)] = 2
    stop_check_steps: Annotated[int, at_least(0)] = 0

    def problems(self) -> list[str]:
        """Return the problems of these fields, one line each."""
        problems = [f"train.{problem}" for problem in field_problems(self)]
        if self.final_learning_rate > self.learning_rate:
            problems.append(
                f"train.final_learning_rate={self.final_learning_rate} must not be above "
                f"train.learning_rate={self.learning_rate}. Lower it."
            )
        if not problems and self.warmup_steps >= self.steps:
            problems.append(
                f"train.warmup_steps={self.warmup_steps} must be below train.steps={self.steps}. Lower "
                "--config.train.warmup_steps."
            )
        if not problems and self.stop_check_steps >= self.steps:
            problems.append(
                f"train.stop_check_steps={self.stop_check_steps} must be below train.steps={self.steps}. Lower it, or "
                "set it to 0."
            )
        if not problems and self.batch_size % self.accumulation:
            fits = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            problems.append(
                f"train.accumulation={self.accumulation} does not divide train.batch_size={self.batch_size}. Use "
                f"one of {fits}."
            )
        try:
            policy = parse_policy(self.positions)
            if (have := (1 + policy.last(self.length)) ** policy.axes) < self.length:
                problems.append(
                    f"train.positions={self.positions}: it has {have} positions for the {self.length} tokens of "
                    "train.length. Raise longest."
                )
        except ConfigError as error:
            problems.append(f"train.positions: {error}")
        return problems

    def resolve(self) -> TrainConfig:
        """Return the same with the text of its policy as posx prints it."""
        return dataclasses.replace(self, positions=str(parse_policy(self.positions)))

    @property
    def token_positions(self) -> Positions:
        """The positions of the tokens of training and of measured windows."""
        return Positions(parse_policy(self.positions), self.seed)


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """The runs that a sweep makes: every combination of the values on its axes.

    Attributes:
      encodings, train_lens, seeds: short forms of three axes, which `axes` overrides.
      zip: settings joined by +, which advance together and count as one axis. With ("model.model_dim+model.num_heads",)
        the first width has the first number of heads, the second width the second. The lists may be joined too:
        "encoding+train.learning_rate".
      axes: any setting and its values: {"encoding": ("rope", "rope(base=500000)+alibi"), "train.learning_rate": (1e-3,
        2e-3), "model.layer_policy": ("encoding", "encoding, nope")}. Encodings, and patterns of them, are texts.
    """

    encodings: tuple[str, ...] = CLASSIC
    train_lens: tuple[int, ...] = (64,)
    seeds: tuple[int, ...] = (0,)
    zip: tuple[str, ...] = ()
    axes: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


#: The sections of a run beside `encoding`.
SECTIONS: dict[str, type] = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig, "eval": EvalConfig}
