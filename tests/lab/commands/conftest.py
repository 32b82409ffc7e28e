"""The runs that tests of commands share."""

import shutil
import signal

import pytest


@pytest.fixture
def sweeps(whole, tmp_path):
    """A folder of two sweeps, whose runs have the same name; the second can no longer be read."""
    for name in ("a", "b"):
        shutil.copytree(whole, tmp_path / "sweeps" / name / "t5")
    (tmp_path / "sweeps" / "b" / "t5" / "config.json").write_text("{")
    return tmp_path / "sweeps"


@pytest.fixture
def ctrl_c():
    """Ctrl-C as a person has it: tests that a shell runs in the background would pass on that it is ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)
