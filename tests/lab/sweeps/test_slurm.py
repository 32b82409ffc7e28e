"""Sweeps as SLURM jobs: the batch script that is submitted, and jobs by submitit's own processes."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import tiny

pytestmark = pytest.mark.engines

#: Stand-ins for SLURM's commands: sbatch keeps the script and names job 4711, sacct says that it waits.
COMMANDS = {
    "sbatch": 'cp "$1" "$KEPT"; echo "Submitted batch job 4711"',
    "sacct": 'echo "JobID|State|NodeList"; echo "4711_0|RUNNING|n1"; echo "4711_1|PENDING|"',
    "srun": "true",
}


@pytest.fixture
def slurm(tmp_path):
    """The environment in which those are the commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(stat.S_IRWXU)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "KEPT": str(tmp_path / "script.sh")}


def sweep(site, workdir, *more: str) -> list[str]:
    words = ["sweep", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}", "--config.sweep.encodings=t5"]
    return [*words, "--on=slurm", *more]


def test_the_script_asks_for_resources_and_for_requeueing(site, tmp_path, slurm):
    workdir = tmp_path / "sweep"
    words = sweep(
        site, workdir, "--config.sweep.seeds=0,1", "--slurm.partition=short", "--slurm.time=0-01:30", "--cpus=2"
    )
    code, out, err = tiny.run(*words, **slurm)
    assert code == 0 and out.startswith("2 of 2 runs are submitted, and 0 are with SLURM already (jobs 4711_0 ...)"), (
        err
    )
    script = Path(slurm["KEPT"]).read_text().splitlines()
    asked = {line.removeprefix("#SBATCH --") for line in script if line.startswith("#SBATCH")}
    wanted = {"array=0-1%2", "cpus-per-task=2", "job-name=sweep", "partition=short", "time=90", "requeue",
              "signal=USR2@90", "open-mode=append", "nodes=1"}  # fmt: skip
    assert wanted <= asked and any(line.startswith("mem=") and line.endswith("GB") for line in asked), asked
    assert "submitit.core._submit" in script[-1] and script[-1].startswith("srun ")
    code, out, err = tiny.run(*words, **slurm)
    assert code == 0 and out.startswith("0 of 2 runs are submitted, and 2 are with SLURM already"), err
    code, _, err = tiny.run(*words, "--config.train.learning_rate=0.5", **slurm)
    assert code == 2 and "t5-L16-s0 is with SLURM already, as job 4711_0, with other settings" in err, err
    code, out, err = tiny.run(*words, "--status", **slurm)
    assert code == 0 and "4711_0 RUNNING" in out and "4711_1 PENDING" in out and "0 of 2 runs are finished" in out, err


def test_wrong_settings_and_no_slurm_are_one_line(site, tmp_path, slurm):
    for more, environment, told in (
        (["--slurm.partitoin=short"], slurm, "partitoin"),
        (["--slurm.partition"], slurm, "needs a name and a value"),
        (["--slurm.time=soon"], slurm, "--slurm.time=soon: minutes are expected"),
        ([], {"PATH": "/usr/bin:/bin"}, "srun"),
    ):
        code, _, err = tiny.run(*sweep(site, tmp_path / "sweep", *more), **environment)
        assert code == 2 and told in err.splitlines()[-1] and "Traceback" not in err, err


def test_where_nobody_keeps_accounts_squeue_tells(site, tmp_path, slurm):
    """A job that squeue does not list any more has ended, and its run is submitted again."""
    folder = Path(slurm["PATH"].split(":")[0])
    (folder / "sacct").write_text("#!/bin/bash\nexit 1\n")
    (folder / "squeue").write_text('#!/bin/bash\necho "4711_1 RUNNING"\n')
    (folder / "squeue").chmod(stat.S_IRWXU)
    words = sweep(site, tmp_path / "sweep", "--config.sweep.seeds=0,1")
    assert tiny.run(*words, **slurm)[0] == 0
    code, out, err = tiny.run(*words, **slurm)
    assert code == 0 and out.startswith("1 of 2 runs are submitted, and 1 are with SLURM already"), err


def test_a_signalled_job_saves_and_resumes_in_its_next_turn(site, whole, tmp_path):
    """submitit's processes on this machine, with the signal that SLURM sends. It has an hour to save and does not take
    it: nobody waits here as long."""
    workdir = tmp_path / "sweep"
    words = sweep(site, workdir, "--config.sweep.seeds=0", "--slurm.cluster=local")
    words += ["--config.train.steps=2000", "--config.train.checkpoint_steps=100", "--slurm.signal_delay_s=3600"]
    with open(tmp_path / "out", "wb") as out:  # no pipe: the job would hold it
        done = subprocess.run(
            [sys.executable, "-m", "posx.lab.cli", *words], env=tiny.environment(), stdout=out, stderr=out
        )
    said = (tmp_path / "out").read_text().splitlines()  # a warning of the little text comes first
    assert done.returncode == 0 and said[-1].startswith("1 of 1 runs are submitted"), said
    run = workdir / "t5-L16-s0"
    number = next(iter(json.loads((workdir / ".slurm" / "jobs.json").read_text())["jobs"].values()))
    wait_for(lambda: tiny.step(run) > tiny.CHECKPOINT_STEPS)
    code, out, _ = tiny.run(*words, "--status")
    assert code == 0 and f"{number} RUNNING" in out and "process " in out
    for pid in children(int(number)):
        os.kill(pid, signal.SIGUSR2)
    wait_for(lambda: "resuming" in (run / "log.txt").read_text())
    assert "stopped and saved at step" in (run / "log.txt").read_text()
    wait_for(lambda: (run / "DONE").exists())
    code, out, err = tiny.run(*words)
    assert code == 0 and "| t5 | 1 |" in out and "1 of 1 runs are finished already" in err
    assert {row["attempt"] for row in tiny.rows(run / "metrics.jsonl")} == {1, 2}
    assert "Traceback" not in (run / "log.txt").read_text()


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def wait_for(condition, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
