"""Runs as a SLURM job array, submitted and left alone: each saves and is queued again when it is preempted or its time
is up, and the same command submits what is missing.

submitit writes the batch script and watches for the signal that SLURM sends before it ends a job. What it keeps and
runs again is a command in words, not code: a later posx resumes the run, or refuses to.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shlex
import subprocess
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posx.errors import ConfigError, PosxError, Stopped, WorkdirError
from posx.files.atomic import is_alive, write_json
from posx.files.parse import parsed
from posx.sweeps.engines.shared import Machine, wait_for
from posx.sweeps.plan import Job
from posx.sweeps.schedule import PROCESS_MEMORY
from posx.sweeps.tasks import STARTS, Task, log_file

#: Beside the runs: what submitit writes, and which job makes which run.
FOLDER, JOBS = ".slurm", "jobs.json"
#: How long SLURM leaves a job between the signal and its end, unless --slurm.signal_delay_s says so; what part of that
#: a save may take before the job asks to be queued again; how often it looks after its process.
SIGNAL_SECONDS, SAVE_PART, LOOK_SECONDS = 90, 0.6, 0.2
#: Of an array, how many at once unless --slurm.array_parallelism says so; how often a job is queued again whose time is
#: up; times the expected time that a job asks for, and hours at least.
AT_ONCE, REQUEUES, MARGIN, LEAST_HOURS = 256, 1000, 3.0, 1.0
#: What SLURM says of a job that may still get on.
ALIVE = {"PENDING", "RUNNING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED", "COMPLETING", "CONFIGURING",
         "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "RESV_DEL_HOLD", "SPECIAL_EXIT", "UNKNOWN"}  # fmt: skip


class Order:
    """One run's command, as a job calls it. `checkpoint` is what submitit calls when the job is about to end."""

    def __init__(self, words: Sequence[str], folder: Path, machine: Machine, save_seconds: float):
        self.words, self.folder, self.machine, self.save_seconds = list(words), folder, machine, save_seconds
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        """Runs the command. Raises RuntimeError with its exit code if it failed, which marks the job as failed."""
        code = Stopped.exit_code
        for start in range(STARTS):
            if start:  # stopped by SIGTERM, it is ended within this time; else it goes on, as after a hung step
                time.sleep(SIGNAL_SECONDS)
            wait_for(self.folder)
            with open(self.folder / "log.txt", "ab") as log:
                self.process = self.machine.start(self.words, self.folder, log, log)
            # No wait(): `checkpoint` is called inside of it, and could not see the process end.
            while self.process.poll() is None:
                time.sleep(LOOK_SECONDS)
            code = self.process.returncode
            if code != Stopped.exit_code:
                break
        if code:
            raise RuntimeError(f"posx {self.words[0]} ended with exit code {code}; see {self.folder / 'log.txt'}")

    def checkpoint(self) -> Any:
        """Lets the run save; what is queued in this job's place."""
        from submitit.helpers import DelayedSubmission

        if self.process and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(self.save_seconds)
        return DelayedSubmission(Order(self.words, self.folder, self.machine, self.save_seconds))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"process": None}


