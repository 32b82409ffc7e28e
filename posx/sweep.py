"""Many runs from one config: every run in a process of its own, finished ones skipped, failures named at the end."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from posx import interrupts
from posx.config import RunConfig, with_encoding
from posx.data import check_length, prepare
from posx.data.store import cache_folder
from posx.errors import ConfigError, PosxError
from posx.evaluation.protocols import PerPosition
from posx.evaluation.run import check_stream, protocol_values
from posx.progress import Meter, say
from posx.runs import RunFolder, disk_errors, read_rows, write_json
from posx.stored import like, to_stored

MOST_RUNS = 1000
LOOK_SECONDS = 2.0

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

    def finished(self, data_digest: str = "") -> bool:
        """Whether these settings were trained and evaluated to the end (on just this text, if its digest is given)."""
        return self.folder.finished(self.run, data_digest)

    def progress(self) -> float:
        """The finished part, 0 to 1; evaluation counts as a quarter of a run, and 1 is for those that have ended."""
        steps = max((row.get("step", 0) for row in read_rows(self.folder.metrics_file)), default=0)
        rows = len(read_rows(self.folder.eval_file))
        expected = sum(
            1 if isinstance(protocol, PerPosition) else len(lengths)
            for protocol, lengths in protocol_values(self.run.eval, self.run.train.length)
        )
        return 0.75 * min(steps / self.run.train.steps, 1) + 0.24 * min(rows / expected, 1)

    def state(self) -> str:
        """What the run is at, a few words."""
        rows = read_rows(self.folder.eval_file)
        if rows:
            return f"{self.name} evaluating {rows[-1]['protocol']} at {rows[-1]['eval_len']}"
        last = read_rows(self.folder.metrics_file)[-1:]
        if not last:
            return self.name
        return f"{self.name} {last[0]['step']}/{self.run.train.steps} loss {float(last[0]['loss']):.3f}"

    def outcome(self) -> str:
        """Perplexities of the non-overlapping protocol, shortest and longest length."""
        rows = [row for row in read_rows(self.folder.eval_file) if row["protocol"] == "nonoverlapping"]
        ends = [min(rows, key=_length), max(rows, key=_length)] if rows else []
        return ", ".join(
            f"ppl {row['ppl']:.3f} at {row['eval_len']}"
            if row["status"] == "ok"
            else f"{row['status']} at {row['eval_len']}"
            for row in ends
        )


def plan(config: ConfigDict, workdir: Path, earlier: RunConfig | None = None) -> list[Job]:
    """The runs of the sweep: encodings x train_lens x seeds. Raises ConfigError listing every problem of every run.

    `earlier` is the run that `config` repeats, if any: what it left open stays what it was.
    """
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
                folder = RunFolder(workdir / f"{safe}-L{length}-s{seed}")
                job = Job(folder.as_started(like(run, earlier)), folder)
                problems += [f"{job.name}: {problem}" for problem in job.run.problems()]
                jobs.append(job)
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))
    return jobs


def unfinished(jobs: Sequence[Job]) -> list[Job]:
    """The jobs still to run on the text as it is now. Raises DataError where it is too short for any of them."""
    dataset = prepare(jobs[0].run.data, log=say)
    todo = [job for job in jobs if not job.finished(dataset.digest)]
    for job in todo:
        check_stream(job.run.eval, job.run.train.length, dataset)
        check_length(len(dataset.train.tokens), job.run.train.length, "the training text")
    return todo


def run_all(jobs: Sequence[Job], todo: Sequence[Job], at_once: int) -> dict[str, str]:
    """Runs `todo`, what of `jobs` is not finished, `at_once` processes at a time; returns {name: reason} of failures.

    What a run prints goes to `log.txt` in its folder; here stand the time left for all and one line a finished run.
    """
    if len(todo) < len(jobs):
        say(f"{len(jobs) - len(todo)} of {len(jobs)} runs are finished already")
    if not todo:
        return {}
    _measure_ceiling(cache_folder(todo[0].run.data) / "machine", todo[0].run.model.dtype)
    failed: dict[str, str] = {}
    running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
    started = {job.name: job.progress() for job in todo}
    waiting, ended, looked = list(todo), 0, 0.0
    try:
        with Meter("sweep", len(todo), sum(started.values())) as meter:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    try:
                        running[job.name] = (job, _start(job))
                    except PosxError as error:
                        ended += 1
                        failed[job.name] = str(error)
                        meter.print(f"{job.name} failed: {error}")
                time.sleep(0.2)
                interrupts.check()
                for name, (job, process) in list(running.items()):
                    code = process.poll()
                    if code is None:
                        continue
                    del running[name]
                    ended += 1
                    if code:
                        failed[name] = _reason(job, code)
                    meter.print(f"{name} failed: {failed[name]}" if code else f"{name} done: {job.outcome()}")
                if time.monotonic() - looked >= LOOK_SECONDS or not running:
                    looked = time.monotonic()
                    part = sum(started[job.name] for job in waiting) + sum(
                        job.progress() for job, _ in running.values()
                    )
                    now = ", ".join(job.state() for job, _ in running.values())
                    meter.update(ended + part, f"{ended} of {len(todo)} runs  {now}")
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()
    return failed


def _start(job: Job) -> subprocess.Popen[bytes]:
    """The run as `posx train` in a process of its own. It ends with this one: it watches its standard input."""
    with disk_errors(job.folder.path):
        job.folder.path.mkdir(parents=True, exist_ok=True)
    settings = job.folder.path / "asked.json"
    write_json(settings, to_stored(job.run))
    command = [
        sys.executable, "-P", "-m", "posx.cli", "train", f"--config_json={settings}", f"--workdir={job.folder.path}",
        "--stop_with_stdin",
    ]  # fmt: skip
    (job.folder.path / "status.json").unlink(missing_ok=True)
    with disk_errors(job.folder.path), open(job.folder.path / "log.txt", "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)


def _length(row: dict[str, Any]) -> int:
    return row["eval_len"]


def _reason(job: Job, code: int) -> str:
    try:
        return str(json.loads((job.folder.path / "status.json").read_text())["reason"])
    except (OSError, ValueError, KeyError):
        meaning = MEANINGS.get(code, "it crashed")
        return f"exit code {code}: {meaning}; its output is in {job.folder.path / 'log.txt'}"


def _measure_ceiling(folder: Path, dtype: str) -> None:
    """Measures the machine once, in a process of its own, before runs compete for it."""
    code = "import sys, pathlib, posx.training.ceiling as c; c.matmul_ceiling(pathlib.Path(sys.argv[1]), sys.argv[2])"
    subprocess.run([sys.executable, "-P", "-c", code, str(folder), dtype], check=False, stdin=subprocess.DEVNULL)
