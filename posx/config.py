"""Settings: one ConfigDict for the command line, typed frozen values for the code.

`base_config(name)` gives every option with its default. At the edge the ConfigDict becomes a `RunConfig`; below that
no function sees a ConfigDict. `RunConfig.problems()` finds all that is wrong before anything runs. How a run's settings
are stored, compared and found again stands in `posx.stored`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from posx.attention import EXECUTORS, causal, refusal
from posx.data.corpus import DataConfig, check_config
from posx.encodings import ENCODINGS, Encoding, Spec, encoding_class
from posx.errors import ConfigError
from posx.evaluation.protocols import protocol_name
from posx.fields import typed_fields
from posx.model import Model
from posx.model_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run. `length` L in tokens; `batch_size` in windows of L tokens; durations in steps.

    `dispatch_steps`: as many steps run in one call on the device, fewer before a log line or a checkpoint. It changes
    speed alone: the memory of a call is not given back between its steps, and an accelerator does not wait for Python.
    """

    length: int = 64
    batch_size: int = 64
    steps: int = 1200
    seed: int = 0
    learning_rate: float = 2e-3
    final_learning_rate: float = 2e-4
    warmup_steps: int = 60
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    accumulation: int = 1
    executor: str = "auto"
    dispatch_steps: int = 16
    log_steps: int = 20
    checkpoint_steps: int = 200
    keep_checkpoints: int = 2


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """What is measured after training; lengths, strides and targets in tokens.

    `sliding_lengths` () stands for L, 2L, 4L, 8L, 16L as far as `lengths` go; `stride` 0 for L/4. Targets are spread
    over all held-out documents; `num_targets` and `sliding_targets` 0 score the whole validation stream.
    """

    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    protocols: tuple[str, ...] = ("nonoverlapping", "per_position")
    num_targets: int = 262144
    sliding_targets: int = 65536
    sliding_lengths: tuple[int, ...] = ()
    stride: int = 0
    batch_tokens: int = 16384
    executor: str = "auto"


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """Which runs a sweep makes; `posx train` ignores it."""

    encodings: tuple[str, ...] = tuple(ENCODINGS)
    train_lens: tuple[int, ...] = (64,)
    seeds: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class Resolution:
    """What a run's settings come to with nothing left open: the encoding of every layer, and the model's sizes."""

    layers: tuple[Encoding, ...]
    model: ModelConfig


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that decides the result of one run, as it was asked for: open fields are open.

    `stored` is what they were resolved to when the run was started, None where it is new. Rules and defaults change
    from version to version; a run that exists does not.
    """

    encoding: Mapping[str, Any]
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    eval: EvalConfig
    stored: Resolution | None = None

    @property
    def layers(self) -> tuple[Spec, ...]:
        """What is asked for in each layer."""
        return self.model.layers(self.encoding)

    @property
    def resolution(self) -> Resolution:
        """What was stored, or for a new run what today's rules give. Raises ConfigError for what does not fit."""
        if self.stored is not None:
            return self.stored
        return Resolution(self.model.encodings(self.encoding, self.train.length), self.model.resolved())

    def make_model(self, vocab_size: int) -> Model:
        found = self.resolution
        return Model(found.model, found.layers, vocab_size, found.model.dims(self.train.length))

    def problems(self) -> list[str]:
        """All that is wrong, one line each: path, value, what is allowed."""
        found = self.model.problems() + _train_problems(self.train) + _eval_problems(self.eval, self.train.length)
        checks = [lambda: check_config(self.data)] + ([] if found else [self._check_model])
        for check in checks:
            try:
                check()
            except ConfigError as error:
                found.append(str(error))
        return found

    def _check_model(self) -> None:
        model = self.make_model(vocab_size=257)
        for section, executor in (("train", self.train.executor), ("eval", self.eval.executor)):
            for encoding in model.distinct if executor == "fused" else ():
                if why := refusal(encoding, causal(), in_order=True, segments=False):
                    raise ConfigError(
                        f"{section}.executor='fused' cannot serve {encoding}: {why}; use blockwise or auto"
                    )

    def to_json(self) -> dict[str, Any]:
        """What was asked for as plain values, tuples as lists."""
        sections = {name: getattr(self, name) for name in ("encoding", *SECTIONS)}
        return json.loads(json.dumps({k: dict(v) if k == "encoding" else vars(v) for k, v in sections.items()}))

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> RunConfig:
        """The inverse of `to_json`; what is missing has its default. Raises ConfigError naming an unknown key."""
        encoding = dict(values.get("encoding") or {}) if isinstance(values, Mapping) else {}
        if not isinstance(encoding.get("name"), str):
            raise ConfigError("the config has no encoding.name")
        return RunConfig(encoding, **{name: _section(cls, values, name) for name, cls in SECTIONS.items()})


#: The sections of a config beside `encoding`.
SECTIONS: dict[str, type] = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig, "eval": EvalConfig}


def base_config(encoding: str = "alibi") -> ConfigDict:
    """Every option with its default, for the encoding named by the config file's argument. Raises ConfigError."""
    config = ConfigDict({name: dataclasses.asdict(cls()) for name, cls in SECTIONS.items()})
    config.encoding = ConfigDict(encoding_fields(encoding))
    config.sweep = ConfigDict(dataclasses.asdict(SweepConfig()))
    return config


def encoding_fields(name: str) -> dict[str, Any]:
    """{"name": name, field: default, ...}; a field that is resolved from the sizes reads "auto"."""
    fields = {"name": name}
    for field in dataclasses.fields(encoding_class(name)):
        if field.default is not dataclasses.MISSING:
            fields[field.name] = "auto" if field.default is None else field.default
    return fields


