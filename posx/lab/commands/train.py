"""`posx train`: one run, trained and evaluated."""

from __future__ import annotations

import dataclasses
import math
import shlex
from pathlib import Path
from typing import Any

from posx.contract import walk_values
from posx.errors import ConfigError, WorkdirError
from posx.lab.commands import work_folder
from posx.lab.config import RunConfig, Sections, run_config
from posx.lab.config.sections import LISTS
from posx.lab.data import prepare
from posx.lab.files.rows import result_text
from posx.lab.runs import environment
from posx.lab.runs.changes import run_differences
from posx.lab.runs.checks import check_run, check_work_folder, say_unused, with_text
from posx.lab.runs.describe import describe
from posx.lab.runs.finding import find_run
from posx.lab.runs.folder import RunFolder
from posx.machine.devices import parse_mesh, use_every_core
from posx.machine.guard import start_devices
from posx.notices import say

#: Settings that may leave the shapes of arrays as they are, and change what is computed with them.
_MEANING = tuple(
    f"model.{name}:" for name in (
        "num_heads", "num_kv_heads", "head_dim", "mlp", "norm", "norm_eps", "parallel", "post_norm", "qk_norm",
    )
)  # fmt: skip


def run_train(values: dict[str, Any], config: Sections | RunConfig) -> None:
    """Train a run, or resume it, and evaluate it."""
    folder = RunFolder(work_folder(values, needed=False))
    use_every_core(_least_devices(values, folder))
    start_devices()
    parent = find_run(Path(values["from"]).expanduser().resolve()) if values["from"] else None
    run = _resolve_run(values, config, parent)
    if values["dry_run"]:
        if run.data.is_task:  # items are drawn, not read
            run = with_text(run, prepare(run.data, log=say))
        if values["workdir"]:
            folder.check_resumes(run)  # as the command itself does
        print(describe(run, values["mesh"]))
        return
    folder = RunFolder(work_folder(values))
    from posx.lab.runs.runner import train_and_evaluate  # Flax, Optax, Orbax: once the settings are known to be right

    rows = train_and_evaluate(run, folder, values["mesh"], parent)
    say(_summary(run, rows, values["workdir"]))


def _resolve_run(values: dict[str, Any], config: Sections | RunConfig, parent: RunFolder | None) -> RunConfig:
    """Return the resolved settings of the run. Raises ConfigError for settings of a sweep and for wrong settings."""
    for word, name in values["overrides"].items():
        if name.startswith("sweep."):
            setting = LISTS.get(name.removeprefix("sweep."), name.removeprefix("sweep.axes."))
            one = "" if setting.startswith("sweep.") else f", or give this run its value with --config.{setting}=VALUE"
            raise ConfigError(f"{word}: posx train makes one run. Make several with posx sweep{one}")
    run = config if isinstance(config, RunConfig) else run_config(config)
    if values["workdir"]:
        check_work_folder(work_folder(values), sweep=False)
    if parent:
        if (step := parent.newest_step) is None:
            raise WorkdirError(
                f"--from={values['from']}: {parent.path} has no checkpoint of its own. Import a model of Hugging Face "
                "first: posx import --from FOLDER --to runs/NAME"
            )
        held = parent.read_config()
        run = dataclasses.replace(run, parent=held.as_parent() | {"step": str(step)})
        changed = [line for line in held.differences(run) if line.startswith(_MEANING)]
        for line in (*run_differences(run, held), *changed):
            say(f"notice: --from={values['from']}: {line}")
        lengths = {getattr(value, "original_len", 0) for encoding in run.layers for value in walk_values(encoding)}
        if longer := sorted(length for length in lengths if length > held.train.length):
            say(
                f"notice: original_len is {longer[0]} tokens. --from was trained at {held.train.length}: for that, "
                f"write original_len={held.train.length}"
            )
    elif run.parent:
        raise ConfigError(
            f"--config_json: that run has or starts from the weights of the run {run.parent['hash']} "
            f"({run.parent['encoding']}). Name that run with --from."
        )
    run = check_run(run)
    say_unused([run], values["overrides"])
    return run


def _least_devices(values: dict[str, Any], folder: RunFolder) -> int:
    """Return the least number of CPU devices: those that the run was started on, or those of its mesh."""
    if values["mesh"] and not values["dry_run"]:
        return math.prod(parse_mesh(values["mesh"]))
    return environment.started_devices(folder) or 1


def _summary(run: RunConfig, rows: list[dict[str, Any]], workdir: str) -> str:
    """Return two lines: the results of the first protocol, and the next commands."""
    by_length = {row["eval_len"]: row for row in rows if row["protocol"] == rows[0]["protocol"]}
    lengths = (
        sorted({min(by_length, key=lambda length: abs(length - run.train.length)), max(by_length)}) if by_length else []
    )
    results = [f"{result_text(by_length[length])} at {length} tokens" for length in lengths]
    where = shlex.quote(workdir)
    step = rows[0]["step"] if rows else run.train.steps
    writes = run.train.objective != "masked" and not run.data.is_task
    written = f", or posx generate --workdir {where} --prompt 'some words'" if writes else ""
    return f"done: {', '.join([f'{workdir} at step {step}', *results])}\nnext: posx plot --workdir {where}{written}"