def submit(
    tasks: Sequence[Job], workdir: Path, cpus: int, gpus: float, options: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Submits those `tasks` that no job of an earlier call is at; returns {run: job} of the new and of the old jobs.

    options: further settings of SLURM's, as `--slurm.partition=gpu` gives them; cluster "local" is this machine,
    without SLURM. Raises ConfigError where there is no SLURM, or it does not take them, or has a run of the same name
    that waits with other settings.
    """
    stored = _stored(workdir)
    known, asked = stored.get("jobs", {}), stored.get("digests", {})
    alive = {name: known[name] for name, state in states(workdir).items() if state in ALIVE}
    for task in tasks:
        if asked.get(task.name, task.run.hash) != task.run.hash and task.name in alive:
            raise ConfigError(
                f"{task.name} is with SLURM already, as job {alive[task.name]}, with other settings: cancel that, or "
                "use another --workdir"
            )
    new = [task for task in tasks if task.name not in alive]
    if not new:
        return {}, alive
    executor = _executor(workdir, new, cpus, gpus, dict(options))
    machine, jobs = Machine.like_this(cpus), []
    delay = options.get("signal_delay_s", "")
    save_seconds = SAVE_PART * (int(delay) if delay.isdigit() else SIGNAL_SECONDS)
    with _one_line(), executor.batch():
        for task in new:
            log_file(task)
            jobs.append(executor.submit(Order(task.command(), task.folder.path, machine, save_seconds)))
    made = {task.name: job.job_id for task, job in zip(new, jobs, strict=True)}
    asked |= {task.name: task.run.hash for task in new}
    cluster = options.get("cluster", "slurm")
    write_json(workdir / FOLDER / JOBS, {"cluster": cluster, "jobs": known | made, "digests": asked})
    return made, alive


def _executor(workdir: Path, tasks: Sequence[Task], cpus: int, gpus: float, options: dict[str, str]) -> Any:
    """submitit's, with what the largest of the tasks needs."""
    try:
        import submitit
    except ImportError:
        raise ConfigError("--on slurm needs submitit: pip install 'posx[slurm]'") from None
    cluster = options.pop("cluster", "slurm")
    hours = max(task.cost.seconds(cpus) for task in tasks) * MARGIN / 3600
    memory = max(task.cost.memory for task in tasks) + PROCESS_MEMORY
    asked: dict[str, Any] = {
        "name": workdir.name, "cpus_per_task": cpus, "mem_gb": math.ceil(memory / 1e9),
        "slurm_signal_delay_s": SIGNAL_SECONDS, "slurm_array_parallelism": AT_ONCE,
        "slurm_additional_parameters": {"requeue": True},
    }  # fmt: skip
    if gpus:  # how long a run takes there is not known here: the partition's default, or what the user gives
        asked["gpus_per_node"] = math.ceil(gpus)
    else:
        asked["timeout_min"] = math.ceil(60 * max(hours, LEAST_HOURS))
    asked |= {f"slurm_{name}": _setting(name, text) for name, text in options.items()}
    with _one_line():
        executor = submitit.AutoExecutor(workdir / FOLDER, cluster=cluster, slurm_max_num_timeout=REQUEUES)
        executor.update_parameters(**asked)
    return executor


def _setting(name: str, text: str) -> Any:
    """A setting as submitit takes it: lists of lines or words, minutes, numbers. Raises ConfigError."""
    if name in ("setup", "teardown"):
        return [text]
    if name == "srun_args":
        return shlex.split(text)
    if name == "time":
        return _minutes(text)
    return int(text) if text.isdigit() else text


def _minutes(text: str) -> int:
    """Of what SLURM takes for a time: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        raise ConfigError(f"--slurm.time={text}: minutes are expected, or HOURS:MINUTES:SECONDS, or DAYS-HOURS")
    units = (60, 1, 1 / 60) if dash or len(parts) == 3 else (1, 1 / 60)
    inside = sum(int(part) * unit for part, unit in zip(parts, units, strict=False))
    return max(1, math.ceil(1440 * int(days or 0) + inside))


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """What submitit and SLURM say of a wrong setting, as ConfigError."""
    logging.getLogger("submitit").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except PosxError:
        raise
    except OSError as error:
        raise WorkdirError(f"--on slurm: {error}") from None
    except Exception as error:  # submitit's own kinds, NameError and RuntimeError among them
        raise ConfigError(f"--on slurm: {' '.join(str(error).split())[:300]}") from None


def jobs_of(workdir: Path) -> dict[str, str]:
    """{run: job} of those that were submitted from `workdir`."""
    return _stored(workdir).get("jobs", {})


def _stored(workdir: Path) -> dict[str, Any]:
    try:
        return parsed((workdir / FOLDER / JOBS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise WorkdirError(f"{workdir / FOLDER / JOBS} cannot be read: {error}") from None


def states(workdir: Path) -> dict[str, str]:
    """{run: what SLURM says of its job}; ENDED where it knows it no more, UNKNOWN where it says nothing."""
    stored = _stored(workdir)
    if not stored.get("jobs"):
        return {}
    try:
        import submitit
    except ImportError:
        raise ConfigError("these runs are jobs of SLURM: pip install 'posx[slurm]' to ask for them") from None
    if stored["cluster"] != "local":
        return _told_by_slurm(stored["jobs"])
    found = {}
    for name, number in stored["jobs"].items():
        with contextlib.suppress(Exception):
            found[name] = submitit.LocalJob(workdir / FOLDER, number).state.split()[0]
        if found.get(name, "NO") == "NO":  # process that this one has started
            found[name] = "RUNNING" if is_alive(number) else "ENDED"
    return found


def _told_by_slurm(jobs: Mapping[str, str]) -> dict[str, str]:
    """Asks once for all: sacct, and of what that does not know, or where nobody keeps accounts, squeue."""
    from submitit.slurm.slurm import SlurmInfoWatcher

    watcher = SlurmInfoWatcher()
    logging.getLogger("submitit").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in jobs.values():
            watcher.register_job(number)
        watcher.update()
    told = {name: watcher.get_info(number, mode="cache").get("State", "") for name, number in jobs.items()}
    if all(told.values()):
        return {name: state.split()[0] for name, state in told.items()}
    try:
        lines = subprocess.run(
            ["squeue", "-h", "-r", "-o", "%i %T"], capture_output=True, encoding="utf-8", errors="replace", check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {name: (state or "UNKNOWN").split()[0] for name, state in told.items()}
    queued = dict(line.split()[:2] for line in lines.splitlines() if len(line.split()) > 1)
    return {name: (state or queued.get(jobs[name], "ENDED")).split()[0] for name, state in told.items()}
