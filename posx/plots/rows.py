"""Stored results as plain dicts: read and cleaned. Computes nothing with JAX and draws nothing.

Units: lengths and positions in tokens, `nll` in nats per token, `ppl` = exp(nll) per token.
"""

import collections
import dataclasses
import functools
import logging
import math
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from posx.errors import WorkdirError
from posx.evaluation import protocols
from posx.evaluation.protocols import PerPosition
from posx.evaluation.statistics import targets_key
from posx.files import lines
from posx.files.rows import is_measurement, number, whole
from posx.plots.runs import Run, asked_targets, code_digests, data_digest, read_config, stored_run

FAILED = ("undefined", "nonfinite", "oom")
PER_POSITION = PerPosition.name
#: What captions call each protocol.
PROTOCOLS = {name: protocol.title for name, protocol in protocols.PROTOCOLS.items()}
_LOG = logging.getLogger(__name__)
_LEVELS = ("{}", "*/{}", "*/*/{}")  # a run, a sweep, a folder of sweeps


class Row(dict[str, Any]):
    """A row of an `eval.jsonl`, equal to the plain dict that stands there, and the run that it is of."""

    def __init__(self, values: Mapping[str, Any], run: Run) -> None:
        super().__init__(values)
        self.run = run


def run_folders(folder: pathlib.Path, holding: str) -> list[pathlib.Path]:
    """The run folders at or below `folder` that hold a file named `holding`, sorted."""
    if not folder.is_dir():
        raise WorkdirError(f"work folder {str(folder)!r} does not exist; give the folder of a run or of a sweep")
    found = {path.parent for level in _LEVELS for path in folder.glob(level.format(holding)) if path.is_file()}
    return sorted(found)


def read_rows(folder: str | pathlib.Path) -> list[Row]:
    """Every usable row of the `eval.jsonl` files of a run or a sweep, by the path of the run.

    The last row of a measurement wins: a resumed evaluation replaces its first attempt. A curve mixes neither texts
    nor steps of training nor sets of targets: the run's own text is taken, its last step, and under each protocol and
    stride the targets of most lengths; of its losses per position those of the longest windows. The row's `run` says
    what was left out, and so do figures and tables.
    """
    found = []
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
        found += rows_of(folder_of_run, folder, list(latest.values()))
    return found


def rows_of(run: pathlib.Path, folder: str | pathlib.Path, rows: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows of the run folder `run`, named by its path below `folder`, as `read_rows` gives them."""
    return _of_run(name_of(run, folder), read_config(run), rows)


def name_of(run: pathlib.Path, folder: str | pathlib.Path) -> str:
    """A run folder's path below the folder that is looked at; its own name if that is the run itself."""
    path = run.relative_to(folder).as_posix()
    return run.resolve().name if path == "." else path


def as_rows(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows whose folders are not known, told apart by their run_id; rows that were read are left as they are."""
    plain = list(rows)
    last = {str(row.get("run_id")): row for row in plain if not isinstance(row, Row)}
    runs = {name: stored_run(name, None, row) for name, row in last.items()}
    return [row if isinstance(row, Row) else Row(row, runs[str(row.get("run_id"))]) for row in plain]


def _of_run(path: str, config: Mapping[str, Any] | None, rows: Sequence[dict[str, Any]]) -> list[Row]:
    """The rows of one run that its curves are made of: of one text, one step of training and one set of targets."""
    if not rows:
        return []
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
        choose = _longest if protocol == PER_POSITION else functools.partial(_same_targets, asked=asked_targets(config))
        choices = [choose(slid) for slid in by_stride(latest).values()]
        kept += [row for chosen, _ in choices for row in chosen]
        left_out += [(protocol, words) for words in (said, edited, early, *(others for _, others in choices)) if words]
    run = dataclasses.replace(stored_run(path, config, kept[-1]), left_out=tuple(left_out))
    return [Row(row, run) for row in rows if any(row is one for one in kept)]


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


def _same_targets(rows: Sequence[dict[str, Any]], asked: Collection[int]) -> tuple[list[dict[str, Any]], str]:
    """The rows on one set of targets, and what is left out: on one of as many targets as the run's own config has
    `asked` for, if there is any; of those on the one measured at most lengths, of equals the one measured last."""
    counts = collections.Counter(targets_key(row) for row in rows)
    own = {targets_key(row): row.get("max_targets") in asked for row in rows}
    last = {targets_key(row): place for place, row in enumerate(rows)}
    chosen = max(counts, key=lambda targets: (own[targets], counts[targets], last[targets]))
    return _only([targets_key(row) == chosen for row in rows], rows, "scored on other targets (not comparable)")


def _longest(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The row of the longest windows, of equals the last; what is left out. A row without losses is none."""
    kept = max(enumerate(rows), key=lambda pair: (complete(pair[1]), pair[1]["eval_len"], pair[0]))[1]
    others = [f"{row['eval_len']:,}" for row in rows if row is not kept and complete(row)]
    words = f"windows of {', '.join(others)} tokens left out, those of {kept['eval_len']:,} are drawn" if others else ""
    return [kept], words


def complete(row: Mapping[str, Any]) -> bool:
    """Whether a row holds per-position results: edges [n + 1], nll [n], targets [n], n >= 1."""
    edges, nll, targets = (row.get(key) for key in ("position_edges", "position_nll", "position_targets"))
    if not (isinstance(edges, list) and isinstance(nll, list) and isinstance(targets, list) and nll):
        return False
    whole = all(number(value) is not None for value in [*edges, *targets])
    return whole and len(edges) == len(nll) + 1 == len(targets) + 1


def unfinished(folder: str | pathlib.Path) -> list[str]:
    """Paths of the runs that were started (they have a config.json) and have no result yet."""
    started = run_folders(pathlib.Path(folder), "config.json")
    return [name_of(run, folder) for run in started if not (run / "eval.jsonl").is_file() and is_run(run)]


def is_run(folder: pathlib.Path) -> bool:
    """False for a sweep's own folder, which may hold a config.json beside its runs."""
    return not any(folder.glob("*/config.json"))


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
