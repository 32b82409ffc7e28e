"""The text that a run is measured on has the name of what is scored, and nothing else is read for it."""

import dataclasses
import shutil

import numpy as np
import pytest

from posx.errors import DataError, WorkdirError
from posx.lab.data import corpus
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.text import run_text
from tests import tiny


@pytest.fixture
def imported(workdir, tmp_path):
    """A function: the text of a run as `posx import` leaves it, without a text of its own."""
    run = RunFolder(workdir).read_config()
    tokenizer = str(RunFolder(workdir).tokenizer_file)
    data = dataclasses.replace(run.data, source="stdlib", tokenizer=tokenizer)
    asked = dataclasses.replace(run.asked, data=data)
    run = dataclasses.replace(run, text="imported abc", held_out="", data=data, asked=asked)
    return lambda **asked: run_text(RunFolder(workdir), run, asked | {"cache_dir": str(tmp_path / "cache")})


@pytest.fixture
def held(site, tmp_path):
    return shutil.copytree(site / "text", tmp_path / "held")


def refuse(*_):
    raise AssertionError("a training text is looked at")


def test_a_run_without_training_text_reads_none(imported, held, monkeypatch):
    monkeypatch.setattr(corpus, "stdlib_files", refuse)
    found = imported(validation=str(held))
    assert len(found.train.tokens) == 0 and found.source == str(held)
    assert found.validation.num_bytes == sum(path.stat().st_size for path in held.iterdir())
    again = imported(validation=str(held))
    assert again.held_out_digest == found.held_out_digest


def test_equal_targets_have_one_name(imported, held, workdir, site, tmp_path):
    """The training text, the names of files and the form of storage do not count."""
    alone = imported(validation=str(held))
    other = tmp_path / "other.txt"
    other.write_text("other words " * 99)
    renamed = shutil.copytree(held, tmp_path / "renamed")
    for path in renamed.iterdir():
        path.rename(path.with_suffix(".md"))
    np.save(tmp_path / "ids.npy", alone.validation.tokens)
    split = tmp_path / "split"
    shutil.copytree(held, split / "validation")
    shutil.copytree(renamed, split / "train")
    run, folder = RunFolder(workdir).read_config(), RunFolder(workdir)
    found = [
        imported(source=str(other), validation=str(held)),
        imported(validation=str(renamed)),
        imported(validation=str(tmp_path / "ids.npy")),
        imported(source=str(split)),
        run_text(folder, run, {"validation": str(held)}),
    ]
    name = alone.held_out_digest
    assert {one.held_out_digest for one in found} == {name} and name != run.held_out
    assert all(np.array_equal(one.validation.token_bytes, alone.validation.token_bytes) for one in found)
    again = [run_text(folder, run, asked) for asked in ({}, {"source": str(site / "text")})]
    assert {(one.digest, one.held_out_digest) for one in again} == {(run.text, run.held_out)}


def test_a_named_text_is_scored_after_tuning(workdir, held, tmp_path):
    run = RunFolder(workdir).read_config()
    asked = dataclasses.replace(run.asked, data=dataclasses.replace(run.asked.data, tuning_fraction=0.2))
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, tuning_fraction=0.2), asked=asked)
    (held / "more.txt").write_text("a text of its own " * 9)
    found = run_text(RunFolder(workdir), run, {"validation": str(held), "cache_dir": str(tmp_path / "cache")})
    assert found.validation.num_bytes == sum(path.stat().st_size for path in held.iterdir())


def test_a_run_of_bytes_reads_no_ids(workdir, held, tmp_path):
    """A stray file of ids is left out as in training, and ids alone are refused."""
    np.save(held / "stray.npy", np.arange(99))
    run, asked = RunFolder(workdir).read_config(), {"validation": str(held), "cache_dir": str(tmp_path / "cache")}
    found = run_text(RunFolder(workdir), run, asked)
    assert found.validation.num_bytes == sum(path.stat().st_size for path in held.glob("*.txt"))
    with pytest.raises(DataError, match="data.tokenizer=bytes reads text. To train on them, name the tokenizer"):
        run_text(RunFolder(workdir), run, asked | {"validation": str(held / "stray.npy")})


def test_one_folder_for_both_says_what_to_do(imported, held):
    message = "both training and validation text. To score all of it .* name it as --config.data.validation alone if"
    with pytest.raises(DataError, match=message):
        imported(source=str(held), validation=str(held))


def test_a_text_that_is_not_named_is_asked_for(imported):
    for asked in ({}, {"layout": "line"}):
        with pytest.raises(WorkdirError, match="Name a text with --config.data.validation=PATH"):
            imported(**asked)
    with pytest.raises(WorkdirError, match="tuning_fraction=0.1: .* has no training text to take documents from"):
        imported(validation="x", tuning_fraction=0.1)


def test_a_training_text_that_is_gone_is_not_needed(workdir, held, site, tmp_path, capsys):
    tiny.edit_json(workdir / "config.json", lambda old: old.replace(str(site / "text"), str(tmp_path / "gone")))
    folder = RunFolder(workdir)
    found = run_text(folder, folder.read_config(), {"validation": str(held)})
    assert len(found.train.tokens) == 0 and found.held_out_digest != folder.read_config().held_out
    said = capsys.readouterr().err
    assert "is no longer at" in said and "is measured on other text than in training" in said


@pytest.mark.slow
def test_own_rows_of_other_training_texts_are_compared(site, held, tmp_path, capsys):
    """Two runs that were trained on other texts and score one validation text have one name for it."""
    runs = [tmp_path / "one", tmp_path / "two"]
    for run, part in zip(runs, ("0", "1"), strict=True):
        text = tmp_path / f"text{part}"
        text.mkdir()
        for path in (site / "text").glob(f"{part}*.txt"):
            (text / path.name).write_text(path.read_text() * 9 + part)
        words = [f"--config.data.source={text}", f"--config.data.validation={held}", "--config.train.steps=3"]
        words += ["--config.eval.protocols=nonoverlapping", f"--config.data.cache_dir={tmp_path / 'cache'}"]
        code, _, err = tiny.call(capsys, "train", f"--config={site / 'tiny.py'}:alibi", f"--workdir={run}", *words)
        assert code == 0, err
    rows = [tiny.rows(run / "eval.jsonl")[0] for run in runs]
    assert rows[0]["own_text"] and rows[0]["data_digest"] == rows[1]["data_digest"]
    assert rows[0]["settings"]["data"] != rows[1]["settings"]["data"] and rows[0]["hash"] != rows[1]["hash"]
    code, out, err = tiny.call(capsys, "compare", *map(str, runs))
    assert code == 0 and "text0, held out" in out and "text1, held out" in out, out + err
