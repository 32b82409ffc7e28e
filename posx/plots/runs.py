"""What a stored run is: where it lies, what its encoding is called, and the settings that its results follow from.

Read from `config.json` and a row of `eval.jsonl`, whichever there are. Imports no JAX and no matplotlib.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from posx.encodings import spec_text
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


def stored_run(path, config, row):
    config, row = config or {}, row or {}
    settings = dict(row.get("settings", {}))
    if not settings and config:
        from posx.config import RunConfig
        try:
            settings = RunConfig.from_json(config).settings
        except Exception:
            settings = {}
    train_len, seed = row.get("train_len", settings.get("train.length")), row.get("seed", settings.get("train.seed"))
    layers = row.get("layers", [])
    text = ", ".join(layers) if len(set(layers)) > 1 else row.get("encoding") or (spec_text(config["asked"]["encoding"]) if config else path)
    digest = row.get("data_digest", settings.get("data", ""))
    decisive = {k: v for k, v in settings.items() if not k.startswith(("encoding.", "data", "train.length", "train.seed"))}
    asked = json.dumps(decisive, sort_keys=True)
    kind = json.dumps([asked, {k: v for k, v in settings.items() if k.startswith("encoding.")}, digest])
    return Run(path, text, train_len, seed, {k: v for k, v in settings.items() if k not in ("train.seed", "data", "encoding.name")}, {}, digest, asked, kind)


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
    return values


def data_digest(config):
    return str((config or {}).get("text", ""))


def code_digests(config):
    return (config or {}).get("code", {})


def asked_targets(config: Mapping[str, Any] | None) -> frozenset[int]:
    """The numbers of targets that a run's own evaluation has."""
    return frozenset(n for name, n in _section(config or {}, "eval").items() if name.endswith("_targets"))


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


