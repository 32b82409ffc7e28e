"""The runs of a sweep, each in a process of its own: failures are named at the end, one never stops the others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from posx import interrupts
from posx.config.stored import to_stored
from posx.data.store import cache_folder
from posx.errors import PosxError
from posx.files.atomic import disk_errors, write_json
from posx.progress import Meter, say
from posx.sweeps.plan import Job

LOOK_SECONDS = 2.0

#: What an exit code of a run means, for the summary.
MEANINGS = {
    2: "bad config", 3: "data", 4: "work folder or checkpoint", 5: "non-finite loss", 6: "out of memory or disk",
    7: "some lengths failed", -9: "killed (often: out of memory)", 130: "interrupted",
}  # fmt: skip


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
    job.folder.status_file.unlink(missing_ok=True)
    with disk_errors(job.folder.path), open(job.folder.path / "log.txt", "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)


def _reason(job: Job, code: int) -> str:
    try:
        return str(json.loads(job.folder.status_file.read_text())["reason"])
    except (OSError, ValueError, KeyError):
        meaning = MEANINGS.get(code, "it crashed")
        return f"exit code {code}: {meaning}; its output is in {job.folder.path / 'log.txt'}"


def _measure_ceiling(folder: Path, dtype: str) -> None:
    """Measures the machine in a process of its own, before runs compete, unless that was done within the hour."""
    measure = "c.matmul_ceiling(pathlib.Path(sys.argv[1]), sys.argv[2], max_age=3600)"
    code = f"import sys, pathlib, posx.machine.ceiling as c; {measure}"
    subprocess.run([sys.executable, "-P", "-c", code, str(folder), dtype], check=False, stdin=subprocess.DEVNULL)
