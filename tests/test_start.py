"""The cost of a start: help and wrong words import no JAX, wrong settings no library that only a run needs."""

import subprocess
import sys

import pytest

from posx.attention import EXECUTORS
from posx.conformance import DIMS
from posx.evaluation.protocols import PROTOCOLS
from posx.lab import plots
from posx.lab.commands import COMMANDS, FIGURES, command_function
from tests import tiny

#: Print which libraries of the first argument are imported after each line of words in the other arguments.
CALLS = """
import sys
import posx.lab.cli
for words in sys.argv[2:]:
    code = posx.lab.cli.main(words.split())
    found = [name for name in sys.argv[1].split(",") if name in sys.modules]
    print(f"{code} {','.join(found) or 'none'}", file=sys.stderr)
"""

#: The libraries that a run needs and its settings do not.
HEAVY = "flax,optax,orbax,tensorstore,datasets,tokenizers,matplotlib,pandas,tensorboardX"


def imported(libraries: str, *lines: str) -> list[str]:
    """Return the exit code of each line in one process, and which of `libraries` it has imported by then."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS, libraries, *lines], env=tiny.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stderr.splitlines() if not line.startswith("posx: ")]
    assert len(found) == len(lines), done.stderr
    return found


def test_help_and_wrong_words_import_no_jax(site):
    right = ["--help", *(f"{name} --help" for name in COMMANDS)]
    wrong = ["trian", "doctor --workdri=x", "generate --num_tokens=ten", "plot --config=x.py"]
    wrong += [f"{name} --config={site / 'tiny.py'} --workdri=x" for name in ("train", "sweep")]
    found = imported("jax,numpy,flax", *right, *wrong)
    assert found == ["0 none"] * len(right) + ["2 none"] * len(wrong)


def test_wrong_settings_import_nothing_that_only_a_run_needs(site, whole):
    config = f"--config={site / 'tiny.py'}"
    wrong = [
        f"train {config}:albi", f"train {config} --config.model.widht=3", f"train {config} --config.train.steps=-1",
        f"train {config}:rope --config.model.model_dim=34", f"train {config} --config.train.executor=fast",
        f"train {config}", f"sweep {config} --config.sweep.encodings=rope,albi",
        f"sweep {config} --workdir=x --jobs=-1",
        f"evaluate --workdir={whole} --protocol=slidin", f"evaluate --workdir={whole} --lengths=64,16",
        f"generate --workdir={whole} --temperature=-1", f"plot --workdir={whole} --what=lenghts",
    ]  # fmt: skip
    assert imported(HEAVY, *wrong) == ["2 none"] * len(wrong)


#: As on Windows, where the module `fcntl` does not exist.
WITHOUT_FCNTL = """
import sys
sys.modules["fcntl"] = None
from pathlib import Path
import posx
encoding = posx.build("alibi", posx.Dims(model_dim=8, num_heads=2, head_dim=4, num_layers=1, train_len=8))
print(encoding, posx.attend.__name__, posx.evaluate.__name__, posx.causal(), hasattr(posx, "nil"))
print([name for name in ("flax", "optax", "orbax", "tensorstore") if name in sys.modules])
from posx.lab.config import base_config, run_config
from posx.lab.machine.compile_cache import start_cost
from posx.lab.runs.describe import expected_model, layout, opening
run = run_config(base_config("tupe+rope"))
model = expected_model(run)
print(opening(run, model, layout(run, model, None, "")), start_cost()["compile_seconds"])
from posx.lab.runs.folder import RunFolder
with RunFolder(Path(sys.argv[1])).hold():
    try:
        with RunFolder(Path(sys.argv[1])).hold():
            print("held twice")
    except posx.errors.WorkdirError as error:
        print(error)
"""


@pytest.mark.slow
def test_posx_without_a_model_and_without_fcntl(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FCNTL, str(tmp_path)], env=tiny.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    value, heavy, first, held = done.stdout.splitlines()
    assert value == "Alibi(num_heads=2, scale='linear') attend evaluate Mask(causal=True, window=0, sinks=0) False"
    assert heavy == "[]" and "in use by process" in held
    assert first.startswith("894,592 parameters, ") and first.endswith(" 0.0"), "nothing is compiled for the first line"


def test_help_matches_the_library():
    assert all(callable(command_function(name)) for name in COMMANDS)
    assert _words("evaluate", "protocol") >= set(PROTOCOLS)
    assert _words("evaluate", "executor") <= {"auto", "or", *EXECUTORS}
    assert FIGURES == plots.WHAT
    check = {name: default for name, (default, _) in COMMANDS["check"].flags.items()}
    assert check.items() >= {name: size for name, size in vars(DIMS).items() if name != "num_layers"}.items()


def _words(command: str, flag: str) -> set[str]:
    return set(COMMANDS[command].flags[flag][1].replace(",", "").split())
