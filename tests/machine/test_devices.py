"""Eight devices, simulated on this CPU, compute what one does."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from posx.lab.machine import ceiling
from posx.machine.cores import bind_cores, usable_cores
from tests import tiny

EIGHT = {"JAX_NUM_CPU_DEVICES": "8"}


def test_an_edited_or_old_ceiling_is_measured_again(tmp_path, monkeypatch):
    """The best of all times counts, so that a wrong one would stay. Other kinds of CPU have files of their own."""
    speeds = [1e11, 2e11, 1e10, 3e11]
    monkeypatch.setattr(ceiling, "_measure", lambda dtype: speeds.pop(0))
    assert ceiling.machine_ceiling(tmp_path, "float32") == ceiling.machine_ceiling(tmp_path, "float32") == 1e11
    (file,) = tmp_path.glob("ceiling-*.json")
    file.write_text(file.read_text().replace("100000000000.0", "900000000000.0"))
    assert ceiling.machine_ceiling(tmp_path, "float32") == 2e11
    os.utime(file, (0, 0))
    assert ceiling.machine_ceiling(tmp_path, "float32") == 2e11
    assert speeds == [3e11], "the old one was not measured again"
    monkeypatch.setattr(ceiling, "cpu_name", lambda: "another CPU")
    assert ceiling.machine_ceiling(tmp_path, "float32") == 3e11


@pytest.mark.slow
@pytest.mark.parametrize("what", ["training", "attention", "parts"])
def test_eight_devices_compute_what_one_does(what):
    environment = tiny.environment(**EIGHT)
    command = [sys.executable, "-m", "tests.machine.eight_devices", what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_on_eight_devices_is_that_on_one(tmp_path):
    tiny.write_config(tmp_path)
    words = ["train", f"--config={tmp_path / 'tiny.py'}:t5", "--config.train.steps=4", "--config.model.model_dim=64"]
    words += ["--config.train.batch_size=128", "--config.train.length=64", "--config.eval.lengths=64,256"]
    for name, extra in (("one", {"JAX_NUM_CPU_DEVICES": "1"}), ("eight", EIGHT)):
        code, _, err = tiny.run(*words, f"--workdir={tmp_path / name}", **extra)
        assert code == 0, err
    for file, value in (("metrics.jsonl", "loss"), ("metrics.jsonl", "grad_norm"), ("eval.jsonl", "nll")):
        one, eight = ([row[value] for row in tiny.rows(tmp_path / name / file)] for name in ("one", "eight"))
        assert one == pytest.approx(eight, rel=1e-4) and len(one) == len(eight)
    env = json.loads((tmp_path / "eight" / "env.json").read_text())
    assert env["num_devices"] == 8
    code, _, err = tiny.run(*words, f"--workdir={tmp_path / 'eight'}")
    assert code == 0 and "notice" not in err, "the run goes on with as many devices, whatever the cores"
    code, _, err = tiny.run(*words, f"--workdir={tmp_path / 'eight'}", JAX_NUM_CPU_DEVICES="1")
    assert code == 0 and "notice" in err and "num_devices: 8 -> 1" in err


@pytest.mark.slow
def test_more_devices_than_cores_go_on_after_a_long_stop(tmp_path):
    """As after Ctrl-Z and fg, or a night's sleep: XLA would complain after 20 s, and end the process after 40 more."""
    tiny.write_config(tmp_path)
    words = ["train", f"--config={tmp_path / 'tiny.py'}", "--config.train.steps=20", "--config.model.model_dim=64"]
    words += ["--config.train.batch_size=128", "--config.train.length=64", "--config.train.checkpoint_steps=20"]
    words += ["--config.eval.lengths=16", "--config.eval.protocols=nonoverlapping"]
    with bind_cores(usable_cores()[:1]):
        process = tiny.start(*words, f"--workdir={tmp_path / 'run'}", **EIGHT)
    metrics = tmp_path / "run" / "metrics.jsonl"
    tiny.until(lambda: metrics.exists() and len(tiny.rows(metrics)) > 3, process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(25)
    stopped = tiny.step(tmp_path / "run")
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=900)
    assert stopped < 20, "stopped too late to show anything"
    assert process.returncode == 0 and "rendezvous" not in err and "waiting" not in err, err
    assert json.loads((tmp_path / "run" / "env.json").read_text())["num_devices"] == 8


#: Prints, after what each line of words says, its exit code: commands share a process, where JAX starts anew for each.
CALLS = """
import contextlib, io, sys
import posx.lab.cli
for words in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = posx.lab.cli.main(words.split())
    print(code, said.getvalue().rstrip().replace(chr(10), " / "))
"""


def ends(commands: list[str], **environment: str) -> list[str]:
    """The exit code of each command and what it said, in one line each."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS, *commands], env=tiny.environment(**environment), capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if line[:1].isdigit()]


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        pytest.param(
            "JAX_PLATFORMS", "cuda", "JAX_PLATFORMS=cuda: JAX finds no such device: its plugin is not installed. Unset",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "JAX_PLATFORMS", "foo", "'foo' is not in the list of known backends", marks=pytest.mark.slow
        ),
        ("JAX_NUM_CPU_DEVICES", "x", "JAX_NUM_CPU_DEVICES=x: JAX takes no such value"),
    ],
)  # fmt: skip
def test_devices_that_do_not_exist_are_one_line(site, whole, name, value, wanted):
    config = f"--config={site / 'tiny.py'}"
    commands = ["encodings rope", "check rope --only=eager", f"evaluate --workdir={whole}"]
    if value == "cuda":  # whose error says nothing
        commands += [f"train {config} --workdir={whole}", f"sweep {config} --dry_run"]
        commands += [f"generate --workdir={whole} --prompt=a", f"export --workdir={whole} --to=x.safetensors", "doctor"]
    # A value that stops the import of JAX stops it once in a process.
    calls = [commands] if name == "JAX_PLATFORMS" else [[words] for words in commands]
    found = [line for lines in calls for line in ends(lines, **{name: value})]
    assert len(found) == len(commands)
    for line in found:
        assert line.startswith("2 posx: ") and wanted in line and " / " not in line, line
