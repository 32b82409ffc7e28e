"""Stored results as plain dicts: read, cleaned and grouped. Imports no JAX and no matplotlib.

Units: lengths and positions in tokens, `nll` in nats per token, `ppl` = exp(nll) per token.
"""

import collections
import dataclasses
import json
import logging
import math
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from posx.errors import WorkdirError
from posx.evaluation.statistics import targets_key

Row = dict[str, Any]
FAILED = ("undefined", "nonfinite", "oom")
PER_POSITION = "per_position"
_LEVELS = ("{}", "*/{}", "*/*/{}")  # a run, a sweep, a folder of sweeps


def read_jsonl(path: pathlib.Path) -> list[Row]:
    """The objects of a JSON Lines file in order. A torn last line is dropped, other broken ones also logged."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows, broken = [], 0
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            broken += number < len(lines) - 1
            continue
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken += 1
    if broken:
        logging.getLogger(__name__).warning("%s: %d broken lines left out", path, broken)
    return rows


def run_folders(folder: pathlib.Path, holding: str) -> list[pathlib.Path]:
    """The run folders at or below `folder` that hold a file named `holding`, sorted."""
    if not folder.is_dir():
        raise WorkdirError(f"work folder {str(folder)!r} does not exist; give the folder of a run or of a sweep")
    found = {path.parent for level in _LEVELS for path in folder.glob(level.format(holding)) if path.is_file()}
    return sorted(found)


def read_rows(folder: str | pathlib.Path) -> list[Row]:
    """Every usable row of the `eval.jsonl` files of a run or a sweep.

    The last row of a measurement wins: a resumed evaluation replaces its first attempt. Of several sets of targets
    that a run was measured on under one protocol, one is taken, so that no curve mixes them; the log names the others.
    """
    latest: dict[tuple[Any, ...], Row] = {}
    for run in run_folders(pathlib.Path(folder), "eval.jsonl"):
        for row in read_jsonl(run / "eval.jsonl"):
            row.setdefault("run_id", run.name)
            if not _usable(row):
                logging.getLogger(__name__).warning("%s: a row without encoding, protocol or lengths left out", run)
                continue
            key = (*_kind(row), targets_key(row), row["eval_len"], str(row.get("stride")))
            latest.pop(key, None)
            latest[key] = row
    return _same_targets(list(latest.values()))


def _kind(row: Row) -> tuple[str, str]:
    return str(row["run_id"]), row["protocol"]


def _same_targets(rows: list[Row]) -> list[Row]:
    """Of a run's rows of one protocol, those on one set of targets, so that no curve mixes sets: the set measured at
    most lengths, of equals the one measured last."""
    counts = collections.Counter((_kind(row), targets_key(row)) for row in rows)
    chosen: dict[tuple[str, str], tuple[Any, ...]] = {}
    for row in rows:
        kind, targets = _kind(row), targets_key(row)
        if counts[kind, targets] >= counts[kind, chosen.get(kind, targets)]:
            chosen[kind] = targets
    for kind, left_out in collections.Counter(
        _kind(row) for row in rows if chosen[_kind(row)] != targets_key(row)
    ).items():
        logging.getLogger(__name__).warning("%s: %d rows of %s on other targets left out", kind[0], left_out, kind[1])
    return [row for row in rows if chosen[_kind(row)] == targets_key(row)]


def unfinished(folder: str | pathlib.Path) -> list[str]:
    """Names of the runs that were started (they have a config.json) and have no result yet."""
    started = run_folders(pathlib.Path(folder), "config.json")
    return [run.name for run in started if not (run / "eval.jsonl").is_file() and _is_run(run)]


def _is_run(folder: pathlib.Path) -> bool:
    """False for a sweep's own folder, which may hold a config.json beside its runs."""
    return not any(folder.glob("*/config.json"))


