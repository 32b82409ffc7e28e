"""`posx evaluate`: a trained run, or all runs of a sweep, at any lengths."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posx.errors import ConfigError, PartialFailure, WorkdirError
from posx.lab.argv.settings import replace_settings
from posx.lab.commands import COMMANDS, work_folder
from posx.lab.config import RunConfig
from posx.lab.files.lines import json_line
from posx.lab.files.rows import failures
from posx.lab.progress import group_by_reason
from posx.lab.runs.changes import change_run, run_differences
from posx.lab.runs.checks import check_run, say_unused
from posx.lab.runs.cost import evaluation_speed
from posx.lab.runs.exported import unpack
from posx.lab.runs.finding import find_runs, run_name, typed_path
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.requests import Request, evaluate_request
from posx.lab.sweeps.engines.local import LocalEngine
from posx.lab.sweeps.schedule import CORE_SPEED
from posx.lab.sweeps.tasks import Evaluation
from posx.machine.cores import usable_cores
from posx.machine.devices import parse_mesh, use_every_core
from posx.machine.guard import start_devices, uses_cpus
from posx.notices import say
from posx.parsing import split, split_items, to_type

#: How to keep a change off the layers that it does not need. A whole spec would also change those of other encodings.
WINDOWS = " (--layers=full with one field, such as base=500000, leaves these out)"

#: {setting of eval: the flag that sets it}.
FLAGS = {
    "lengths": "lengths", "num_targets": "num_targets", "protocols": "protocol", "stride": "stride",
    "executor": "executor",
}  # fmt: skip
#: {setting of eval: the flag that sets it too, unless it is given}.
ALSO = {"sliding_lengths": "lengths", "sliding_targets": "num_targets"}

#: {run folder: its rows of `eval.jsonl`}.
Measured = Mapping[RunFolder, Sequence[dict[str, Any]]]


def run_evaluate(values: dict[str, Any], _: None) -> Callable[[], None]:
    """Evaluate runs; return the function that shows their rows."""
    use_every_core(math.prod(parse_mesh(values["mesh"])) if values["mesh"] else 1)
    workdir = unpack(work_folder(values))
    requests, failed = _requests(values, workdir)
    if (values["encoding"] or values["masks"]) and RunFolder(workdir).config_file.exists():
        workdir = workdir.parent  # the folder of the runs under other encodings
    for line in group_by_reason(failed.items()):
        say(line)
    stride = {} if values["stride"] is None else {f"--stride={values['stride']}": "eval.stride"}
    say_unused((request.asked for request in requests), values["overrides"] | stride)
    for request in requests:
        if request.parent:
            name = request.folder.path.name
            for line in run_differences(request.run, request.parent.read_config(), WINDOWS):
                say(f"{name}: {line}")
        if request.parent and not values["dry_run"]:
            request.folder.take_weights(request.parent, request.run)
    measured: Measured = {}
    if values["dry_run"]:
        for request in requests:
            name, config = run_name(request.folder.path, workdir), request.asked.eval
            print(f"{name}: {', '.join(config.protocols)} at {config.lengths}")
        failed |= _print_estimate(values, {run_name(one.folder.path, workdir): one for one in requests})
    elif len(requests) + len(failed) == 1:
        place = str(work_folder(values))
        measured = {request.folder: evaluate_request(request, values["mesh"], place) for request in requests}
    else:
        measured, reasons = _evaluate_processes(values, requests)
        failed |= {run_name(folder.path, workdir): why for folder, why in reasons.items() if not measured[folder]}
    return functools.partial(_show, values, workdir, measured, failed)


def _requests(values: dict[str, Any], workdir: Path) -> tuple[list[Request], dict[str, str]]:
    """Return a request for each run in `workdir`, and {name: reason} of the runs that cannot be evaluated.

    Raises ConfigError for wrong settings, so that nothing starts.
    """
    folders = find_runs(workdir)
    requests: dict[Path, Request] = {}
    failed: dict[str, str] = {}
    errors = []
    for folder in folders:
        try:
            variants = list(run_variants(values, folder))
        except (ConfigError, WorkdirError) as error:
            errors.append(error)
            failed[run_name(folder.path, workdir)] = str(error)
        else:
            requests |= {one[0].path: make_request(values, *one) for one in variants}
    if errors and not requests:
        raise errors[0]
    if not requests:
        raise ConfigError(f"--workdir={values['workdir']} has the weights of another run. Name that run.")
    if len(requests) > 1 and (values["mesh"] or (values["processes"] or 1) > 1):
        first = next(iter(requests))
        raise ConfigError(
            f"--workdir={values['workdir']}: there are {len(requests)} runs to evaluate, but several processes "
            f"evaluate one run. Name one: --workdir={first}"
        )
    return list(requests.values()), failed


def run_variants(values: dict[str, Any], folder: RunFolder) -> Iterator[tuple[RunFolder, RunConfig, RunFolder | None]]:
    """Yield a run, or those with its weights under the encodings and masks that the flags name, and their parent.

    Raises ConfigError if the flags name nothing, or a change that does not fit the trained weights.
    """
    texts, masks = split(values["encoding"]), tuple(split(values["masks"]))
    for flag, choices in (("encoding", texts), ("masks", masks)):
        if values[flag] and not choices:
            raise ConfigError(f"--{flag}={values[flag]} names nothing. Give one, as --{flag}=...")
    if values["layers"] and not (texts or masks):
        raise ConfigError(f"--layers={values['layers']} changes nothing alone. Give --encoding or --masks too.")
    if not texts and not masks:
        yield folder, folder.read_config(), None
    elif work_folder(values).is_file():
        raise ConfigError(f"--encoding, --masks: {values['workdir']} is an exported file. Name the folder of a run.")
    elif not folder.is_borrowed:
        own, children = folder.read_config(), {child.hash: child for child in folder.children() if child.hash}
        for text in texts or [""]:
            run = change_run(own, text, masks, values["layers"])
            if run is own:
                asked = " and ".join([*([text] if text else []), *masks])
                say(f"notice: {folder.path.name}: {asked} changes nothing, so its rows are those of the run itself")
                yield folder, own, None
            else:
                words = [*([run.encoding] if text else []), *(run.model.mask_policy if masks else [])]
                words += [f"layers={values['layers']}"] * bool(values["layers"])
                child = children.get(run.hash) or folder.child(words)  # the same change may have another name
                if child in (other for name, other in children.items() if name != run.hash):
                    child = folder.child([*words, run.hash])
                children[run.hash] = child
                yield child, child.read_config() if child.hash else run, folder


def make_request(values: dict[str, Any], folder: RunFolder, run: RunConfig, parent: RunFolder | None) -> Request:
    """Return the evaluation of a run by the flags and settings of a command. Raises ConfigError if they do not fit."""
    settings = replace_settings(run, values["overrides"], COMMANDS["evaluate"].sections)
    for name in {"tokenizer", "vocab_size"} & set(settings["data"]):
        raise ConfigError(
            f"--config.data.{name}: a run keeps the tokenizer that it was trained with. Leave this setting out."
        )
    read = values | {
        "lengths": to_type(values["lengths"], tuple[int, ...], "--lengths"),
        "protocol": tuple(split_items(values["protocol"])),
    }
    given = {name: read[flag] for name, flag in (FLAGS | ALSO).items() if read[flag] not in (None, "", ())}
    if twice := [name for name in FLAGS if name in given.keys() & settings["eval"].keys()]:
        raise ConfigError(f"--{FLAGS[twice[0]]} and --config.eval.{twice[0]} are about the same setting. Give it once.")
    config = dataclasses.replace(run.eval, **given | settings["eval"])
    asked = dataclasses.replace(run, data=dataclasses.replace(run.data, **settings["data"]))
    if run.data.is_task and not asked.data.is_task:
        raise WorkdirError(
            f"{folder.path} was trained on {run.data.source}, so it knows the words of this task and not those of a "
            "text. Name a task of the same words with --config.data.source."
        )
    asked = dataclasses.replace(asked, eval=config.resolve(asked.target_kind))
    check_run(asked)
    return Request(folder, run, asked, settings["data"], parent)


def _print_estimate(values: dict[str, Any], requests: Mapping[str, Request]) -> dict[str, str]:
    """Print the rows that are asked of runs with their cost. Return {name: reason} of the runs that fail."""
    from posx.lab.commands.estimate import estimate

    made, failed = estimate(requests, values["jobs"])
    print(f"\n{made}" if made else "", end="\n" if made else "")
    return failed


def _core_speed(run: RunConfig) -> float:
    """Return the expected FLOP/s of evaluation on one core. An accelerator is left to the processes that evaluate."""
    if not uses_cpus():
        return CORE_SPEED
    start_devices()
    return evaluation_speed(run) / len(usable_cores())


def _evaluate_processes(values: dict[str, Any], requests: Sequence[Request]) -> tuple[Measured, dict[RunFolder, str]]:
    """Return the rows of each run, measured in its own process, and {folder: reason} of the runs that failed."""
    with tempfile.TemporaryDirectory() as outputs:
        tasks = [
            Evaluation(
                request.asked,
                request.folder,
                Path(outputs, str(number)),
                request,
                speed=_core_speed(request.run),
                debug=values["debug"],
            )
            for number, request in enumerate(requests)
        ]
        failed = LocalEngine(tasks, values["jobs"]).run(tasks, "evaluate", echo=True)
        return {task.folder: task.rows() for task in tasks}, failed


def redraw(runs: Iterable[RunFolder]) -> list[Path]:
    """Draw the figures that exist again. Return the folders of the runs, of their sweeps and of the sweeps around."""
    from posx.lab import plots  # Matplotlib: once the settings are known to be right

    places = list(dict.fromkeys(place for run in runs for place in (run.path, *run.path.parents[:2])))
    for place in places:
        try:
            plots.draw_again(place)
        except WorkdirError as error:
            say(f"notice: there are no figures: {error}")
    return places


def _show(values: dict[str, Any], workdir: Path, measured: Measured, failed: Mapping[str, str]) -> None:
    """Print the rows as JSON lines, or print them as a table and redraw the figures that exist.

    Raises PartialFailure if some runs or lengths failed.
    """
    from posx.lab import plots  # Matplotlib: once the settings are known to be right
    from posx.lab.results.table import build_results

    rows = [row for run_rows in measured.values() for row in run_rows]
    if values["json"]:
        for row in rows:
            print(json_line(row))
    elif rows:
        stored = {run_name(folder.path, workdir): own for folder, own in measured.items()}
        if made := plots.table(build_results(stored, typed_path(workdir))):
            print(made)
        sys.stdout.flush()  # before the figures, which take longer
        if work_folder(values).is_file():
            say("notice: the rows of an exported file are not stored; --json prints them")
        places = redraw(measured)
        tables = [place / "table.md" for place in places if plots.is_table(place / "table.md")]
        shown = {path: path.read_text("utf-8", "replace").partition(f"\n\n{plots.TRAINING}")[0] for path in tables}
        others = [typed_path(path) for path, text in shown.items() if text.rstrip("\n") != made]
        if made and others:
            say(
                "notice: the printed table has only the rows of this command. All stored rows on the same targets "
                f"are in {' and '.join(others)}"
            )
    if problems := [*group_by_reason(failed.items()), *failures(rows)]:
        raise PartialFailure(f"{'; '.join(problems)} (docs/guides/troubleshooting.md)")
