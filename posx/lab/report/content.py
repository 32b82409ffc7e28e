"""The contents of a report as plain JSON: curves, points, verdicts, training, settings, and what was left out.

It is computed from stored rows alone, by the functions that draw the figures. The page's script only chooses and draws.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import inspect
import io
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from posx.errors import PosxError
from posx.evaluation.answers import Answers
from posx.evaluation.differences import Verdict
from posx.evaluation.statistics import horizon
from posx.lab.config import TrainConfig, base_config, run_config
from posx.lab.plots import baselines, captions, effects, look, pictures
from posx.lab.plots.convergence import convergence_tables
from posx.lab.plots.formats import FORMATS
from posx.lab.plots.groups import Curve, Panel, Point, choose_places, curves_of_runs, panels
from posx.lab.plots.points import (
    Log,
    answer_curves,
    average_bins,
    average_log,
    bits_curves,
    local_loss,
    perplexity_curves,
    ratio_curves,
    read_log,
)
from posx.lab.plots.tables import RowTable, cell, panel_tables, seed_count
from posx.lab.plots.verdicts import comparisons
from posx.lab.results.columns import FAILED, plain_rows
from posx.lab.results.facts import OF_ENCODINGS
from posx.lab.results.table import PER_POSITION, common_folder, list_runs, missing_runs, read_results, relative_name
from posx.lab.runs.finding import run_folders

#: The measures of the main chart: the curves of a panel of a text, and of a task.
MEASURES = {"ppl": perplexity_curves, "bpb": bits_curves, "R_k": ratio_curves}
MEASURES_OF_TASKS = {"right": answer_curves}
#: Curves of which each pair is compared: their number grows with the square.
MOST_COMPARED = 50
#: Pictures of encodings, of about 50 kB each.
MOST_PICTURES = 12
#: Sizes from which posx resolves others.
RESOLVED_FROM = ("model.num_layers", "model.model_dim", "model.num_heads", "model.mlp", "train.length")
#: Columns of a row that the page offers as a table.
COLUMNS = (
    "run_id", "encoding", "train_len", "seed", "protocol", "stride", "eval_len", "status", "num_targets", "nll", "ppl",
    "bpb", "exact_match", "accuracy", "nll_interval", "step", "hash", "data_digest", "tokenizer", "targets",
)  # fmt: skip


def content(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the contents of a report on the runs at or below `folders`. Raises WorkdirError for a missing folder."""
    folders = list(dict.fromkeys(folder.resolve() for folder in folders))
    with _collect_warnings() as warnings:
        table = read_results(folders)
    used = table[table.left_out == ""]
    split = panels(table, missing_runs(folders))
    windows = [panel for panel in split if panel.protocol != PER_POSITION]
    positions = [(panel, average_bins(panel, local_loss)) for panel in split if panel.protocol == PER_POSITION]
    curves = curves_of_runs(list_runs(used))
    places = {run: n for n, curve in enumerate(curves) for run in curve.runs.run}
    logs = _logs(folders)
    convergence = convergence_tables(list_runs(used), logs)
    tables = [*panel_tables(windows), *(convergence if windows else [])]
    measured = [{name: made(panel) for name, made in _measures(panel).items()} for panel in windows]
    return {
        "curves": [_curve(curve) for curve in curves],
        "panels": [
            _panel(panel, places, logs, next(iter(own.values())))
            | {"points": list(_points(panel, own, places)), "table": _table(panel, own, places)}
            for panel, own in zip(windows, measured, strict=True)
        ],
        "copies": {name: write(tables) for name, write in FORMATS.items()},
        "positions": [
            _panel(panel, places, logs, drawn) | {"points": list(_positions(drawn, places))}
            for panel, drawn in positions
        ],
        "training": list(_training(logs, places)),
        "convergence": list(map(_convergence, convergence)),
        **_verdicts(used, curves),
        "settings": [_settings(curve.runs.iloc[0]) for curve in curves],
        **_pictures(folders),
        "warnings": warnings,
        "columns": COLUMNS,
        "rows": [
            [_json_cell(row[name]) for name in COLUMNS] for row in plain_rows(used) if row["status"] != "diverged"
        ],
    }


