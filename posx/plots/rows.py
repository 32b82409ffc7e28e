"""Stored results as plain dicts: read and cleaned. Computes nothing with JAX and draws nothing.

Units: lengths and positions in tokens, `nll` in nats per token, `ppl` = exp(nll) per token.
"""

import collections
import contextlib
import dataclasses
import logging
import math
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from posx.evaluation import protocols
from posx.evaluation.protocols import PerPosition
from posx.evaluation.statistics import targets_key
from posx.files import lines
from posx.files.parse import parsed
from posx.files.rows import is_measurement, number, whole
from posx.plots.runs import Run, asked_targets, code_digests, data_digest, read_config, stored_run
from posx.runs.folder import RunFolder, is_run, name_of, run_folders, typed_path
from posx.runs.targets import anchor_of

#: Why a row has no perplexity. The last two are given here: the run has no results, or none that compare.
FAILED = ("undefined", "nonfinite", "oom", "diverged", "apart")
PER_POSITION = PerPosition.name
#: What captions call each protocol.
PROTOCOLS = {name: protocol.title for name, protocol in protocols.PROTOCOLS.items()}
#: The fields that an evaluation adds to a row.
_SCORED = (
    "ppl", "nll", "bpb", "nll_interval", "block_nll", "num_targets", "num_bytes", "num_documents", "num_stretches",
)  # fmt: skip
#: For each run, the chosen rows and a text on those left out.
_Chosen = dict[Any, tuple[list[dict[str, Any]], str]]
_LOG = logging.getLogger(__name__)


class Row(dict[str, Any]):
    """A row of an `eval.jsonl`, equal to the plain dict that stands there, and the run that it is of."""

    def __init__(self, values: Mapping[str, Any], run: Run) -> None:
        super().__init__(values)
        self.run = run


def read_rows(folder: str | pathlib.Path) -> list[Row]:
    """Return the usable rows of the `eval.jsonl` files of a run or a sweep, by the path of the run.

    The last row of a measurement wins: a resumed evaluation replaces its first attempt. Rows of one run are of its own
    text and its last step of training. Rows of one figure are on one set of targets: the one that most runs have. A run
    without it keeps its lengths, with the status "apart" and no values. Losses per position are those of the longest
    windows. A run whose training ended with NaN has one row, of the status "diverged". The row's `run` says what else
    was left out, and figures and tables repeat it.
    """
    measured = {}
    for folder_of_run in run_folders(pathlib.Path(folder), "eval.jsonl"):
        latest: dict[tuple[Any, ...], dict[str, Any]] = {}
        for stored in lines.read(folder_of_run / "eval.jsonl", _LOG.warning):
            if not is_measurement(stored):
                _LOG.warning("%s: a row without encoding or lengths left out", folder_of_run)
                continue
            row = {"run_id": folder_of_run.name} | whole(stored)
            key = (
                row["protocol"],
                targets_key(row),
                row["eval_len"],
                str(row.get("stride")),
                row.get("step"),
                _code(row),
            )
            latest.pop(key, None)
            latest[key] = row
        measured[folder_of_run] = list(latest.values())
    return rows_of(measured, folder) + _diverged(folder)


def rows_of(measured: Mapping[pathlib.Path, Sequence[dict[str, Any]]], folder: str | pathlib.Path) -> list[Row]:
    """Return the rows of run folders as `read_rows` does. Runs are named by their paths below `folder`."""
    configs = {run: read_config(run) for run in measured}
    current = {run: _of_run(configs[run], rows) for run, rows in measured.items()}
    asked = {run: asked_targets(config) for run, config in configs.items()}
    panels: dict[tuple[Any, ...], list[dict[str, Any]]] = collections.defaultdict(list)
    whose = {}
    for run, (rows, _) in current.items():
        for row in rows:
            panels[_text(row), row["train_len"], row["protocol"]].append(row)
            whose[id(row)] = run
    kept: dict[pathlib.Path, list[dict[str, Any]]] = collections.defaultdict(list)
    left_out = {run: [*said] for run, (_, said) in current.items()}
    for (_, _, protocol), members in panels.items():
        for slid in by_stride(members).values():
            by_run: dict[pathlib.Path, list[dict[str, Any]]] = collections.defaultdict(list)
            for row in slid:
                by_run[whose[id(row)]].append(row)
            for run, (rows, words) in (_longest if protocol == PER_POSITION else _same_targets)(by_run, asked).items():
                kept[run] += rows
                left_out[run] += [(protocol, words)] if words else []
    found = []
    for run, rows in kept.items():
        whole_run = dataclasses.replace(
            stored_run(name_of(run, folder), configs[run], rows[-1]),
            left_out=tuple(left_out[run]), longest=max(map(anchor_of, current[run][0])), workdir=typed_path(folder),
        )  # fmt: skip
        found += [Row(row, whole_run) for row in rows]
    return found


