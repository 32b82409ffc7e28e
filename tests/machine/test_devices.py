"""Eight devices, simulated on this CPU, compute what one does."""

import json
import subprocess
import sys

import pytest

from tests import tiny

EIGHT = {"JAX_NUM_CPU_DEVICES": "8"}


def test_attention_over_heads_training_over_the_batch_and_a_batch_that_cannot_be_shared(site, tmp_path):
    command = [sys.executable, "-m", "tests.machine.eight_devices", str(site / "tiny.py"), str(tmp_path / "new")]
    environment = tiny.environment(**EIGHT)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    err = done.stderr
    assert "train.batch_size=12" in err and "8 devices" in err and len(err.splitlines()) == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_run_on_eight_devices_is_that_on_one(tmp_path):
    tiny.write_config(tmp_path)
    words = ["train", f"--config={tmp_path / 'tiny.py'}:t5", "--config.train.batch_size=8"]
    words += ["--config.eval.batch_tokens=48"]  # one to three windows at a time, fewer than devices
    for name, extra in (("one", {}), ("eight", EIGHT)):
        code, _, err = tiny.run(*words, f"--workdir={tmp_path / name}", **extra)
        assert code == 0, err
    for file, value in (("metrics.jsonl", "loss"), ("metrics.jsonl", "grad_norm"), ("eval.jsonl", "nll")):
        one, eight = ([row[value] for row in tiny.rows(tmp_path / name / file)] for name in ("one", "eight"))
        assert one == pytest.approx(eight, rel=1e-4) and len(one) == len(eight)
    assert json.loads((tmp_path / "eight" / "env.json").read_text())["num_devices"] == 8
    code, _, err = tiny.run(*words, f"--workdir={tmp_path / 'eight'}")
    assert code == 0 and "notice" in err and "num_devices: 8 -> 1" in err
