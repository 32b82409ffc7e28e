"""A step that hangs, in a real process; a pause that is none."""

import os
import signal
import subprocess
import sys
import time

import pytest

from posx.lab.training.watchdog import Watchdog
from tests import tiny


def hanging(after: int, seconds: float) -> dict[str, str]:
    """The environment for `hanging:Hangs`."""
    user = tiny.ROOT / "tests" / "faults" / "user"
    return tiny.environment(
        PYTHONPATH=f"{user}{os.pathsep}{tiny.ROOT}", HANG_AFTER=str(after), HANG_SECONDS=str(seconds)
    )


#: Patience of twice the longest time between two beats: the first has compiling in it.
SHORT = """
import sys, posx.lab.training.watchdog as w
from posx.lab import cli

w.LEAST_SECONDS, w.LONGER = 3.0, 2.0
sys.exit(cli.main())
"""


@pytest.mark.slow
def test_a_step_that_hangs_ends_the_run_and_says_where_it_stood(site, tmp_path):
    words = ["train", f"--config={site / 'tiny.py'}:hanging:Hangs", f"--workdir={tmp_path / 'run'}"]
    words += ["--config.train.dispatch_steps=1"]  # patience is at least for two calls of so many steps
    done = subprocess.run(
        [sys.executable, "-c", SHORT, *words], cwd=tmp_path, env=hanging(20, 600), text=True, capture_output=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 75, done.stderr
    assert "posx: run: no step ended for" in done.stderr.splitlines()[-1]
    assert "the same command resumes" in done.stderr and "Traceback" not in done.stderr
    assert "wait" in (tmp_path / "run" / "stacks.txt").read_text()


PAUSED = """
import sys, time
import posx.lab.training.watchdog as w

w.LEAST_SECONDS = 1.5
with w.Watchdog(w.Path(sys.argv[1]), tick=0.1) as watchdog:
    watchdog.beat()
    print("now", flush=True)
    time.sleep(0.2)
    sys.stdin.readline()
    watchdog.beat()
print("alive")
"""


@pytest.mark.slow
def test_a_process_that_was_stopped_had_no_time(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", PAUSED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "now\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(process.pid, signal.SIGCONT)
    out, _ = process.communicate("\n")
    assert out == "alive\n" and process.returncode == 0


def test_compiling_takes_what_it_takes(tmp_path, monkeypatch):
    monkeypatch.setattr("posx.lab.training.watchdog.LEAST_SECONDS", 0.05)
    with Watchdog(tmp_path, tick=0.01) as watchdog:
        time.sleep(0.3)  # no beat yet
    assert watchdog.ticks and not watchdog.watching


SLOW = """
import sys
import time, posx.lab.cli, posx.lab.training.watchdog as w
import posx.lab.training.loop as loop

w.LEAST_SECONDS = 0.5
tick = w.Watchdog.__init__
w.Watchdog.__init__ = lambda self, folder, steps: tick(self, folder, steps, 0.05)
save = loop.Checkpoints.save
loop.Checkpoints.save = lambda self, *words: (time.sleep(1.5), save(self, *words))
sys.exit(posx.lab.cli.main())
"""


@pytest.mark.slow
def test_slow_steps_and_slow_saves_are_no_hang(site, tmp_path):
    words = [
        "train", f"--config={site / 'tiny.py'}:hanging:Hangs", f"--workdir={tmp_path / 'run'}",
        "--config.train.steps=32", "--config.train.log_steps=32", "--config.train.checkpoint_steps=32",
        "--config.train.dispatch_steps=16", "--config.eval.lengths=16", "--config.eval.protocols=nonoverlapping",
        "--config.eval.batch_tokens=16",  # each window of a batch waits, those that fill it up too
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SLOW, *words], cwd=tmp_path, env=hanging(0, 0.05), text=True, capture_output=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
