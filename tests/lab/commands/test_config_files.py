"""Config files and presets: how they are found, and one clear line for each that cannot be used."""

import shutil

import pytest

from tests import tiny
from tests.lab.commands import refused

CONFIG_FILES = {
    "syntax error": ("def get_config(:\n", ["line 1"]),
    "raises at import": ("x = 1\nraise KeyError('oops')\n", ["line 2", "KeyError", "oops"]),
    "raises inside": ("def get_config(arg='a'):\n    return 1 / 0\n", ["line 2", "ZeroDivisionError"]),
    "no get_config": ("config = 3\n", ["defines no get_config"]),
    "ends the process": ("import sys\nsys.exit(0)\n", ["line 2", "SystemExit"]),
    "ends the process inside": ("import sys\ndef get_config():\n    sys.exit(0)\n", ["line 3", "SystemExit"]),
    "wrong type": ("def get_config(arg='a'):\n    return {}\n", ["must return a ConfigDict, not dict"]),
    "missing section": (
        "from ml_collections import ConfigDict\ndef get_config(arg='a'):\n    return ConfigDict()\n",
        ["section 'encoding' is missing", "base_config"],
    ),
    "unknown name inside": (
        "from posx.lab.config import base_config\ndef get_config():\n    return base_config('albi')\n",
        ["Did you mean"],
    ),
    "extra key": (
        "from posx.lab.config import base_config\ndef get_config(arg='alibi'):\n    c = base_config(arg)\n"
        "    c.model.widht = 3\n    return c\n", ["model.widht", "nearest", "width"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), list(CONFIG_FILES.values())[:-1], ids=list(CONFIG_FILES)[:-1])
def test_bad_config_files_name_file_and_line(capsys, tmp_path, text, wanted):
    path = tmp_path / "mine.py"
    path.write_text(text)
    refused(capsys, 2, ["train", f"--config={path}", f"--workdir={tmp_path / 'new'}"], "mine.py", *wanted)
    assert not (tmp_path / "new").exists()


COMPUTES = """
import dataclasses, os, random, runpy
from posx.encodings import Alibi

@dataclasses.dataclass(frozen=True)
class Mine(Alibi):
    pass

def get_config(arg="alibi"):
    config = runpy.run_path({tiny!r})["get_config"]({encoding})
    config.train.seed = {seed}
    return config
"""


@pytest.mark.parametrize(
    ("seed", "encoding", "wanted"),
    [
        ("random.randrange(2**31)", "arg", ("train.seed is ", "at one execution and", "Compute it from a fixed seed")),
        ("random.Random(0).randrange(9)", 'f"{__name__}:Mine"', ("Name it computes:CLASS",)),
    ],
)
def test_a_config_file_that_gives_no_fixed_run_is_refused(capsys, tmp_path, site, seed, encoding, wanted):
    path = tmp_path / "computes.py"
    path.write_text(COMPUTES.format(tiny=str(site / "tiny.py"), seed=seed, encoding=encoding))
    for command in ("train", "sweep") if encoding == "arg" else ("train",):  # each starts a process that reads the file
        code, _, err = tiny.call(capsys, command, f"--config={path}", f"--workdir={tmp_path / 'run'}")
        assert code == 2 and len(err.splitlines()) == 1 and all(words in err for words in wanted), err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("argument", ["", ":t5"])
def test_a_config_file_runs_once_for_a_command(capsys, tmp_path, site, argument):
    path, runs = tmp_path / "counts.py", tmp_path / "runs.txt"
    path.write_text(f"open({str(runs)!r}, 'a').write('x')\n" + (site / "tiny.py").read_text())
    for number, command in enumerate(("train", "sweep"), 1):
        words = [f"--config={path}{argument}", "--config.sweep.encodings=t5"][: 1 + (command == "sweep")]
        code, _, err = tiny.call(capsys, command, *words, "--print_config")
        assert code == 0 and runs.read_text() == "x" * number, err
    code, _, err = tiny.call(capsys, "sweep", f"--config={path}:t5", f"--workdir={tmp_path / 'new'}", "--status")
    assert code == 2 and "the sweep makes the same runs without 't5'" in err and runs.read_text() == "xxx"


def test_a_sweep_takes_the_default_argument_that_is_no_encoding(capsys, tmp_path):
    """`scaling:64x64`, the first cell of its study, was refused, and `scaling:128x64` was not."""
    words = ("--config.data.source=embedded", f"--workdir={tmp_path}", "--config.sweep.seeds=0", "--print_config")
    given = [tiny.call(capsys, "sweep", f"--config=scaling{cell}", *words) for cell in ("", ":64x64", ":128x64")]
    assert [code for code, *_ in given] == [0, 0, 0] and given[0] == given[1] != given[2]
    code, out, err = tiny.call(capsys, "sweep", "--config=scaling:64x64", *words[:-1], "--status")
    assert code == 0 and "12 runs" in out, err


def test_a_config_file_that_computes_other_values_is_refused(capsys, monkeypatch, tmp_path, site, whole):
    path = tmp_path / "computes.py"
    path.write_text(COMPUTES.format(tiny=str(site / "tiny.py"), seed="int(os.environ['SEED'])", encoding="arg"))
    for seed, wanted in (("0", 0), ("7", 4)):
        monkeypatch.setenv("SEED", seed)
        code, _, err = tiny.call(
            capsys, "train", f"--config={path}:t5", f"--workdir={shutil.copytree(whole, tmp_path / seed)}"
        )
        assert code == wanted and ("train.seed: 0 -> 7" in err) == bool(wanted), err


def test_an_unknown_key_set_inside_a_config_file_is_refused(capsys, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CONFIG_FILES["extra key"][0])
    refused(capsys, 2, ["train", f"--config={path}", "--dry_run"], "section 'model' has no field 'widht'")


def test_a_config_file_that_is_not_there(capsys, tmp_path, site):
    refused(capsys, 2, ["train", f"--config={site / 'tinny.py'}"], "does not exist", "Did you mean", "tiny.py")
    refused(capsys, 2, ["train", f"--config={site}"], "is a folder")
    refused(capsys, 2, ["train"], "--config")
    refused(capsys, 2, ["sweep", "--config="], "--config='' names no preset and no file")
    refused(capsys, 2, ["train", "--config"], "--config has no value. Write --config=VALUE")
    refused(capsys, 2, ["train", f"--config_json={site / 'whole'}"], "is a folder. Did you mean", "whole/config.json?")
    config = site / "whole" / "config.json"
    refused(capsys, 2, ["train", f"--config={config}"], f"Did you mean --config_json {config}?")
    refused(capsys, 2, ["train", "--config_json="], "--config_json='' names no file")
    (tmp_path / "broken.json").write_text("{")
    refused(capsys, 2, ["train", f"--config_json={tmp_path / 'broken.json'}"], "broken.json")
    refused(capsys, 2, ["train", f"--config_json={tmp_path / 'none.json'}"], "cannot be read")


def test_a_preset_is_known_by_its_name_anywhere(capsys, tmp_path, monkeypatch):
    """A local folder of that name does not hide it; a local file of that name is told, and named as a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick").mkdir()
    path = tiny.ROOT / "configs" / "quick.py"
    named, by_path = (tiny.call(capsys, "train", f"--config={word}:t5", "--print_config") for word in ("quick", path))
    assert named == by_path and "--config.encoding=t5" in named[1] and not named[2]
    (tmp_path / "quick.py").write_text(path.read_text().replace("500", "77"))
    code, preset, err = tiny.call(capsys, "train", "--config=quick:t5", "--print_config")
    assert (code, preset) == (0, named[1]) and "the file in this folder is --config=quick.py" in err
    _, own, err = tiny.call(capsys, "train", "--config=quick.py:t5", "--print_config")
    assert "--config.train.steps=77" in own and not err


def test_a_name_that_is_no_preset_lists_the_presets(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in ("quik", "configs/quick.py"):
        refused(capsys, 2, ["sweep", f"--config={word}", "--dry_run"], f"config file {word} does not exist",
                "Did you mean 'quick'?", "The presets are: encoders_cpu, gpt_1b3, leaderboard,")  # fmt: skip
    (tmp_path / "quack.py").touch()
    refused(capsys, 2, ["sweep", "--config=quick.py", "--dry_run"], "Did you mean 'quick'?")  # not quack.py
    assert "presets: encoders_cpu, gpt_1b3, leaderboard," in tiny.call(capsys, "sweep", "--help")[1]
