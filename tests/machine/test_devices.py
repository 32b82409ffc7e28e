"""Eight devices, simulated on this CPU, compute what one does."""

import json
import subprocess
import sys

import pytest

from tests import cheap, tiny

EIGHT = {"JAX_NUM_CPU_DEVICES": "8"}


def test_attention_over_heads_and_queries_and_training_over_the_batch():
    environment = tiny.environment(**EIGHT, XLA_FLAGS=cheap.FLAGS)
    command = [sys.executable, "-m", "tests.machine.eight_devices"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_on_eight_devices_is_that_on_one(tmp_path):
    tiny.write_config(tmp_path)
    words = ["train", f"--config={tmp_path / 'tiny.py'}:t5", "--config.train.steps=4", "--config.model.model_dim=64"]
    words += ["--config.train.batch_size=128", "--config.train.length=64", "--config.eval.lengths=64,256"]
    for name, extra in (("one", {}), ("eight", EIGHT)):
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
