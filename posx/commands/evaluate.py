"""`posx evaluate`: a trained run, or all runs of a sweep, at any lengths."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from posx import interrupts
from posx.commands import COMMANDS, MEASURING, work_folder
from posx.config import EvalConfig, RunConfig
from posx.config.flags import set_anew, tuple_of_ints
from posx.config.overrides import setting_of
from posx.data import Dataset
from posx.data.store import cache_folder
from posx.errors import ConfigError, PartialFailure, WorkdirError
from posx.fields import items_of
from posx.files.atomic import finite
from posx.machine import processes
from posx.machine.backend import start_devices
from posx.machine.compile_cache import use_compile_cache
from posx.machine.devices import mesh_of, use_every_core
from posx.progress import by_reason, say
from posx.runs import text
from posx.runs.checks import check_stream, checked, say_unused
from posx.runs.export import unpacked
from posx.runs.folder import RunFolder, name_of, runs_in, typed_path
from posx.sweeps.engines.here import Here
from posx.sweeps.evaluation import Evaluation

if TYPE_CHECKING:
    from posx.plots.rows import Row

#: A stored run, how it is to be measured, and what of its text is set anew.
Asked = tuple[RunConfig, EvalConfig, dict[str, Any]]


def main(values: dict[str, Any], _: None) -> None:
    use_every_core(math.prod(mesh_of(values["mesh"])) if values["mesh"] and not processes.are_asked(values) else 1)
    if not values["dry_run"]:
        processes.join(values)
    if values["stop_with_stdin"]:
        interrupts.end_with_stdin()
    workdir = unpacked(work_folder(values))
    asked, failed = processes.together(lambda: _asked_of_each(values, workdir))
    for line in by_reason(failed.items()):
        say(line)
    if not values["stop_with_stdin"]:  # else the sweep's own process has said it
        words = {word: setting_of(word) for word in values["overrides"]}
        words |= {f"--stride={values['stride']}": "eval.stride"} if values["stride"] is not None else {}
        say_unused((dataclasses.replace(run, eval=config) for run, config, _ in asked.values()), words)
    from posx.plots.rows import rows_of  # Flax, Orbax, Matplotlib: once the settings are known to be right
    from posx.runs.runner import listed

    if values["dry_run"]:
        for folder in asked:
            config = asked[folder][1]
            print(f"{name_of(folder.path, workdir)}: {', '.join(config.protocols)} at {config.lengths}")
        measured = {}
    elif len(asked) + len(failed) == 1:
        measured = {folder: _evaluate_folder(values, folder, *asked[folder]) for folder in asked}
    else:
        measured, more = _side_by_side(values, workdir, asked)
        failed |= more
    rows = [row for found in measured.values() for row in found]
    shown = rows_of({folder.path: found for folder, found in measured.items()}, workdir)
    processes.first(lambda: _show(values, measured, rows, shown))
    told = by_reason(failed.items())
    told += [listed([row]) for row in rows if row["status"] in ("oom", "nonfinite")]
    if told:
        raise PartialFailure("; ".join(told))


def _asked_of_each(values: dict[str, Any], workdir: Path) -> tuple[dict[RunFolder, Asked], dict[str, str]]:
    """What is asked of every run in `workdir`, and {name: why} of those that cannot be measured."""
    folders = runs_in(workdir)
    if len(folders) > 1 and (values["mesh"] or processes.several()):
        raise ConfigError(f"--workdir={values['workdir']} holds {len(folders)} runs: several processes measure one")
    asked: dict[RunFolder, Asked] = {}
    failed: dict[str, str] = {}
    for folder in folders:  # settings that are wrong for one of them start nothing
        try:
            asked[folder] = _asked(values, folder)
        except WorkdirError as error:
            if len(folders) == 1:
                raise
            failed[name_of(folder.path, workdir)] = str(error)
    return asked, failed


def _show(
    values: dict[str, Any], runs: Iterable[RunFolder], rows: Sequence[dict[str, Any]], shown: Sequence[Row]
) -> None:
    """Print the rows as JSON, or the table of those that are `shown` and draw the figures again."""
    from posx.plots.tables import is_table, table

    if values["json"]:
        for row in rows:
            print(json.dumps(finite(row)))
    elif rows:
        print(made := table(shown))
        sys.stdout.flush()  # before what takes longer
        if work_folder(values).is_file():
            say("notice: rows of an exported file are not stored; --json prints them")
        places = list(dict.fromkeys(place for run in runs for place in (run.path, *run.path.parents[:2])))
        for place in places:
            _draw_again(place)  # of a run, its sweep, the folder of sweeps
        tables = [place / "table.md" for place in places if is_table(place / "table.md")]
        if others := [typed_path(path) for path in tables if path.read_text(encoding="utf-8") != f"{made}\n"]:
            say(
                f"notice: the printed table has the rows of this command alone. {' and '.join(others)} has all stored "
                "rows of its folder that are on the same targets"
            )


def _side_by_side(
    values: dict[str, Any], workdir: Path, asked: dict[RunFolder, Asked]
) -> tuple[dict[RunFolder, list[dict[str, Any]]], dict[str, str]]:
    """The rows of each run, measured in processes of their own, and {name: why it failed} of those without."""
    words = [f"--{name}={values[name]}" for name in MEASURING if values[name] not in (None, "")]
    words += ["--debug"] * values["debug"] + values["overrides"]
    with tempfile.TemporaryDirectory() as outputs:
        tasks = [
            Evaluation(dataclasses.replace(run, eval=config), folder, tuple(words), Path(outputs, str(number)))
            for number, (folder, (run, config, _)) in enumerate(asked.items())
        ]
        failed = Here(tasks, values["jobs"]).run(tasks, tasks, "evaluate", echo=True)
        rows = {task.folder: task.rows() for task in tasks}
    return rows, {name_of(folder.path, workdir): why for folder, why in failed.items() if not rows[folder]}


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
    values: dict[str, Any], folder: RunFolder, run: RunConfig, config: EvalConfig, anew: dict[str, Any]
) -> list[dict[str, Any]]:
    from posx.runs.evaluate import evaluate_run
    from posx.runs.load import load_model
    from posx.training.layout import Copies, Layout, asked_layout

    use_compile_cache(cache_folder(dataclasses.replace(run.data, **anew)))
    start_devices()  # before the text is read
    dataset = processes.together(lambda: _text(folder, run, config, anew))
    layout: Layout = Copies()
    if values["mesh"] or processes.several():
        key_heads = run.model.kv_heads
        layout = processes.together(lambda: asked_layout(values["mesh"], 0, key_heads, jax.device_count()))
    facts = {"settings": repr((run, config)), "text": dataset.digest, "--mesh": str(layout)}
    processes.check_same(facts | {"--workdir": str(work_folder(values))})
    with folder.held():
        model, params, _, step = load_model(folder, layout)
        params = layout.put(params) if processes.several() else params
        return evaluate_run(run, config, model, params, dataset, folder, step, layout)


def _text(folder: RunFolder, run: RunConfig, config: EvalConfig, anew: dict[str, Any]) -> Dataset:
    dataset = text.text_of(folder, run, anew)
    check_stream(config, run.train.length, dataset)
    return dataset


def _eval_config(values: dict[str, Any], config: EvalConfig) -> EvalConfig:
    asked: dict[str, Any] = {}
    if values["lengths"]:
        asked["lengths"] = asked["sliding_lengths"] = tuple_of_ints(values["lengths"], "lengths")
    if values["protocol"]:
        asked["protocols"] = tuple(items_of(values["protocol"]))
    if values["stride"] is not None:
        asked["stride"] = values["stride"]
    if values["num_targets"] is not None:
        asked["num_targets"] = asked["sliding_targets"] = values["num_targets"]
    if values["executor"]:
        asked["executor"] = values["executor"]
    return dataclasses.replace(config, **asked)


def _draw_again(folder: Path) -> None:
    """The figures and the table of a run or a sweep, where figures were drawn: they follow its rows."""
    from posx import plots

    try:
        plots.draw_again(folder)
    except WorkdirError as error:
        say(f"no figures: {error}")