def _diverged(folder: str | pathlib.Path) -> list[Row]:
    """Return a row without a value for every run that has no results because its training ended with NaN."""
    found = []
    for folder_of_run in _without_results(folder):
        step = RunFolder(folder_of_run).ended_with_nan()
        run = stored_run(name_of(folder_of_run, folder), read_config(folder_of_run), None)
        if step is not None and isinstance(run.train_len, int):
            lengths = dict.fromkeys(("train_len", "eval_len", "stride"), run.train_len)
            facts = {"run_id": run.path, "encoding": run.text, "seed": run.seed, "step": step, "status": "diverged"}
            found.append(Row({"protocol": protocols.Nonoverlapping.name, **facts, **lengths}, run))
    return found


def diverged(stored: Iterable[Row]) -> dict[str, str]:
    """Return {path of a run: why it has no results} of the runs whose training ended with NaN."""
    ended = [row for row in stored if row.get("status") == "diverged"]
    return {row.run.path: f"training ended with NaN at step {row['step']:,}" for row in ended}


def as_rows(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows whose folders are not known, told apart by their run_id; rows that were read are left as they are."""
    plain = list(rows)
    last = {str(row.get("run_id")): row for row in plain if not isinstance(row, Row)}
    runs = {name: stored_run(name, None, row) for name, row in last.items()}
    return [row if isinstance(row, Row) else Row(row, runs[str(row.get("run_id"))]) for row in plain]


def _of_run(
    config: Mapping[str, Any] | None, rows: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Return the rows of one run that are of its own text, code and last step, and (protocol, what is left out)."""
    if not rows:
        return [], []
    text, code = _text_of(rows, data_digest(config)), _code_of(rows, code_digests(config))
    last = max((_step(row) for row in rows if _text(row) == text and _code(row) == code), default=-1)
    kept: list[dict[str, Any]] = []
    left_out: list[tuple[str, str]] = []
    for protocol in sorted({row["protocol"] for row in rows}):
        mine = [row for row in rows if row["protocol"] == protocol]
        own, said = _only([_text(row) == text for row in mine], mine, "measured on other text (not comparable)")
        why = "measured with other code of the encoding (not comparable)"
        own, edited = _only([_code(row) == code for row in own], own, why)
        latest, early = _only([_step(row) in (last, -1) for row in own], own, "measured earlier in training")
        kept += latest
        left_out += [(protocol, words) for words in (said, edited, early) if words]
    return [row for row in rows if any(row is one for one in kept)], left_out


def _text(row: Mapping[str, Any]) -> str:
    return str(row.get("data_digest"))


def _text_of(rows: Sequence[dict[str, Any]], own: str) -> str:
    """The text that a run is shown on: its `own` if there is a row on it, else that of its first row."""
    return own if any(_text(row) == own for row in rows) else _text(rows[0])


def _code(row: Mapping[str, Any]) -> str:
    """The code of a user's own encodings that a row was measured with; "" if they are all of posx."""
    return str(row.get("code", ""))


def _code_of(rows: Sequence[dict[str, Any]], own: Mapping[str, Any]) -> str:
    """The code that a run is shown with: its `own` if there is a row of it, else that of its first row."""
    said = str(own) if own else ""
    return said if any(_code(row) == said for row in rows) else _code(rows[0])


def _step(row: Mapping[str, Any]) -> int:
    """After how many steps of training a row was measured; -1 where it does not say."""
    step = row.get("step")
    return step if isinstance(step, int) else -1


def _only(wanted: Sequence[bool], rows: Sequence[dict[str, Any]], why: str) -> tuple[list[dict[str, Any]], str]:
    """The `wanted` ones of `rows`, and in words how many were left out."""
    kept = [row for row, keep in zip(rows, wanted, strict=True) if keep]
    others = len(rows) - len(kept)
    return kept, f"{others} row{'s' * (others > 1)} left out, {why}" if others else ""


def by_stride(rows: Iterable[Any]) -> dict[Any, list[Any]]:
    """Rows of one protocol by stride, where windows of one length were slid with several; else all of them by None."""
    slid, found = collections.defaultdict(set), collections.defaultdict(list)
    for row in (stored := list(rows)):
        slid[row["eval_len"]].add(row.get("stride"))
    several = any(len(strides) > 1 for strides in slid.values())
    for row in stored:
        found[row.get("stride") if several else None].append(row)
    return found


def _same_targets(by_run: Mapping[Any, Sequence[dict[str, Any]]], asked: Mapping[Any, Collection[int]]) -> _Chosen:
    """Choose for all runs the rows on one set of targets.

    The set that most runs have; of equals that with as many targets as most configs have `asked` for, then the one
    measured at most lengths, then the one measured last. A run without it keeps rows of the status "apart".
    """
    every = [(targets_key(row), run, row) for run, rows in by_run.items() for row in rows]
    runs = {targets: len({run for one, run, _ in every if one == targets}) for targets, _, _ in every}
    own = collections.Counter(
        targets for targets, run in {(t, run) for t, run, row in every if row.get("max_targets") in asked[run]}
    )
    counts = collections.Counter(targets for targets, _, _ in every)
    last = {targets: place for place, (targets, _, _) in enumerate(every)}
    chosen = max(counts, key=lambda targets: (runs[targets], own[targets], counts[targets], last[targets]))
    found = {}
    for run, rows in by_run.items():
        mine = [targets_key(row) == chosen for row in rows]
        apart = {row["eval_len"]: {name: row[name] for name in row if name not in _SCORED} for row in rows}
        found[run] = (
            _only(mine, rows, "scored on other targets (not comparable)")
            if any(mine)
            else ([row | {"status": "apart"} for row in apart.values()], "")
        )
    return found


def _longest(by_run: Mapping[Any, Sequence[dict[str, Any]]], asked: Mapping[Any, Collection[int]]) -> _Chosen:
    """Choose for each run the row of its longest windows, if several on the targets that most runs have.

    A row without losses is none, and of equals the last counts.
    """
    runs = collections.Counter(key for rows in by_run.values() for key in {targets_key(row) for row in rows})
    found = {}
    for run, rows in by_run.items():
        ranks = [(complete(row), row["eval_len"], runs[targets_key(row)], place) for place, row in enumerate(rows)]
        kept = rows[max(ranks)[-1]]
        others = [row for row in rows if row is not kept and complete(row)]
        differ = [row["eval_len"] != kept["eval_len"] for row in others]
        shorter, same = _only(differ, others, "scored on other targets (not comparable)")
        lengths = ", ".join(f"{length:,}" for length in sorted({row["eval_len"] for row in shorter}))
        drawn = f"windows of {lengths} tokens left out, those of {kept['eval_len']:,} are drawn" if lengths else ""
        found[run] = [kept], ", ".join(filter(None, (drawn, same)))
    return found


def complete(row: Mapping[str, Any]) -> bool:
    """Whether a row holds per-position results: edges [n + 1], nll [n], targets [n], n >= 1."""
    edges, nll, targets = (row.get(key) for key in ("position_edges", "position_nll", "position_targets"))
    if not (isinstance(edges, list) and isinstance(nll, list) and isinstance(targets, list) and nll):
        return False
    whole = all(number(value) is not None for value in [*edges, *targets])
    return whole and len(edges) == len(nll) + 1 == len(targets) + 1


def unfinished(folder: str | pathlib.Path) -> dict[str, str]:
    """Return {path: why it failed} of the runs that were started and have no row; "" if nothing says that it failed."""
    found = {}
    for run in _without_results(folder):
        if RunFolder(run).ended_with_nan() is None:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                found[name_of(run, folder)] = ""
                found[name_of(run, folder)] = str(parsed((run / "status.json").read_text("utf-8"))["reason"])
    return found


def _without_results(folder: str | pathlib.Path) -> list[pathlib.Path]:
    """Return the runs that were started (they have a config.json) and have no results."""
    started = run_folders(pathlib.Path(folder), "config.json")
    return [run for run in started if not (run / "eval.jsonl").is_file() and is_run(run)]


def perplexity(row: Mapping[str, Any]) -> float | None:
    """Perplexity per token of a row, or None where the row has no finite one."""
    if row.get("status", "ok") != "ok":
        return None
    value, nll = number(row.get("ppl")), number(row.get("nll"))
    if value is None and nll is not None and nll < 700:
        value = math.exp(nll)
    return value if value is not None and value > 0 else None


def failure(row: Mapping[str, Any]) -> str:
    """Why a row has no finite perplexity: "undefined", "nonfinite" or "oom"."""
    status = row.get("status", "ok")
    return status if status in FAILED else "nonfinite"
