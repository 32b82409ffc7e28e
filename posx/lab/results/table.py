"""The only reader of stored rows: from the folders of runs to one table, in which each row says why it is left out.

The steps are operations on the table, in this order:

1. Read the whole rows.
2. Keep the last row of each measurement.
3. Use each run's rows of one text, one code and the last step.
4. Use the rows of most items of a task.
5. Use the rows on the targets that most runs have.
6. Use the longest windows, for losses by position.

Lengths are in tokens.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from posx.evaluation.protocols import PROTOCOLS, PerPosition, chosen_stride
from posx.evaluation.settings import USUAL
from posx.lab.files import lines
from posx.lab.files.rows import SCORES, row_problem
from posx.lab.results.columns import COLUMNS, RUN_COLUMNS, make_table
from posx.lab.results.facts import config_facts, run_facts
from posx.lab.runs.finding import run_folders, run_name, typed_path
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.targets import row_anchor

PER_POSITION = PerPosition.name
#: Why a row is left out, if its targets are not those of the rows that are used.
OTHER_TARGETS = "scored on other targets (not comparable)"
#: The columns that tell measurements apart.
_MEASUREMENT = [
    "run", "targets", "block_len", "hash", "step", "weights", "code_text", "protocol", "eval_len", "stride", "num_items"
]  # fmt: skip
_TARGETS = ["targets", "block_len"]
_LOG = logging.getLogger(__name__)

Folders = str | pathlib.Path | Sequence[str | pathlib.Path]


def read_results(folder: Folders) -> pd.DataFrame:
    """Return the stored rows of a run or a sweep as one table. `posx.lab.results.columns.COLUMNS` lists its columns.

    Rows that disagree with themselves count as not measured, and a warning names them. Rows with an empty `left_out`
    can be compared: they are of the last step of each run, on one text, one set of targets. A run whose training ended
    with NaN has a row at L for each protocol of other runs, of the status "diverged". A run without the targets of the
    others keeps its lengths, with the status "apart" and no values.

    Args:
      folder: a run or a sweep. If several are given, runs are named below the folder that they share.

    Raises:
      WorkdirError: a folder does not exist, or a file cannot be read.
    """
    folders, root = _folders_and_root(folder)
    stored = {relative_name(run, root): rows for one in folders for run, rows in _stored_rows(one)}
    ended = {row["run"]: row for one in folders for row in _nan_rows(one, root)}
    table = build_results(stored, typed_path(root))
    rows = (row | place for row in ended.values() for place in _nan_places(row, table))
    return pd.concat([table, make_table(rows)], ignore_index=True)


def common_folder(folders: Sequence[pathlib.Path]) -> pathlib.Path:
    """Return the folder below which the runs of several folders are named: that of all runs with a file of rows."""
    measured = {run for folder in folders for run in run_folders(folder, "eval.jsonl")}
    return pathlib.Path(os.path.commonpath(measured or folders))


def _folders_and_root(folder: Folders) -> tuple[list[pathlib.Path], pathlib.Path]:
    """Return the folders to read, and the folder below which their runs are named."""
    if isinstance(folder, str | pathlib.Path):
        return [pathlib.Path(folder)], pathlib.Path(folder)
    folders = [pathlib.Path(one).resolve() for one in folder]
    return folders, common_folder(folders)


def relative_name(run: pathlib.Path, root: pathlib.Path) -> str:
    """Return the name of a run of several folders. root: the folder that the runs with rows share."""
    return run_name(run, root) if run.is_relative_to(root) else os.path.relpath(run, root)


def _stored_rows(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, list[dict[str, Any]]]]:
    """Yield the whole rows of each run that has a file of rows, none if its training ended with NaN after them."""
    measured = run_folders(folder, "eval.jsonl")
    for run in measured:
        rows = RunFolder(run).measured_rows(_warn_of_row)
        if rows and (step := _nan_step(RunFolder(run))) is not None:
            _LOG.warning("%s: training ended with NaN at step %s. Rows of earlier steps do not count", run, step)
            rows = []
        yield run, rows
    for run in run_folders(folder, "rows.json"):
        if run not in measured:
            RunFolder(run).measured_rows(_warn_of_row)  # its `eval.jsonl` is gone


def _warn_of_row(problem: str) -> None:
    """Say that a row counts as not measured."""
    _LOG.warning("%s. The row counts as not measured: posx evaluate measures it again", problem)


def _nan_step(run: RunFolder) -> int | None:
    """Return the step at which the training of a run ended with NaN, None if it did not. A finished run is not read."""
    return None if run.done_file.is_file() else run.nan_step()


def _without_results(folder: pathlib.Path) -> list[RunFolder]:
    """Return the started runs without a whole row, or whose training ended with NaN and has no row of its end."""
    started = map(RunFolder, run_folders(folder, "config.json"))
    return [run for run in started if _has_no_row(run) or _nan_step(run) is not None]


def _has_no_row(run: RunFolder) -> bool:
    return bool(row_problem(lines.first_object(run.eval_file))) and not run.measured_rows()


def _nan_rows(folder: pathlib.Path, root: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yield a row of the status "diverged" for each run whose training ended with NaN, named below `root`."""
    for run in _without_results(folder):
        step = run.nan_step()
        if step is not None and (facts := config_facts(run.path, relative_name(run.path, root)))["train_len"]:
            protocol, *_ = USUAL[kind := run.read_config().target_kind]
            names = ("eval_len", "anchor") if kind == "task" else ("eval_len", "anchor", "stride")
            lengths = dict.fromkeys(names, facts["train_len"])
            yield facts | lengths | {"protocol": protocol, "step": step, "status": "diverged"}


