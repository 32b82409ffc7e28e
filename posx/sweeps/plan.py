"""The runs of a sweep, and the progress of each."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from posx.config import RunConfig
from posx.config.data import PLACES
from posx.data import DataConfig, Dataset, check_length, prepare
from posx.errors import ConfigError, PosxError
from posx.evaluation.protocols import Nonoverlapping, num_required_rows
from posx.files.atomic import write_json
from posx.files.lines import parsed
from posx.files.rows import result_of
from posx.progress import by_reason, say
from posx.runs import text
from posx.runs.checks import check_stream, checked, unused
from posx.runs.describe import Expected, expected
from posx.runs.folder import RunFolder
from posx.sweeps.axes import Point, names_of, points_of, run_at, text_of
from posx.sweeps.schedule import CORE_SPEED, START, Cost
from posx.sweeps.tasks import ALONE


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a sweep, at one combination of the values on its axes."""

    run: RunConfig
    folder: RunFolder
    point: Point

    @property
    def output(self) -> None:
        """No file: the run prints nothing but its log."""

    @property
    def name(self) -> str:
        return self.folder.path.name

    @functools.cached_property
    def expected(self) -> Expected:
        """The cost of the run, whose tokenizer its folder may hold."""
        return expected(text.at_hand(self.folder, self.run))

    @functools.cached_property
    def cost(self) -> Cost:
        train = self.run.train
        found, rows = self.expected, train.batch_size // train.accumulation
        work = found.slower * (found.flops + (found.eval_flops or 0.0))
        return Cost(work, found.lengths, found.memory, train.steps, rows, train.seed)

    def command(self) -> list[str]:
        """Return the words of the run as `posx train`. Leaves its settings in its folder."""
        settings = self.folder.path / "asked.json"
        write_json(settings, self.run.to_json())
        self.folder.status_file.unlink(missing_ok=True)
        return ["train", f"--config_json={settings}", f"--workdir={self.folder.path}", ALONE]

    def failure(self) -> str:
        """Return why the last process failed, "" if it did not."""
        try:
            reason = str(parsed(self.folder.status_file.read_text(encoding="utf-8"))["reason"])
            return reason.removeprefix(f"{self.name}: ")
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def finished(self) -> bool:
        """Tell whether these settings were trained and evaluated to the end."""
        return self.folder.finished(self.run)

    def progress(self) -> float:
        """Return the finished part of the expected work after the start, below 1 until the run has ended."""
        steps = max((row["step"] for row in self.folder.logged()), default=0)
        rows = len(self.folder.measured())
        required = num_required_rows(self.run.eval, self.run.train.length)
        training = self.expected.slower * self.expected.flops / CORE_SPEED / (self.cost.seconds(1) - START)
        return 0.99 * (training * min(steps / self.run.train.steps, 1) + (1 - training) * min(rows / required, 1))

    def part(self) -> float:
        """Return the finished part. 1 means that the run is finished."""
        return 1.0 if self.finished() else self.progress()

    def state(self) -> str:
        """Return the present activity of the run in a few words."""
        rows = self.folder.measured()
        if rows:
            return f"{self.name} evaluating {rows[-1]['protocol']} at {rows[-1]['eval_len']}"
        last = self.folder.logged()[-1:]
        if not last:
            return self.name
        loss = last[0].get("loss")
        told = f" loss {loss:.3f}" if isinstance(loss, float) else ""
        return f"{self.name} {last[0]['step']}/{self.run.train.steps}{told}"

    def outcome(self) -> str:
        """Return perplexities of the non-overlapping protocol at the shortest and the longest length."""
        rows = [row for row in self.folder.measured() if row["protocol"] == Nonoverlapping.name]
        ends = [min(rows, key=_length), max(rows, key=_length)] if rows else []
        return ", ".join(f"{result_of(row)} at {row['eval_len']}" for row in ends)


def plan(config: ConfigDict, workdir: Path, read: bool = False) -> list[Job]:
    """Return the runs of a sweep: every combination of the values on its axes, each in its folder.

    A run is in the folder that holds it already, else in one named by what varies. `read` reads the texts, whose
    digests tell runs apart. Without it, the texts of the runs in the folder are taken as unchanged.

    Raises:
      ConfigError: with every problem of every run; or two runs are the same.
      DataError: a text is missing, or too short for a run.
    """
    points = points_of(config)
    held = _runs_there(workdir)
    jobs, found = list[Job](), list[tuple[str, str]]()
    for name, point in zip(names_of(points), points, strict=True):
        try:
            jobs.append(Job(checked(run_at(config, point)), RunFolder(workdir / name), point))
        except ConfigError as error:
            found.append((name, str(error)))
    if found:
        raise ConfigError("; ".join(by_reason(found)))
    return _in_their_folders(_once(_with_texts(jobs, held, read)), held, workdir)


