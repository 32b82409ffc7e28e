"""The `posx` command: what it prints and writes, and one clear line for every wrong input."""

import dataclasses
import importlib.machinery
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers as hf

import posx
import posx.cli
import posx.runs.evaluate
from posx.cli import COMMANDS
from posx.data import ByteTokenizer, DataConfig, batch, prepare
from posx.errors import ConfigError
from posx.files.locks import holder
from posx.progress import Meter
from posx.runs.folder import RunFolder
from posx.training import loop
from posx.training.checkpoints import Checkpoints
from tests import tiny
from tests.made_rows import words as words_of


@pytest.fixture
def workdir(whole, tmp_path):
    """A copy of the finished run."""
    return shutil.copytree(whole, tmp_path / "run")


def refused(capsys, code: int, words: list, *wanted: str) -> str:
    """Asserts that the command ends with `code` and one line that holds all of `wanted`."""
    found, out, err = tiny.call(capsys, *words)
    assert found == code, f"exit {found}: {out} {err}"
    line = one_line(err)
    for text in wanted:
        assert text in line, line
    return line


def one_line(err: str) -> str:
    """The message; what is said before it is progress, and a traceback is never among it."""
    lines = err.strip().splitlines()
    assert lines and lines[-1].startswith("posx: ") and "Traceback" not in err, err
    assert sum(line.startswith("posx: ") for line in lines) == 1
    return lines[-1]


