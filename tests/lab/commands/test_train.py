"""`posx train`: its folder, its messages, and the texts, folders and losses that end it."""

import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import posx
from posx.lab.data import ByteTokenizer
from posx.lab.files.locks import holder, lock
from posx.lab.runs.folder import RunFolder
from posx.lab.training import loop
from posx.lab.training.checkpoints import Checkpoints
from tests import tiny
from tests.lab.commands import refused, watched


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
        "torn tokenizer": ([f"--config.data.tokenizer={tmp_path}/torn.json"], ["torn.json", "cannot be read as JSON"]),
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


def test_token_ids_beyond_the_vocabulary_are_refused(capsys, site, tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode_batch", lambda self, texts: [np.array([999]) for _ in texts])
    words = ["train", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path / 'new'}"]
    refused(capsys, 3, [*words, f"--config.data.cache_dir={tmp_path / 'cache'}"], "id 999, outside its 257 ids")
    assert not (tmp_path / "new").exists()


def test_checkpoints_of_another_model_are_refused(capsys, site, workdir):
    folder = RunFolder(workdir)
    run = folder.read_config()
    folder.write_config(
        dataclasses.replace(run, model=dataclasses.replace(run.model, model_dim=64, head_dim=32, mlp_dim=256))
    )
    refused(
        capsys, 4, ["evaluate", f"--workdir={workdir}", "--lengths=16,64"], "another model", "embedding", "[257, 32]"
    )
    words = ["train", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}", "--config.model.model_dim=64"]
    refused(capsys, 4, words, "another model", "embedding", "[257, 32]")


def test_training_on_names_changed_heads(capsys, site, workdir):
    words = ["train", f"--config={site / 'tiny.py'}:t5", f"--from={workdir}", "--dry_run"]
    code, _, err = tiny.call(capsys, *words, "--config.model.num_heads=1", "--config.model.head_dim=16")
    assert code == 0 and "model.num_heads: 2 -> 1" in err and "model.mlp" not in err, err


def test_other_text_under_the_same_name_is_refused(capsys, site, workdir, tmp_path):
    text = shutil.copytree(site / "text", tmp_path / "text")
    tiny.edit_json(workdir / "config.json", lambda old: old.replace(str(site / "text"), str(text)))
    (text / "00.txt").write_text("edited since " * 40)
    words = ["train", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}", f"--config.data.source={text}"]
    refused(capsys, 4, words, "trained on other text", "digest")


def test_all_checkpoints_damaged_is_one_line(capsys, site, workdir):
    for path in (workdir / "checkpoints").glob("*.json"):
        path.write_text("")
    words = ["train", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}"]
    refused(capsys, 4, words, "No good checkpoint is left")


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
from posx.lab.runs.folder import RunFolder
with RunFolder(Path(sys.argv[1])).hold():
    print("held", flush=True)
    time.sleep(300)
"""


@pytest.mark.slow
def test_a_folder_in_use_names_the_process_until_it_died(capsys, site, workdir):
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


def test_probes_of_a_lock_do_not_see_each_other_as_its_holder(tmp_path):
    """As the processes of one run do when they start together, in a folder that a dead one has held."""
    lock = tmp_path / ".lock"
    lock.touch()
    (tmp_path / ".lock.holder").write_text("process 1, long dead")
    with ThreadPoolExecutor(4) as several:
        assert set(several.map(lambda _: holder(lock), range(2000))) == {""}


def test_a_lock_is_probed_where_it_cannot_be_shared(tmp_path, monkeypatch):
    """Some file systems have no locks that probes can share."""
    system = fcntl.flock

    def flock(file, operation):
        if operation & fcntl.LOCK_SH:
            raise OSError(errno.ENOSYS, "not implemented")
        system(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock(tmp_path / ".lock", busy=pytest.fail):
        assert holder(tmp_path / ".lock").startswith(f"process {os.getpid()} ")
    assert holder(tmp_path / ".lock") == ""


def test_a_run_folder_holds_what_it_should(whole):
    names = {path.name for path in whole.iterdir()}
    assert {"config.json", "env.json", "metrics.jsonl", "eval.jsonl", "checkpoints", "tensorboard", "DONE"} <= names
    assert "status.json" not in names
    env = json.loads((whole / "env.json").read_text())
    assert {"versions", "git", "device", "threads", "text_digest", "tokenizer_digest", "num_cpus"} <= env.keys()
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


def test_a_finished_run_ends_with_a_summary(capsys, site, whole, workdir):
    at_16, at_32 = (row["ppl"] for row in tiny.rows(whole / "eval.jsonl")[:2])
    first = (site / "whole.err").read_text().splitlines()[-2:]
    assert first == [
        f"done: {whole} at step {tiny.STEPS}, ppl {at_16:.3f} at 16 tokens, ppl {at_32:.3f} at 32 tokens",
        f"next: posx plot --workdir {whole}, or posx generate --workdir {whole} --prompt 'some words'",
    ]
    code, _, err = tiny.call(capsys, "train", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}")
    assert code == 0 and err.splitlines()[-2:] == [line.replace(str(whole), str(workdir)) for line in first], err


#: The first update moves every weight by about 1e17: its square overflows in the second step.
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


def test_a_model_beyond_all_memory_is_refused_at_once(capsys, site, tmp_path, monkeypatch):
    monkeypatch.setattr("posx.lab.runs.checks.own_memory", lambda: 100_000.0)
    words = ["train", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path / 'new'}"]
    refused(capsys, 6, words, "kB of memory", "this process may use 100 kB", "Lower the model's sizes")
    assert not (tmp_path / "new" / "config.json").exists()


def test_parameters_that_overflow_are_not_saved(capsys, site, tmp_path):
    """The loss of a step is that of the parameters before it: after the last step nothing else would notice."""
    words = [f"--config={site / 'tiny.py'}:rope", f"--workdir={tmp_path / 'run'}", "--config.train.checkpoint_steps=1"]
    words += ["--config.train.steps=1"]
    overflow = ["--config.train.learning_rate=3.4e38", "--config.train.warmup_steps=0"]
    line = refused(capsys, 5, ["train", *words, *overflow], "a parameter is not finite after step 1. Lower")
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [] and "kept" not in line
    assert not (tmp_path / "run" / "DONE").exists()


def test_training_names_its_model_first_and_logs_little(site):
    """Of the run that tests share, in whose log nobody watches a bar."""
    first, *rest = (site / "whole.err").read_text().splitlines()
    assert re.fullmatch(r"whole  [\d,]+ parameters, blockwise attention, \d+ cpu devices?.*", first)
    stored = json.loads((site / "whole" / "config.json").read_text())
    assert f"{stored['num_params']:,} parameters" in first and not any("compiling" in line for line in rest)
