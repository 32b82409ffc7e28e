"""Many runs from one config: every run in a process of its own, finished ones skipped, failures named at the end."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from posx.config import RunConfig, with_encoding
from posx.data import prepare
from posx.data.store import cache_folder
from posx.errors import ConfigError
from posx.evaluation.run import check_stream
from posx.progress import duration, say
from posx.runs import RunFolder, write_json

MOST_RUNS = 1000

#: What an exit code of a run means, for the summary.
MEANINGS = {
    2: "bad config", 3: "data", 4: "work folder or checkpoint", 5: "non-finite loss", 6: "out of memory or disk",
    7: "some lengths failed", -9: "killed (often: out of memory)", 130: "interrupted",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a sweep; its folder's name says what it is."""

    run: RunConfig
    folder: RunFolder

    @property
    def name(self) -> str:
        return self.folder.path.name

    def finished(self) -> bool:
        """Whether a process has trained and evaluated just these settings to the end."""
        try:
            return json.loads(self.folder.done_file.read_text())["digest"] == self.run.digest()
        except (OSError, ValueError, KeyError):
            return False


def plan(config: ConfigDict, workdir: Path) -> list[Job]:
    """The runs of the sweep: encodings x train_lens x seeds. Raises ConfigError listing every problem of every run."""
    sweep = config.sweep
    axes = {"encodings": sweep.encodings, "train_lens": sweep.train_lens, "seeds": sweep.seeds}
    for name, values in axes.items():
        if not values:
            raise ConfigError(f"sweep.{name} is empty: name at least one")
        if len(set(values)) != len(values):
            raise ConfigError(f"sweep.{name}={tuple(values)} names a value twice")
    count = len(sweep.encodings) * len(sweep.train_lens) * len(sweep.seeds)
    if count > MOST_RUNS:
        raise ConfigError(f"this sweep has {count} runs, more than {MOST_RUNS}: split it")
    jobs, problems = [], []
    for length in sweep.train_lens:
        for encoding in sweep.encodings:
            for seed in sweep.seeds:
                run = with_encoding(config, encoding, length, seed)
                safe = encoding.replace(":", ".")
                job = Job(run, RunFolder(workdir / f"{safe}-L{length}-s{seed}"))
                problems += [f"{job.name}: {problem}" for problem in run.problems()]
                jobs.append(job)
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))
    return jobs


def run_all(jobs: Sequence[Job], at_once: int) -> dict[str, str]:
    """Runs what is not finished, `at_once` processes at a time; returns {name: reason} of what failed."""
    todo = [job for job in jobs if not job.finished()]
    if len(todo) < len(jobs):
        say(f"{len(jobs) - len(todo)} of {len(jobs)} runs are finished already")
    if not todo:
        return {}
    data = todo[0].run.data
    dataset = prepare(data, log=say)
    check_stream(todo[0].run.eval, dataset)
    _measure_ceiling(cache_folder(data) / "machine", todo[0].run.model.dtype)
    failed: dict[str, str] = {}
    running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
    waiting, began, done = list(todo), time.monotonic(), 0
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                say(f"run {len(todo) - len(waiting)} of {len(todo)}: {job.name}")
                running[job.name] = (job, _start(job, quiet=at_once > 1))
            time.sleep(0.2)
            for name, (job, process) in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[name]
                done += 1
                if code:
                    failed[name] = _reason(job, code)
                    say(f"{name} failed: {failed[name]}")
                left = (time.monotonic() - began) / done * (len(todo) - done)
                say(f"{done} of {len(todo)} runs done, about {duration(left)} left" if done < len(todo) else
                    f"{done} runs took {duration(time.monotonic() - began)}")  # fmt: skip
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()
    return failed


def _start(job: Job, quiet: bool) -> subprocess.Popen[bytes]:
    """The run as `posx train` in a process of its own. It ends with this one: it watches its standard input."""
    job.folder.path.mkdir(parents=True, exist_ok=True)
    settings = job.folder.path / "asked.json"
    write_json(settings, job.run.to_json())
    command = [
        sys.executable, "-m", "posx.cli", "train", f"--config_json={settings}", f"--workdir={job.folder.path}",
        "--stop_with_stdin",
    ]  # fmt: skip
    (job.folder.path / "status.json").unlink(missing_ok=True)
    if not quiet:
        return subprocess.Popen(command, stdin=subprocess.PIPE)
    with open(job.folder.path / "log.txt", "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)


def _reason(job: Job, code: int) -> str:
    try:
        return str(json.loads((job.folder.path / "status.json").read_text())["reason"])
    except (OSError, ValueError, KeyError):
        meaning = MEANINGS.get(code, "it crashed; see its output")
        return f"exit code {code}: {meaning}"


def _measure_ceiling(folder: Path, dtype: str) -> None:
    """Measures the machine once, in a process of its own, before runs compete for it."""
    subprocess.run(
        [sys.executable, "-m", "posx.training.ceiling", str(folder), dtype], check=False, stdin=subprocess.DEVNULL
    )


def summary(jobs: Sequence[Job], failed: dict[str, str]) -> str:
    """One line a run that failed; empty if none did."""
    return "\n".join(f"failed: {name}: {failed[name]}" for name in (job.name for job in jobs) if name in failed)
