"""One run by several processes, which are real ones: the same losses as by one, killed, stopped, resumed by fewer."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess

import numpy as np
import pytest

from posx.machine.cores import bind_cores, usable_cores
from tests import tiny

pytestmark = pytest.mark.slow

#: What JAX's runtime logs, as where a slow machine lets it wait.
BY_RUNTIME = re.compile(r"[IWE]\d{4} \d\d:")

ALONE = {"JAX_NUM_CPU_DEVICES": "1"}  # of each process

#: A run that saves so often is still at work when a test has seen its first checkpoint.
OFTEN = "--config.train.checkpoint_steps=1"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def start(count: int, *words: str) -> list[subprocess.Popen]:
    together = [f"--coordinator=127.0.0.1:{free_port()}", f"--processes={count}"]
    return [tiny.start(*words, *together, f"--process={n}", **ALONE) for n in range(count)]


def ended(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each."""
    told = [process.communicate(timeout=1800) for process in processes]
    return [(process.returncode, *words) for process, words in zip(processes, told, strict=True)]


def training(site, workdir, *more: str) -> list[str]:
    return ["train", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}", *more]


def all_well(found: list[tuple[int, str, str]]) -> str:
    """What the first said, if all ended well and none of the others said anything."""
    assert [code for code, _, _ in found] == [0] * len(found), found
    for _, out, err in found[1:]:
        assert [line for line in (out + err).splitlines() if not BY_RUNTIME.match(line)] == []
    return found[0][2]


def same_as_whole(workdir, whole) -> None:
    """Every step once, with the loss that one process has, and every measurement."""
    found, wanted = (tiny.rows(folder / "metrics.jsonl") for folder in (workdir, whole))
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([row[name] for row in found], [row[name] for row in wanted], rtol=2e-5)
    found, wanted = (tiny.rows(folder / "eval.jsonl") for folder in (workdir, whole))
    assert [(row["protocol"], row["eval_len"]) for row in found] == [(r["protocol"], r["eval_len"]) for r in wanted]
    np.testing.assert_allclose([row["nll"] for row in found], [row["nll"] for row in wanted], rtol=2e-5)


def sums(workdir, step: int) -> dict[str, str]:
    manifest = json.loads((workdir / "checkpoints" / f"{step}.json").read_text())
    return {name: facts.get("sum") or facts["sha256"] for name, facts in manifest["arrays"].items()}


@pytest.fixture(scope="module")
def by_two(site, tmp_path_factory):
    """The run that two processes have made, weights and moments in parts."""
    workdir = tmp_path_factory.mktemp("by_two") / "run"
    said = all_well(ended(start(2, *training(site, workdir, "--mesh=2x1"))))
    assert "2x1 cpu devices of 2 processes" in said
    return workdir


def test_weights_in_parts(by_two, whole):
    same_as_whole(by_two, whole)
    manifest = json.loads((by_two / "checkpoints" / f"{tiny.STEPS}.json").read_text())
    cut = [name for name, facts in manifest["arrays"].items() if "sha256" not in facts]
    assert any("embedding" in name for name in cut)


def test_started_by_slurm(site, tmp_path, whole):
    """No flag says that there are two: SLURM does. Each has all weights and half of the rows."""
    workdir = tmp_path / "run"
    slurm = {
        "SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
    }  # fmt: skip
    processes = [
        tiny.start(*training(site, workdir), SLURM_PROCID=str(n), SLURM_LOCALID=str(n), **slurm, **ALONE)
        for n in range(2)
    ]
    assert "2 cpu devices of 2 processes" in all_well(ended(processes))
    same_as_whole(workdir, whole)
    # What they have saved is whole, and for one process as good as its own.
    code, _, err = tiny.run("evaluate", f"--workdir={workdir}", "--lengths=48", "--protocol=nonoverlapping", **ALONE)
    assert code == 0 and "damaged" not in err, err
    code, _, err = tiny.run(*training(site, workdir), **ALONE)
    assert code == 0 and "processes: 2 -> 1" in err, err


def test_one_is_killed_and_all_resume(site, tmp_path, by_two):
    workdir = tmp_path / "run"
    words = training(site, workdir, "--mesh=2x1", OFTEN)
    processes = start(2, *words)
    tiny.until((workdir / "checkpoints" / "1.json").exists, processes[1])
    processes[1].kill()
    (code, _, err), _ = ended(processes)
    line = "posx: another process of this run has ended, so this one ends too; the same command resumes"
    assert code == 75 and f"{line} (docs/guides/resuming.md)" in err.splitlines(), err
    assert not (workdir / "DONE").exists()
    assert "resuming run at step" in all_well(ended(start(2, *words)))
    assert sums(workdir, tiny.STEPS) == sums(by_two, tiny.STEPS), "not bit for bit"


def test_a_part_that_is_gone_is_passed_over(site, tmp_path, by_two):
    """One process alone cannot read its part of the newest step: all go back to the one before."""
    workdir = tmp_path / "run"
    shutil.copytree(by_two, workdir)
    parts = list((workdir / "checkpoints" / str(tiny.STEPS) / "ocdbt.process_1" / "d").iterdir())
    max(parts, key=lambda path: path.stat().st_size).unlink()
    (workdir / "DONE").unlink()
    said = all_well(ended(start(2, *training(site, workdir, "--mesh=2x1"))))
    assert "is damaged" in said and f"resuming run at step {tiny.STEPS - tiny.CHECKPOINT_STEPS}" in said
    assert sums(workdir, tiny.STEPS) == sums(by_two, tiny.STEPS), "not bit for bit"


