"""Run tasks as a SLURM job array that is submitted and left alone.

A job saves and is queued again if it is preempted or its time is up. The same command submits the runs that are
missing. submitit writes the batch script and watches for the signal that SLURM sends before it ends a job. It stores a
command in words, not code, so a later posx resumes the run, or refuses to.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from posx.lab.files.atomic import is_alive, write_json
from posx.lab.files.lines import parse_json
from posx.lab.runs.folder import RunFolder
from posx.lab.sweeps.engines.local import STARTS, Engine, RemoteCommand, finish, log_file, stop
from posx.lab.sweeps.tasks import Job
from posx.notices import say

#: Beside the runs: the folder that submitit writes to, and the file in it that names the job of each run.
FOLDER, JOBS = ".slurm", "jobs.json"
#: Seconds between SLURM's signal and the end of a job, unless --slurm.signal_delay_s is given. A save may take a part
#: of them before the job asks to be queued again.
SIGNAL_SECONDS, SAVE_PART = 90, 0.6
#: Jobs of an array at once, unless --slurm.array_parallelism is given, and how often a job whose time is up is queued
#: again. A job asks for the expected time times MARGIN, at least LEAST_HOURS.
AT_ONCE, REQUEUES, MARGIN, LEAST_HOURS = 256, 1000, 3.0, 1.0
#: States of a job that may still make progress, as SLURM names them.
ALIVE = {"PENDING", "RUNNING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED", "COMPLETING", "CONFIGURING",
         "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "RESV_DEL_HOLD", "SPECIAL_EXIT", "UNKNOWN"}  # fmt: skip


@dataclasses.dataclass
class QueuedCommand(RemoteCommand):
    """The command of a run as a job. submitit calls `checkpoint` when the job is about to end."""

    save_seconds: float
    process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        """Run the command. Raises RuntimeError with its exit code if it fails, which marks the job as failed."""
        code = Stopped.exit_code
        for start in range(STARTS):
            if start:  # after SIGTERM the job ends within this time, else it continues, as after a hung step
                time.sleep(SIGNAL_SECONDS)
            self.process = self.start()
            if (code := finish(self.process)) != Stopped.exit_code:
                break
        if code:
            raise RuntimeError(f"posx train ended with exit code {code}; see {self.folder.log_file}")

    def checkpoint(self) -> Any:
        """Stop the run, which saves; return the job to queue in place of this one."""
        from submitit.helpers import DelayedSubmission

        if self.process and self.process.poll() is None:
            stop(self.process, self.save_seconds)
        return DelayedSubmission(dataclasses.replace(self, process=None))


class SlurmEngine(Engine):
    """SLURM, with `cpus` and `gpus` for each of the `jobs`.

    Args:
      jobs: of the plan.
      cpus: of a job.
      gpus: of a job.
      options: further settings of SLURM, as `--slurm.partition=gpu` gives them. The cluster "local" is this machine,
        without SLURM.
    """

    def __init__(self, jobs: Sequence[Job], cpus: int, gpus: float, options: Mapping[str, str]):
        self.jobs, self.cpus, self.gpus, self.options = jobs, cpus, gpus, dict(options)

    def run(self, tasks: Sequence[Any], *_: Any, **__: Any) -> dict[RunFolder, str]:
        """Submit the jobs that are not with SLURM yet, and do not wait for them.

        Raises ConfigError if there is no SLURM, or if it rejects an option. Raises it too if SLURM has a run of the
        same name with other settings.
        """
        for job in tasks:
            if why := job.failure():
                say(f"{job.name} has failed ({why})")
        workdir = tasks[0].folder.path.parent
        stored = _read_submissions(workdir)
        asked = stored.get("digests", {})
        alive = {name: number for name, (number, state) in submitted_jobs(workdir).items() if state in ALIVE}
        digests = {job.name: job.run.hash for job in tasks}
        for name, wanted in digests.items():
            if name in alive and asked.get(name, wanted) != wanted:
                raise ConfigError(
                    f"{name} is with SLURM already, as job {alive[name]}, with other settings. Cancel it with scancel "
                    f"{alive[name]}, or use another --workdir."
                )
        new = sorted((job for job in tasks if job.name not in alive), key=lambda job: job.cost.order)
        made = self._submit(new, workdir) if new else {}
        if new:
            cluster = self.options.get("cluster", "slurm")
            values = {"cluster": cluster, "jobs": stored.get("jobs", {}) | made, "digests": asked | digests}
            write_json(workdir / FOLDER / JOBS, values)
        first = next(iter({**made, **alive}.values()))
        print(
            f"{len(made)} of {len(self.jobs)} runs are submitted, and {len(alive)} are with SLURM already (jobs "
            f"{first} ...). --status shows their progress. When they have ended, the same command draws the "
            "figures."
        )
        return {}

    def _submit(self, tasks: Sequence[Job], workdir: Path) -> dict[str, str]:
        """Submit tasks as one array, each with the resources that the largest needs; return {run: job}."""
        import submitit

        options = dict(self.options)
        cluster, delay = options.pop("cluster", "slurm"), options.get("signal_delay_s", "")
        memory = max(task.cost.memory for task in tasks)
        asked: dict[str, Any] = {
            "name": workdir.name, "cpus_per_task": self.cpus, "mem_gb": math.ceil(memory / 1e9),
            "slurm_signal_delay_s": SIGNAL_SECONDS, "slurm_array_parallelism": AT_ONCE,
            "slurm_additional_parameters": {"requeue": True},
        }  # fmt: skip
        if self.gpus:  # the time of a run there is unknown: the partition's default, or the user's --slurm.time
            asked["gpus_per_node"] = math.ceil(self.gpus)
        else:
            hours = max(task.cost.seconds(self.cpus) for task in tasks) * MARGIN / 3600
            asked["timeout_min"] = math.ceil(60 * max(hours, LEAST_HOURS))
        asked |= {f"slurm_{name}": _setting(name, text) for name, text in options.items()}
        seconds = SAVE_PART * (int(delay) if delay.isdigit() else SIGNAL_SECONDS)
        jobs = []
        with _one_line():
            executor = submitit.AutoExecutor(workdir / FOLDER, cluster=cluster, slurm_max_num_timeout=REQUEUES)
            executor.update_parameters(**asked)
            with executor.batch():
                for task in tasks:
                    log_file(task)
                    jobs.append(executor.submit(QueuedCommand.from_task(task, self.cpus, save_seconds=seconds)))
        return {task.name: job.job_id for task, job in zip(tasks, jobs, strict=True)}


def _setting(name: str, text: str) -> Any:
    """Return an option as submitit takes it: lists of lines or words, minutes, numbers. Raises ConfigError."""
    if name in ("setup", "teardown"):
        return [text]
    if name == "srun_args":
        return shlex.split(text)
    if name == "time":
        return _minutes(text)
    return int(text) if text.isdigit() else text


def _minutes(text: str) -> int:
    """Return the minutes of a time as SLURM takes it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. Raises ConfigError."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        raise ConfigError(f"--slurm.time={text}: minutes are expected, or HOURS:MINUTES:SECONDS, or DAYS-HOURS.")
    units = (60, 1, 1 / 60) if dash or len(parts) == 3 else (1, 1 / 60)
    inside = sum(int(part) * unit for part, unit in zip(parts, units, strict=False))
    return max(1, math.ceil(1440 * int(days or 0) + inside))


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Turn the errors of submitit and SLURM about a wrong setting into ConfigError."""
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


def _read_submissions(workdir: Path) -> dict[str, Any]:
    """Return the stored facts of earlier submissions, none if there were none. Raises WorkdirError."""
    try:
        return parse_json((workdir / FOLDER / JOBS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise WorkdirError(f"{workdir / FOLDER / JOBS} cannot be read: {error}") from None


def submitted_jobs(workdir: Path) -> dict[str, tuple[str, str]]:
    """Return {run: (its job, the state of that)} of the runs that were submitted from `workdir`.

    The state is ENDED if SLURM does not list the job any more, and UNKNOWN if SLURM does not answer.
    """
    stored = _read_submissions(workdir)
    if not stored.get("jobs"):
        return {}
    try:
        import submitit
    except ImportError:
        raise ConfigError(
            "these runs are jobs of SLURM. To query them, install submitit: pip install 'posx[slurm]'"
        ) from None
    if stored["cluster"] != "local":
        return _query_slurm(stored["jobs"])
    jobs = {}
    for name, number in stored["jobs"].items():
        state = "NO"
        with contextlib.suppress(Exception):
            state = submitit.LocalJob(workdir / FOLDER, number).state.split()[0]
        if state == "NO":  # process that this one has started
            state = "RUNNING" if is_alive(number) else "ENDED"
        jobs[name] = number, state
    return jobs


def _query_slurm(jobs: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Ask SLURM once for all jobs: sacct, then squeue for the jobs that it does not know, as without accounting."""
    from submitit.slurm.slurm import SlurmInfoWatcher

    watcher = SlurmInfoWatcher()
    logging.getLogger("submitit").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in jobs.values():
            watcher.register_job(number)
        watcher.update()
    told = {number: watcher.get_info(number, mode="cache").get("State", "") for number in jobs.values()}
    queued, unlisted = dict[str, str](), "ENDED"
    if not all(told.values()):
        command = ["squeue", "-h", "-r", "-o", "%i %T"]
        try:
            done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True)
            queued = dict(line.split()[:2] for line in done.stdout.splitlines() if len(line.split()) > 1)
        except (OSError, subprocess.SubprocessError):
            unlisted = "UNKNOWN"
    return {name: (number, (told[number] or queued.get(number, unlisted)).split()[0]) for name, number in jobs.items()}