def _nan_places(row: Mapping[str, Any], table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the protocols and strides that a run which ended with NaN fails at: those of other runs of its length.

    row: of `_nan_rows`. Its own protocol is the only one if no other run predicts the same kind of targets at L.
    """
    kind = PROTOCOLS[row["protocol"]].measures
    alike = {name for name, protocol in PROTOCOLS.items() if protocol.measures == kind} - {PER_POSITION}
    used = (table.left_out == "") & table.protocol.isin(alike)
    at_train = table[used & (table.train_len == row["train_len"]) & (table.eval_len == row["train_len"])]
    places = at_train[["protocol", "stride"]].drop_duplicates().to_dict("records")
    return [{str(name): value for name, value in place.items() if pd.notna(value)} for place in places] or [{}]


def missing_runs(folder: Folders) -> dict[str, str]:
    """Return {name: why it failed} of the started runs without results; "" if no failure is recorded.

    Runs are named as `read_results` names them. A run whose training ended with NaN has a row there that says so.
    """
    folders, root = _folders_and_root(folder)
    ended = {row["run"] for one in folders for row in _nan_rows(one, root)}
    runs = {relative_name(run.path, root): run for one in folders for run in _without_results(one)}
    return {name: run.failure() for name, run in runs.items() if name not in ended}


def diverged_runs(table: pd.DataFrame) -> dict[str, str]:
    """Return {name: why it has no results} of the runs whose training ended with NaN."""
    ended = table[table.status == "diverged"]
    return {run: f"training ended with NaN at step {step:,}" for run, step in zip(ended.run, ended.step, strict=True)}


def list_runs(table: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of runs, a row for each run of a table, with the names of the runs as index."""
    runs = table.drop_duplicates("run")[[*RUN_COLUMNS]]
    return runs.set_index("run", drop=False)


def build_results(stored: Mapping[str, Sequence[Mapping[str, Any]]], workdir: str = "") -> pd.DataFrame:
    """Return the table of stored rows, sorted by run. The rows that are used come before those that are left out.

    Args:
      stored: {name of a run: its rows, in the order of writing}.
      workdir: the folder that the names are below, as a command can name it.
    """
    rows = _select_most_items(_select_last_runs(_last_of_each(_read(stored, workdir), _MEASUREMENT)))
    used = rows.left_out == ""
    parts = [rows[~used]]
    for (_, _, protocol), members in rows[used].groupby(["data_digest", "train_len", "protocol"], sort=False):
        members = members.assign(rule=stride_rule(members))
        for _, slid in members.groupby("rule", sort=False, dropna=False):
            parts.append((_select_longest if protocol == PER_POSITION else _select_same_targets)(slid))
    table = pd.concat(parts).sort_values(["run", "order"], kind="stable")[[*COLUMNS]].reset_index(drop=True)
    own = (*SCORES, "num_targets", "num_bytes", "num_documents", "num_stretches")  # that only rows to compare have
    return table.assign(**{name: table[name].where(table.status != "apart") for name in own})


def _read(stored: Mapping[str, Sequence[Mapping[str, Any]]], workdir: str) -> pd.DataFrame:
    """Return stored rows as a table, with columns for the steps that follow."""
    rows = [(name, row) for name, own in stored.items() for row in own]
    usual = {"workdir": workdir, "status": "ok"}
    table = make_table({**usual, **row, "run": name, "anchor": row_anchor(dict(row))} for name, row in rows)
    own_code = [{n[5:]: v for n, v in row["settings"].items() if n.startswith("code.")} for _, row in rows]
    table["code_text"] = [json.dumps(row.get("code", {}), sort_keys=True) for _, row in rows]
    table["own_code"] = [json.dumps(code, sort_keys=True) for code in own_code]
    return table.assign(row=[row for _, row in rows], order=0)


def _leave_out(rows: pd.DataFrame, others: pd.Series, why: str | pd.Series) -> pd.DataFrame:
    """Return `rows` in which the `others` that are used until now are left out, and `why`."""
    others = others & (rows.left_out == "")
    last = rows.order.max() + 1
    return rows.assign(left_out=rows.left_out.mask(others, why), order=rows.order.mask(others, last))


def _last_of_each(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return the last row of each measurement, at the place of the first: a repeated one replaces its first attempt."""
    place = rows.groupby(keys, sort=False, dropna=False).ngroup()
    last = rows.assign(place=place).drop_duplicates("place", keep="last")
    return last.sort_values("place", kind="stable").drop(columns="place")


def _best_value(rows: pd.DataFrame, column: str, rank: pd.Series) -> pd.Series:
    """Return {run: the value of a column in its row of the highest rank}. Ties go to the first row."""
    best = rows.assign(rank=rank.astype(int)).sort_values("rank", ascending=False, kind="stable")
    return best.drop_duplicates("run").set_index("run")[column]


def _select_last_runs(rows: pd.DataFrame) -> pd.DataFrame:
    """Leave out the rows of other runs, texts, codes, steps and weights than each folder's last run has.

    The text is that of most runs. Ties go to the run's own text, then to the first. The code is the run's own, or that
    of its first row.
    """
    runs = rows.run
    rows = _leave_out(rows, rows.hash != runs.map(rows.groupby("run").hash.last()), "of another run (not comparable)")
    own = rows[rows.left_out == ""]
    measured = rows.drop_duplicates(["run", "data_digest"]).data_digest.value_counts()
    home = own.data_digest == own.run.map(_best_value(own, "data_digest", own.own_text.astype(bool)))
    text = _best_value(own, "data_digest", 2 * own.data_digest.map(measured) + home)
    own_code = own.drop_duplicates("run").set_index("run").own_code
    code = _best_value(own, "code_text", own.code_text == own.run.map(own_code))
    both = own[(own.data_digest == own.run.map(text)) & (own.code_text == own.run.map(code))]
    both = pd.concat([both, own[~own.run.isin(both.run)]])
    last = both.step.fillna(0).groupby(both.run).max()
    facts = _facts(both[both.step.isna() | (both.step == both.run.map(last))])
    rows = rows.assign(**{name: facts.loc[runs, name].array for name in facts})
    rows = _leave_out(rows, rows.data_digest != runs.map(text), "measured on other text (not comparable)")
    rows = _leave_out(
        rows, rows.code_text != runs.map(code), "measured with other code of the encoding (not comparable)"
    )
    rows = _leave_out(rows, (rows.step != runs.map(last)).fillna(False).astype(bool), "measured earlier in training")
    weights = runs.map(rows[rows.left_out == ""].groupby("run").weights.last())
    return _leave_out(rows, rows.weights != weights, "measured with other weights (not comparable)")


def _facts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the facts of each run from its rows, with the names of the runs as index."""
    firsts, longest = rows.drop_duplicates("run"), rows.groupby("run").anchor.max()
    facts = [run_facts(row) | {"longest": longest[run]} for run, row in zip(firsts.run, firsts.row, strict=True)]
    columns = {name: column for name, column in RUN_COLUMNS.items() if name not in ("run", "workdir", "train_len")}
    return make_table(facts, columns).set_index(pd.Index(firsts.run))


def _select_most_items(rows: pd.DataFrame) -> pd.DataFrame:
    """Leave out the rows of a task that answered fewer of the same items than another row of the run."""
    most = rows[rows.left_out == ""].groupby(["run", "eval_len"]).num_items.transform("max").reindex(rows.index)
    return _leave_out(rows, (rows.num_items < most).fillna(False).astype(bool), "of fewer items than are used")


def stride_rule(rows: pd.DataFrame) -> pd.Series:
    """Return the strides of rows of one protocol if windows of one length were slid with several, else NA.

    NA too for strides that follow from the window.
    """
    slid = rows.drop_duplicates(["eval_len", "stride"])
    several = slid.eval_len.duplicated().any()
    return pd.Series(chosen_strides(rows) if several else pd.NA, rows.index, "Int64")


def chosen_strides(rows: pd.DataFrame) -> list[int | None]:
    """Return the stride of each row, None if it follows from its window or the protocol has none."""
    facts = rows[["protocol", "eval_len", "stride"]].to_dict("records")
    return [None if pd.isna(row["stride"]) else chosen_stride(row) for row in facts]


def _select_same_targets(rows: pd.DataFrame) -> pd.DataFrame:
    """Leave out the rows on other targets than most runs have.

    Ties go to the set with as many targets as most runs were first evaluated on. Further ties go to the set of most
    rows, then to the last. A run without the set keeps rows of the status "apart".
    """
    number = rows.groupby(_TARGETS, sort=False, dropna=False).ngroup()
    asked = rows.max_targets.fillna(-1)
    own = rows.run.where(asked == rows.run.map(asked.groupby(rows.run).first()))
    facts = pd.DataFrame({"run": rows.run, "own": own, "place": range(len(rows))})
    ranks = {"runs": ("run", "nunique"), "own": ("own", "nunique"), "rows": ("place", "size"), "last": ("place", "max")}
    chosen = number == facts.groupby(number).agg(**ranks).sort_values([*ranks]).index[-1]
    there = rows.run.isin(rows.run[chosen])
    apart = _last_of_each(rows[~there], ["run", "eval_len"]).assign(status="apart")
    return pd.concat([_leave_out(rows[there], ~chosen[there], OTHER_TARGETS), apart])


def _select_longest(rows: pd.DataFrame) -> pd.DataFrame:
    """Leave out all but each run's last row of its longest windows with losses.

    Rows on the targets of most runs are preferred.
    """
    number = rows.groupby(_TARGETS, sort=False, dropna=False).ngroup()
    losses, runs = rows.position_nll.astype(bool), number.map(rows.run.groupby(number).nunique())
    best = rows.assign(losses=losses, runs=runs).sort_values(["losses", "eval_len", "runs"], kind="stable")
    best = best.drop_duplicates("run", keep="last")
    drawn, is_best = rows.run.map(best.set_index("run").eval_len), rows.index.isin(best.index)
    rows = _leave_out(rows, rows.eval_len != drawn, drawn.map("those of {:,} are drawn".format))
    return _leave_out(rows, pd.Series(~is_best, rows.index), OTHER_TARGETS)[losses | is_best]
