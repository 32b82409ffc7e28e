"""Damage in the folder of a run: files that were cut, edited, removed, or changed by the disk.

Rows agree with themselves and with their checksums, JSON files with theirs, checkpoints with their manifests. posx
never deletes a damaged file: `mend` moves it to `NAME.damaged-DATE`. The command that made the run then writes,
measures or trains again what the file held.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import posx
from posx.errors import Damaged, PosxError, WorkdirError
from posx.lab.config.run import IMPORTED
from posx.lab.files import checksums, manifests, rows
from posx.lab.files.locks import holder
from posx.lab.runs.finding import typed_path, workdir_flag
from posx.lab.runs.folder import TOKENIZER_CHECKSUM, RunFolder
from posx.lab.runs.load import check_borrowed
from posx.notices import say

#: The file that holds the stamp of a folder: a digest that stays the same as long as nothing touches the files.
STAMP = ".verified"
#: Seconds that files must be old before a stamp is written: clocks of file systems are coarse.
SETTLED_SECONDS = 2.0
#: The files that a stamp covers, beside all of `checkpoints`.
COVERED = (
    "config.json", "env.json", "tokenizer.json", "DONE", "rows.json", "eval.jsonl", "metrics.jsonl", "weights.txt",
)  # fmt: skip
#: How to mend most damage.
REPEAT = "Repeat the command that made the run"
MEASURE = "Repeat the command that made the run, or measure it again: posx evaluate {}"


@dataclasses.dataclass(frozen=True)
class Damage:
    """One damaged file or row.

    Attributes:
      path: the file.
      problem: in words.
      mend: how to mend it.
      line: the line of the row, 0 for the whole file.
    """

    path: Path
    problem: str
    mend: str
    line: int = 0

    def __str__(self) -> str:
        place = typed_path(self.path) + (f", line {self.line}" if self.line else "")
        return f"{place}: {self.problem}. {self.mend}."


def damages(folder: RunFolder, thorough: bool = False) -> list[Damage]:
    """Return all damage in the folder of a run.

    Args:
      folder: of a run, finished or not.
      thorough: read every file. Otherwise a folder that was whole, and whose files were not touched since, is not read
        again. Their sizes, times and inodes tell.

    Returns:
      The damage, in the order of the files. In a folder that a process is writing, only damage that is found twice
      counts.
    """
    stamp = _stamp(folder)
    with contextlib.suppress(OSError):
        if not thorough and (folder.path / STAMP).read_bytes() == stamp.encode():
            return []
    damaged = list(_damages(folder))
    if damaged and holder(folder.path / ".lock"):  # a file may be half written: real damage is found a second time
        damaged = [damage for damage in _damages(folder) if damage in damaged]
    with contextlib.suppress(OSError):  # the folder may be read-only
        if damaged:
            (folder.path / STAMP).unlink(missing_ok=True)
        elif time.time() - _newest(folder) > SETTLED_SECONDS:
            (folder.path / STAMP).write_text(stamp, "utf-8")
    return damaged


def _damages(folder: RunFolder) -> Iterator[Damage]:
    yield from _config(folder)
    for path in (folder.env_file, folder.done_file):
        if path.exists() and (why := _why(path)):
            yield Damage(path, why, f"{REPEAT}: it writes the file again")
    yield from _checkpoints(folder)
    yield from _weights(folder)
    for damage in (*_rows(folder), *_log(folder)):
        if folder.done_file.exists() or not damage.line or damage.line != _torn_line(damage.path):
            yield damage  # the torn last line of a killed process is none before the run is finished


def _torn_line(path: Path) -> int:
    """Return the number of the last line of a file if it has no line break, else 0."""
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        return 0 if not data or data.endswith(b"\n") else 1 + data.count(b"\n")
    return 0


def _why(path: Path) -> str:
    """Return why a JSON file is not whole, without its path."""
    try:
        checksums.read_checked(path)
    except Damaged as error:
        return str(error).removeprefix(str(path)).lstrip(": ")
    return ""


def _config(folder: RunFolder) -> Iterator[Damage]:
    """Yield damage of the settings and of the tokenizer whose checksum they hold."""
    path, again = folder.config_file, f"{REPEAT}: it writes the file again if all else here is of that run"
    made = [one for one in (folder.done_file, folder.eval_file, folder.checkpoints) if one.exists()]
    if not path.exists():
        if made:
            yield Damage(path, f"it is missing beside {made[0].name}", "Restore it, or train the run in another folder")
        return
    try:
        folder.read_config()
    except Damaged as error:
        yield Damage(path, str(error).removeprefix(f"{path} "), again)
        return
    except PosxError as error:
        problem, _, fix = str(error).removeprefix(f"{path} ").partition(". ")  # some of these errors name a fix
        yield Damage(path, problem, fix.rstrip(".") or "Restore it, or train the run again")
        return
    wanted, tokenizer = checksums.read_verified(path).get(TOKENIZER_CHECKSUM), folder.tokenizer_file
    if not tokenizer.exists():
        if made:
            yield Damage(tokenizer, "it is missing", f"{REPEAT}: it writes the file again")
    elif wanted and (not tokenizer.is_file() or checksums.file_checksum(tokenizer) != wanted):
        yield Damage(tokenizer, "it does not match its checksum in config.json", f"{REPEAT}: it writes the file again")


def _checkpoints(folder: RunFolder) -> Iterator[Damage]:
    settings, done = checksums.read_verified(folder.config_file), checksums.read_verified(folder.done_file)
    own, steps = str(settings.get("hash", "")), manifests.steps(folder.checkpoints)
    train = f"{REPEAT}: it trains again from the newest whole checkpoint, or from step 0"
    for step in steps:
        path = folder.checkpoints / str(step)
        try:
            problem = manifests.manifest_problem(folder.checkpoints, step)
            run = manifests.manifest_run(folder.checkpoints, step)
        except WorkdirError as error:
            yield Damage(path, str(error).rstrip("."), "Train the run again in another folder")
            continue
        if problem:
            yield Damage(path, problem, train)
        elif own and run and run != own:
            yield Damage(path, f"it is of the run {run}, but config.json is of {own}", "Restore the checkpoint")
    if str(settings.get("text")).startswith(IMPORTED) and not (steps or folder.is_borrowed):
        yield Damage(folder.checkpoints, "the weights of this imported model are missing", "Import the model again")
    parent = settings.get("parent")
    if isinstance(parent, Mapping) and parent and "step" not in parent and not folder.is_borrowed:
        mend = "Restore it, or remove this run and evaluate its parent again"
        yield Damage(folder.weights_file, f"it is missing, but the weights are those of run {parent.get('hash')}", mend)
    if done and done.get("step") not in steps:
        yield Damage(folder.checkpoints, f"DONE says step {done.get('step')}, but that checkpoint is missing", train)
    if done and own and done.get("hash") != own:
        yield Damage(folder.done_file, f"it is of the run {done.get('hash')}, but config.json is of {own}", REPEAT)


def _weights(folder: RunFolder) -> Iterator[Damage]:
    """Yield damage of the run whose weights this one has."""
    mend = "Restore that run, or remove this one and evaluate it again"
    try:
        run = folder.read_config()
    except WorkdirError:
        return  # named already
    try:
        if folder.is_borrowed:
            check_borrowed(folder, run)
    except WorkdirError as error:
        yield Damage(folder.weights_file, str(error).removeprefix(f"{folder.weights_file} ").rstrip("."), mend)


def _rows(folder: RunFolder) -> Iterator[Damage]:
    """Yield damage of `eval.jsonl`: rows that are not whole, and rows that were listed once and are gone."""
    path = folder.eval_file
    again = MEASURE.format(workdir_flag(folder.path))
    try:
        every = folder.checked_rows()
    except WorkdirError as error:
        yield Damage(path, str(error).removeprefix(f"{path} "), again)
        return
    yield from (Damage(path, problem, again, line) for line, _, problem in every if problem)
    yield from (Damage(path, problem, again) for problem in folder.gone_rows(every))
    if (folder.ledger_file.exists() or folder.done_file.exists()) and (why := _why(folder.ledger_file)):
        yield Damage(folder.ledger_file, why, f"{REPEAT}: it writes the file again")


def _log(folder: RunFolder) -> Iterator[Damage]:
    """Yield damage of the log of training. Only the figure of training reads the log."""
    path = folder.metrics_file
    mend = f"{REPEAT}: it moves the line away. Only the figure of training rests on it"
    try:
        every = rows.check_rows(path, rows.log_problem, folder.hash)
    except WorkdirError as error:
        yield Damage(path, str(error).removeprefix(f"{path} "), mend)
        return
    named = set[str]()  # a log of another run is named once
    for line, _, why in every:
        if why and why not in named:
            yield Damage(path, why, mend, line)
            named |= {why} if why.startswith("it is of the run") else set()
    steps, done = [row["step"] for _, row, why in every if not why], checksums.read_verified(folder.done_file)
    last, wanted = max(steps, default=0), done.get("step", 0)
    if last < wanted and not list(folder.path.glob(f"{path.name}.damaged-*")):
        mend = "Only the figure of training rests on the rest. Train the run again in another folder to have it"
        yield Damage(path, f"it ends at step {last}, but DONE says step {wanted}", mend)


def mend(folder: RunFolder, run: str) -> None:
    """Move damaged files of a run that is about to resume out of the way, and say which. The caller holds its lock.

    Args:
      folder: of the run, with its settings, unless these were damaged.
      run: the hash of the run.

    Raises:
      WorkdirError: a checkpoint is of another format, or a file cannot be read or moved.
    """
    with contextlib.suppress(OSError):
        (folder.path / STAMP).unlink(missing_ok=True)
    _mend_checkpoints(folder, run)
    log = rows.check_rows(folder.metrics_file, rows.log_problem, run)
    _mend_lines(folder.metrics_file, {line: why for line, _, why in log})


def mend_settings(folder: RunFolder) -> None:
    """Move damaged settings or a damaged tokenizer away, before they are written again. Raises WorkdirError."""
    for damage in list(_config(folder)):
        if damage.path.exists():
            place = checksums.set_aside(damage.path)
            say(f"notice: {typed_path(damage.path)}: {damage.problem}. It is written again; the old file is now "
                f"{place.name}")  # fmt: skip


def _mend_checkpoints(folder: RunFolder, run: str) -> None:
    """Move damaged checkpoints away if a whole one is left, or if all are known to be of this run."""
    place = folder.checkpoints
    problems = {step: manifests.manifest_problem(place, step) for step in manifests.steps(place)}
    bad = [step for step, problem in problems.items() if problem]
    is_known = len(bad) < len(problems) or all(manifests.manifest_run(place, step) == run for step in bad)
    if not bad or not is_known:  # `Checkpoints.restore` refuses them
        return
    target = checksums.damaged_path(place)
    target.mkdir()
    for step in bad:
        manifests.manifest_path(place, step).rename(target / f"{step}.json")
        with contextlib.suppress(FileNotFoundError):
            (place / str(step)).rename(target / str(step))
        say(f"notice: checkpoint {step} in {place} is damaged ({problems[step]}) and was skipped. It is now in "
            f"{target.name}")  # fmt: skip
    if len(bad) == len(problems):
        say(f"notice: {folder.path.name}: no good checkpoint is left, so training starts again at step 0")
        folder.done_file.unlink(missing_ok=True)


def mend_rows(folder: RunFolder) -> None:
    """Move damaged rows of `eval.jsonl` away, so that they are measured again. Raises WorkdirError."""
    damaged = [damage for damage in _rows(folder) if damage.path == folder.eval_file]
    for damage in damaged:
        if not damage.line:
            say(f"notice: {typed_path(damage.path)}: {damage.problem}")
    _mend_lines(folder.eval_file, {damage.line: damage.problem for damage in damaged if damage.line})


def _mend_lines(path: Path, problems: Mapping[int, str]) -> None:
    bad = {line: why for line, why in problems.items() if why}
    if not bad:
        return
    torn = _torn_line(path)
    place = checksums.set_lines_aside(path, bad)
    alike = collections.Counter(bad.values())
    for line, why in bad.items():
        if line == torn or not (more := alike.pop(why, 0)):  # a torn line is the usual trace of a killed process
            continue
        why += f" (and {more - 1} lines more)" if more > 1 else ""
        say(f"notice: {typed_path(path)}, line {line}: {why}. It is now in {place.name}")


def _stamp(folder: RunFolder) -> str:
    """Return a digest of the names, sizes, times and inodes of the covered files."""
    facts = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in _stats(folder)]
    return hashlib.sha256(json.dumps([posx.__version__, rows.ROW_VERSION, facts]).encode()).hexdigest()


def _newest(folder: RunFolder) -> float:
    return max((stat.st_ctime for _, stat in _stats(folder)), default=0.0)


def _stats(folder: RunFolder) -> Iterator[tuple[str, os.stat_result]]:
    saved = [path for one in folder.checkpoints.glob("*") for path in (one, *one.rglob("*"))]  # a step may be a link
    for path in [*(folder.path / name for name in COVERED), *sorted(saved)]:
        with contextlib.suppress(FileNotFoundError):
            yield path.relative_to(folder.path).as_posix(), path.stat()
