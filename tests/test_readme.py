"""What the README shows works as shown."""

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import posx
from posx import cli, encodings
from posx.contract import FORMULA, acting
from posx.machine import devices
from posx.testing import CHECKS, DIMS, check_encoding
from tests import tiny

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
OWN, FROM_PYTHON = (next(b for b in BLOCKS if word in b) for word in ("class LogDecay", "posx.attend"))


def test_own_encoding_trains_and_generates(capsys, monkeypatch, tmp_path):
    """The 15 lines, saved as the README says, are found by the command in another process, from another folder."""
    (tmp_path / "my_encoding.py").write_text(OWN)
    (tmp_path / "cache" / "machine").mkdir(parents=True)
    tiny.write_ceilings(tmp_path / "cache" / "machine")
    (tmp_path / "text.txt").write_text("the cat sat on the mat. the dog sat on the log.\n" * 400)
    small = [
        "--config.model.num_layers=1", "--config.model.model_dim=16", "--config.model.num_heads=2",
        "--config.train.length=16", "--config.train.steps=12", "--config.train.warmup_steps=2",
        "--config.train.batch_size=8", "--config.eval.lengths=16", "--config.eval.num_targets=256",
        "--config.eval.protocols=nonoverlapping",
        f"--config.data.source={tmp_path / 'text.txt'}", f"--config.data.cache_dir={tmp_path / 'cache'}",
    ]  # fmt: skip
    config = f"{ROOT / 'configs/quick.py'}:my_encoding:LogDecay"
    command = [sys.executable, "-m", "posx.cli", "train", "--config", config, "--workdir", "run", *small]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, done.stderr
    assert "my_encoding:LogDecay" in (tmp_path / "run/eval.jsonl").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = tiny.call(capsys, "generate", "--workdir", "run", "--prompt", "the", "--num_tokens=5")
    assert code == 0 and out.startswith("the"), err


def test_own_encoding_passes_the_checks(tmp_path, monkeypatch):
    (tmp_path / "my_checked_encoding.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    report = check_encoding("my_checked_encoding:LogDecay")
    assert report.ok and len(report.outcomes) == len(CHECKS), str(report)


def test_own_encoding_is_short():
    body = OWN[OWN.index("@dataclasses") :].strip().splitlines()
    assert len(body) <= 15


def test_python_example():
    names: dict = {}
    exec(FROM_PYTHON, names)
    dense = names["posx"].attend(
        names["encoding"], names["params"], names["q"], names["k"], names["v"], names["pos"], executor="dense",
    )  # fmt: skip
    np.testing.assert_allclose(names["o"], dense, atol=1e-5)


def test_every_page_with_ratios_defines_them_alike():
    """R_k is how many times as large perplexity is at k times the training length, as `posx plot` draws it."""
    assert "R_k = ppl(kL) / ppl(L)" in posx.plots.curves.ratio.__doc__
    for path in (ROOT / "README.md", *ROOT.glob("experiments/*/README.md")):
        text = path.read_text()
        k = re.search(r"R_(\d+)", text)
        forms = ("R_k = PPL(kL) / PPL(L)", f"R_{k[1]} = PPL({k[1]}L) / PPL(L)") if k else ("",)
        assert any(form in text for form in forms), path


def test_readme_shows_the_formula_of_the_contract():
    assert f"\n\n{textwrap.indent(FORMULA, ' ' * 4)}\n\n" in README


def test_readme_table_names_every_encoding():
    rows = dict(re.findall(r"^\| `(\w+)` (\|.*)$", README, re.MULTILINE))
    for name, cls in encodings.ENCODINGS.items():  # as `posx encodings` says it
        on = ", ".join(acting(posx.build(name, DIMS))) or "nothing"
        assert rows[name].startswith(f"| {on} | ") and f" | {cls.about.beyond} | " in rows[name]


@pytest.mark.parametrize("line", re.findall(r"^    posx (\w+ .*)$", README, re.MULTILINE))
def test_commands_parse(line, monkeypatch, tmp_path, capsys):
    """Every command of the README is understood: --dry_run goes through parsing, config and validation."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(devices, "_measure", lambda dtype: 1e11)  # seconds of products for each sweep otherwise
    (tmp_path / "my_encoding.py").write_text(OWN)
    words = [word.strip('"') for word in re.split(r"\s+(?=(?:[^\"]*\"[^\"]*\")*[^\"]*$)", line.split("#")[0].strip())]
    assert cli.main([*words, "--dry_run"]) in (
        (0, 4) if words[0] in ("evaluate", "export", "generate", "plot") else (0,)
    )


def test_scripts_are_the_readme_commands():
    for name in re.findall(r"^    \./(scripts/\w+\.sh)", README, re.MULTILINE):
        assert os.access(ROOT / name, os.X_OK), name


def _environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


#: Resolves each name with nothing of posx imported but `posx` itself; libraries stay, for speed.
RESOLVE = """
import sys
import textwrap
for name in sys.argv[1:]:
    for module in [module for module in sys.modules if module.split(".")[0] == "posx"]:
        del sys.modules[module]
    import posx
    try:
        eval(name)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
"""


def _docstrings():
    """Yield the docstrings of posx's modules, public classes and public functions."""
    for path in (ROOT / "posx").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            if documented and not getattr(node, "name", "").startswith("_"):
                yield ast.get_docstring(node) or ""


def test_documented_names_work_after_import_posx():
    names = {name for text in (README, *_docstrings()) for name in re.findall(r"\bposx(?:\.\w+)+", text)}
    assert names > {"posx.machine.devices.use_every_core", "posx.training.layout.RULES"}
    command = [sys.executable, "-c", RESOLVE, *sorted(names)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
