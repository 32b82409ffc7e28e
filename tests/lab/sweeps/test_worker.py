"""The process of one task: it starts from the settings in the folder, and never from a command line of posx."""

import json
import shutil
import subprocess
import sys

import jax
import pytest

from posx.lab.files.checksums import with_checksum
from posx.lab.runs import runner
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.requests import Request
from posx.lab.sweeps import worker
from posx.lab.sweeps.tasks import Evaluation, Job
from tests import tiny


def start(*words: object, **how) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "posx.lab.sweeps.worker", *map(str, words)]
    return subprocess.Popen(command, env=tiny.environment(), text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **how)  # fmt: skip


@pytest.fixture
def here(monkeypatch):
    """A worker in this process, whose standard input stays open."""
    monkeypatch.setattr(worker.interrupts, "end_with_stdin", lambda: None)

    def call(capsys, *words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with jax.numpy_dtype_promotion("standard"):
            code = worker.run_worker([*map(str, words)])
        return code, *capsys.readouterr()

    return call


@pytest.mark.slow
def test_a_worker_ends_when_its_sweep_does(whole):
    """Its standard input is closed from the start."""
    process = start(whole, stdin=subprocess.DEVNULL)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 143 and not out, err


def test_a_worker_resumes_the_run_of_its_folder(capsys, here, whole, tmp_path, monkeypatch):
    """A finished run keeps every row; no setting is resolved, and no check of settings is made again."""
    folder = RunFolder(shutil.copytree(whole, tmp_path / "run"))
    Job(folder.read_config(), folder).prepare_worker()
    folder.status_file.write_text(json.dumps(with_checksum({"code": 5, "reason": "of an earlier process"})))
    seen, train = [folder.failure()], runner.train
    monkeypatch.setattr(runner, "train", lambda *given: seen.append(folder.failure()) or train(*given))
    (folder.path / "DONE").unlink()
    rows = folder.eval_file.read_bytes()
    code, out, err = here(capsys, folder.path)
    assert code == 0 and not out and folder.is_finished(folder.read_config()), err
    assert folder.eval_file.read_bytes() == rows and seen == ["of an earlier process", ""]


def test_a_worker_refuses_edited_or_missing_settings(capsys, here, whole, tmp_path):
    folder = RunFolder(shutil.copytree(whole, tmp_path / "run"))
    code, _, err = here(capsys, folder.path)
    assert code == 4 and "there is no asked.json in it" in err and len(err.splitlines()) == 1
    Job(folder.read_config(), folder).prepare_worker()
    folder.asked_file.write_text(folder.asked_file.read_text().replace('"steps": 32', '"steps": 33'))
    code, _, err = here(capsys, folder.path)
    assert code == 4 and "does not match its checksum" in err and len(err.splitlines()) == 1


def test_a_worker_prints_the_rows_of_a_request(capsys, here, whole, tmp_path):
    folder = RunFolder(shutil.copytree(whole, tmp_path / "run"))
    run = folder.read_config()
    task = Evaluation(run, folder, tmp_path / "rows", Request(folder, run, run, {}))
    code, out, _ = here(capsys, *task.prepare_worker())
    printed, stored = [json.loads(line) for line in out.splitlines()], tiny.rows(folder.eval_file)
    assert code == 0 and len(printed) == len(stored) and stored[0]["run_id"] == "whole"
    renamed = {"run_id": "run", "checksum": ""}  # the folder is a copy
    assert [row | renamed for row in printed] == [row | renamed for row in stored]
