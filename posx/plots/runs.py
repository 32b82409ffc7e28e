"""What a stored run is: where it lies, what its encoding is called, and the settings that its results follow from.

Read from `config.json` and a row of `eval.jsonl`, whichever there are. Imports no JAX and no matplotlib.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posx.config.schema_1 import migrated
from posx.config.stored import BEFORE, SAFE_TO_CHANGE, without_past
from posx.encodings.rates import Rates, from_json, multipliers, special
from posx.errors import ConfigError
from posx.files.parse import parsed

#: Settings that name no curve: the seeds of one curve differ in the first; the layers say what came of the second.
_NOT_NAMED = ("train.seed", "model.layer_policy")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run folder. Two are the same run only if they lie at the same path, whatever their names and settings."""

    path: str  # relative to the folder that is looked at; a row's run_id where no folder is known
    text: str = dataclasses.field(default="", compare=False)  # "rope(base=500000)+alibi"; of a hybrid "rope, nope"
    train_len: int | None = dataclasses.field(default=None, compare=False)
    seed: Any = dataclasses.field(default=None, compare=False)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)  # {"train.steps": 1200}
    resolved: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)  # {"model.mlp_dim": 128}
    data: str = dataclasses.field(default="", compare=False)  # digest of text and tokenizer, if known
    asked: str = dataclasses.field(default="", compare=False)  # all settings but length, seed and the encodings
    kind: str = dataclasses.field(default="", compare=False)  # those, and what the encodings and the data came to
    left_out: tuple[tuple[str, str], ...] = dataclasses.field(default=(), compare=False)  # (protocol, what and why)
    longest: int = dataclasses.field(default=0, compare=False)  # window that any row of the run serves, shown or not
    workdir: str = dataclasses.field(default="", compare=False)  # folder that is looked at, as a command can name it

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of training text that an optimiser step sees; None where no config.json says so."""
        batch = self.settings.get("train.batch_size")
        return batch * self.train_len if isinstance(batch, int) and self.train_len else None


def stored_run(path: str, config: Mapping[str, Any] | None, row: Mapping[str, Any] | None) -> Run:
    """The run of a folder's `config.json` and of one row of its results; either may be missing."""
    config, row = without_past(config or {}), row or {}
    settings = _settings(config) or {f"encoding.{name}": value for name, value in _fields(row.get("encoding_value"))}
    train_len, seed = (
        row.get(name, _section(config, "train").get(key)) for name, key in (("train_len", "length"), ("seed", "seed"))
    )
    text = _text(config, row)
    text = path if text is None else text
    if code := row.get("code", code_digests(config)):
        settings["code"] = ",".join(map(str, code.values()))
    settings["train.length"] = train_len
    resolved = _open_settings(config)
    if "train.position_lr_multiplier" in settings and "rates" not in _section(config, "resolved"):
        settings["train.position_lr_multiplier"] = 1.0  # what it was before it could be set
    digest = str(row.get("data_digest") or data_digest(config))
    if digest != data_digest(config) and "data_source" in row:  # measured on another text than it was trained on
        settings["data.source"] = resolved["data.source"] = row["data_source"]
    if settings.get("data.tokenizer") != "bpe":
        settings.pop("data.vocab_size", None)  # without effect
    # Stand in the kind or beside it. The digest stands for all settings of the data.
    elsewhere = ("encoding.", "data." if digest else "data.source", "train.length", "train.position_lr_multiplier")
    decisive = {name: value for name, value in (settings | resolved).items() if not name.startswith(elsewhere)}
    rates = _rates(config)
    trained_otherwise = [special(rates)] if special(rates) else []
    data = digest or str(settings.get("data.source"))
    dtype = row.get("dtype", settings.get("model.dtype"))
    measured = [_fields(_resolved(config, row)), trained_otherwise, data, "" if digest else row.get("tokenizer"), dtype]
    asked = json.dumps(decisive, sort_keys=True)
    kind = json.dumps([asked, *measured])
    return Run(path, text, train_len, seed, settings, resolved, digest, asked, kind)