@contextlib.contextmanager
def _collect_warnings() -> Iterator[list[str]]:
    """Collect the warnings on rows that cannot be used."""
    said: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("posx.lab.results")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def _measures(panel: Panel) -> Mapping[str, Callable[[Panel], Sequence[Curve]]]:
    return MEASURES_OF_TASKS if panel.protocol == Answers.name else MEASURES


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, with None for NaN and infinity."""
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json_cell(value: Any) -> Any:
    """Return a value of the table as JSON has it: "inf" for an infinite perplexity, None for no text."""
    return "inf" if value == math.inf else _plain(value) if value != "" else None


def _curve(curve: Curve) -> dict[str, Any]:
    dashes = curve.look.dashes if isinstance(curve.look.dashes, tuple) else (0, ())
    return {
        "label": curve.label, "color": curve.look.color, "dash": [3 * size for size in dashes[1]],
        "runs": list(curve.runs.run), "window_of": curve.window_of,
    }  # fmt: skip


def _panel(panel: Panel, places: Mapping[str, int], logs: Mapping[str, Log], drawn: Sequence[Curve]) -> dict[str, Any]:
    """Return the words of a panel and of the training of its runs. drawn: its curves of the first measure."""
    rule = captions.TITLES.get(panel.protocol, panel.protocol) + (f", stride {panel.stride}" if panel.stride else "")
    runs = pd.concat([curve.runs for curve in panel.curves])
    warning = captions.mixture(panel.rows)
    return {
        "title": f"L = {panel.train_len:,}, {rule}", "train_len": panel.train_len,
        "quantity": captions.perplexity_name(panel.protocol), "facts": captions.subtitle([panel]),
        "notes": [
            *([warning] if warning else []), *captions.notes([panel], drawn), *baselines.no_context_note([panel])
        ],
        "training": captions.training_mixture(runs[runs.run.isin([*logs])]),
        "curves": sorted(places[curve.runs.run.iloc[0]] for curve in panel.curves),
    }  # fmt: skip


def _points(
    panel: Panel, measured: Mapping[str, Sequence[Curve]], places: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """Yield a point for each measure, curve and window of a panel."""
    for measure, curves in measured.items():
        for curve in curves:
            for point in curve.points:
                low, high = point.interval or (None, None)
                yield {
                    "measure": measure, "curve": places[curve.runs.run.iloc[0]],
                    "x": round(point.x * (panel.train_len if measure == "R_k" else 1)), "mean": _plain(point.mean),
                    "values": list(point.values), "low": low, "high": high,
                    "failures": [FAILED[kind] for kind in point.failures],
                }  # fmt: skip


def _table(panel: Panel, measured: Mapping[str, Sequence[Curve]], places: Mapping[str, int]) -> dict[str, Any]:
    """Return the table of a panel: its head, and the numbers and the cells of its curves, the best first.

    The cells are seeds, perplexity and bits at L, R_k, and the 1 % horizon, or right answers by length.
    """
    lengths = {name: sorted({point.x for one in drawn for point in one.points}) for name, drawn in measured.items()}
    if of_answers := "right" in measured:
        columns = {f"right at {look.plain_number(n)}": ("right", n) for n in lengths["right"]}
    else:
        quantity, at_train = captions.perplexity_name(panel.protocol), float(panel.train_len)
        columns = {f"{quantity} at L": ("ppl", at_train), "bits per byte at L": ("bpb", at_train)}
        columns |= {f"R_{look.plain_number(k)}": ("R_k", k) for k in choose_places(k for k in lengths["R_k"] if k > 1)}
    lines = dict[int, list[Any]]()
    for curve in panel.curves:
        own = {name: next(one for one in drawn if one.label == curve.label) for name, drawn in measured.items()}
        first = own["right" if of_answers else "ppl"]
        cells = [
            next((_cell(point) for point in own[name].points if point.x == x), None) for name, x in columns.values()
        ]
        if not of_answers:
            cells.append(_horizon({point.x: _mean_of_all(point) for point in own["R_k"].points}))
        seeds = {"value": first.seeds[1], "text": seed_count(first)}
        lines[places[curve.runs.run.iloc[0]]] = [seeds, *cells]

    def rank(n: int) -> float:
        value = (lines[n][-1 if of_answers else 1] or {}).get("value")
        return math.inf if value is None else -value if of_answers else value

    best = sorted(lines, key=rank)
    head = ["encoding", "seeds", *columns, *([] if of_answers else ["horizon / L"])]
    return {"head": head, "curves": best, "body": [lines[n] for n in best]}


def _mean_of_all(point: Point) -> float:
    """Return the mean of a point, NaN if a seed failed there, as the mean of the other seeds would mislead."""
    return math.nan if point.failures else point.mean


def _horizon(ratios: Mapping[float, float]) -> dict[str, Any] | None:
    """Return the cell of the 1 % horizon in training lengths, with >= if it is the longest length measured.

    There is none if a seed has no value at L, as the mean of the other seeds would be a choice.
    """
    known = [k for k, ratio in ratios.items() if math.isfinite(ratio)]
    if 1 not in known or max(known) == 1:
        return None
    longest = horizon(ratios)
    return {"value": longest, "text": f"{'>= ' if longest == max(ratios) else ''}{look.plain_number(longest)}"}


def _cell(point: Point) -> dict[str, Any]:
    """Return a cell: the number that it is sorted by, and its text with spread and interval."""
    return {"value": _plain(point.mean) if point.values else None, "text": cell(point)}


def _positions(drawn: Sequence[Curve], places: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for curve in drawn:
        for point in curve.points:
            yield {"curve": places[curve.runs.run.iloc[0]], "x": point.x, "mean": _plain(point.mean)}


def _logs(folders: Sequence[Path]) -> dict[str, Log]:
    """Return the logs of runs, by their names in the table of results."""
    root = common_folder(folders)
    logs = {path: read_log(path) for path in sorted(p for one in folders for p in run_folders(one, "metrics.jsonl"))}
    return {relative_name(path, root): log for path, log in logs.items() if log}


def _training(logs: Mapping[str, Log], places: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the losses of each run, averaged over equal spans of a long log: [step, loss, tokens, seconds]."""
    for name, log in logs.items():
        counted = [row for row in log if row.tokens]
        if counted and name in places:
            steps = [
                [round(row.step), _plain(round(row.loss, 6)), round(row.tokens), round(row.seconds, 2)]
                for row in average_log(counted)
            ]
            yield {"curve": places[name], "run": name, "steps": steps, "seconds": round(log[-1].seconds, 2)}


