"""All settings of one run: one resolved frozen value that everything below reads.

A run is its resolved settings. `RunConfig.hash` names it: two runs are the same if and only if their hashes are equal.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from posx.encodings import Dims, Encoding, code_of, encoding_name, from_spec, spec_of, spec_text
from posx.encodings.rates import Rates, from_json, layer_rates, multipliers_in_rows, to_json
from posx.errors import ConfigError, join_problems
from posx.lab.config.data import PLACES
from posx.lab.config.given import Sections, read_sections, typed_sections
from posx.lab.config.sections import (
    SECTIONS,
    DataConfig,
    EvalConfig,
    ModelConfig,
    SweepConfig,
    TrainConfig,
    shortest_cycle,
)

#: The version of `config.json`. A file of another version is an error.
SCHEMA_VERSION = 8

#: How the digest of an imported model begins, in the place of that of a text.
IMPORTED = "imported"
#: Settings of training that change no weight.
_FREE = ("dispatch_steps", "log_steps", "checkpoint_steps", "keep_checkpoints")
#: Settings of training that name a run only if they are not the default.
_IF_SET = ("positions", "stop_check_steps")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """All settings of one run, with nothing left open.

    Attributes:
      layers: the encoding of each layer.
      model, data, train, eval: the sections.
      rates: how the parameters of each layer's encoding are trained.
      code: {name: digest} of the user's own classes among the encodings.
      text: the digest of text, split and tokenizer, "" until the text is read; or "imported" and the digest of an
        imported model.
      held_out: the digest of the scored part of that text, which `text` covers.
      parent: the run whose weights this one has or starts from, see `as_parent`.
      asked: the settings as they were given, from which its encoding has its name and new settings are resolved.
    """

    layers: tuple[Encoding, ...]
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    eval: EvalConfig
    rates: Rates
    code: Mapping[str, str]
    asked: Sections = dataclasses.field(compare=False, repr=False)
    text: str = ""
    held_out: str = ""
    parent: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def dims(self) -> Dims:
        return self.model.dims(self.train.length)

    @property
    def target_kind(self) -> str:
        """The kind of targets that the run predicts, a key of `posx.evaluation.settings.USUAL`."""
        return "task" if self.data.is_task else "hidden tokens" if self.train.objective == "masked" else "text"

    @property
    def encoding(self) -> str:
        """The encoding as it was given: rope(base=500000)+alibi."""
        return self.asked.encoding

    @property
    def layer_texts(self) -> tuple[str, ...]:
        """The encoding of each layer as it was given."""
        return tuple(map(spec_text, self.model.layers(self.encoding)))

    def as_given(self) -> Sections:
        """Return the settings that ask for this run again, from any directory. A sweep of them makes this run."""
        places = {name: getattr(self.data, name) for name in PLACES}
        sweep = SweepConfig((self.encoding,), (self.train.length,), (self.train.seed,))
        return dataclasses.replace(self.asked, data=dataclasses.replace(self.asked.data, **places), sweep=sweep)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """{path: value} of all settings that decide the weights.

        "data" is the digest of the text. Until the text is read, the settings of the data stand in its place.
        """
        settings = {f"model.{name}": value for name, value in vars(self.model).items() if name != "layer_policy"}
        unnamed = (*_FREE, *(name for name in _IF_SET if getattr(self.train, name) == getattr(TrainConfig, name)))
        settings |= {f"train.{name}": value for name, value in vars(self.train).items() if name not in unnamed}
        settings["train.position_lr_multiplier"] = multipliers_in_rows(self.rates)
        decayed = sorted(f"{n}.{name}" for n, layer in enumerate(self.rates) for name, rate in layer if rate.decays)
        settings |= {"train.decayed": decayed} if decayed else {}
        specs = plain_values([spec_of(encoding) for encoding in shortest_cycle(self.layers)])
        settings |= dict(_leaves(specs[0], "encoding") if len(specs) == 1 else _leaves(specs, "layers"))
        settings |= {f"code.{name}": digest for name, digest in self.code.items()}
        settings |= {f"parent.{name}": value for name, value in self.parent.items()}
        settings |= (
            {"data": self.text} if self.text else {f"data.{name}": v for name, v in self.data.token_settings().items()}
        )
        return plain_values(settings)

    @functools.cached_property
    def hash(self) -> str:
        """The name of the run: a hash of `settings`."""
        return _digest(self.settings)

    @property
    def is_imported(self) -> bool:
        """Whether the weights are those of a model from elsewhere, so that the run has no text of its own."""
        return self.text.startswith(IMPORTED)

    def as_parent(self) -> dict[str, str]:
        """Return what a run says of the one whose weights it has: `kind` is alike for runs of other seeds."""
        own = {name: value for name, value in self.settings.items() if name not in ("train.seed", "parent.hash")}
        return {"encoding": self.encoding, "kind": _digest(own), "hash": self.hash}

    def differences(self, other: RunConfig) -> list[str]:
        """Return the settings in which another run differs from this one, as "path: old -> new".

        Texts are compared by their settings if one of them is not read.
        """
        unread = not (self.text and other.text)
        a, b = (dataclasses.replace(run, text="").settings if unread else run.settings for run in (self, other))
        paths = sorted(path for path in a.keys() | b.keys() if a.get(path) != b.get(path))
        return [f"{path}: {a.get(path)!r} -> {b.get(path)!r}" for path in paths]

    def code_changes(self) -> str:
        """Say which of a stored run's own encodings have other code by now; "" if none has."""
        now = code_of(self.layers)
        changed = [
            f"{name} (digest {self.code.get(name, 'unknown')}, now {digest})"
            for name, digest in now.items()
            if self.code.get(name) != digest
        ]
        return f"the code of {' and of '.join(changed)} has changed" if changed else ""

    def to_json(self) -> dict[str, Any]:
        """Return what `config.json` holds."""
        sections = {name: vars(getattr(self, name)) for name in SECTIONS}
        resolved = {"layers": list(map(spec_of, self.layers)), "rates": to_json(self.rates), "code": dict(self.code)}
        texts = {"text": self.text, "held_out": self.held_out}
        head = {"schema_version": SCHEMA_VERSION, "hash": self.hash, **texts, "parent": dict(self.parent)}
        asked = {name: fields for name, fields in self.asked.fields().items() if name != "sweep"}
        return plain_values(head | {"asked": asked} | sections | resolved)

    @staticmethod
    def from_json(values: Any) -> RunConfig:
        """Return the run that a `config.json` holds. Raises ConfigError for other versions and for damaged values."""
        version = values.get("schema_version") if isinstance(values, Mapping) else None
        if version is None:
            family = values.get("model_type") if isinstance(values, Mapping) else None
            whose = f", but of a Hugging Face model ({family})" if family else ""
            raise ConfigError(f"it has no schema_version, so it is not of a run that `posx train` made{whose}")
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"its schema_version is {version!r}, but this posx reads {SCHEMA_VERSION}. "
                "Train the run in another --workdir, or use the posx that made it."
            )
        sections = typed_sections(values)
        try:
            layers, rates = tuple(map(from_spec, values["layers"])), from_json(values["rates"])
            code, parent = dict(values["code"]), dict(values["parent"])
            text, held_out = str(values["text"]), str(values["held_out"])
            asked = read_sections(values["asked"])
        except ConfigError:  # it names the encoding
            raise
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConfigError(f"its settings are damaged: {type(error).__name__}: {error}") from None
        if len(layers) != sections["model"].num_layers or len(rates) != len(layers):
            raise ConfigError(f"layers and rates must have {sections['model'].num_layers} entries, one for each layer")
        run = RunConfig(
            layers, rates=rates, code=code, text=text, held_out=held_out, parent=parent, asked=asked, **sections
        )
        for layer, stored in zip(layers, values["layers"], strict=True):
            if plain_values(spec_of(layer)) != stored:
                raise ConfigError(
                    f"it holds {stored}, but the code of {encoding_name(layer)} now resolves to {layer}. Restore the "
                    "code, or train the run again."
                )
        if run.hash != values.get("hash"):
            raise ConfigError(
                f"its settings have the hash {run.hash}, but it names {values.get('hash')!r}. It was edited, or "
                "another posx made it. Restore the file, or train the run again."
            )
        return run


