"""Which runs a sweep makes, and how far each of them is."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from posx.config import RunConfig
from posx.config.stored import identity, like, repeated, to_stored
from posx.data import DataConfig, check_length, prepare
from posx.errors import ConfigError, PosxError
from posx.evaluation.protocols import Nonoverlapping, rows_owed
from posx.files.atomic import write_json
from posx.files.parse import parsed
from posx.files.rows import result_of
from posx.progress import by_reason, say
from posx.runs import text
from posx.runs.checks import check_stream, problems, unused
from posx.runs.describe import Expected, expected_in
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
        """It prints nothing but its log."""

    @property
    def name(self) -> str:
        return self.folder.path.name

    @functools.cached_property
    def expected(self) -> Expected:
        """Its cost, also where its tokenizer lies in its folder by now."""
        return expected_in(self.folder, self.run)

    @functools.cached_property
    def cost(self) -> Cost:
        train = self.run.train
        found, rows = self.expected, train.batch_size // train.accumulation
        work = found.slower * (found.flops + (found.eval_flops or 0.0))
        return Cost(work, found.lengths, found.memory, train.steps, rows, train.seed)

    def command(self) -> list[str]:
        """The words of the run as `posx train`. Leaves its settings in its folder."""
        settings = self.folder.path / "asked.json"
        write_json(settings, to_stored(self.run))
        self.folder.status_file.unlink(missing_ok=True)
        return ["train", f"--config_json={settings}", f"--workdir={self.folder.path}", ALONE]

    def failure(self) -> str:
        """Why its last process failed, empty where it did not."""
        try:
            reason = str(parsed(self.folder.status_file.read_text(encoding="utf-8"))["reason"])
            return reason.removeprefix(f"{self.name}: ")
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def finished(self, data_digest: str = "") -> bool:
        """Whether these settings were trained and evaluated to the end (on just this text, if its digest is given)."""
        return self.folder.finished(self.run, data_digest)

    def progress(self) -> float:
        """The finished part of the expected work after its start, 0 to 1, where 1 is only for those that have ended."""
        steps = max((row["step"] for row in self.folder.logged()), default=0)
        rows = len(self.folder.measured())
        owed = rows_owed(self.run.eval, self.run.train.length)
        training = self.expected.slower * self.expected.flops / CORE_SPEED / (self.cost.seconds(1) - START)
        return 0.99 * (training * min(steps / self.run.train.steps, 1) + (1 - training) * min(rows / owed, 1))

    def part(self) -> float:
        """The finished part, 0 to 1, where 1 is only what is finished."""
        return 1.0 if self.finished() else self.progress()

    def state(self) -> str:
        """What the run is at, a few words."""
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
        """Perplexities of the non-overlapping protocol, shortest and longest length."""
        rows = [row for row in self.folder.measured() if row["protocol"] == Nonoverlapping.name]
        ends = [min(rows, key=_length), max(rows, key=_length)] if rows else []
        return ", ".join(f"{result_of(row)} at {row['eval_len']}" for row in ends)


def plan(config: ConfigDict, workdir: Path, earlier: RunConfig | None = None) -> list[Job]:
    """The runs of the sweep: all combinations of the values on its axes, each in the folder that holds it already or in
    one named by what varies. Raises ConfigError listing every problem of every run.

    `earlier` is the run that `config` repeats, if any: what it left open stays what it was.
    """
    points = points_of(config)
    jobs, found = list[Job](), list[tuple[str, str]]()
    for name, point in zip(names_of(points), points, strict=True):
        folder = RunFolder(workdir / name)
        run = folder.as_started(repeated(run_at(config, point), earlier))
        found += [(name, problem) for problem in problems(run)]
        jobs.append(Job(run, folder, point))
    if found:
        raise ConfigError("; ".join(by_reason(found)))
    jobs = _in_their_folders(_once(jobs), workdir)
    _check_different(jobs)
    return jobs


def _once(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs without those that differ from an earlier one only in settings that neither of them uses.

    A vocabulary's size is one of them for bytes, a multiplier of rates for an encoding that has no parameters. Raises
    ConfigError for an axis that no job uses.
    """
    idle = [unused(job.run) for job in jobs]
    for setting in jobs[0].point:
        values = list(dict.fromkeys(text_of(setting, job.point[setting]) for job in jobs))
        if len(values) > 1 and all(setting in found for found in idle):
            raise ConfigError(f"{setting}={values[0]} and {values[1]} are the same run: {idle[0][setting]}")
    first: dict[Any, Job] = {}
    for job, found in zip(jobs, idle, strict=True):
        apart = tuple(
            text_of(s, value)
            for s, value in job.point.items()
            if s != "train.position_lr_multiplier" and s not in found
        )
        usual: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(DataConfig) if f"data.{f.name}" in found}
        run = dataclasses.replace(job.run, data=dataclasses.replace(job.run.data, **usual))
        first.setdefault((apart, identity(run)), job)
    return list(first.values())


