"""Stored results as plain dicts, and their runs. Nothing here draws, or computes with JAX.

Units: lengths and positions in tokens, `nll` in nats per token, `ppl` = exp(nll) per token.
"""

import collections
import dataclasses
import functools
import json
import logging
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from posx.errors import WorkdirError
from posx.evaluation import protocols
from posx.evaluation.protocols import PerPosition
from posx.evaluation.statistics import targets_key
from posx.lab.config.run import IMPORTED
from posx.lab.config.sections import cycle_of
from posx.lab.files import lines
from posx.lab.files.rows import number, problem_of
from posx.lab.runs.folder import RunFolder, name_of, run_folders, typed_path
from posx.lab.runs.targets import anchor_of

#: Why a row has no perplexity, in words. The last two are set here, for runs without results or comparable ones.
FAILED = {
    "undefined": "undefined",
    "nonfinite": "not finite",
    "oom": "out of memory",
    "diverged": "ended with NaN",
    "apart": "on other targets",
}
PER_POSITION = PerPosition.name
#: The names of the protocols in captions.
PROTOCOLS = {name: protocol.title for name, protocol in protocols.PROTOCOLS.items()}
#: The fields that an evaluation adds to a row.
_SCORED = (
    "ppl", "nll", "bpb", "nll_interval", "block_nll", "num_targets", "num_bytes", "num_documents", "num_stretches",
)  # fmt: skip
#: Settings that belong to an encoding or are resolved for it. They follow from the text of the encoding, unless posx
#: resolved the same text in another way.
OF_ENCODINGS = (
    "encoding.", "layers.", "code.", "model.mask_policy", "train.position_lr_multiplier", "train.decayed"
)  # fmt: skip
#: Settings in which the runs of one curve differ.
SEED = ("train.seed", "parent.hash")
#: The settings in which rows of one run can differ: the text that was scored, and the step of the weights.
SCORED = SCORED_TEXT, SCORED_STEP = "scored.text", "scored.step"
#: The fields of a row that name the weights and the code that it was measured with.
_SAME_MODEL = ("hash", "step", "weights", "code")
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One run folder. No two folders are the same run, whatever their names and settings.

    Attributes:
      path: below the folder that is plotted.
      text: the encoding, as "rope(base=500000)+alibi", or "rope, nope" for a hybrid.
      train_len: tokens.
      settings: of training, with the scored text and step. Code is as it was when the rows were measured.
      longest: the longest window of any row, in tokens.
      workdir: the folder that is plotted, as a command can name it.
      left_out: (protocol, the rows that figures and tables leave out, and why).
    """

    path: str
    text: str = ""
    train_len: int = 0
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    longest: int = 0
    workdir: str = ""
    left_out: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def kind(self) -> str:
        """All settings but the seed. The text of training counts by its digest, a parent by its encoding."""
        text = [name for name in self.settings if name.startswith("data.") and name != "data.text"]
        return self._without(*SEED, *text, *SCORED)

    @property
    def scored(self) -> tuple[Any, ...]:
        """The scored text and the step of the weights, None if the run has no results."""
        return tuple(self.settings.get(name) for name in SCORED)

    @functools.cached_property
    def around(self) -> str:
        """The settings except encoding, data, seed and training length, as JSON. The dashes of curves show them."""
        return self._without(*SEED, "train.length", "data.", SCORED_TEXT, *OF_ENCODINGS)

    def _without(self, *starts: str) -> str:
        kept = {name: value for name, value in self.settings.items() if not name.startswith(starts)}
        return json.dumps(kept, sort_keys=True)


class Row(dict[str, Any]):
    """A row of an `eval.jsonl`, equal to the plain dict in the file, with its run."""

    def __init__(self, values: Mapping[str, Any], run: Run) -> None:
        super().__init__(values)
        self.run = run


def run_of_row(path: str, row: Mapping[str, Any], **others: Any) -> Run:
    """Return the run at `path` with the settings of a row of its results.

    The text of training is known by its digest. It is also known by its place if the row was scored on the same text.
    The seed of an imported model is not known.
    """
    trained = row["settings"]
    settings = {name: value for name, value in trained.items() if not name.startswith(("code.", "data"))}
    settings |= {f"code.{name}": digest for name, digest in row.get("code", {}).items()}
    settings |= {f"trained.{n}": v for n, v in trained.items() if n.startswith("code.") and settings.get(n) != v}
    if str(trained.get("data", "")).startswith(IMPORTED):
        settings.pop("train.seed", None)
    if row.get("own_text"):  # else the settings of the data are of another text
        settings |= {f"data.{name}": value for name, value in row.get("data_settings", {}).items()}
    known = {
        "data.text": trained.get("data"),
        "data.source": row.get("data_source") if row.get("own_text") else None,
        "data.tokenizer": row.get("tokenizer"),
        SCORED_TEXT: row.get("data_digest"),
        SCORED_STEP: row.get("step"),
    }
    settings |= {name: value for name, value in known.items() if value is not None}
    layers, masks = row.get("layers", []), trained.get("model.mask_policy", ["causal"])
    text = ", ".join(layers if len(set(layers)) > 1 else layers[:1] or [row["encoding"]])
    text += f" under {', '.join(masks)}" if masks != ["causal"] else ""
    text += f" from {trained['parent.encoding']}" if "parent.step" in trained else ""
    return Run(path, text, row["train_len"], settings, **others)


def run_of_config(folder: pathlib.Path, path: str) -> Run:
    """Return the run of a folder without rows from its `config.json`, without settings if that cannot be read."""
    try:
        run = RunFolder(folder).read_config()
    except WorkdirError:
        return Run(path, path)
    facts = {"settings": run.settings, "encoding": run.encoding, "layers": cycle_of(run.layer_texts)}
    data = {"own_text": True, "data_source": run.data.source, "tokenizer": run.data.tokenizer}
    return run_of_row(path, {**facts, **data, "train_len": run.train.length, "code": run.code})


def read_rows(folder: str | pathlib.Path) -> list[Row]:
    """Return the usable rows of the `eval.jsonl` files of a run or a sweep, by the path of the run.

    The last row of a measurement wins, so that a resumed evaluation replaces its first attempt. Rows of one run are of
    one text and its last training step. Rows of one figure are on the targets that most runs have. A run without
    them keeps its lengths, with the status "apart" and no values. Losses per position are of the longest windows.
    A run whose training ended with NaN has one row, of the status "diverged". `run.left_out` has all other omissions.
    """
    return rows_of(_measured([folder]), folder) + diverged_rows(folder)


def read_several(folders: Sequence[str | pathlib.Path]) -> list[Row]:
    """Return the rows of several runs or sweeps as `read_rows` does, without those of runs that ended with NaN."""
    measured = _measured([pathlib.Path(folder).resolve() for folder in folders])
    return rows_of(measured, common_folder(measured)) if measured else []


def common_folder(folders: Iterable[pathlib.Path]) -> pathlib.Path:
    """Return the folder below which the runs of several folders are named."""
    return pathlib.Path(os.path.commonpath(list(folders)))


def _measured(folders: Sequence[str | pathlib.Path]) -> dict[pathlib.Path, list[dict[str, Any]]]:
    """Return the last row of each measurement of the runs below `folders`, by run."""
    measured: dict[pathlib.Path, list[dict[str, Any]]] = {}
    for run in (run for folder in folders for run in run_folders(pathlib.Path(folder), "eval.jsonl")):
        latest: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in RunFolder(run).measured(_warn_of_row):
            place = [str(row.get(name)) for name in (*_SAME_MODEL, "protocol", "eval_len", "stride")]
            latest[targets_key(row), *place] = row
        if latest and (step := _nan_step(RunFolder(run))) is not None:
            _LOG.warning("%s: training ended with NaN at step %s. Rows of earlier steps do not count", run, step)
            latest = {}
        measured[run] = list(latest.values())
    for folder in folders:
        for run in run_folders(pathlib.Path(folder), "rows.json"):
            if run not in measured:
                RunFolder(run).measured(_warn_of_row)  # its `eval.jsonl` is gone
    return measured


def _warn_of_row(problem: str) -> None:
    """Say that a row counts as not measured."""
    _LOG.warning("%s. The row counts as not measured: posx evaluate measures it again", problem)


def rows_of(measured: Mapping[pathlib.Path, Sequence[dict[str, Any]]], folder: str | pathlib.Path) -> list[Row]:
    """Return the rows of run folders as `read_rows` does. Runs are named by their paths below `folder`."""
    panels: dict[tuple[Any, ...], list[Row]] = collections.defaultdict(list)
    texts = collections.Counter(text for rows in measured.values() for text in {row.get("data_digest") for row in rows})
    for path, rows in measured.items():
        for row in _of_run(rows, name_of(path, folder), typed_path(folder), texts) if rows else ():
            panels[row.get("data_digest"), row["train_len"], row["protocol"]].append(row)
    found: list[Row] = []
    for (_, _, protocol), members in panels.items():
        for slid in by_stride(members).values():
            found += (_longest if protocol == PER_POSITION else _same_targets)(slid)
    return sorted(found, key=lambda row: row.run.path)


def _of_run(rows: Sequence[dict[str, Any]], path: str, workdir: str, runs_of: Mapping[str | None, int]) -> list[Row]:
    """Return the rows of a folder's last run: of its last step, of one text, and of its own code or its first row's.

    The text is that of most runs, whose numbers are in `runs_of`. Ties go to the run's own text, then to the first.
    """
    every, name = rows, rows[-1].get("hash")
    rows = [row for row in every if row.get("hash") == name]
    settings = rows[0]["settings"]
    own_code = {name.removeprefix("code."): value for name, value in settings.items() if name.startswith("code.")}
    texts, codes = [row.get("data_digest") for row in rows], [row.get("code", {}) for row in rows]
    own_text = next((row["data_digest"] for row in rows if row.get("own_text")), texts[0])
    text = max(texts, key=lambda one: (runs_of[one], one == own_text))
    code = own_code if own_code in codes else codes[0]
    own = [row for row, *facts in zip(rows, texts, codes, strict=True) if facts == [text, code]] or rows
    last = max(row.get("step") or 0 for row in own)
    own = [row for row in own if row.get("step") in (None, last)]
    run = run_of_row(path, own[0], longest=max(map(anchor_of, own)), workdir=workdir)
    kept = _only([Row(row, run) for row in every], lambda row: row.get("hash") == name, "of another run")
    kept = _only(kept, lambda row: row.get("data_digest") == text, "measured on other text")
    kept = _only(kept, lambda row: row.get("code", {}) == code, "measured with other code of the encoding")
    kept = _only(kept, lambda row: row.get("step") in (None, last), "measured earlier in training", "")
    return _only(kept, lambda row: row.get("weights") == kept[-1].get("weights"), "measured with other weights")


def _only(rows: Sequence[Row], wanted: Callable[[Row], bool], why: str, so: str = " (not comparable)") -> list[Row]:
    """Return the `wanted` rows. `Run.left_out` of the other rows' runs gets their number, and `why`."""
    others = collections.Counter((row.run, row["protocol"]) for row in rows if not wanted(row))
    for (run, protocol), n in others.items():
        run.left_out.append((protocol, f"{n} row{'s' * (n > 1)} left out, {why}{so}"))
    return [row for row in rows if wanted(row)]