def _usable(row: Row) -> bool:
    lengths = (row.get("train_len"), row.get("eval_len"))
    whole = all(isinstance(length, int) and not isinstance(length, bool) and length > 0 for length in lengths)
    return whole and isinstance(row.get("encoding"), str) and isinstance(row.get("protocol"), str)


def number(value: Any) -> float | None:
    """A finite float, or None (null, "inf", NaN, a word, a bool)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def perplexity(row: Row) -> float | None:
    """Perplexity per token of a row, or None where the row has no finite one."""
    if row.get("status", "ok") != "ok":
        return None
    value, nll = number(row.get("ppl")), number(row.get("nll"))
    if value is None and nll is not None and nll < 700:
        value = math.exp(nll)
    return value if value is not None and value > 0 else None


def failure(row: Row) -> str:
    """Why a row has no finite perplexity: "undefined", "nonfinite" or "oom"."""
    status = row.get("status", "ok")
    return status if status in FAILED else "nonfinite"


@dataclasses.dataclass(frozen=True)
class Panel:
    """The rows that may share one set of axes: one training length, one protocol, one stride rule."""

    train_len: int
    protocol: str
    stride: int | None
    rows: tuple[Row, ...]


def panels(rows: Iterable[Row]) -> list[Panel]:
    """Rows split by training length and protocol, and by stride where one run was slid with several."""
    grouped: dict[tuple[int, str], list[Row]] = collections.defaultdict(list)
    for row in rows:
        grouped[row["train_len"], row["protocol"]].append(row)
    found = []
    for (train_len, protocol), members in sorted(grouped.items()):
        places = collections.Counter((str(row["run_id"]), row["eval_len"]) for row in members)
        strides = {row.get("stride") for row in members} if max(places.values()) > 1 else {None}
        for stride in sorted(strides, key=lambda value: (value is None, value)):
            chosen = [row for row in members if len(strides) == 1 or row.get("stride") == stride]
            found.append(Panel(train_len, protocol, stride if len(strides) > 1 else None, tuple(chosen)))
    return found


def by_encoding(rows: Sequence[Row]) -> list[tuple[str, str, int, list[Row]]]:
    """(encoding, detail, variant, rows) for every distinct encoding value.

    `detail` tells values of the same name apart and is empty where the name is enough. Two runs of one value and one
    seed differ in something else (model, data, optimiser), so they are not averaged: `detail` is then the run's id.
    """
    values: dict[tuple[str, str], list[Row]] = collections.defaultdict(list)
    for row in rows:
        values[row["encoding"], str(row.get("encoding_value", ""))].append(row)
    groups = []
    for (name, value), members in values.items():
        runs = {str(row["run_id"]): row.get("seed") for row in members}
        rivals = [other for kin, other in values if kin == name]
        if len(set(runs.values())) == len(runs):
            groups.append((name, _difference(value, rivals), members))
            continue
        groups += [(name, run, [row for row in members if str(row["run_id"]) == run]) for run in runs]
    groups.sort(key=lambda group: group[:2])
    variants: collections.Counter[str] = collections.Counter()
    numbered = []
    for name, detail, members in groups:
        numbered.append((name, detail, variants[name], members))
        variants[name] += 1
    return numbered


def _difference(value: str, rivals: Sequence[str]) -> str:
    """The fields of an encoding value's repr that not all of its rivals share; empty where it has none but itself."""
    if len(rivals) < 2:
        return ""
    fields = {rival: [field for field in re.split(r"[(),]\s*", rival) if field] for rival in rivals}
    shared = set.intersection(*(set(parts) for parts in fields.values()))
    own = {rival: ", ".join(part for part in parts if part not in shared) for rival, parts in fields.items()}
    return own[value] if all(own.values()) and len(set(own.values())) == len(rivals) else value


def seed_count(rows: Sequence[Row]) -> int:
    """The most runs that any one encoding value has: the n that a figure states once."""
    return max((len({str(row["run_id"]) for row in members}) for *_, members in by_encoding(rows)), default=0)
