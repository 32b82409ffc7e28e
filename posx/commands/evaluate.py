"""`posx evaluate`: a trained run, or all runs of a sweep, at any lengths."""

from __future__ import annotations

import dataclasses
from typing import Any

from posx.commands.command import Command, run_folders, work_folder
from posx.config import EvalConfig, RunConfig
from posx.config.flags import tuple_of_ints
from posx.data import prepare
from posx.data.store import cache_folder
from posx.errors import ConfigError, PartialFailure, PosxError, WorkdirError
from posx.evaluation.protocols import PROTOCOLS
from posx.machine.compile_cache import use_compile_cache
from posx.plots.tables import table
from posx.progress import say
from posx.runs.checks import check_stream, checked
from posx.runs.evaluate import evaluate_run
from posx.runs.folder import RunFolder
from posx.runs.load import load_model
from posx.runs.runner import listed


def evaluate_command(values: dict[str, Any], _: None) -> None:
    folders = run_folders(work_folder(values))
    rows, failed = [], []
    for folder in folders:
        try:
            rows += _evaluate_folder(values, folder)
        except PosxError as error:
            if len(folders) == 1 or isinstance(error, ConfigError):
                raise
            failed.append(f"{folder.path.name}: {error}")
            say(failed[-1])
    if rows:
        print(table(rows))
    failed += [listed([row]) for row in rows if row["status"] in ("oom", "nonfinite")]
    if failed:
        raise PartialFailure("; ".join(failed))


def _evaluate_folder(values: dict[str, Any], folder: RunFolder) -> list[dict[str, Any]]:
    run = folder.read_config()
    config = _eval_config(values, run)
    checked(dataclasses.replace(run, eval=config))
    if values["dry_run"]:
        print(f"{folder.path.name}: {', '.join(config.protocols)} at {config.lengths}")
        return []
    use_compile_cache(cache_folder(run.data))
    dataset = prepare(run.data, log=say)
    check_stream(config, run.train.length, dataset)
    with folder.held():
        model, params, tokenizer, step = load_model(folder)
        if tokenizer.digest != dataset.tokenizer.digest:
            raise WorkdirError(
                f"{folder.path} was trained with another tokenizer than its data gives now (digest "
                f"{tokenizer.digest[:12]}, now {dataset.tokenizer.digest[:12]}): restore the text it was trained on"
            )
        return evaluate_run(run, config, model, params, dataset, folder, step)


def _eval_config(values: dict[str, Any], run: RunConfig) -> EvalConfig:
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
    return dataclasses.replace(run.eval, **asked)


COMMAND = Command(
    evaluate_command, "measure a trained run, or all runs of a sweep, at any lengths",
    {
        "lengths": ("", "window lengths in tokens, for example 64,128"),
        "protocol": ("", f"{', '.join(PROTOCOLS)}, or several with commas"),
        "stride": (0, "of the sliding protocol, in tokens"),
        "num_targets": (0, "targets to score; 0 as in the run's config"),
        "executor": ("", "auto, dense or blockwise"),
    },
)  # fmt: skip