def by_stride(rows: Sequence[Row]) -> dict[Any, list[Row]]:
    """Return rows of one protocol by stride if windows of one length were slid with several, else all by None."""
    slid = {(row["eval_len"], row.get("stride")) for row in rows}
    several = len(slid) > len({length for length, _ in slid})
    found = collections.defaultdict(list)
    for row in rows:
        found[row.get("stride") if several else None].append(row)
    return found


def _same_targets(rows: Sequence[Row]) -> list[Row]:
    """Choose for all runs the rows on one set of targets, the set that most runs have.

    Ties go to the set with as many targets as most runs were first evaluated on. Further ties go to the set of most
    rows, then to the last. A run without the set keeps rows of the status "apart".
    """
    first = {row.run: row.get("max_targets") for row in reversed(rows)}
    keys = list(map(targets_key, rows))

    def rank(targets: Any) -> tuple[int, ...]:
        on = [(place, row) for place, row in enumerate(rows) if keys[place] == targets]
        own = {row.run for _, row in on if row.get("max_targets") == first[row.run]}
        return len({row.run for _, row in on}), len(own), len(on), on[-1][0]

    chosen = max(dict.fromkeys(keys), key=rank)
    there = {row.run for row, targets in zip(rows, keys, strict=True) if targets == chosen}
    kept = [row for row in rows if row.run in there]
    apart = {(row.run, row["eval_len"]): row for row in rows if row.run not in there}
    empty = [{name: row[name] for name in row if name not in _SCORED} | {"status": "apart"} for row in apart.values()]
    return [
        *_only(kept, lambda row: targets_key(row) == chosen, "scored on other targets"),
        *(Row(row, run) for row, (run, _) in zip(empty, apart, strict=True)),
    ]