def test_several_devices_in_each(site, tmp_path):
    """Two cores are two devices, in each of two processes, and so they are when the same command goes on."""
    workdir, more = tmp_path / "run", ["--mesh=4x1", "--config.train.steps=6", "--config.train.checkpoint_steps=3"]
    for again in (False, True):
        together = [f"--coordinator=127.0.0.1:{free_port()}", "--processes=2"]
        with bind_cores(usable_cores()[:2]):
            processes = [tiny.start(*training(site, workdir, *more), *together, f"--process={n}") for n in range(2)]
        said = all_well(ended(processes))
        assert "4x1 cpu devices of 2 processes" in said and "notice" not in said
        if not again:
            (workdir / "DONE").unlink()
            (workdir / "checkpoints" / "6.json").unlink()


def test_stopped_on_four_and_resumed_on_two(site, tmp_path, whole):
    """SIGTERM reaches one of four, all of which save the same step; two go on, cut another way."""
    workdir = tmp_path / "run"
    processes = start(4, *training(site, workdir, "--mesh=2x2", OFTEN))
    tiny.until((workdir / "checkpoints" / "1.json").exists, processes[3])
    processes[3].send_signal(signal.SIGTERM)
    found = ended(processes)
    assert [code for code, _, _ in found] == [75] * 4, found
    lines = [line for _, _, err in found for line in err.splitlines() if "stopped and saved at step" in line]
    assert len(lines) == 1, lines
    said = all_well(ended(start(2, *training(site, workdir, "--mesh=1x2"))))
    assert "layout: 2x2 -> 1x2" in said and "processes: 4 -> 2" in said
    same_as_whole(workdir, whole)


def test_windows_longer_than_a_device_is_given(site, tmp_path, by_two):
    """One window at a time, its tokens over two processes; and the same run, saved in parts, by one process."""
    shutil.copytree(by_two, tmp_path / "run")
    asked = ["evaluate", "--lengths=96", "--protocol=nonoverlapping", "--config.eval.batch_tokens=96", "--json"]
    (code, out, err), other = ended(start(2, *asked, f"--workdir={by_two}", "--mesh=2x1"))
    assert code == other[0] == 0 and not other[1], (err, other)
    code, alone, err = tiny.run(*asked, f"--workdir={tmp_path / 'run'}", **ALONE)
    assert code == 0, err
    found, wanted = (json.loads(text.splitlines()[-1]) for text in (out, alone))
    assert found["eval_len"] == 96 and found["num_targets"] == wanted["num_targets"]
    np.testing.assert_allclose(found["nll"], wanted["nll"], rtol=1e-5)


WRONG = {
    "a mesh of other devices": (2, "--mesh=3x1", "--mesh=3x1 needs 3 devices, but there are 2"),
    "heads that cannot be cut": (2, "--mesh=1x2 --config.model.num_kv_heads=1", "MODEL must divide the 1 key heads"),
    "a batch that cannot be cut": (2, "--config.train.batch_size=3", "2 devices must divide the 3 rows"),
    "text that is not there": (3, "--config.data.source=/no/connection", "/no/connection"),
}


@pytest.mark.parametrize(("code", "more", "wanted"), WRONG.values(), ids=WRONG.keys())
def test_what_does_not_fit_is_one_line_of_the_first(site, tmp_path, code, more, wanted):
    found = ended(start(2, *training(site, tmp_path / "run", *more.split())))
    assert [one for one, _, _ in found] == [code, code], found
    lines = [line for _, _, err in found for line in err.splitlines()]
    assert len(lines) in (1, 2) and wanted in lines[-1] and not found[1][2], lines
    assert not os.path.exists(tmp_path / "run" / "config.json")


def test_text_that_one_process_lacks_is_an_error_of_all(site, tmp_path):
    """The process that fails and the one that has read everything meet before the folder is held."""
    words = training(site, tmp_path / "run", f"--coordinator=127.0.0.1:{free_port()}", "--processes=2")
    more = ([], ["--config.data.source=/no/connection"])
    found = ended([tiny.start(*words, f"--process={n}", *more[n], **ALONE) for n in range(2)])
    assert [code for code, _, _ in found] == [3, 3], found
    assert "'/no/connection' does not exist" in found[0][2].splitlines()[-1] and not found[1][2], found


def test_processes_that_were_not_started_alike(site, tmp_path):
    together = [f"--coordinator=127.0.0.1:{free_port()}", "--processes=2"]
    words = training(site, tmp_path / "run", *together)
    found = ended([tiny.start(*words, f"--process={n}", f"--config.train.seed={n}", **ALONE) for n in range(2)])
    assert [code for code, _, _ in found] == [2, 2], found
    last = found[0][2].splitlines()[-1]
    assert "with different settings: settings. Start all of them with the same command." in last and not found[1][2]


def test_flags_that_say_too_little(capsys, site, tmp_path):
    for more, wanted in (
        (["--processes=2", "--process=0"], "--coordinator is missing"),
        (["--coordinator=somewhere"], "--coordinator=somewhere: HOST:PORT is expected, or auto"),
        (["--coordinator=localhost:1", "--process=2", "--processes=2"], "--processes=2, --process=2: "),
    ):
        code, out, err = tiny.call(capsys, *training(site, tmp_path / "run", *more))
        assert code == 2 and wanted in err and not out