def _in_their_folders(jobs: Sequence[Job], workdir: Path) -> list[Job]:
    """The same jobs where they were started, whatever the folder is called.

    A new one whose name another run has, of an earlier call or of this one, gets its identity behind it.
    """
    held: dict[Any, list[tuple[RunFolder, RunConfig, str]]] = {}
    for folder, run in _runs_there(workdir):
        held.setdefault(_kind(run), []).append((folder, run, identity(run)))
    found = [_where_started(job, held.get(_kind(job.run), ())) for job in jobs]
    taken = {job.folder.path for job in found if job is not None}
    placed, beside = [], []
    for job, there in zip(jobs, found, strict=True):
        apart = [] if there else job.folder.differences(job.run)
        if there is None and (apart or job.folder.path in taken):
            there = dataclasses.replace(job, folder=RunFolder(workdir / f"{job.name}-{identity(job.run)}"))
            beside.append(f"{there.name} ({'; '.join(apart) or 'its name is taken'})")
        placed.append(there or job)
    if beside:
        taken_names = "1 folder name is" if len(beside) == 1 else f"{len(beside)} folder names are"
        say(f"notice: {taken_names} taken by runs with other settings; the new runs go to {beside[0]}")
    return placed


def _kind(run: RunConfig) -> Any:
    """What tells most runs apart at once; `identity` is slower."""
    return run.train.length, run.train.seed, run.train.learning_rate


def _where_started(job: Job, held: Sequence[tuple[RunFolder, RunConfig, str]]) -> Job | None:
    """`job` in the folder that holds it, with what it left open as it was resolved there."""
    for folder, run, name in held:
        asked = like(job.run, run)
        if identity(asked) == name:
            return Job(asked, folder, job.point)
    return None


def _check_different(jobs: Sequence[Job]) -> None:
    """Raises ConfigError where two points of the sweep train the same."""
    seen: dict[str, Job] = {}
    for job in jobs:
        other = seen.setdefault(identity(job.run), job)
        if other is not job:
            apart = {s: v for s, v in job.point.items() if text_of(s, v) != text_of(s, other.point[s])}
            told = ", ".join(f"{s}={text_of(s, other.point[s])} and {text_of(s, v)}" for s, v in apart.items())
            raise ConfigError(f"{told} are the same run: what is trained does not depend on {' and '.join(apart)}")


def _runs_there(workdir: Path) -> list[tuple[RunFolder, RunConfig]]:
    """The runs in `workdir` that can be read, whatever their folders are called."""
    found = []
    with contextlib.suppress(OSError):  # a folder that cannot be read is refused where it is to be written
        for path in sorted(workdir.glob("*/config.json")):
            with contextlib.suppress(PosxError):
                folder = RunFolder(path.parent)
                found.append((folder, folder.read_config()))
    return found


def unfinished(jobs: Sequence[Job]) -> list[Job]:
    """The jobs still to run on the text as it is now. Raises DataError where it is too short for any of them."""
    texts = {job.name: text.settings(job.folder, job.run.data) for job in jobs}
    datasets = {where: prepare(where, log=say) for where in dict.fromkeys(texts.values())}
    for dataset in datasets.values():
        say(dataset.summary())
    todo = [job for job in jobs if not job.finished(datasets[texts[job.name]].digest)]
    for job in todo:
        dataset = datasets[texts[job.name]]
        check_stream(job.run.eval, job.run.train.length, dataset)
        check_length(len(dataset.train.tokens), job.run.train.length, "the training text")
    return todo


def _length(row: dict[str, Any]) -> int:
    return row["eval_len"]