def _convergence(made: RowTable) -> dict[str, Any]:
    """Return the words and the cells of a table of the steps to a training loss."""
    body = [
        [
            curve.label,
            seed_count(curve),
            *({"value": _plain(one.mean), "text": made.write(one)} for one in cells.values()),
        ]
        for curve, cells in made.lines
    ]
    return {"facts": made.facts, "head": ["encoding", "seeds", *made.columns], "body": body, "notes": made.notes}


def _verdicts(table: pd.DataFrame, curves: Sequence[Curve]) -> dict[str, Any]:
    """Return the comparisons of all pairs as short rows, and which pairs are not compared.

    A row is [curve, other curve, number of its place, effect, verdict on these checkpoints, verdict on the method,
    reason]. A verdict is [low, high, adjusted p, word]. A place is [protocol, stride, window, k, measure], k of R_k or
    None. Each verdict has a family of its own.
    """
    if len(curves) > MOST_COMPARED:
        why = f"{len(curves)} curves are too many for a verdict on each pair. Compare a few: posx compare RUN RUN"
        return {"verdicts": [], "places": [], "families": [0, 0], "no_verdicts": [why]}
    judged, left_out = comparisons(table, curves)
    places = list(dict.fromkeys(one.place for one in judged))

    def short(value: float | None) -> Any:
        return value and _plain(float(f"{value:.10g}"))

    def cells(verdict: Verdict) -> list[Any]:
        return [*map(short, (verdict.low, verdict.high, verdict.adjusted_p)), verdict.word]

    rows = [
        [*one.pair, places.index(one.place), short(one.effect), cells(one.checkpoints), cells(one.method), one.reason]
        for one in judged
    ]
    families = [judged[0].checkpoints.family, judged[0].method.family] if judged else [0, 0]
    return {
        "verdicts": rows,
        "places": [(*place, place.measure) for place in places],
        "families": families,
        "no_verdicts": left_out,
    }