def _longest(rows: Sequence[Row]) -> list[Row]:
    """Choose each run's last row of its longest windows with losses, preferably on the targets of most runs."""
    runs = collections.Counter(key for _, key in {(row.run, targets_key(row)) for row in rows})
    found: dict[Run, Row] = {}
    for row in sorted(rows, key=lambda row: (bool(row.get("position_nll")), row["eval_len"], runs[targets_key(row)])):
        found[row.run] = row
    for run, kept in found.items():
        shorter = {row["eval_len"] for row in rows if row.run == run and row.get("position_nll")} - {kept["eval_len"]}
        if lengths := ", ".join(f"{length:,}" for length in sorted(shorter)):
            drawn = f"windows of {lengths} tokens left out, those of {kept['eval_len']:,} are drawn"
            run.left_out.append((PER_POSITION, drawn))
    same = [row for row in rows if row.get("position_nll") and row["eval_len"] == found[row.run]["eval_len"]]
    _only(same, lambda row: row is found[row.run], "scored on other targets")
    return list(found.values())


def diverged_rows(folder: str | pathlib.Path) -> list[Row]:
    """Return a row without a value for every run that has no results because its training ended with NaN."""
    return _ended({run.path: name_of(run.path, folder) for run in _without_results(folder)})


def diverged_of_several(folders: Sequence[str | pathlib.Path]) -> list[Row]:
    """Return the rows of `diverged_rows` for several folders, of runs that are named as `read_several` names its."""
    resolved = [pathlib.Path(folder).resolve() for folder in folders]
    measured = {run for folder in resolved for run in run_folders(folder, "eval.jsonl")}
    started = [run.path for folder in resolved for run in _without_results(folder)]
    return _ended({path: os.path.relpath(path, common_folder(measured)) for path in started}) if measured else []


