"""All settings of one run: every option with its default for the command line, one typed frozen value for the code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from posx.config.data import DataConfig
from posx.config.evaluation import EvalConfig
from posx.config.model import ModelConfig
from posx.config.sweep import sweep_section
from posx.config.train import TrainConfig
from posx.encodings import CHAIN, Chain, Encoding, Spec, code_of, encoding_name, from_spec, spec_text
from posx.encodings.rates import Rates, rates_of_layers
from posx.errors import ConfigError
from posx.fields import typed_fields


@dataclasses.dataclass(frozen=True)
class Resolution:
    """What a run's settings come to with nothing left open: the encoding of every layer, and the model's sizes.

    `rates`: how the parameters of each layer's encoding are trained, those that are not named at Rate().
    `data` says where the text of a run that was started lay, paths absolute, and with "digest" what it was.
    `code`: digests of the user's own classes among the encodings, by name.
    """

    layers: tuple[Encoding, ...]
    model: ModelConfig
    rates: Rates = ()
    data: Mapping[str, str] = dataclasses.field(default_factory=dict)
    code: Mapping[str, str] = dataclasses.field(default_factory=dict)


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
        layers, dims = self.model.encodings(self.encoding, self.train.length), self.model.dims(self.train.length)
        rates = rates_of_layers(layers, dims, self.train.position_lr_multiplier)
        return Resolution(layers, self.model.resolved(), rates, code=code_of(layers))

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
    """Every option with its default, for the encoding that the config file's argument spells. Raises ConfigError."""
    config = ConfigDict({name: dataclasses.asdict(cls()) for name, cls in SECTIONS.items()})
    config.encoding = encoding_section(encoding)
    config.sweep = sweep_section()
    return config


def encoding_section(text: str) -> ConfigDict:
    """The section `encoding` of what `text` spells: its name and every field. Raises ConfigError.

    A field that is resolved from the sizes reads "auto", an encoding inside another is a text; of several encodings
    `parts` holds the texts. Fields take values of any type here, as "auto" is one: the encoding's own are asked later.
    """
    value = from_spec(text)
    if isinstance(value, Chain):
        return ConfigDict({"name": CHAIN, "parts": tuple(map(spec_text, value.parts))}, type_safe=False)
    fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    return ConfigDict({"name": encoding_name(value), **fields}, type_safe=False)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return "auto" if value is None else spec_text(value) if isinstance(value, Encoding) else value


def run_config(config: ConfigDict) -> RunConfig:
    """The typed settings of one run. Raises ConfigError for what is unknown or mistyped; whether they fit together is
    asked of `posx.runs.checks`."""
    return RunConfig.from_json(config.to_dict())


def _section(cls: type, values: Any, name: str) -> Any:
    given = values.get(name) if isinstance(values, Mapping) else None
    if not isinstance(given, Mapping):
        raise ConfigError(f"the config has no section {name!r}")
    return cls(**typed_fields(cls, given, f"config section {name!r}", f"{name}."))
