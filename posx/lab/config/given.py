"""A config as it is given: the ConfigDict that a config file fills in, and the typed frozen value that it becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from posx.contract import Value
from posx.encodings import CHAIN, Chain, encoding_name, from_spec, spec_text
from posx.errors import ConfigError
from posx.lab.config.data import DataConfig
from posx.lab.config.sections import SECTIONS, EvalConfig, ModelConfig, SweepConfig, TrainConfig
from posx.parsing import typed_fields


@dataclasses.dataclass(frozen=True)
class Sections:
    """The settings of a config, typed, with everything open that is resolved from other settings.

    Attributes:
      encoding: its text: rope(base=500000)+alibi.
      model, data, train, eval: the sections of a run.
      sweep: the runs that a sweep makes. Its axes are typed when the sweep is planned.
    """

    encoding: str
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    eval: EvalConfig
    sweep: SweepConfig = dataclasses.field(default_factory=SweepConfig)

    def fields(self) -> dict[str, dict[str, Any]]:
        """Return {section: {field: value}}, with every field of the encoding, in the order of a config file."""
        return {
            "encoding": encoding_fields(self.encoding),
            **{name: dict(vars(getattr(self, name))) for name in (*SECTIONS, "sweep")},
        }


def read_sections(config: ConfigDict | Mapping[str, Any]) -> Sections:
    """Return the settings of a config. Raises ConfigError for an unknown or mistyped setting and a missing section."""
    values = config.to_dict() if isinstance(config, ConfigDict) else config
    encoding, sweep = values.get("encoding") or {}, values.get("sweep", {})
    if not isinstance(encoding.get("name"), str):
        raise ConfigError("the config has no encoding.name. Give one: --config.encoding=rope")
    typed_fields(SweepConfig, dict.fromkeys(sweep, ()), "config section 'sweep'", "sweep.")  # its names alone
    return Sections(spec_text(encoding), **typed_sections(values), sweep=SweepConfig(**sweep))


def typed_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {section: value} of a config. Raises ConfigError for a missing section, an unknown key or a wrong type."""
    sections = {}
    for name, cls in SECTIONS.items():
        if not isinstance(given := values.get(name), Mapping):
            raise ConfigError(f"the config has no section {name!r}. Start from posx.lab.config.base_config().")
        sections[name] = cls(**typed_fields(cls, given, f"config section {name!r}", f"{name}."))
    return sections


def base_config(encoding: str = "alibi") -> ConfigDict:
    """Return every option with its default, for the encoding that a text names. Raises ConfigError."""
    config = ConfigDict({name: dataclasses.asdict(cls()) for name, cls in SECTIONS.items()})
    config.encoding = ConfigDict(encoding_fields(encoding), type_safe=False)  # its class checks them: "auto" is a value
    config.sweep = ConfigDict(vars(SweepConfig()), convert_dict=False)  # names of axes have dots
    return config


def encoding_fields(text: str) -> dict[str, Any]:
    """Return the name and every field of the encoding that `text` names. Raises ConfigError.

    A field that is resolved from the sizes is "auto", an encoding inside another is a text. A chain has the texts in
    `parts`.
    """
    value = from_spec(text)
    if isinstance(value, Chain):
        return {"name": CHAIN, "parts": tuple(map(spec_text, value.parts))}
    fields = {field.name: _typable(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    return {"name": encoding_name(value), **fields}


def _typable(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_typable, value))
    return "auto" if value is None else spec_text(value) if isinstance(value, Value) else value