def read_config(folder: pathlib.Path) -> Mapping[str, Any] | None:
    """Return a run folder's `config.json`, the first schema as the second; None if there is none that can be read.

    The place of a tokenizer's file is replaced by the digest of the tokenizer that lies in the folder.
    """
    try:
        values = parsed((folder / "config.json").read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return None
    if not isinstance(values, dict):
        return None
    with contextlib.suppress(ConfigError):
        values = migrated(values) if values.get("schema_version") == 1 else values
    if data := _section(_section(values, "resolved"), "data"):
        with contextlib.suppress(OSError):
            digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
            values["resolved"]["data"] = {**data, "tokenizer": digest}
    return values


def data_digest(config: Mapping[str, Any] | None) -> str:
    """Of the text that a run was trained on; "" where its config.json does not say."""
    return str(_section(_section(config or {}, "resolved"), "data").get("digest", ""))


def code_digests(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """{name: digest of its source} of the user's own encodings of a run."""
    return _section(_section(config or {}, "resolved"), "code")


def asked_targets(config: Mapping[str, Any] | None) -> frozenset[int]:
    """The numbers of targets that a run's own evaluation has."""
    return frozenset(n for name, n in _section(config or {}, "eval").items() if name.endswith("_targets"))


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """{"section.name": value} of what a config asks for that results follow from; older files lack newer settings."""
    found = {
        f"{section}.{name}": value
        for section in ("model", "data", "train")
        for name, value in (BEFORE[section] | dict(_section(config, section))).items()
        if section in config
    }
    kept = {name: value for name, value in found.items() if not name.startswith((*SAFE_TO_CHANGE, *_NOT_NAMED))}
    fields = {f"encoding.{name}": value for name, value in _section(config, "encoding").items() if name != "name"}
    return kept | fields if kept else {}


def _open_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"section.name": value} of settings that config.json holds a resolved value of."""
    resolved = _section(config, "resolved")
    found = {f"model.{name}": value for name, value in _section(resolved, "model").items()}
    places = _section(resolved, "data")
    found |= {f"data.{name}": places[name] for name in ("source", "validation", "tokenizer") if name in places}
    factors = multipliers(_rates(config)) or [1.0]
    return found | {"train.position_lr_multiplier": factors[0] if len(factors) == 1 else factors}


def _text(config: Mapping[str, Any], row: Mapping[str, Any]) -> str | None:
    """The encoding as it can be typed; of a hybrid its layers' cycle, such as "rope, nope"."""
    asked = config.get("encoding")
    asked = asked.get("name") if isinstance(asked, Mapping) else asked
    text = row.get("encoding", asked)
    layers = row.get("layers")
    if isinstance(layers, str) and isinstance(text, str) and "+" in layers and "+" not in text:
        layers = layers.split("+")  # rows of before name the encodings of a hybrid once each
        policy = _section(config, "model").get("layer_policy")
        if isinstance(policy, list):
            layers = [text if word == "encoding" else word for word in policy]
    if isinstance(layers, list) and len(set(map(str, layers))) > 1:
        return ", ".join(map(str, layers))
    if text is None and isinstance(asked, list):
        return "+".join(str(part.get("name")) if isinstance(part, Mapping) else str(part) for part in asked)
    return text if isinstance(text, str) else None


def _resolved(config: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    """What the encodings of the layers came to; one of them where all are alike, as rows tell it."""
    layers = _section(config, "resolved").get("layers", row.get("encoding_value"))
    alike = isinstance(layers, list) and layers and all(layer == layers[0] for layer in layers)
    return layers[0] if alike else layers


def _rates(config: Mapping[str, Any]) -> Rates:
    """How each layer's position parameters are trained; nothing where the run is from before there were rates."""
    try:
        return from_json(_section(config, "resolved").get("rates", ()))
    except (AttributeError, TypeError):
        return ()


def _fields(value: Any) -> list[tuple[str, Any]]:
    """The fields of an encoding, given as Python prints its value or as its spec, encodings within it included."""
    if isinstance(value, str):
        return [(name, text) for name, text in re.findall(r"(\w+)=((?:[^(),]|\([^()=]*\))*)", value) if text]
    return [(name, repr(tuple(found) if isinstance(found, list) else found)) for name, found in _leaves(value)]


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    for item in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
        for name, found in item.items() if isinstance(item, Mapping) else ():
            nested = found if isinstance(found, list) else [found]
            if any(isinstance(part, Mapping) for part in nested):
                yield from _leaves(nested)
            elif name != "name":
                yield name, found