def _ended(names: Mapping[pathlib.Path, str]) -> list[Row]:
    """Return a row of the status "diverged" for each run folder whose training ended with NaN. names: of the runs."""
    found = []
    for path, name in names.items():
        step = RunFolder(path).ended_with_nan()
        if step is not None and (run := run_of_config(path, name)).train_len:
            lengths = dict.fromkeys(("train_len", "eval_len", "stride"), run.train_len)
            facts = {"protocol": protocols.Nonoverlapping.name, "step": step, "status": "diverged"}
            found.append(Row(facts | lengths, run))
    return found


def diverged(stored: Iterable[Row]) -> dict[str, str]:
    """Return {path of a run: why it has no results} of the runs whose training ended with NaN."""
    ended = [row for row in stored if row.get("status") == "diverged"]
    return {row.run.path: f"training ended with NaN at step {row['step']:,}" for row in ended}


def unfinished(folder: str | pathlib.Path, stored: Iterable[Row]) -> dict[str, str]:
    """Return {path: why it failed} of the started runs without a row in `stored`; "" if no failure is recorded."""
    there = {row.run.path for row in stored}
    names = {name_of(run.path, folder): run for run in _without_results(folder)}
    return {name: run.failure() for name, run in names.items() if name not in there}


def _without_results(folder: str | pathlib.Path) -> list[RunFolder]:
    """Return the started runs without a whole row, or whose training ended with NaN and has no row of its end."""
    started = map(RunFolder, run_folders(pathlib.Path(folder), "config.json"))
    return [run for run in started if _has_no_row(run) or _nan_step(run) is not None]


def _has_no_row(run: RunFolder) -> bool:
    return bool(problem_of(lines.first(run.eval_file))) and not run.measured()


def _nan_step(run: RunFolder) -> int | None:
    """Return the step at which the training of a run ended with NaN, None if it did not. A finished run is not read."""
    return None if run.done_file.is_file() else run.ended_with_nan()


def perplexity(row: Mapping[str, Any]) -> float | None:
    """Return the perplexity per token of a row, or None if the row has no finite one."""
    value = number(row.get("ppl")) if row.get("status", "ok") == "ok" else None
    return value if value is not None and value > 0 else None