BAD_WORDS = {
    "no such command": (["trian"], ["unknown command 'trian'", "did you mean 'train'"]),
    "unknown key": (["train", "--config.model.model_dmi=64"], ["key 'model.model_dmi'", "nearest: model.model_dim"]),
    "unknown key, short name": (["train", "--config.train.lr=2"], ["unknown config key", "learning_rate"]),
    "section as a value": (["train", "--config.model=3"], ["unknown config key 'model'"]),
    "unknown flag": (["train", "--workdri=x"], ["unknown flag --workdri", "did you mean --workdir"]),
    "another command's flag": (["train", "--num_tokens=3"], ["unknown flag --num_tokens", "eval.num_targets"]),
    "unknown flag of a command without settings": (["plot", "--steps=5"], ["unknown flag --steps; flags of this"]),
    "setting without its path": (["train", "--steps=5"], ["unknown flag --steps", "mean --config.train.steps=5?"]),
    "setting with hyphens": (["sweep", "--learning-rate=5"], ["mean --config.train.learning_rate=5?"]),
    "setting of evaluate without its path": (["evaluate", "--batch_tokens=5"], ["mean --config.eval.batch_tokens=5?"]),
    "encoding without its path": (["train", "--encoding=t5"], ["mean --config.encoding=t5?"]),
    "wrong value of a flag": (["generate", "--num_tokens=many"], ["posx: --num_tokens=many: not a whole number"]),
    "wrong number": (["sweep", "--gpus=some"], ["posx: --gpus=some: not a number"]),
    "wrong switch": (["train", "--dry_run=maybe"], ["posx: --dry_run=maybe: not true or false"]),
    "flag twice": (["plot", "--workdir=A", "--workdir", "B"], ["--workdir is given 2 times: give it once"]),
    "a switch and its opposite": (["train", "--dry_run", "--nodry_run"], ["--dry_run is given 2 times"]),
    "config twice": (["train", "--config=other.py"], ["--config is given 2 times"]),
    "family twice": (["sweep", "--slurm.time=1", "--slurm.time=2"], ["--slurm.time is given twice"]),
    "setting twice": (
        ["train", "--config.train.steps=5", "--config.train.steps=6"],
        ["--config.train.steps=5 and --config.train.steps=6 are about the same setting"],
    ),
    "no process": (["train", "--process=-1", "--workdir=new"], ["--process=-1", "count from 1 and from 0"]),
    "no processes": (["train", "--processes=0", "--workdir=new"], ["--processes=0", "count from 1 and from 0"]),
    "stray word": (["train", "steps=3"], ["stray word 'steps=3'", "--config.train.steps=3"]),
    "stray word without dashes": (["train", "config.lr=2"], ["'config.lr=2'", "--config.train.learning_rate=2"]),
    "wrong type": (["train", "--config.train.steps=many"], ["posx: --config.train.steps=many: not a whole number"]),
    "fraction for a whole number": (["train", "--config.train.steps=1.5"], ["steps", "1.5"]),
    "a flag of absl": (["train", "--undefok=x"], ["unknown flag --undefok"]),
    "a file of flags": (["train", "--flagfile=x"], ["unknown flag --flagfile"]),
    "a pair of dashes": (["train", "--", "--dry_run"], ["stray word '--dry_run'; leave out the --"]),
    "a flag for a value": (["train", "--workdir", "--dry_run"], ["--workdir has no value: write --workdir=VALUE"]),
    "no value at the end": (["train", "--workdir"], ["--workdir has no value"]),
    "two sources": (["train", "--config_json=x.json"], ["--config and --config_json are both given"]),
    "no value": (["train", "--config.train.steps"], ["--config.train.steps has no value"]),
    "wrong tuple": (["train", "--config.eval.lengths=16,x"], ["--config.eval.lengths=16,x: x is not a whole number"]),
    "NaN": (["train", "--config.train.learning_rate=nan"], ["train.learning_rate=nan", "finite"]),
    "unknown field of the encoding": (["train", "--config.encoding.slope=2"], ["unknown config key 'encoding.slope'"]),
    "unknown executor": (["train", "--config.train.executor=fast"], ["train.executor='fast'", "dense"]),
    "unknown mlp": (["train", "--config.model.mlp=gleu"], ["model.mlp='gleu'", "gelu"]),
    "unknown dtype": (["train", "--config.model.dtype=float64"], ["model.dtype='float64'", "bfloat16"]),
    "unknown remat": (["train", "--config.model.remat=all"], ["model.remat='all'", "layer"]),
    "no steps in a call": (["train", "--config.train.dispatch_steps=0"], ["train.dispatch_steps=0", "at least 1"]),
    "unknown layer": (["train", "--config.model.layer_policy=nop"], ["unknown encoding 'nop'", "nope"]),
    "layers that never occur": (
        ["train", "--config.model.num_layers=2", "--config.model.layer_policy=encoding,encoding,rope,nope"],
        ["model.layer_policy=encoding,encoding,rope,nope: rope and nope would be in none of the 2 layers"],
    ),
    "seeds of one run": (["train", "--config.sweep.seeds=0,1"], ["posx train makes one run", "--config.train.seed="]),
    "an axis of one run": (
        ["train", "--config.sweep.axes.model.model_dim=32,64"], ["posx sweep", "--config.model.model_dim=VALUE"],
    ),
    "zipped axes of one run": (["train", "--config.sweep.zip=a+b"], ["posx train makes one run"]),
    "width": (["train", "--config.model.model_dim=30", "--config.model.num_heads=4"], ["model_dim=30", "num_heads=4"]),
    "key/value heads": (["train", "--config.model.num_heads=4", "--config.model.num_kv_heads=3"], ["num_kv_heads=3"]),
    "many at once": (
        ["train", "--config.model.num_layers=0", "--config.train.steps=-1", "--config.train.batch_size=0",
         "--config.eval.lengths=0,16"],
        ["model.num_layers=0", "train.steps=-1", "train.batch_size=0", "eval.lengths=(0, 16)"],
    ),
    "warm-up": (["train", "--config.train.warmup_steps=32"], ["train.warmup_steps=32", "train.steps=32"]),
    "accumulation": (["train", "--config.train.accumulation=3"], ["train.accumulation=3", "train.batch_size=4"]),
    "seed": (["train", "--config.train.seed=-1"], ["train.seed=-1"]),
    "lengths not increasing": (["train", "--config.eval.lengths=32,16"], ["eval.lengths=(32, 16)", "increase"]),
    "a length twice": (["train", "--config.eval.lengths=16,16"], ["eval.lengths=(16, 16)", "once"]),
    "no lengths": (["train", "--config.eval.lengths=()"], ["eval.lengths is empty"]),
    "unknown protocol": (["train", "--config.eval.protocols=slidng"], ["'slidng' is unknown", "sliding"]),
    "a protocol twice": (
        ["train", "--config.eval.protocols=P1,nonoverlapping"], ["P1,nonoverlapping names nonoverlapping twice"],
    ),
    "stride": (
        ["train", "--config.eval.protocols=sliding", "--config.eval.stride=17"],
        ["eval.stride=17", "shortest sliding window, 16"],
    ),
    "stride below zero": (["train", "--config.eval.stride=-1"], ["eval.stride=-1"]),
    "no --workdir": (["train"], ["--workdir is missing"]),
    "layers": (["train", "--config.model.num_layers=1000000000", "--workdir=new"], ["at most 4,096"]),
    "a width of 10^30": (["train", f"--config.model.model_dim={10**30}", "--workdir=new"], ["beyond all range"]),
    "home": (["train", "--config.data.source=~nosuch/x", "--workdir=new"], ["'~nosuch/x' can be no path"]),
    "work folder": (["train", "--workdir=~nosuch/x"], ["~nosuch/x is no path"]),
    "codec": (["train", "--config.data.text_encoding=rot13", "--workdir=new"], ["'rot13' is unknown"]),
    "jobs": (["sweep", "--jobs=-1", "--workdir=new"], ["--jobs=-1 must be at least 1"]),
    "an encoding twice": (["sweep", "--config.sweep.encodings=rope,rope", "--workdir=new"], ["names a value twice"]),
    "no encoding": (["sweep", "--config.sweep.encodings=()", "--workdir=new"], ["sweep.encodings is empty"]),
    "unknown in a sweep": (["sweep", "--config.sweep.encodings=rope,albi", "--workdir=new"], ["'albi'", "'alibi'"]),
    "too many runs": (
        ["sweep", f"--config.sweep.seeds={','.join(map(str, range(501)))}", "--workdir=new"], ["1002 runs"],
    ),
    "problems of several runs": (
        ["sweep", "--config.sweep.encodings=rope,t5", "--config.model.num_heads=16", "--config.model.model_dim=48",
         "--workdir=new"],
        ["rope-L16-s0", "even"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("words", "wanted"), BAD_WORDS.values(), ids=BAD_WORDS.keys())
def test_wrong_words_and_values_are_one_line_and_start_nothing(capsys, site, tmp_path, monkeypatch, words, wanted):
    monkeypatch.chdir(tmp_path)
    config = [f"--config={site / 'tiny.py'}"] if words[0] in ("train", "sweep") else []
    refused(capsys, 2, [words[0], *config, *words[1:]], *wanted)
    assert list(tmp_path.iterdir()) == []


BAD_ENCODINGS = {
    "unknown": ("albi", [], ["unknown encoding 'albi'", "did you mean 'alibi'", "sinusoidal"]),
    "odd head width": ("rope", ["--config.model.model_dim=34", "--config.model.num_heads=2"], ["rope", "17"]),
    "odd rotary_dim": ("rope", ["--config.encoding.rotary_dim=3"], ["rope", "3"]),
    "odd buckets": ("t5", ["--config.encoding.num_buckets=7"], ["num_buckets=7", "even"]),
    "max_distance": (
        "t5",
        ["--config.encoding.num_buckets=16", "--config.encoding.max_distance=8"],
        ["max_distance=8"],
    ),
    "too short": ("learned", ["--config.encoding.num_positions=8"], ["positions 0 to 7", "train.length=16"]),
    "beyond": ("learned", ["--config.encoding.beyond=wrap"], ["beyond='wrap'", "clamp"]),
    "a file for a module": ("mine.py:Mine", [], ["did you mean mine:Mine?"]),
    "no such module": ("no_such_package:Mine", [], ["cannot be imported", "no_such_package"]),
    "not an encoding": ("json:JSONDecoder", [], ["json:JSONDecoder", "posx.Encoding"]),
}


@pytest.mark.parametrize(("name", "words", "wanted"), BAD_ENCODINGS.values(), ids=BAD_ENCODINGS.keys())
def test_encodings_that_do_not_fit_are_one_line(capsys, site, tmp_path, name, words, wanted):
    new = tmp_path / "new"
    refused(capsys, 2, ["train", f"--config={site / 'tiny.py'}:{name}", f"--workdir={new}", *words], *wanted)
    assert not new.exists()


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
        "from posx.config import base_config\ndef get_config():\n    return base_config('albi')\n", ["did you mean"],
    ),
    "extra key": (
        "from posx.config import base_config\ndef get_config(arg='alibi'):\n    c = base_config(arg)\n"
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
    for command in ("train", "sweep"):
        code, _, err = tiny.call(capsys, command, f"--config={path}", f"--workdir={tmp_path / 'run'}")
        assert code == 2 and len(err.splitlines()) == 1 and all(words in err for words in wanted), err
    assert not (tmp_path / "run").exists()


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
    refused(capsys, 2, ["train", f"--config={site / 'tinny.py'}"], "does not exist", "did you mean", "tiny.py")
    refused(capsys, 2, ["train", f"--config={site}"], "is a folder")
    refused(capsys, 2, ["train"], "--config")
    refused(capsys, 2, ["sweep", "--config="], "--config='' names no preset and no file")
    refused(capsys, 2, ["train", "--config"], "--config has no value: write --config=VALUE")
    refused(capsys, 2, ["train", f"--config_json={site / 'whole'}"], "is a folder; did you mean", "whole/config.json?")
    config = site / "whole" / "config.json"
    refused(capsys, 2, ["train", f"--config={config}"], f"did you mean --config_json {config}?")
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
                "did you mean 'quick'?", "presets: gpt_1b3, leaderboard,")  # fmt: skip
    (tmp_path / "quack.py").touch()
    refused(capsys, 2, ["sweep", "--config=quick.py", "--dry_run"], "did you mean 'quick'?")  # not quack.py
    assert "presets: gpt_1b3, leaderboard," in tiny.call(capsys, "sweep", "--help")[1]


def test_help_and_the_version_are_found_in_any_order(capsys):
    _, of_sweep, _ = tiny.call(capsys, "sweep", "--help")
    assert of_sweep.startswith("posx sweep: all runs of a config")
    for words in (["help", "sweep"], ["--help", "sweep"], ["sweep", "help"]):
        assert tiny.call(capsys, *words) == (0, of_sweep, "")
    assert tiny.call(capsys, "--version") == (0, f"posx {posx.__version__}\n", "")
    one, other = (
        tiny.call(capsys, *words) for words in (["encodings", "rope", "--dry_run"], ["encodings", "--dry_run", "rope"])
    )
    assert one == other and one[0] == 0 and one[1].startswith("rope\n")


def text_folder(folder, content: bytes):
    folder.mkdir()
    (folder / "a.txt").write_bytes(content)
    return folder


def bad_data(tmp_path) -> dict[str, tuple[list[str], list[str]]]:
    (tmp_path / "torn.json").write_text("{")
    latin = "caf\xe9 ".encode("latin-1") * 99
    held_out = text_folder(tmp_path / "held_out", b"other words " * 40)
    return {
        "missing": ([f"--config.data.source={tmp_path}/none"], ["does not exist", "nearest existing folder"]),
        "a hub name without network": (["--config.data.source=no-such-owner/nothing"], ["no-such-owner/nothing"]),
        "empty folder": ([f"--config.data.source={tmp_path / 'empty'}"], ["without files"]),
        "empty file": ([f"--config.data.source={text_folder(tmp_path / 'zero', b'')}"], ["empty (0 bytes)"]),
        "blank": ([f"--config.data.source={text_folder(tmp_path / 'blank', b' ' * 99)}"], ["blank"]),
        "binary": ([f"--config.data.source={text_folder(tmp_path / 'binary', bytes(range(256)) * 9)}"], ["byte"]),
        "latin-1": ([f"--config.data.source={text_folder(tmp_path / 'latin', latin)}"], ["utf-8"]),
        "too short to train": (
            [f"--config.data.source={text_folder(tmp_path / 'short', b'word ' * 40)}", "--config.eval.lengths=2",
             f"--config.data.validation={held_out}", "--config.train.length=220"],
            ["too few for one window of length 220", "largest usable length"],
        ),
        "too short to evaluate": (
            ["--config.eval.lengths=16,1000000", "--config.eval.num_targets=0"],
            ["validation text", "largest usable length"],
        ),
        "too short to slide": (
            ["--config.eval.protocols=sliding", "--config.eval.sliding_lengths=400,100000"],
            ["validation text", "sliding windows of 100000"],
        ),
        "no tokenizer": ([f"--config.data.tokenizer={tmp_path}/none.json"], ["tokenizer", "does not exist"]),
        "torn tokenizer": ([f"--config.data.tokenizer={tmp_path}/torn.json"], ["torn.json", "not JSON"]),
    }  # fmt: skip


@pytest.mark.parametrize("name", [
    "missing", "a hub name without network", "empty folder", "empty file", "blank", "binary", "latin-1",
    "too short to train", "too short to evaluate", "too short to slide", "no tokenizer", "torn tokenizer",
])  # fmt: skip
@pytest.mark.parametrize("command", ["train", "sweep"])
def test_unusable_text_is_exit_3_and_leaves_no_work_folder(capsys, site, tmp_path, monkeypatch, command, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    words, wanted = bad_data(tmp_path)[name]
    new = tmp_path / "new"
    if command == "sweep" and name == "too short to train":
        words = [*words, "--config.sweep.train_lens=220"]
    refused(capsys, 3, [command, f"--config={site / 'tiny.py'}", f"--workdir={new}", *words], *wanted)
    assert not new.exists()


def test_token_ids_beyond_the_vocabulary_are_refused_and_never_clamped(capsys, site, tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode_batch", lambda self, texts: [np.array([999]) for _ in texts])
    words = ["train", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path / 'new'}"]
    refused(capsys, 3, [*words, f"--config.data.cache_dir={tmp_path / 'cache'}"], "id 999, outside its 257 ids")
    assert not (tmp_path / "new").exists()


def test_a_work_folder_of_another_config_names_the_fields(capsys, site, workdir):
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    line = refused(
        capsys, 4,
        ["train", f"--config={site / 'tiny.py'}:alibi", f"--workdir={workdir}", "--config.model.model_dim=64"],
        "another config", "encoding.name: 't5' -> 'alibi'", "model.model_dim: 32 -> 64",
    )  # fmt: skip
    assert "train.steps" not in line
    words = ["train", f"--config={site / 'tiny.py'}:alibi", f"--workdir={workdir}", "--config.model.model_dim=64"]
    assert refused(capsys, 4, [*words, "--dry_run"]) == line
    assert before == {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}


def test_checkpoints_of_another_model_are_refused(capsys, site, workdir):
    folder = RunFolder(workdir)
    run = folder.read_config()
    folder.write_config(dataclasses.replace(run, model=dataclasses.replace(run.model, model_dim=64, mlp_dim=256)))
    refused(
        capsys, 4, ["evaluate", f"--workdir={workdir}", "--lengths=16,64"], "another model", "embedding", "[257, 32]"
    )
    words = ["train", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}", "--config.model.model_dim=64"]
    refused(capsys, 4, words, "another model", "embedding", "[257, 32]")


def test_other_text_under_the_same_name_is_refused(capsys, site, workdir, tmp_path):
    text = shutil.copytree(site / "text", tmp_path / "text")
    path = workdir / "config.json"
    path.write_text(path.read_text().replace(str(site / "text"), str(text)))
    (text / "00.txt").write_text("edited since " * 40)
    words = ["train", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}", f"--config.data.source={text}"]
    refused(capsys, 4, words, "trained on other text", "digest")


def test_all_checkpoints_damaged_is_one_line(capsys, site, workdir):
    for path in (workdir / "checkpoints").glob("*.json"):
        path.write_text("")
    words = ["train", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}"]
    refused(capsys, 4, words, "no good checkpoint is left")


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_work_folders_that_cannot_be_written(capsys, site, tmp_path, command):
    words = [command, f"--config={site / 'tiny.py'}"]
    file = tmp_path / "file"
    file.write_text("mine")
    refused(capsys, 4, [*words, f"--workdir={file}"], str(file), "is a file")
    refused(capsys, 4, [*words, f"--workdir={file / 'below'}"], str(file), "is a file")
    assert file.read_text() == "mine"
    # Nobody can make a folder there, not even root, for whom no folder is read-only.
    refused(capsys, 4, [*words, "--workdir=/proc/posx"], "/proc/posx", "cannot be written")
    refused(capsys, 4, [*words, f"--workdir={tmp_path / ('x' * 300)}"], "cannot be written", "too long")


HOLD = """
import sys, time
from pathlib import Path
from posx.runs.folder import RunFolder
with RunFolder(Path(sys.argv[1])).held():
    print("held", flush=True)
    time.sleep(300)
"""


def test_a_folder_in_use_by_a_live_process_names_it_and_is_free_once_it_died(capsys, site, workdir):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(workdir)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        words = ["train", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}"]
        refused(capsys, 4, words, "in use by process", str(process.pid), "since")
        refused(capsys, 4, ["evaluate", f"--workdir={workdir}", "--lengths=16,64"], "in use by process")
        assert not (workdir / "status.json").exists()
    finally:
        process.kill()
        process.wait()
    code, _, err = tiny.call(capsys, *words)
    assert code == 0, err


def test_who_only_looks_does_not_take_another_who_looks_for_the_holder(tmp_path):
    """As the processes of one run do when they start together, in a folder that a dead one has held."""
    lock = tmp_path / ".lock"
    lock.touch()
    (tmp_path / ".lock.holder").write_text("process 1, long dead")
    with ThreadPoolExecutor(4) as several:
        assert set(several.map(lambda _: holder(lock), range(2000))) == {""}


@pytest.mark.parametrize("command", ["evaluate", "plot", "generate"])
def test_folders_without_a_run(capsys, tmp_path, command):
    line = refused(capsys, 4, [command, f"--workdir={tmp_path / 'none'}"], str(tmp_path / "none"))
    assert refused(capsys, 4, [command, f"--workdir={tmp_path / 'none'}", "--dry_run"]) == line
    assert not (tmp_path / "none").exists()
    refused(capsys, 4, [command, f"--workdir={tmp_path}"], str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine" / "figures").mkdir(parents=True)
    for hint in ("mine/config.json", "mine/figures/model.safetensors"):  # a run is above, a file beside
        (tmp_path / hint).touch()
        near = (tmp_path / hint).parent if hint.endswith("json") else tmp_path / hint
        line = refused(capsys, 4, [command, f"--workdir={tmp_path / 'mine' / 'figures'}"], "holds no")
        assert command == "plot" or f"did you mean {near}?" in line
        (tmp_path / hint).unlink()
    refused(capsys, 2, [command], "--workdir is missing")


@pytest.fixture
def sweeps(whole, tmp_path):
    """A folder of two sweeps, whose runs have the same name; the second can no longer be read."""
    for name in ("a", "b"):
        shutil.copytree(whole, tmp_path / "sweeps" / name / "t5")
    (tmp_path / "sweeps" / "b" / "t5" / "config.json").write_text("{")
    return tmp_path / "sweeps"


def test_evaluate_takes_a_folder_of_sweeps_as_plot_does(capsys, sweeps):
    """Runs are named by their paths, which tell those of one name apart."""
    code, out, err = tiny.call(capsys, "evaluate", f"--workdir={sweeps}", "--lengths=16,32", "--dry_run")
    assert (code, out) == (7, "a/t5: nonoverlapping, per_position at (16, 32)\n")
    assert "posx: b/t5: " in err and "config.json cannot be read" in err
    words = ["--lengths=16, 32", "--protocol=nonoverlapping, per_position,", "--dry_run"]  # with spaces
    assert tiny.call(capsys, "evaluate", f"--workdir={sweeps / 'a'}", *words)[1].endswith(out.removeprefix("a/"))
    code, out, err = tiny.call(capsys, "evaluate", f"--workdir={sweeps}", "--print_config")
    assert code == 0 and "settings of" in err and "the first of 2 runs" in err


def test_commands_on_one_run_name_the_runs_of_a_sweep(capsys, sweeps):
    for words in (["generate"], ["export", "--to=m.safetensors"]):
        refused(capsys, 4, [*words, f"--workdir={sweeps}"], "holds 2 runs", f"--workdir={sweeps}/a/t5", "a/t5, b/t5")
    with pytest.raises(posx.errors.WorkdirError, match="holds 2 runs, one is needed"):
        posx.load(sweeps)
    code, out, _ = tiny.call(capsys, "generate", f"--workdir={sweeps / 'a'}", "--dry_run")  # there is only one
    assert code == 0 and str(sweeps / "a" / "t5") in out


def test_a_hugging_face_model_is_called_one(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    said = "it is not of a run that `posx train` made, but of a Hugging Face model (llama)"
    for command in ("evaluate", "generate"):
        refused(capsys, 4, [command, f"--workdir={tmp_path}"], said)
    refused(capsys, 2, ["train", f"--config_json={tmp_path / 'config.json'}"], said)
    with pytest.raises(posx.errors.WorkdirError, match="Hugging Face"):
        posx.load(tmp_path)


def test_a_name_that_is_too_long_is_one_line(capsys):
    for words in (["evaluate", "--workdir"], ["generate", "--workdir"], ["plot", "--workdir"], ["train", "--config"]):
        line = refused(capsys, 2 if words[0] == "train" else 4, [*words, "x" * 5000 + ".safetensors"], "does not exist")
        assert len(line) < 600
    refused(capsys, 2, ["plot", "/".join("x" * 5000)], "stray word")


def test_a_current_folder_that_was_removed_is_one_line(capsys, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    refused(capsys, 2, ["encodings"], "the current folder has been removed")
    assert tiny.call(capsys, "--help")[0] == 0


@pytest.mark.parametrize(("encoding", "dot"), [("ascii", rb"\xb7"), ("latin-1", b"\xb7")])
def test_results_reach_an_output_that_is_not_utf_8(workdir, monkeypatch, encoding, dot):
    """Signs that it does not have are escaped: a middle dot in ASCII, an ellipsis in Latin-1 too."""
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", out)
    with jax.numpy_dtype_promotion("standard"):
        assert posx.cli.main(["evaluate", f"--workdir={workdir}", "--lengths=16"]) == 0
    print("\u2026", file=out, flush=True)
    printed = out.buffer.getvalue()
    assert b"windows " + dot + b" 256 targets" in printed and rb"\u2026" in printed


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["plot", "runs/mine"], "did you mean --workdir runs/mine?"),
        (["plot", "--workdir=runs/a", "runs/b"], "one work folder at a time"),
        (["train", "--config", "quick", "rope"], "did you mean --config quick:rope?"),
        (["train", "--config=quick", "rope"], "did you mean --config quick:rope?"),
        (["generate", "--prompt", "to", "be"], "did you mean --prompt='to be'?"),
        (["evaluate", "--lengths=16,", "32"], "did you mean --lengths='16, 32'?"),
        (["train", "--config=quick", "--config.train.steps", "5"], "did you mean --config.train.steps=5?"),
        (["encodings", "rope", "alibi"], "one NAME at a time"),
        (["evaluate", "--lengths=16", "my runs/a"], "did you mean --workdir 'my runs/a'?"),
        (["generate", "there"], "did you mean --workdir there?"),
        (["sweep", "quick", "--workdir=new"], "did you mean --config quick?"),
        (["train", "mine.py:rope"], "did you mean --config mine.py:rope?"),
    ],
)
def test_a_stray_word_is_told_its_flag(capsys, tmp_path, monkeypatch, words, meant):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    refused(capsys, 2, words, "stray word", meant)


def test_a_run_that_was_never_trained(capsys, site, tmp_path, whole):
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    for command in ("evaluate", "generate"):
        refused(capsys, 4, [command, f"--workdir={tmp_path}"], "no trained model yet")


BAD_QUESTIONS = {
    "lengths": (["evaluate", "--lengths=64,16"], ["(64, 16)", "increase"]),
    "not numbers": (["evaluate", "--lengths=16,b"], ["--lengths=16,b: b is not a whole number"]),
    "protocol": (["evaluate", "--protocol=slidin"], ["'slidin' is unknown", "sliding"]),
    "stride": (["evaluate", "--protocol=sliding", "--lengths=16,32", "--stride=20"], ["stride=20", "16"]),
    "stride of P2": (["evaluate", "--protocol=P2", "--lengths=16,32", "--stride=20"], ["stride=20", "16"]),
    "less than a window": (["evaluate", "--lengths=16,512"], ["eval.num_targets=256", "512 tokens"]),
    "default stride": (["evaluate", "--protocol=sliding", "--lengths=2,32"], ["stride=4", "2 tokens"]),
    "executor": (["evaluate", "--executor=fast"], ["'fast' is unknown"]),
    "config": (["evaluate", "--config=x.py"], ["takes no config"]),
    "override": (["generate", "--config.train.steps=3"], ["takes no config"]),
    "what": (["plot", "--what=lenghts"], ["'lenghts' is unknown"]),
    "temperature": (["generate", "--temperature=-1"], ["temperature=-1"]),
    "top_k": (["generate", "--top_k=-1"], ["top_k=-1"]),
    "num_tokens": (["generate", "--num_tokens=0"], ["--num_tokens=0"]),
    "number": (["generate", "--num_tokens=ten"], ["num_tokens", "ten"]),
    "seed": (["generate", f"--seed={2**70}"], ["--seed=", "beyond all range"]),
}


@pytest.mark.parametrize(("words", "wanted"), BAD_QUESTIONS.values(), ids=BAD_QUESTIONS.keys())
def test_wrong_questions_about_a_run(capsys, whole, words, wanted):
    before = (whole / "eval.jsonl").read_bytes()
    refused(capsys, 2, [*words, f"--workdir={whole}"], *wanted)
    assert (whole / "eval.jsonl").read_bytes() == before


@pytest.mark.parametrize("flag", ["--print_config", "--dry_run"])
@pytest.mark.parametrize("command", list(COMMANDS))
def test_print_config_and_dry_run_write_nothing(capsys, site, whole, tmp_path, monkeypatch, command, flag):
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "cache"
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    if COMMANDS[command].takes_config:
        words = [f"--config={site / 'tiny.py'}", f"--workdir={tmp_path / 'new'}", f"--config.data.cache_dir={cache}"]
    else:
        words = [*(["t5"] if COMMANDS[command].operand else []), f"--workdir={whole}"]
    if command == "export":
        words += ["--to=model.safetensors"]
    code, out, err = tiny.call(capsys, command, *words, flag)
    assert code == 0 and out.strip() and not err, err
    assert list(tmp_path.iterdir()) == []
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*")}


def test_print_config_shows_the_overrides(capsys, site):
    code, out, _ = tiny.call(
        capsys, "train", f"--config={site / 'tiny.py'}:t5", "--print_config", "--config.train.steps=77",
        "--config.eval.lengths=16,48", "--config.encoding.num_buckets=8",
    )  # fmt: skip
    chosen, _, defaults = out.partition("# defaults")
    assert code == 0 and "--config.encoding=t5(num_buckets=8)" in chosen and "--config.train.steps=77" in chosen
    assert "--config.train.weight_decay=0.1" in defaults and "!!python" not in out
    # What is printed can be typed: the same settings from another config file's.
    words = [shlex.split(line)[0] for line in out.splitlines() if line.startswith(("-", "'"))]
    _, again, _ = tiny.call(
        capsys, "train", f"--config={tiny.ROOT / 'configs' / 'novels_cpu.py'}:rope", *words, "--print_config"
    )
    assert again == out
    code, told, err = tiny.call(capsys, "train", f"--config={site / 'tiny.py'}:rope", *words, "--dry_run")
    assert (
        code == 0
        and "77 steps" in told
        and [line.split()[1] for line in err.splitlines()] == ["--config.eval.sliding_targets=64"]
    )


def test_the_catalogue_lists_every_encoding(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    code, out, _ = tiny.call(capsys, "encodings")
    assert code == 0
    header, *lines = out.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == list(posx.ENCODINGS) and len(lines) >= 10
    assert all(word in header for word in ("name", "acts on", "learned", "shift-invariant", "kernels", "paper"))
    of = {line.split()[0]: line for line in lines}
    assert "8 x 64" not in of["t5"] and " 4,096 " in of["learned"] and "position 63" in of["learned"]
    assert " 128 + 4,096 a layer " in of["transformer_xl"] and " any " in of["rope"] and " tiles " in of["shaw"]


def test_one_encoding_of_the_catalogue_with_its_picture(capsys, tmp_path):
    words = ["rope(base=500)+alibi", "--num_heads=8", "--model_dim=96", f"--workdir={tmp_path}"]
    code, out, err = tiny.call(capsys, "encodings", *words)
    assert code == 0, err
    assert out.startswith("rope(base=500)+alibi\n")
    assert re.search(r"^0\.base +500 \(default: 10000\)$", out, re.M) and "num_heads=8" in out and "acts on" in out
    assert out.index("Su et al. 2021") < out.index("bias_h(r) = -slope_h * |r|"), "each part is said"
    drawn = [Path(line) for line in out.splitlines() if line.endswith((".png", ".svg"))]
    assert len(drawn) == 2 and all(path.read_bytes() for path in drawn)
    code, out, _ = tiny.call(capsys, "encodings", "alibi", "--dry_run")
    assert code == 0 and "bias_h(r) = -slope_h * |r|" in out and "Press, Smith and Lewis 2022" in out
    code, _, err = tiny.call(capsys, "encodings", "albi")
    assert code == 2 and "did you mean 'alibi'" in err and "Traceback" not in err


def test_an_encoding_of_a_run_is_shown_as_trained(capsys, workdir, monkeypatch):
    drawn = []
    monkeypatch.setattr("posx.plots.look.save", lambda made, figures, name: drawn.append((made, figures)) or [])
    code, out, err = tiny.call(capsys, "encodings", "t5", f"--workdir={workdir}")
    assert code == 0, err
    assert "model_dim=32, num_heads=2, head_dim=16, num_layers=1, train_len=16" in out
    ((figure, figures),) = drawn
    assert any(f"2 heads of 16, L = 16 · trained in {workdir.name}, step 32" in text for text in words_of(figure))
    assert figures == workdir / "figures"


def test_an_encoding_that_a_run_does_not_have_is_refused(capsys, workdir):
    line = refused(
        capsys, 2, ["encodings", "alibi", f"--workdir={workdir}"], "was trained with t5", "posx encodings t5"
    )
    assert f"--workdir {workdir}" in line
    refused(capsys, 2, ["encodings", "t5", f"--workdir={workdir}", "--num_heads=8"], "sizes of its own")
    refused(capsys, 2, ["encodings", "t5", f"--workdir={workdir.parent}"], "Name one of them", str(workdir.parent))


def test_a_picture_is_written_only_where_asked(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = tiny.call(capsys, "encodings", "alibi")
    assert code == 0 and out.startswith("alibi\n") and "add --workdir FOLDER" in out and not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    code, out, err = tiny.call(capsys, "encodings", "alibi", f"--workdir={tmp_path / 'file'}")
    assert code == 4 and out.startswith("alibi\n") and len(err.splitlines()) == 1 and "could not be written" in err


@pytest.mark.parametrize("columns", [70, 100, 160])
def test_the_catalogue_fits_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = tiny.call(capsys, "encodings")
    assert max(map(len, out.splitlines())) <= columns
    assert [name for name in re.findall(r"^(\w+)  ", out, flags=re.M) if name != "name"] == list(posx.ENCODINGS)
    assert "kernels: tiles; paper: arXiv 1803.02155;" in re.sub(r"\s+", " ", out)


def page(capsys, *words: str) -> dict[str, str]:
    """What the page of one encoding says beside each name, without its picture."""
    code, out, err = tiny.call(capsys, "encodings", *words, "--dry_run")
    assert code == 0, err
    return dict(re.findall(r"^(\S+) {2,}(\S.*)$", out, flags=re.M))


def test_fields_are_shown_with_the_units_that_their_types_state(capsys):
    t5 = page(capsys, "t5(max_distance=20)")
    assert t5["max_distance"] == "20 tokens (default: set from the sizes)"
    assert t5["num_buckets"].endswith(" buckets (set from the sizes)")
    assert t5["scaled"] == "True"
    assert page(capsys, "fox(shortest=3)")["shortest"] == "3 tokens (default: 2)"
    assert page(capsys, "tupe(untied=(0, 3))")["untied"] == "(0, 3) tokens (default: ())"
    assert page(capsys, "bam")["initial_scale"] == "0.0 nats a token^shape"


def test_arrays_are_shown_with_their_learning_rates(capsys):
    dape = page(capsys, "dape")
    assert dape["rate"] == "by array"
    assert dape["base.a"] == "[4] in each layer, 3 x the model's learning rate"
    assert dape["b_1"] == "[32] in each layer, 1 x the model's learning rate"
    assert page(capsys, "fox")["b"] == "[4] in each layer, 0.1 x the model's learning rate"


def test_fields_of_what_an_encoding_holds_are_shown_below_its_name(capsys):
    dape = page(capsys, "dape(base=rope(base=500))")
    assert dape["base"] == "rope(base=500) (default: kerple(per_layer=True))"
    assert dape["base.base"] == "500 (default: 10000)" and dape["width"] == "32 hidden units"
    assert dape["base.rotary_dim"] == "16 channels (set from the sizes)"
    nested = page(capsys, "xpos+dape(base=rope+alibi)")
    assert nested["0"] == "xpos" and nested["0.rope.base"] == "10000" and nested["1.base.1"] == "alibi"
    assert nested["1.base.1.num_heads"] == "4 heads (set from the sizes)"


def test_the_catalogue_goes_on_where_an_encoding_does_not_fit_the_sizes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    code, out, err = tiny.call(capsys, "encodings", "--model_dim=12", "--num_heads=4")
    assert code == 0, err
    of = {line.split()[0]: line for line in out.split("\n\n")[0].splitlines()[1:]}
    assert list(of) == list(posx.ENCODINGS) and " 120 " in of["t5"]
    assert of["rope"].endswith("  not at these sizes: rotary_dim=3 must be even and at least 2")
    assert of["alibi"].index("arXiv") == of["nope"].index("arXiv"), "a reason widens no column"


def test_sizes_that_no_model_could_have_are_refused(capsys):
    for words in (["encodings"], ["encodings", "rope"]):
        refused(capsys, 2, [*words, "--model_dim=10"], "--model_dim=10 is not divisible by num_heads=4; nearest: 5")
    refused(capsys, 2, ["encodings", "--num_kv_heads=3"], "--num_kv_heads=3 does not divide num_heads=4")
    refused(capsys, 2, ["encodings", "--num_heads=0"], "--num_heads=0 must be at least 1")
    refused(capsys, 2, ["encodings", "--train_len=0"], "train_len=0")


def test_usage(capsys):
    for words in ([], ["--help"]):
        code, out, _ = tiny.call(capsys, *words)
        assert code == (0 if words else 2) and all(name in out for name in COMMANDS)
    for name, command in COMMANDS.items():
        code, out, _ = tiny.call(capsys, name, "--help")
        assert code == 0 and all(f"--{flag}" in out for flag in command.flags)


def test_a_run_folder_holds_what_it_should(whole):
    names = {path.name for path in whole.iterdir()}
    assert {"config.json", "env.json", "metrics.jsonl", "eval.jsonl", "checkpoints", "tensorboard", "DONE"} <= names
    assert "status.json" not in names
    env = json.loads((whole / "env.json").read_text())
    assert {"versions", "git", "device", "threads", "data_digest", "tokenizer_digest", "num_cpus"} <= env.keys()
    steps = [row["step"] for row in tiny.rows(whole / "metrics.jsonl")]
    assert steps == list(range(1, tiny.STEPS + 1))
    rows = tiny.rows(whole / "eval.jsonl")
    assert [(row["protocol"], row["eval_len"]) for row in rows] == [
        ("nonoverlapping", 16), ("nonoverlapping", 32), ("per_position", 32),
    ]  # fmt: skip
    for row in rows:
        assert row["status"] == "ok" and row["run_id"] == "whole" and row["encoding"] == "t5"
        assert {
            "schema_version",
            "train_len",
            "stride",
            "seed",
            "num_targets",
            "num_bytes",
            "num_separators",
            "nll",
            "ppl",
            "bpb",
        } <= row.keys()
        assert row["num_targets"] == 256
    assert list((whole / "tensorboard").iterdir())


@pytest.mark.slow
def test_bits_per_byte_of_a_stored_tokenizer_are_of_the_text(capsys, site, tmp_path):
    """Byte fallback, and no token for a space: each of them is three tokens and one byte."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    made = hf.Tokenizer(
        hf.models.Unigram(pieces + [(letter, -3.0) for letter in "aeiou"], unk_id=0, byte_fallback=True)
    )
    made.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = hf.decoders.Sequence([hf.decoders.ByteFallback(), hf.decoders.Metaspace(prepend_scheme="always")])
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tok.json"))
    words = [
        "train", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path / 'run'}", "--config.eval.num_targets=0",
        f"--config.data.tokenizer={tmp_path / 'tok.json'}", "--config.train.steps=3",
        "--config.eval.protocols=nonoverlapping", "--config.eval.lengths=16,",
    ]  # fmt: skip
    code, _, err = tiny.call(capsys, *words)
    assert code == 0, err
    held_out, eos = (
        prepare(
            DataConfig(str(site / "text"), tokenizer=str(tmp_path / "tok.json"), cache_dir=str(site / "cache"))
        ).validation,
        1,
    )
    apply, params, tokenizer = posx.load(tmp_path / "run")
    ends = zip(held_out.offsets[:-1], held_out.offsets[1:], strict=True)
    documents = [tokenizer.decode(held_out.tokens[start:end]) for start, end in ends]
    assert set(documents) <= {path.read_text(encoding="utf-8") for path in (site / "text").iterdir()}
    size = sum(len(document.encode()) for document in documents)
    assert len(re.findall(rf"{size:,} bytes in \d documents? \(.* held out; unigram .* [\d,]+ parameters", err)) == 1
    assert tiny.call(capsys, "evaluate", f"--workdir={tmp_path / 'run'}", "--lengths=32")[0] == 0
    stream = np.concatenate([[eos], held_out.tokens]).astype(int)
    sizes = np.concatenate([[0], held_out.token_bytes])
    log_probs = lambda tokens: jax.nn.log_softmax(apply(params, tokens[:, :-1]))  # noqa: E731
    rows = tiny.rows(tmp_path / "run" / "eval.jsonl")
    assert [row["eval_len"] for row in rows] == [16, 32]
    assert all(row["num_bytes"] == size and row["num_separators"] == held_out.num_documents for row in rows)
    (same,) = posx.evaluate(log_probs, stream, "P1", [32], token_bytes=sizes, separators=[eos])
    assert rows[1]["bpb"] == pytest.approx(same["bpb"], rel=1e-5)
    assert same["bpb"] < same["nll"] * same["num_targets"] / size / math.log(2), "separators cost something"


def test_evaluate_computes_only_what_is_missing(capsys, workdir):
    words = ["evaluate", f"--workdir={workdir}"]
    before = (workdir / "eval.jsonl").read_bytes()
    code, out, _ = tiny.call(capsys, *words)
    assert code == 0 and (workdir / "eval.jsonl").read_bytes() == before and "| t5 |" in out
    asked = [*words, "--lengths=16,32,64", "--protocol=nonoverlapping,sliding"]
    assert tiny.call(capsys, *asked)[0] == 0
    rows = tiny.rows(workdir / "eval.jsonl")
    new = [(row["protocol"], row["eval_len"]) for row in rows[3:]]
    assert sorted(new) == [("nonoverlapping", 64), ("sliding", 16), ("sliding", 32), ("sliding", 64)]
    assert {row["num_targets"] for row in rows if row["protocol"] == "sliding"} == {64}
    assert {row["stride"] for row in rows if row["protocol"] == "sliding"} == {4}
    after = (workdir / "eval.jsonl").read_bytes()
    assert tiny.call(capsys, *asked)[0] == 0
    assert (workdir / "eval.jsonl").read_bytes() == after


def test_no_targets_are_all_targets_as_in_the_settings(capsys, workdir):
    words = ["evaluate", f"--workdir={workdir}", "--lengths=32,320"]
    refused(capsys, 2, [*words, "--num_targets=300"], "at least as many targets, or 0 for all")
    code, _, err = tiny.call(capsys, *words, "--num_targets=0", "--protocol=nonoverlapping")
    assert code == 0, err
    (row,) = [row for row in tiny.rows(workdir / "eval.jsonl") if row["eval_len"] == 320]
    assert row["num_targets"] > 300
    code, out, _ = tiny.call(capsys, "evaluate", f"--workdir={workdir}", "--dry_run")
    assert code == 0 and "(16, 32)" in out


def test_lists_of_flags_may_have_spaces_and_quotes(capsys, workdir):
    words = ["evaluate", f"--workdir={workdir}", "--dry_run", "--lengths= 16, '32'"]
    code, out, _ = tiny.call(capsys, *words, "--protocol=nonoverlapping, sliding")
    assert code == 0 and "nonoverlapping, sliding at (16, 32)" in out


def test_a_lost_sliding_row_alone_is_measured_again_on_the_same_targets(capsys, workdir):
    asked = ["evaluate", f"--workdir={workdir}", "--lengths=16,32,64", "--protocol=sliding"]
    assert tiny.call(capsys, *asked)[0] == 0
    path = workdir / "eval.jsonl"
    rows = tiny.rows(path)
    lost = next(row for row in rows if row["protocol"] == "sliding" and row["eval_len"] == 32)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row != lost))
    assert tiny.call(capsys, *asked)[0] == 0
    again = tiny.rows(path)
    assert len(again) == len(rows) and again[-1] == lost


def test_rows_of_other_targets_or_blocks_stay_beside_the_new_and_out_of_their_curve(capsys, workdir):
    """Rows of a version before digests, and of other blocks, as an old folder holds them."""
    path = workdir / "eval.jsonl"
    new = [row | {"run_id": "run"} for row in tiny.rows(path)]
    assert all(row["schema_version"] == 4 and row["num_documents"] and row["num_stretches"] == 1 for row in new)
    first = {key: value for key, value in new[0].items() if key not in ("targets", "num_documents", "num_stretches")}
    old = [first | {"schema_version": 1, "block_len": 1024, "ppl": 99.0}, new[1] | {"block_len": 128, "ppl": 99.0}]
    path.write_text("".join(json.dumps(row) + "\n" for row in (*old, new[2])))
    code, out, _ = tiny.call(capsys, "evaluate", f"--workdir={workdir}", "--protocol=P1")
    assert code == 0 and "99.0" not in out
    again = tiny.rows(path)[3:]
    names = ("protocol", "eval_len", "targets", "block_len")
    assert [[row[name] for name in names] for row in again] == [[row[name] for name in names] for row in new[:2]]
    assert [row["ppl"] for row in again] == pytest.approx([row["ppl"] for row in new[:2]])
    assert [row for row in posx.plots.read_rows(workdir) if row["protocol"] == "nonoverlapping"] == again


def test_rows_where_memory_ran_out_are_tried_again(capsys, workdir):
    path = workdir / "eval.jsonl"
    rows = tiny.rows(path)
    failed = rows[1] | {"status": "oom", "nll": None, "ppl": None, "bpb": None}
    path.write_text("".join(json.dumps(row) + "\n" for row in (rows[0], failed, rows[2])))
    code, _, err = tiny.call(capsys, "evaluate", f"--workdir={workdir}")
    assert code == 0, err
    again = tiny.rows(path)[3]
    numbers = {name: value for name, value in rows[1].items() if isinstance(value, float)}
    assert {name: again[name] for name in numbers} == pytest.approx(numbers, rel=1e-5)
    assert again | numbers | {"block_nll": rows[1]["block_nll"]} == rows[1] | {"run_id": "run"}


def test_evaluation_that_fails_in_part_says_where_and_keeps_the_rest(capsys, workdir, monkeypatch):
    module = posx.runs.evaluate
    real = module._log_probs

    def fail(model, executor, num_devices, params, tokens):
        if tokens.shape[1] > 33:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return real(model, executor, num_devices, params, tokens)

    monkeypatch.setattr(module, "_log_probs", fail)
    words = ["evaluate", f"--workdir={workdir}", "--lengths=16,48,64", "--protocol=nonoverlapping"]
    line = refused(capsys, 7, words, "at 48: oom", "at 64: oom")
    assert "at 16" not in line
    assert [row["status"] for row in tiny.rows(workdir / "eval.jsonl")[3:]] == ["oom", "oom"]


def test_generate_continues_the_prompt(capsys, whole):
    words = ["generate", f"--workdir={whole}", "--prompt=kara", "--num_tokens=12"]
    code, out, err = tiny.call(capsys, *words)
    assert code == 0 and out.startswith("kara") and len(out) > 5, err
    assert tiny.call(capsys, *words)[1] == out
    assert tiny.call(capsys, *words, "--seed=1")[1] != out
    code, greedy, _ = tiny.call(capsys, *words, "--temperature=0")
    assert code == 0 and tiny.call(capsys, *words, "--temperature=0", "--seed=5")[1] == greedy


def test_generate_prints_nothing_before_an_error(capsys, whole, monkeypatch):
    def beyond(*args, **options):
        raise ConfigError("at most 3 new tokens.")
        yield

    monkeypatch.setattr("posx.commands.generate.generate", beyond)
    code, out, err = tiny.call(capsys, "generate", f"--workdir={whole}", "--prompt=kara")
    assert code == 2 and out == ""
    assert "at most 3 new tokens. The end-of-text token before the prompt counts" in one_line(err)


def test_generate_and_export_name_the_runs_of_a_sweep(capsys, whole, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(whole / "config.json", tmp_path / name)
    for words in (["generate"], ["export", "--to=m.safetensors"]):
        refused(capsys, 4, [*words, f"--workdir={tmp_path}"], " 2 runs", "runs: a, b", f"--workdir={tmp_path / 'a'}")


def test_a_missing_tokenizer_is_called_missing(capsys, workdir):
    (workdir / "tokenizer.json").unlink()
    for command in ("evaluate", "generate"):
        refused(capsys, 4, [command, f"--workdir={workdir}"], "tokenizer.json is missing", "`posx train`")


def test_a_finished_run_ends_with_a_summary(capsys, site, whole, workdir):
    at_16, at_32 = (row["ppl"] for row in tiny.rows(whole / "eval.jsonl")[:2])
    first = (site / "whole.err").read_text().splitlines()[-2:]
    assert first == [
        f"done: {whole} at step {tiny.STEPS}, ppl {at_16:.3f} at 16 tokens, ppl {at_32:.3f} at 32 tokens",
        f"next: posx plot --workdir {whole}, or posx generate --workdir {whole} --prompt 'some words'",
    ]
    code, _, err = tiny.call(capsys, "train", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}")
    assert code == 0 and err.splitlines()[-2:] == [line.replace(str(whole), str(workdir)) for line in first], err


def test_plot_draws_a_run(capsys, workdir):
    code, out, err = tiny.call(capsys, "plot", f"--workdir={workdir}")
    assert code == 0, err
    made = [line for line in out.splitlines() if line.endswith(".png")]
    assert made and all(os.path.getsize(path) > 1000 for path in made)


def test_load_hands_the_model_to_python(whole):
    apply, params, tokenizer = posx.load(whole)
    tokens = np.array([tokenizer.encode("kara losto")], np.int32)
    logits = apply(params, tokens)
    assert logits.shape == (1, 10, 257) and np.isfinite(logits).all()


#: The first update moves every weight by about 1e17: its square overflows in the second step.
class Seen(list):
    """What a bar is told: (what goes on, how much is done)."""

    total = 0.0


def watched(monkeypatch, module) -> Seen:
    """What the bars of `module` are told from now on."""
    seen = Seen()

    class Watched(Meter):
        def __enter__(self):
            seen.total = self.total
            return super().__enter__()

        def waiting(self, what, seconds=None):
            super().waiting(what, seconds)
            seen.append((what, self.done))

        def update(self, done, facts):
            super().update(done, facts)
            seen.append((facts, done))

    monkeypatch.setattr(module, "Meter", Watched)
    return seen


DIVERGES = [
    "--config.train.learning_rate=1e18", "--config.train.warmup_steps=6", "--config.train.checkpoint_steps=1",
]  # fmt: skip


def test_a_loss_that_is_not_finite_stops_the_run_at_its_step(capsys, caplog, site, tmp_path, monkeypatch):
    seen = watched(monkeypatch, loop)
    words = ["train", f"--config={site / 'tiny.py'}:rope", f"--workdir={tmp_path / 'run'}", *DIVERGES]
    line = refused(capsys, 5, words, "at step", "learning_rate")
    step = int(line.split("at step ")[1].split(";")[0])
    last = tiny.rows(tmp_path / "run" / "metrics.jsonl")[-1]
    assert step == last["step"] and {last["loss"], last["grad_norm"]} & {"nan", "inf"}
    assert json.loads((tmp_path / "run" / "status.json").read_text())["code"] == 5
    assert not (tmp_path / "run" / "DONE").exists() and not (tmp_path / "run" / "eval.jsonl").exists()
    assert seen[0] == ("compiling", 0) and seen[1][1] == 1 and seen.total == tiny.STEPS
    saved = Checkpoints(tmp_path / "run" / "checkpoints").steps()
    assert saved and max(saved) < step and f"; the checkpoint of step {max(saved)} is kept." in line
    assert "NaN or Inf" not in caplog.text
    _, params, _ = posx.load(tmp_path / "run")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)), "the checkpoint that is kept must be good"


def test_a_model_that_no_memory_holds_is_refused_before_anything_starts(capsys, site, tmp_path, monkeypatch):
    monkeypatch.setattr("posx.runs.checks.own_memory", lambda: 100_000.0)
    words = ["train", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path / 'new'}"]
    refused(capsys, 6, words, "kB of memory", "this process may use 100 kB", "lower the model's sizes")
    assert not (tmp_path / "new" / "config.json").exists()


def test_parameters_that_overflow_are_not_saved(capsys, site, tmp_path):
    """The loss of a step is that of the parameters before it: after the last step nothing else would notice."""
    words = [f"--config={site / 'tiny.py'}:rope", f"--workdir={tmp_path / 'run'}", "--config.train.checkpoint_steps=1"]
    words += ["--config.train.steps=1"]
    overflow = ["--config.train.learning_rate=3.4e38", "--config.train.warmup_steps=0"]
    line = refused(capsys, 5, ["train", *words, *overflow], "a parameter is not finite after step 1. Lower")
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [] and "kept" not in line
    assert not (tmp_path / "run" / "DONE").exists()


def test_runs_and_sweeps_do_not_share_a_folder(capsys, site, whole, tmp_path):
    sweep = tmp_path / "sweeps" / "quick"
    shutil.copytree(whole, sweep / "t5")
    config = f"--config={site / 'tiny.py'}"
    refused(capsys, 4, ["train", config, f"--workdir={sweep}"], "t5 is one of its runs", f"--workdir {sweep}-train")
    refused(capsys, 4, ["train", config, f"--workdir={sweep.parent}", "--dry_run"], "quick is one of them", "/new")
    refused(capsys, 4, ["sweep", config, f"--workdir={sweep.parent}"], "quick is one of them", "/new")
    refused(capsys, 4, ["sweep", config, f"--workdir={sweep / 't5'}"], "holds a run", f"--workdir {sweep}/t5-sweep")
    assert {path.name for path in sweep.iterdir()} == {"t5"} and not (sweep.parent / "config.json").exists()
    code, _, err = tiny.call(capsys, "train", f"{config}:t5", f"--workdir={sweep / 't5'}", "--dry_run")
    assert code == 0 and not err
    code, _, err = tiny.call(capsys, "sweep", config, f"--workdir={sweep}", "--dry_run")
    assert code == 0 and not err


def test_dry_run_of_an_engine_speaks_of_it_and_says_if_it_is_missing(capsys, site, monkeypatch):
    words = ["sweep", f"--config={site / 'tiny.py'}", "--on=ray", "--cpus=2", "--jobs=3"]
    installed = types.ModuleType("ray")
    installed.__spec__ = importlib.machinery.ModuleSpec("ray", None)
    monkeypatch.setitem(sys.modules, "ray", installed)
    code, out, err = tiny.call(capsys, *words, "--dry_run")
    assert code == 0 and "on 2 CPUs a run, ray decides how many go at once" in out and "at a time" not in out
    assert "--jobs=3 is not used: --on ray decides" in err and "not installed" not in err
    monkeypatch.setitem(sys.modules, "ray", None)
    code, out, err = tiny.call(capsys, *words, "--dry_run")
    assert code == 0 and "notice: --on ray needs ray, which is not installed: pip install 'posx[ray]'" in err
    refused(capsys, 2, [*words, "--workdir=new"], "--on ray needs ray, which is not installed")


def test_the_real_command_prints_one_line(site, tmp_path):
    started = tiny.start("train", f"--config={site / 'tiny.py'}", "--config.model.model_dmi=3")
    other = tiny.start("evaluate", f"--workdir={tmp_path / 'none'}")
    _, err = started.communicate(timeout=1800)
    assert started.returncode == 2 and "model.model_dim" in one_line(err) and len(err.splitlines()) == 1
    _, err = other.communicate(timeout=1800)
    assert other.returncode == 4 and len(err.splitlines()) == 1


def test_a_process_of_a_sweep_ends_when_the_sweep_does(whole):
    for command in ("train", "evaluate"):  # whose standard input is closed from the start
        words = [f"--config_json={whole / 'config.json'}"] if command == "train" else []
        code, out, err = tiny.run(command, *words, f"--workdir={whole}", "--stop_with_stdin")
        assert code == 143 and not out, err


@pytest.fixture
def ctrl_c():
    """Ctrl-C as a person has it: tests that a shell runs in the background would pass on that it is ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def piped(words: str) -> int:
    """The exit code of a command whose reader has gone away."""
    shell = f"{sys.executable} -m posx.cli {words} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], env=tiny.environment(), capture_output=True, text=True, timeout=600)
    assert "Traceback" not in done.stderr and "rror" not in done.stderr, done.stderr
    return done.returncode


@pytest.mark.slow
def test_a_run_goes_on_where_nobody_listens(site, tmp_path):
    assert piped(f"train --config={site / 'tiny.py'}:t5 --workdir={tmp_path / 'run'} 2>&1") == 0
    assert (tmp_path / "run" / "DONE").exists()


def test_results_nobody_reads_are_no_success():
    """`posx encodings | head -0` ends as a closed pipe does."""
    assert piped("encodings") == piped("--help") == 141
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "posx.cli", "encodings"], env=tiny.environment(), stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=600,
        )  # fmt: skip
    assert done.returncode == 6 and "no space left" in one_line(done.stderr)


def test_an_interrupt_leaves_no_traceback(site, tmp_path, ctrl_c):
    """Stopped with Ctrl-C while it trains."""
    process = tiny.start(
        "train", f"--config={site / 'tiny.py'}:t5", f"--workdir={tmp_path / 'run'}",
        "--config.train.checkpoint_steps=1",
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    tiny.until(lambda: metrics.exists() and metrics.stat().st_size, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=1800)
    assert process.returncode == 130 and "stopped and saved at step" in one_line(err)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the very thing on test
def test_an_interrupt_that_lands_in_a_destructor_is_not_lost(site, tmp_path, monkeypatch, ctrl_c):
    class Unlucky:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    def batch_with_garbage(*args, **options):
        Unlucky()
        return batch(*args, **options)

    monkeypatch.setattr(loop, "batch", batch_with_garbage)
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):  # Optax promotes types
        warnings.simplefilter("ignore", pytest.PytestUnraisableExceptionWarning)
        code = posx.cli.main(["train", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path / 'run'}"])
    assert code == 130


def test_training_says_first_what_it_trains_and_a_log_stays_short(site):
    """Of the run that tests share, in whose log nobody watches a bar."""
    first, *rest = (site / "whole.err").read_text().splitlines()
    assert re.fullmatch(r"whole  [\d,]+ parameters, blockwise attention, \d+ cpu devices?.*", first)
    stored = json.loads((site / "whole" / "config.json").read_text())
    assert f"{stored['num_params']:,} parameters" in first and not any("compiling" in line for line in rest)


def test_the_bar_of_an_evaluation_weighs_windows_by_what_they_cost(capsys, workdir, monkeypatch):
    """Every batch of every protocol and length is reported, what compiles too; passes that are shared count once."""
    seen = watched(monkeypatch, posx.runs.evaluate)
    (workdir / "eval.jsonl").unlink()
    words = ["--lengths=16,32", "--protocol=nonoverlapping,sliding,per_position", "--config.eval.batch_tokens=64"]
    code, _, err = tiny.call(capsys, "evaluate", f"--workdir={workdir}", *words)
    assert code == 0, err
    assert [done for _, done in seen] == sorted(done for _, done in seen) and seen[-1][1] == seen.total
    starts = [seen.index(one) for one in seen if one[0].startswith("compiling")]
    passes = [seen[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    lengths = [("16" if " 16 " in one[0][0] else "32") for one in passes]
    assert lengths == ["16", "32", "16", "32"]
    costs = [(one[-1][1] - one[0][1]) for one in passes]
    short, long = costs[:2]  # of as many tokens
    assert short < long < 2 * short and all(len(one) > 2 for one in passes)
