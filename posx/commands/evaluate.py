"""`posx evaluate`: a trained run, or all runs of a sweep, at any lengths."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from posx import interrupts
from posx.commands import COMMANDS, MEASURING, work_folder
from posx.config import EvalConfig, RunConfig
from posx.config.flags import set_anew, tuple_of_ints
from posx.data.store import cache_folder
from posx.errors import ConfigError, PartialFailure, WorkdirError
from posx.files.atomic import finite
from posx.machine.compile_cache import use_compile_cache
from posx.machine.devices import use_every_core
from posx.progress import Meter, say
from posx.runs import text
from posx.runs.checks import check_stream, checked
from posx.runs.folder import RunFolder, runs_in
from posx.sweeps.evaluation import Evaluation
from posx.sweeps.processes import run_all, schedule_here

#: A stored run, how it is to be measured, and what of its text is set anew.
Asked = tuple[RunConfig, EvalConfig, dict[str, Any]]


def main(values: dict[str, Any], _: None) -> None:
    use_every_core()
    if values["stop_with_stdin"]:
        interrupts.end_with_stdin()
    workdir = work_folder(values)
    folders = runs_in(workdir)
    asked: dict[RunFolder, Asked] = {}
    failed: dict[str, str] = {}
    for folder in folders:  # settings that are wrong for one of them start nothing
        try:
            asked[folder] = _asked(values, folder)
        except WorkdirError as error:
            if len(folders) == 1:
                raise
            failed[folder.path.name] = str(error)
    for name, reason in failed.items():
        say(f"{name}: {reason}")
    from posx.plots.rows import rows_of  # Flax, Orbax, Matplotlib: once the settings are known to be right
    from posx.plots.tables import table
    from posx.runs.runner import listed

    if values["dry_run"]:
        for folder in asked:
            config = asked[folder][1]
            print(f"{folder.path.name}: {', '.join(config.protocols)} at {config.lengths}")
        measured = {}
    elif len(folders) == 1:
        measured = {folder: _evaluate_folder(folder, *asked[folder]) for folder in folders}
    else:
        measured, more = _side_by_side(values, asked)
        failed |= more
    rows = [row for folder, found in measured.items() for row in rows_of(folder.path, workdir, found)]
    if values["json"]:
        for row in rows:
            print(json.dumps(finite(row)))
    elif rows:
        print(table(rows))
        for place in (workdir, *workdir.parents[:2]):  # the run, its sweep, the folder of sweeps
            _draw_again(place)
    told = [f"{name}: {reason}" for name, reason in failed.items()]
    told += [listed([row]) for row in rows if row["status"] in ("oom", "nonfinite")]
    if told:
        raise PartialFailure("; ".join(told))


def _side_by_side(
    values: dict[str, Any], asked: dict[RunFolder, Asked]
) -> tuple[dict[RunFolder, list[dict[str, Any]]], dict[str, str]]:
    """The rows of each run, measured in processes of their own, and {name: why it failed} of those without."""
    words = [f"--{name}={values[name]}" for name in (*MEASURING, "debug") if values[name]] + values["overrides"]
    with tempfile.TemporaryDirectory() as outputs:
        tasks = [
            Evaluation(dataclasses.replace(run, eval=config), folder, tuple(words), Path(outputs, str(number)))
            for number, (folder, (run, config, _)) in enumerate(asked.items())
        ]
        schedule, cores = schedule_here(tasks, values["jobs"])
        say(f"{schedule}; --jobs=N for another number")
        failed = run_all(tasks, range(len(tasks)), schedule, cores, "evaluate", Meter.print)
        rows = {task.folder: task.rows() for task in tasks}
    return rows, {tasks[n].folder.path.name: why for n, why in failed.items() if not rows[tasks[n].folder]}


def _asked(values: dict[str, Any], folder: RunFolder) -> Asked:
    """What `values` ask of a stored run. Raises ConfigError for wrong settings."""
    run = folder.read_config()
    asked = set_anew(run, values["overrides"], COMMANDS["evaluate"].sections)
    for name in {"tokenizer", "vocab_size"} & set(asked["data"]):
        raise ConfigError(f"--config.data.{name}: the weights of a run go with the tokenizer that it was trained with")
    config = _eval_config(values, dataclasses.replace(run.eval, **asked["eval"]))
    checked(dataclasses.replace(run, eval=config, data=dataclasses.replace(run.data, **asked["data"])))
    return run, config, asked["data"]


def _evaluate_folder(
    folder: RunFolder, run: RunConfig, config: EvalConfig, anew: dict[str, Any]
) -> list[dict[str, Any]]:
    from posx.runs.evaluate import evaluate_run
    from posx.runs.load import load_model

    use_compile_cache(cache_folder(dataclasses.replace(text.settings(folder, run.data), **anew)))
    dataset = text.text_of(folder, run, anew)
    check_stream(config, run.train.length, dataset)
    with folder.held():
        model, params, _, step = load_model(folder)
        return evaluate_run(run, config, model, params, dataset, folder, step)


def _eval_config(values: dict[str, Any], config: EvalConfig) -> EvalConfig:
    asked: dict[str, Any] = {}
    if values["lengths"]:
        asked["lengths"] = asked["sliding_lengths"] = tuple_of_ints(values["lengths"], "lengths")
    if values["protocol"]:
        asked["protocols"] = tuple(values["protocol"].split(","))
    if values["stride"]:
        asked["stride"] = values["stride"]
    if values["num_targets"]:
        asked["num_targets"] = asked["sliding_targets"] = values["num_targets"]
    if values["executor"]:
        asked["executor"] = values["executor"]
    return dataclasses.replace(config, **asked)


def _draw_again(folder: Path) -> None:
    """The figures and the table of a run or a sweep, where figures were drawn: they follow its rows."""
    from posx import plots

    if not plots.has_figures(folder):
        return
    try:
        plots.plot(folder)
    except WorkdirError as error:
        say(f"no figures: {error}")