def _settings(run: pd.Series) -> dict[str, str]:
    """Return the settings of a run that differ from the defaults of its encoding.

    A setting that posx resolved from others is a default too.
    """
    try:
        usual = base_config(re.split(" under | at | from ", run.method)[0])
        skipped: tuple[str, ...] = ("layers.", "encoding.")
    except PosxError:  # a hybrid, or a class of the user's own that is not at hand
        usual, skipped = base_config("nope"), OF_ENCODINGS
    given = {name: value for name, value in run.settings.items() if not name.startswith(skipped)}
    defaults = {f"train.{field.name}": field.default for field in dataclasses.fields(TrainConfig)}
    defaults |= run_config(usual).settings  # which leaves out what is not set
    for name in RESOLVED_FROM:
        section, _, field = name.partition(".")
        if name in given:
            usual[section][field] = given[name]
    with contextlib.suppress(PosxError):  # sizes that only another version takes
        resolved = run_config(usual).settings
        defaults |= {name: resolved[name] for name in defaults.keys() & resolved.keys() if name not in RESOLVED_FROM}
    if str(given.get("data.source", "")).startswith(f"{defaults['data.source']} ("):  # with the version of Python
        defaults["data.source"] = given["data.source"]
    differ = {name: value for name, value in given.items() if name in defaults and value != defaults[name]}
    return {name: str(value) for name, value in sorted(differ.items())}


def _pictures(folders: Sequence[Path]) -> dict[str, Any]:
    """Return (name, line on the class, PNG as a data URL) of trained encodings, and why others have no picture."""
    pictures, reasons = dict[str, tuple[str, str]](), dict[str, list[str]]()

    def leave_out(name: str, why: object) -> None:
        # Without the path of the file and the kinds of errors around the last.
        text = str(why).rpartition(" cannot be read: ")[2].rpartition("ConfigError: ")[2]
        reasons.setdefault(text, []).append(name)

    for subject in [one for folder in folders for one in effects.folder_encodings(folder, leave_out)]:
        if not subject.trained:
            leave_out(subject.name, "no run has a checkpoint of it")
        elif len(pictures) >= MOST_PICTURES:
            leave_out(subject.name, f"the page has {MOST_PICTURES} pictures. Draw all with posx plot --what encodings")
        else:
            kind = type(subject.encoding)
            line = (inspect.getdoc(kind) or "").partition("\n")[0]
            try:
                title = subject.name if subject.name not in pictures else f"{subject.name}, {subject.origin}"
                pictures[title] = f"{kind.__name__}: {line}", _picture(subject)
            except Exception as error:  # a class of the user's own may raise anything
                leave_out(subject.name, f"{type(error).__name__}: {error}")
    return {
        "pictures": [(title, *facts) for title, facts in pictures.items()],
        "no_pictures": [f"No picture of {captions.join_names(names, 'runs')}: {why}" for why, names in reasons.items()],
    }


def _picture(subject: effects.Subject) -> str:
    with look.style(), io.BytesIO() as file:
        pictures.encodings([subject]).savefig(file, format="png", dpi=70, bbox_inches="tight")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