def _with_texts(jobs: Sequence[Job], held: Mapping[RunFolder, RunConfig], read: bool) -> list[Job]:
    """Return the jobs with the digests of their texts, at the places where earlier runs of the folder found them."""
    found: list[Job] = []
    datasets: dict[DataConfig, Dataset] = {}
    for job in jobs:
        namesakes = (
            (folder, old) for folder, old in held.items() if len(text.named_alike(job.run, old)) == len(PLACES)
        )
        folder, before = next(namesakes, (job.folder, job.run))
        run = text.at_known_places(job.run, before)
        if read:
            data = text.at_hand(folder, run).data
            if data not in datasets:
                datasets[data] = prepare(data, log=say)
                say(datasets[data].summary())
            check_stream(run.eval, run.train.length, datasets[data])
            check_length(len(datasets[data].train.tokens), run.train.length, "the training text")
            known = datasets[data].digest
        else:  # the run in the job's own folder counts wherever its text is
            own_first = {job.folder: held[job.folder], **held} if job.folder in held else held
            same = (old.text for at, old in own_first.items() if text.may_be_the_same(run, old, at == job.folder))
            known = next(same, "")
        found.append(dataclasses.replace(job, run=dataclasses.replace(run, text=known)))
    return found


def _once(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs without those that differ from an earlier one only in settings that neither of them uses.

    The size of the vocabulary is such a setting for bytes, the multiplier of rates for an encoding without parameters.
    Raises ConfigError for an axis that no job uses, and for two points that train the same.
    """
    idle = [unused(job.run) for job in jobs]
    for setting in jobs[0].point:
        values = list(dict.fromkeys(text_of(setting, job.point[setting]) for job in jobs))
        if len(values) > 1 and all(setting in found for found in idle):
            raise ConfigError(f"{setting}={values[0]} and {values[1]} are the same run: {idle[0][setting]}")
    first: dict[str, Job] = {}
    for job, not_used in zip(jobs, idle, strict=True):
        other = first.setdefault(job.run.hash, job)
        apart = {s: v for s, v in job.point.items() if text_of(s, v) != text_of(s, other.point[s])}
        if any(s != "train.position_lr_multiplier" and s not in not_used for s in apart):
            told = ", ".join(f"{s}={text_of(s, other.point[s])} and {text_of(s, v)}" for s, v in apart.items())
            raise ConfigError(f"{told} are the same run: what is trained does not depend on {' and '.join(apart)}")
    return list(first.values())


def _in_their_folders(jobs: Sequence[Job], held: Mapping[RunFolder, RunConfig], workdir: Path) -> list[Job]:
    """Return the jobs in the folders that hold them, whatever those are called.

    If the folder of a new run's name holds another run, the hash of the new run is appended to the name.
    """
    by_hash: dict[str, RunFolder] = {}
    wanted = {job.folder for job in jobs}
    for folder, run in sorted(held.items(), key=lambda item: (not item[0].finished(item[1]), item[0] not in wanted)):
        by_hash.setdefault(run.hash, folder)  # of two copies the finished one
    taken = {by_hash[job.run.hash].path for job in jobs if job.run.hash in by_hash}
    placed, beside = [], []
    for job in jobs:
        folder = by_hash.get(job.run.hash, job.folder)
        if job.run.hash not in by_hash and (folder in held or folder.path in taken):
            apart = held[folder].differences(job.run) if folder in held else []
            folder = RunFolder(workdir / f"{job.name}-{job.run.hash}")
            beside.append(f"{folder.path.name} ({'; '.join(apart) or 'its name is taken'})")
        placed.append(dataclasses.replace(job, folder=folder))
    if beside:
        taken_names = "1 folder name is" if len(beside) == 1 else f"{len(beside)} folder names are"
        say(f"notice: {taken_names} taken by runs with other settings; the new runs go to {beside[0]}")
    return placed


def _runs_there(workdir: Path) -> dict[RunFolder, RunConfig]:
    """Return the runs in `workdir` whose settings can be read, whatever their folders are called."""
    found = {}
    with contextlib.suppress(OSError):  # writing there says why a folder cannot be read
        for path in sorted(workdir.glob("*/config.json")):
            with contextlib.suppress(PosxError):
                folder = RunFolder(path.parent)
                found[folder] = folder.read_config()
    return found


def _length(row: dict[str, Any]) -> int:
    return row["eval_len"]
