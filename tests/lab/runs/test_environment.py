"""What a user's shell is set up for changes no number of a run, or is recorded and said when the run resumes."""

import json
import shutil
import subprocess
import sys

import pytest

import posx
from posx.machine.guard import SET
from tests import tiny

#: What the variables in SET are set to otherwise.
OTHER = {
    "JAX_ENABLE_X64": "True", "JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_DEFAULT_PRNG_IMPL": "rbg", "JAX_THREEFRY_PARTITIONABLE": "off", "JAX_ENABLE_CUSTOM_PRNG": "1",
    "JAX_RANDOM_SEED_OFFSET": "7", "JAX_TRANSFER_GUARD": "disallow", "JAX_NO_TRACING": "yes", "JAX_NO_EXECUTION": "1",
}  # fmt: skip


@pytest.mark.slow
def test_jax_variables_change_no_number_of_a_run(site, whole, tmp_path):
    assert OTHER.keys() == SET.keys()
    words = ["train", f"--config={site / 'tiny.py'}:t5", f"--workdir={tmp_path / 'run'}", "--config.train.steps=3"]
    words += ["--config.eval.lengths=16", "--config.eval.protocols=nonoverlapping"]
    code, _, err = tiny.run(*words, **OTHER, PYTHONWARNINGS="error", PYTHONHASHSEED="7", COLUMNS="9", TZ="Asia/Tokyo")
    assert code == 0, err
    for name, value in OTHER.items():
        assert f"notice: {name}={value} is not used: posx sets it to {SET[name]}" in err
    first, wanted = (tiny.rows(folder / "metrics.jsonl")[0] for folder in (tmp_path / "run", whole))
    assert first["step"] == wanted["step"] == 1 and first["loss"] == wanted["loss"]
    found, usual = (json.loads((folder / "env.json").read_text())["jax"] for folder in (tmp_path / "run", whole))
    assert json.loads((whole / "env.json").read_text())["versions"]["posx"] == posx.__version__
    assert found == usual and found["jax_default_prng_impl"] == "threefry2x32" and found["jax_enable_x64"] == "False"


#: Prints the exit code of each line of words, on the folder in the first argument.
CALLS = """
import sys
import posx.lab.cli
for words in sys.argv[2:]:
    print(posx.lab.cli.main([*words.split(), f"--workdir={sys.argv[1]}"]))
"""


@pytest.mark.slow
def test_a_path_that_cannot_be_passed_on_is_refused(site, whole, tmp_path):
    workdir, config = tmp_path / "\u00e9", f"--config={site / 'tiny.py'}"
    shutil.copytree(whole, workdir)
    commands = [f"train {config}", "evaluate", "generate", f"sweep {config}"]
    done = subprocess.run(
        [sys.executable, "-c", CALLS, workdir, *commands], env=tiny.environment(PYTHONUTF8="0", LC_ALL="C"),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.split() == ["4"] * len(commands), done.stderr
    said = done.stderr.splitlines()
    assert len(said) == len(commands) and (workdir / "DONE").exists()
    for line in said:
        assert "is no UTF-8 text, but Python reads names as ascii" in line and "set LC_ALL=C.UTF-8" in line


def test_options_that_decide_bits_are_said_on_resuming(capsys, site, whole, tmp_path):
    workdir = shutil.copytree(whole, tmp_path / "run")
    (workdir / "DONE").unlink()
    env = json.loads((workdir / "env.json").read_text())
    env["jax"]["jax_default_matmul_precision"] = "bfloat16"
    tiny.edit_json(workdir / "env.json", lambda old: json.dumps(env))
    code, _, err = tiny.call(capsys, "train", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}")
    assert code == 0 and "jax_default_matmul_precision: bfloat16 -> None" in err
