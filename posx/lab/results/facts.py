"""The facts of a run that its rows, or its `config.json`, tell: how it was trained, and what it was scored on."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from posx.errors import WorkdirError
from posx.lab.config.run import IMPORTED
from posx.lab.config.sections import shortest_cycle
from posx.lab.runs.folder import RunFolder

#: Settings that belong to an encoding or are resolved for it. They follow from the text of the encoding, unless posx
#: resolved the same text in another way.
OF_ENCODINGS = (
    "encoding.", "layers.", "code.", "model.mask_policy", "train.position_lr_multiplier", "train.decayed",
    "train.positions",
)  # fmt: skip
#: Settings in which the runs of one curve differ.
SEED = ("train.seed", "parent.hash")
#: The settings of training that an imported model has.
_OF_IMPORTED = ("train.length", "train.objective")
#: The settings in which rows of one run can differ: the text that was scored, and the step of the weights. A training
#: that ended because its task was solved counts as one of all its steps.
SCORED = SCORED_TEXT, SCORED_STEP = "scored.text", "scored.step"


def run_facts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of the run of a stored row, by the names of their columns.

    The text of training is known by its digest. It is also known by its place if the row was scored on the same text.
    How an imported model was trained is not known.
    """
    trained = row["settings"]
    settings = {name: value for name, value in trained.items() if not name.startswith(("code.", "data"))}
    settings |= {f"code.{name}": digest for name, digest in row.get("code", {}).items()}
    settings |= {f"trained.{n}": v for n, v in trained.items() if n.startswith("code.") and settings.get(n) != v}
    text = str(trained.get("data", ""))
    if is_imported := text.startswith(IMPORTED):  # posx did not train it
        settings = {n: v for n, v in settings.items() if not n.startswith("train.") or n in _OF_IMPORTED}
    if row.get("own_text"):  # else the settings of the data are of another text
        settings |= {f"data.{name}": value for name, value in row.get("data_settings", {}).items()}
    known = {
        "imported.model" if is_imported else "data.text": text.removeprefix(f"{IMPORTED} ") or None,
        "data.source": row.get("data_source") if row.get("own_text") else None,
        "data.tokenizer": row.get("tokenizer"),
        SCORED_TEXT: row.get("data_digest"),
        SCORED_STEP: trained.get("train.steps") if row.get("solved") else row.get("step"),
    }
    settings |= {name: value for name, value in known.items() if value is not None}
    layers, masks = row.get("layers", []), trained.get("model.mask_policy", ["causal"])
    text = ", ".join(layers if len(set(layers)) > 1 else layers[:1] or [row["encoding"]])
    text += f" under {', '.join(masks)}" if masks not in (["causal"], ["full"]) else ""
    text += f" at {trained['train.positions']}" if "train.positions" in trained else ""
    text += f" from {trained['parent.encoding']}" if "parent.step" in trained else ""
    # A run that trains on from its parent has weights of its own.
    weights_of = None if "parent.step" in trained else trained.get("parent.hash")
    facts = {"method": text, "train_len": row["train_len"], "weights_of": weights_of or row.get("hash")}
    return settings_facts(settings) | facts


def settings_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a run that follow from its settings. The text of training counts by its digest."""
    text = [name for name in settings if name.startswith("data.") and name != "data.text"]
    return {
        "settings": settings,
        "kind": _drop_settings(settings, *SEED, *text, *SCORED),
        "around": _drop_settings(settings, *SEED, "train.length", "data.", SCORED_TEXT, *OF_ENCODINGS),
        "train_seed": settings.get("train.seed"),
        "scored_text": settings.get(SCORED_TEXT),
        "scored_step": settings.get(SCORED_STEP),
    }


def _drop_settings(settings: Mapping[str, Any], *starts: str) -> str:
    kept = {name: value for name, value in settings.items() if not name.startswith(starts)}
    return json.dumps(kept, sort_keys=True)


def config_facts(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """Return the facts of a run without rows from its `config.json`, a length of 0 if that cannot be read."""
    try:
        run = RunFolder(folder).read_config()
    except WorkdirError:
        return settings_facts({}) | {"run": name, "method": name, "train_len": 0}
    facts = {"settings": run.settings, "encoding": run.encoding, "layers": shortest_cycle(run.layer_texts)}
    data = {"own_text": True, "data_source": run.data.source, "tokenizer": run.data.tokenizer}
    data |= {"hash": run.hash, "train_len": run.train.length, "code": run.code}
    return run_facts(facts | data) | {"run": name}
