"""`posx sweep`: its engines, and settings that its axes set."""

import importlib.machinery
import shutil
import sys
import types

import pytest

from posx.lab.commands import sweep
from tests import tiny
from tests.lab.commands import refused


def test_dry_run_of_an_engine_says_if_it_is_missing(capsys, site, monkeypatch):
    words = ["sweep", f"--config={site / 'tiny.py'}", "--on=ray", "--cpus=2", "--jobs=3"]
    installed = types.ModuleType("ray")
    installed.__spec__ = importlib.machinery.ModuleSpec("ray", None)
    monkeypatch.setitem(sys.modules, "ray", installed)
    code, out, err = tiny.call(capsys, *words, "--dry_run")
    assert code == 0 and "on 2 CPUs a run; ray decides how many train at once" in out and "at a time" not in out
    assert "--jobs=3 is not used: --on ray decides" in err and "not installed" not in err
    monkeypatch.setitem(sys.modules, "ray", None)
    code, out, err = tiny.call(capsys, *words, "--dry_run")
    assert code == 0 and "notice: --on ray needs ray: " in err
    refused(capsys, 2, [*words, "--workdir=new"], "Install it: pip install 'posx[ray]'")


def test_a_setting_of_an_axis_is_named_with_its_axis(capsys, site):
    words = {"train.seed": "sweep.seeds", "train.beta1": "sweep.axes.train.beta1"}
    given = [f"--config.{setting}=0.5" if "beta" in setting else f"--config.{setting}=7" for setting in words]
    axis = "--config.sweep.axes.train.beta1=0.8,0.9"
    code, _, err = tiny.call(capsys, "sweep", f"--config={site / 'tiny.py'}", "--dry_run", axis, *given)
    assert code == 0
    for (setting, name), word in zip(words.items(), given, strict=True):
        told = f"{word} is not used: an axis of the sweep sets {setting}. Use --config.{name}=VALUES"
        assert told in err


@pytest.fixture
def started(monkeypatch):
    """Return the list of the words of each run that a sweep would start. Nothing is started or drawn."""
    words = []

    def run(jobs, *_, **__):
        for job in jobs:
            job.folder.path.mkdir(exist_ok=True)
            words.append(job.prepare_worker())
        return {}

    monkeypatch.setattr(sweep.engines, "make_engine", lambda values, jobs: types.SimpleNamespace(run=run))
    monkeypatch.setattr(sweep, "_draw", lambda workdir, failed: None)
    return words


def test_debug_reaches_the_runs_of_a_sweep(capsys, site, tmp_path, started):
    words = ["sweep", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path}", "--config.sweep.encodings=t5"]
    for more in ([], ["--debug"]):
        assert tiny.call(capsys, *words, *more)[0] == 0
        assert started.pop() == [str(tmp_path / "t5-L16-s0"), *more]


def test_a_sweep_says_how_many_runs_are_left(capsys, site, whole, tmp_path, started):
    shutil.copytree(whole, tmp_path / "t5-L16-s0")
    words = ["sweep", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path}", "--config.sweep.encodings=t5,rope"]
    code, _, err = tiny.call(capsys, *words)
    assert code == 0 and "1 of 2 runs are finished already; 1 run left\n" in err and len(started) == 1, err


def test_a_copy_of_another_run_is_not_replaced(capsys, site, whole, tmp_path, started):
    """Folder names have the settings that vary alone, so the runs of two sweeps can have one name."""
    shutil.copytree(whole, tmp_path / "a" / "t5-L16-s0")
    copy = tmp_path / "copies" / "t5-L16-s0"
    words = ["sweep", f"--config={site / 'tiny.py'}", "--config.sweep.encodings=t5", f"--copy_to={copy.parent}"]
    for _ in range(2):  # its own copy is none of another run
        assert tiny.call(capsys, *words, f"--workdir={tmp_path / 'a'}")[0] == 0
    before, other = (copy / "config.json").read_bytes(), [f"--workdir={tmp_path / 'b'}", "--config.train.steps=40"]
    refused(
        capsys, 2, [*words, *other], f"{copy.name} is there already as the copy of another run", "another --copy_to"
    )
    assert (copy / "config.json").read_bytes() == before and not started
    (copy / "config.json").write_bytes(before[:99])  # the copy was not made to its end
    assert tiny.call(capsys, *words, *other)[0] == 0
