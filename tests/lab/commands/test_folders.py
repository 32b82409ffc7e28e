"""The work folders that commands read: no run, several runs, another kind of model."""

import os
import shutil

import numpy as np
import pytest

import posx
from tests import tiny
from tests.cheap import in_one_program
from tests.lab.commands import refused


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
        assert command == "plot" or f"Did you mean {near}?" in line
        (tmp_path / hint).unlink()
    refused(capsys, 2, [command], "--workdir is missing")


def test_commands_on_one_run_name_the_runs_of_a_sweep(capsys, sweeps):
    for words in (["generate"], ["export", "--to=m.safetensors"]):
        refused(capsys, 4, [*words, f"--workdir={sweeps}"], "holds 2 runs", f"example {sweeps}/a/t5", "a/t5, b/t5")
    train = ["train", "--config=smoke", f"--workdir={sweeps.with_name('new')}", f"--from={sweeps}"]
    for words in (["autopsy", str(sweeps)], train):  # --workdir would name another folder, or the run a second time
        assert "--workdir" not in refused(capsys, 4, words, "holds 2 runs", f"example {sweeps}/a/t5;")
    with pytest.raises(posx.errors.WorkdirError, match="holds 2 runs, but one is needed. Name one,"):
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


def test_a_run_that_was_never_trained(capsys, site, tmp_path, whole):
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    for command in ("evaluate", "generate"):
        refused(capsys, 4, [command, f"--workdir={tmp_path}"], "no trained model yet")


def test_a_run_that_never_began_leaves_its_folder_free(capsys, site, whole, tmp_path):
    """As one that ran out of memory, or had another tokenizer than --from: the settings that it is told to change."""
    shutil.copy(whole / "config.json", tmp_path)
    flags = (f"--workdir={tmp_path}", "--config.train.steps=40", "--dry_run")
    words = ["train", f"--config={site / 'tiny.py'}:t5", *flags]
    assert tiny.call(capsys, *words)[0] == 0
    for name in ("checkpoints", "metrics.jsonl", "eval.jsonl"):
        move = shutil.copytree if name == "checkpoints" else shutil.copy
        move(whole / name, tmp_path / name)
        refused(capsys, 4, words, "holds a run of another config (train.steps: 32 -> 40)")
        shutil.rmtree(tmp_path / name) if name == "checkpoints" else (tmp_path / name).unlink()


def test_generate_and_export_name_the_runs_of_a_sweep(capsys, whole, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(whole / "config.json", tmp_path / name)
    for words in (["generate"], ["export", "--to=m.safetensors"]):
        refused(capsys, 4, [*words, f"--workdir={tmp_path}"], " 2 runs", "runs: a, b", f"for example {tmp_path / 'a'};")


def test_a_missing_tokenizer_is_called_missing(capsys, workdir):
    (workdir / "tokenizer.json").unlink()
    for command in ("evaluate", "generate"):
        refused(capsys, 4, [command, f"--workdir={workdir}"], "tokenizer.json is missing", "`posx train`")


def test_plot_draws_a_run(capsys, workdir):
    code, out, err = tiny.call(capsys, "plot", f"--workdir={workdir}")
    assert code == 0, err
    made = [line for line in out.splitlines() if line.endswith(".png")]
    assert made and all(os.path.getsize(path) > 1000 for path in made)


def test_load_hands_the_model_to_python(whole):
    apply, params, tokenizer = posx.load(whole)
    tokens = np.array([tokenizer.encode("kara losto")], np.int32)
    logits = in_one_program(apply, params, tokens)
    assert logits.shape == (1, 10, 257) and np.isfinite(logits).all()


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
