"""`posx evaluate`: a trained run, or all runs of a sweep, at any lengths."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from posx.commands import COMMANDS, work_folder
from posx.config import EvalConfig, RunConfig
from posx.config.flags import set_anew, tuple_of_ints
from posx.data.store import cache_folder
from posx.errors import ConfigError, PartialFailure, PosxError, WorkdirError
from posx.machine.compile_cache import use_compile_cache
from posx.machine.devices import use_every_core
from posx.progress import say
from posx.runs import text
from posx.runs.checks import check_stream, checked
from posx.runs.folder import RunFolder, runs_in


def main(values: dict[str, Any], _: None) -> None:
    use_every_core()
    workdir = work_folder(values)
    folders = runs_in(workdir)
    rows, failed = [], []
    for folder in folders:  # settings that are wrong for one of them start nothing
        with contextlib.suppress(WorkdirError):
            _asked(values, folder)
    from posx.plots.rows import rows_of  # Flax, Orbax, Matplotlib: once the settings are known to be right
    from posx.plots.tables import table
    from posx.runs.runner import listed

    for folder in folders:
        try:
            rows += rows_of(folder.path, workdir, _evaluate_folder(values, folder))
        except PosxError as error:
            if len(folders) == 1:
                raise
            failed.append(f"{folder.path.name}: {error}")
            say(failed[-1])
    if rows:
        print(table(rows))
        for place in (workdir, *workdir.parents[:2]):  # the run, its sweep, the folder of sweeps
            _draw_again(place)
    failed += [listed([row]) for row in rows if row["status"] in ("oom", "nonfinite")]
    if failed:
        raise PartialFailure("; ".join(failed))


def _asked(values: dict[str, Any], folder: RunFolder) -> tuple[RunConfig, EvalConfig, dict[str, Any]]:
    """A stored run, how it is to be measured, what of its text is set anew. Raises ConfigError for wrong settings."""
    run = folder.read_config()
    asked = set_anew(run, values["overrides"], COMMANDS["evaluate"].sections)
    for name in {"tokenizer", "vocab_size"} & set(asked["data"]):
        raise ConfigError(f"--config.data.{name}: the weights of a run go with the tokenizer that it was trained with")
    config = _eval_config(values, dataclasses.replace(run.eval, **asked["eval"]))
    checked(dataclasses.replace(run, eval=config, data=dataclasses.replace(run.data, **asked["data"])))
    return run, config, asked["data"]


def _evaluate_folder(values: dict[str, Any], folder: RunFolder) -> list[dict[str, Any]]:
    run, config, anew = _asked(values, folder)
    if values["dry_run"]:
        print(f"{folder.path.name}: {', '.join(config.protocols)} at {config.lengths}")
        return []
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
