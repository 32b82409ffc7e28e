"""What the README shows works as shown."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import posx
from docs import tracked
from posx.conformance import CHECKS, check_encoding
from posx.encodings import ENCODINGS, build
from posx.lab import cli
from posx.lab.commands.encodings import column_texts
from posx.lab.machine import ceiling
from tests import tiny
from tests.test_language import PAGES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
TASK = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/tasks.md").read_text(), re.DOTALL)[0]
OWN, FROM_PYTHON = (next(b for b in BLOCKS if word in b) for word in ("class LogDecay", "posx.attend"))


@pytest.mark.slow
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
    command = [sys.executable, "-m", "posx.lab.cli", "train", "--config", config, "--workdir", "run", *small]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, done.stderr
    assert "my_encoding:LogDecay" in (tmp_path / "run/eval.jsonl").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = tiny.call(capsys, "generate", "--workdir", "run", "--prompt", "the", "--num_tokens=5")
    assert code == 0 and out.startswith("the"), err


@pytest.mark.slow
def test_own_encoding_passes_the_checks(tmp_path, monkeypatch):
    (tmp_path / "my_checked_encoding.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    report = check_encoding("my_checked_encoding:LogDecay")
    assert report.ok and len(report.outcomes) == len(CHECKS), str(report)


def test_own_encoding_is_short():
    body = OWN[OWN.index("@dataclasses") :].strip().splitlines()
    assert len(body) <= 15


@pytest.mark.slow
def test_python_example(tmp_path, monkeypatch, whole):
    """The second half needs the run of the quickstart that it names: here a tiny one."""
    (tmp_path / "README.md").write_text(README)
    workdir = re.search(r'posx.load\("(.*?)"\)', FROM_PYTHON)[1]
    shutil.copytree(whole, tmp_path / workdir)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(FROM_PYTHON, names)
    dense = names["posx"].attend(
        names["encoding"], names["params"], names["q"], names["k"], names["v"], np.arange(128, dtype=np.int32),
        executor="dense",
    )  # fmt: skip
    np.testing.assert_allclose(names["o"], dense, atol=1e-5)
    assert [(row["eval_len"], row["status"]) for row in names["rows"]] == [(64, "ok"), (1024, "ok")]
    assert len({row["targets"] for row in names["rows"]}) == 1


def test_every_page_with_ratios_defines_them_alike():
    """R_k is how many times as large perplexity is at k times the training length, as `posx plot` draws it."""
    assert "R_k = ppl(kL) / ppl(L)" in posx.lab.plots.curves.ratio.__doc__
    for path in PAGES:
        text = " ".join(path.read_text(encoding="utf-8").split())
        k = re.search(r"R_(\d+)", text)
        forms = ("R_k = PPL(kL) / PPL(L)", f"R_{k[1]} = PPL({k[1]}L) / PPL(L)") if k else ("",)
        assert any(form in text for form in forms), path


def test_tables_of_tracked_pages_are_those_of_the_code():
    """`python -m docs.tracked` writes them."""
    pages = tracked.committed()
    assert {path.name for path in pages} == {"README.md", "catalogue.md", "contract.md", "index.md"}
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, path


def test_guide_names_what_the_fused_kernel_cannot_compute():
    kernels = {name: column_texts(build(name, tracked.DIMS), tracked.DIMS)["kernels"] for name in ENCODINGS}
    guide = (ROOT / "docs/guides/choose.md").read_text(encoding="utf-8")
    for words, kind in (("in tiles", "tiles"), ("whole rows", "whole rows")):
        (listed,) = re.findall(rf"^\| posx's own, {words} \| (.*) \|$", guide, re.MULTILINE)
        assert re.findall(r"`(\w+)`", listed) == sorted(name for name in ENCODINGS if kernels[name] == kind)
    assert "Only posx's own can compute thirteen of them" in guide and sum(k != "any" for k in kernels.values()) == 13


def test_readme_names_ten_encodings_and_all_are_one_link_away():
    listed = re.findall(r"^\| \[`(\w+)`\]\(https://", README, re.MULTILINE)
    assert len(listed) == 10 and set(listed) <= set(ENCODINGS)
    assert "(docs/catalogue.md)" in README
    catalogue = (ROOT / "docs/catalogue.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\| \[`(\w+)`\]\(\.\./posx/encodings/\1\.py\)", catalogue)) == sorted(ENCODINGS)


def test_readme_is_short():
    """A newcomer reads it in a minute. Tables, code and captions count."""
    assert len(README.split()) <= 700


def commands_of(page):
    """Yield the `posx` commands in the shell blocks of a page, but those that name files or machines of a reader."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if re.match(r"posx (?!--)", line) and not re.search(r"/(shared|new|to)/|--on|--config_json|--status", line):
                yield line


def check_understood(line, monkeypatch, tmp_path):
    """--dry_run goes through parsing, config and validation. A run or folder of the reader may be missing."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ceiling, "_measure", lambda dtype: 1e11)  # seconds of products for each sweep otherwise
    (tmp_path / "my_encoding.py").write_text(OWN)
    (tmp_path / "my_task.py").write_text(TASK)
    words = shlex.split(line, comments=True)[1:]
    reads = {"evaluate", "autopsy", "export", "generate", "plot", "table", "verify", "import", "compare", "report"}
    missing = [4] if words[0] in reads or "--from" in words else []
    missing += [3] if "--config.data.source=" in line else []  # a text of the reader's own
    assert cli.main([*words, *([] if "--dry_run" in words else ["--dry_run"])]) in (0, *missing)


@pytest.mark.parametrize("line", re.findall(r"^    (posx \w+ .*)$", README, re.MULTILINE))
def test_commands_of_the_readme_parse(line, monkeypatch, tmp_path):
    check_understood(line, monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_the_pages_parse(page, monkeypatch, tmp_path):
    for line in commands_of(page):
        check_understood(line, monkeypatch, tmp_path)


def test_scripts_are_the_readme_commands():
    for name in re.findall(r"^    \./(scripts/\w+\.sh)", README, re.MULTILINE):
        assert os.access(ROOT / name, os.X_OK), name


@pytest.mark.parametrize("script", ["scripts/quickstart.sh", "scripts/test.sh"])
def test_scripts_install_and_run_in_the_folder_of_venv(script, tmp_path):
    """The programs of the folder are replaced by ones that print how they were called."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "posx"):
        (tmp_path / "bin" / name).write_text('#!/bin/sh\necho "$0 $*"\n', encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    locked = {"CONSTRAINTS": str(ROOT / "scripts/constraints-3.11.txt")}
    env = {**os.environ, "VENV": str(tmp_path), "PYTHON": sys.executable, **locked}
    done = subprocess.run([ROOT / script, "--word"], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    installed, ran = done.stdout.splitlines()
    assert installed.startswith(f"{tmp_path}/bin/python -m pip install")
    assert f"--constraint {locked['CONSTRAINTS']} -e ." in installed
    assert ran.startswith(f"{tmp_path}/bin/") and ran.endswith("--word")


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


@pytest.mark.slow
def test_documented_names_work_after_import_posx():
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    names = {name for text in (*pages, *_docstrings()) for name in re.findall(r"\bposx(?:\.\w+)+", text)}
    assert names > {"posx.machine.devices.use_every_core", "posx.lab.training.layout.RULES"}
    command = [sys.executable, "-c", RESOLVE, *sorted(names)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