def run_config(config: Sections | ConfigDict | Mapping[str, Any]) -> RunConfig:
    """Return the resolved settings of one run.

    Raises ConfigError for an unknown or mistyped setting, and with every setting that is out of its range. Whether the
    encodings, the protocols and the text fit is checked by `posx.lab.runs.checks`.
    """
    asked = config if isinstance(config, Sections) else read_sections(config)
    sections = {name: getattr(asked, name) for name in SECTIONS}
    if problems := [problem for section in sections.values() for problem in section.problems()]:
        raise ConfigError(join_problems(problems))
    model, train = asked.model.resolve(asked.train.objective), asked.train.resolve()
    layers, dims = model.encodings(asked.encoding, train.length), model.dims(train.length)
    rates = layer_rates(layers, dims, train.position_lr_multiplier)
    sections |= {"model": model, "data": asked.data.resolve(), "train": train}
    run = RunConfig(layers, rates=rates, code=code_of(layers), asked=asked, **sections)
    return dataclasses.replace(run, eval=run.eval.resolve(run.target_kind))


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def plain_values(value: Any) -> Any:
    """Return `value` as JSON holds it: tuples as lists."""
    return json.loads(json.dumps(value))


def _leaves(spec: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield ("path.to.field", value) of a spec, also of encodings within encodings."""
    several = isinstance(spec, list) and spec and isinstance(spec[0], dict | list)
    if not several and not isinstance(spec, dict):
        yield path, spec
        return
    for key, inner in spec.items() if isinstance(spec, dict) else enumerate(spec):
        yield from _leaves(inner, f"{path}.{key}")