def run_config(config: ConfigDict) -> RunConfig:
    """The typed settings of one run; raises ConfigError that lists every problem."""
    return checked(RunConfig.from_json(config.to_dict()))


def checked(run: RunConfig) -> RunConfig:
    """`run`, if nothing is wrong with it; raises ConfigError that lists every problem."""
    if problems := run.problems():
        raise ConfigError("; ".join(problems))
    return run


def with_encoding(config: ConfigDict, encoding: str, length: int, seed: int) -> RunConfig:
    """The run of a sweep that trains `encoding` at `length` with `seed`; its fields are kept if it is the config's."""
    values = config.to_dict()
    if values["encoding"]["name"] != encoding:
        values["encoding"] = encoding_fields(encoding)
    values["train"] |= {"length": length, "seed": seed}
    return RunConfig.from_json(values)


def _section(cls: type, values: Any, name: str) -> Any:
    given = values.get(name) if isinstance(values, Mapping) else None
    if not isinstance(given, Mapping):
        raise ConfigError(f"the config has no section {name!r}")
    return cls(**typed_fields(cls, given, f"config section {name!r}", f"{name}."))


def _train_problems(train: TrainConfig) -> list[str]:
    found = [
        f"train.{name}={getattr(train, name)} must be at least {least}"
        for name, least in (
            ("length", 2), ("batch_size", 1), ("steps", 1), ("accumulation", 1), ("log_steps", 1),
            ("dispatch_steps", 1), ("checkpoint_steps", 1), ("keep_checkpoints", 1), ("warmup_steps", 0), ("seed", 0),
        )
        if getattr(train, name) < least
    ]  # fmt: skip
    for name in ("learning_rate", "clip_norm"):
        if not getattr(train, name) > 0:
            found.append(f"train.{name}={getattr(train, name)} must be positive")
    for name in ("final_learning_rate", "weight_decay"):
        if getattr(train, name) < 0:
            found.append(f"train.{name}={getattr(train, name)} must not be negative")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(train, name) < 1:
            found.append(f"train.{name}={getattr(train, name)} must be in [0, 1)")
    if train.seed >= 2**32:
        found.append(f"train.seed={train.seed} must be below 2**32")
    if train.final_learning_rate > train.learning_rate:
        found.append(
            f"train.final_learning_rate={train.final_learning_rate} must not be above "
            f"train.learning_rate={train.learning_rate}"
        )
    if not found and train.warmup_steps >= train.steps:
        found.append(f"train.warmup_steps={train.warmup_steps} must be below train.steps={train.steps}")
    if not found and train.batch_size % train.accumulation:
        fits = [n for n in range(1, train.batch_size + 1) if train.batch_size % n == 0]
        found.append(
            f"train.accumulation={train.accumulation} does not divide train.batch_size={train.batch_size}; {fits}"
        )
    return found + _executor_problems("train", train.executor)


def _eval_problems(evaluation: EvalConfig, train_len: int) -> list[str]:
    found = []
    for name in ("lengths", "sliding_lengths"):
        lengths = getattr(evaluation, name)
        if any(length < 2 for length in lengths):
            found.append(f"eval.{name}={lengths}: every length must be at least 2 tokens")
        if list(lengths) != sorted(set(lengths)):
            found.append(f"eval.{name}={lengths} must increase, each length once")
    if not evaluation.lengths:
        found.append("eval.lengths is empty: name at least one length in tokens")
    for protocol in evaluation.protocols:
        try:
            protocol_name(protocol)
        except ConfigError as error:
            found.append(f"eval.protocols: {error}")
    for name, least in (("num_targets", 0), ("sliding_targets", 0), ("stride", 0), ("batch_tokens", 1)):
        if getattr(evaluation, name) < least:
            found.append(f"eval.{name}={getattr(evaluation, name)} must be at least {least}")
    if not found and 0 < evaluation.num_targets < max(evaluation.lengths):
        found.append(
            f"eval.num_targets={evaluation.num_targets} is less than one window of eval.lengths' longest, "
            f"{max(evaluation.lengths)} tokens: score at least as many targets, or 0 for all"
        )
    if not found and "sliding" in map(protocol_name, evaluation.protocols):
        shortest, stride = min(sliding_lengths(evaluation, train_len)), sliding_stride(evaluation, train_len)
        if stride > shortest:
            found.append(f"eval.stride={stride} is larger than the shortest sliding window, {shortest} tokens")
    return found + _executor_problems("eval", evaluation.executor)


def sliding_lengths(evaluation: EvalConfig, train_len: int) -> tuple[int, ...]:
    """The window lengths of the sliding protocol, tokens."""
    powers = tuple(train_len * 2**n for n in range(5))
    return evaluation.sliding_lengths or tuple(n for n in powers if n <= max(evaluation.lengths)) or (train_len,)


def sliding_stride(evaluation: EvalConfig, train_len: int) -> int:
    """The stride of the sliding protocol, tokens."""
    return evaluation.stride or max(1, train_len // 4)


def _executor_problems(section: str, executor: str) -> list[str]:
    allowed = ("auto", *EXECUTORS)
    return [] if executor in allowed else [f"{section}.executor={executor!r} is unknown; allowed: {', '.join(allowed)}"]


__all__ = [
    "SECTIONS", "EvalConfig", "Resolution", "RunConfig", "SweepConfig", "TrainConfig",
    "base_config", "checked", "encoding_fields", "run_config", "sliding_lengths", "sliding_stride",
    "with_encoding",
]  # fmt: skip
