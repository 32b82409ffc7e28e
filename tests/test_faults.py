"""`python -m tests.faults`: a part of it, in real processes, and whether it notices wrong answers."""

import subprocess
import sys

import pytest

from tests.tiny import ROOT, environment

#: The faults that no other test provokes, and that take seconds each. tests/lab/data/test_store.py provokes the part
#: of F33 that damages token files.
HERE = "16,19,31,33,39,44,51,53,62,65,67"


def campaign(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.faults", *words]
    return subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=1200)


@pytest.mark.slow
def test_faults_are_answered_as_expected():
    done = campaign("--quick", "--jobs=2", f"--only={HERE}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 not answered as expected" in done.stdout and "| F62 | SIGTERM" in done.stdout


@pytest.mark.slow
def test_kills_lose_nothing():
    done = campaign("--only=45", "--kills=3", "--jobs=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills over" in done.stdout


@pytest.mark.slow
def test_unexpected_answers_are_noticed():
    code = (
        "import tests.faults.__main__ as faults, tests.faults.table as t\n"
        "t.FAULTS.clear()\n"
        "t.fault(2, 'wrong command', '2')(lambda scene: scene.posx('trian').must(2, 'Did you mean') and None)\n"
        "t.fault(2, 'wrong code', '3')(lambda scene: scene.posx('trian').must(3) and None)\n"
        "t.fault(2, 'wrong words', '2')(lambda scene: scene.posx('trian').must(2, 'nothing of the kind') and None)\n"
        "t.fault(3, 'broken', '2')(lambda scene: 1 / 0)\n"
        "t.not_provoked(4, 'none', 'a reason')\n"
        "faults.main([])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 1
    assert "5 faults, 3 not answered as expected" in done.stdout
    cells = [line.split(" | ")[1:] for line in done.stdout.splitlines() if line.startswith("| F")]
    got = {what: rest[-1] for what, *rest in cells}
    assert got["wrong command"].startswith("2; posx: command 'trian' is unknown")
    assert "exit code 3 is expected" in got["wrong code"] and "is not said" in got["wrong words"]
    assert "ZeroDivisionError" in got["broken"] and got["none"].startswith("not provoked")
