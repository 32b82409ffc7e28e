"""A run folder can be moved or sent: its text is found again, or named by flag, and never taken for another."""

import dataclasses
import json
import shutil

import pytest

from posx.lab.argv.files import read_config_file
from posx.lab.config import run_config
from posx.lab.data import train_bpe
from posx.lab.runs.checks import check_run
from posx.lab.runs.folder import RunFolder
from tests import tiny


@pytest.fixture
def text(site, tmp_path, workdir):
    """The text of the run, which lies elsewhere by now."""
    tiny.edit_json(workdir / "config.json", lambda old: old.replace(str(site / "text"), str(tmp_path / "gone")))
    return shutil.copytree(site / "text", tmp_path / "text")


def call(capsys, command: str, workdir, *words, code: int = 0) -> str:
    """Standard error of a command that ends with `code`."""
    found, out, err = tiny.call(capsys, command, f"--workdir={workdir}", *words)
    assert found == code, f"{found}: {out} {err}"
    assert not code or sum(line.startswith("posx: ") for line in err.splitlines()) == 1, err
    return err


def test_a_run_remembers_where_its_text_was_and_what_it_was(site, whole):
    values = json.loads((whole / "config.json").read_text())
    data = values["data"]
    assert data["source"] == str(site / "text") and data["validation"] == "" and data["tokenizer"] == "bytes"
    assert values["text"] == json.loads((whole / "env.json").read_text())["text_digest"]


def test_a_relative_source_is_found_from_any_directory(capsys, site, workdir, tmp_path, monkeypatch):
    """Started in one directory, measured and resumed in another."""
    monkeypatch.chdir(site)
    start = [f"--config={site / 'tiny.py'}:t5", "--config.data.source=text", "--config.data.cache_dir=cache"]
    before = (workdir / "eval.jsonl").read_bytes()
    call(capsys, "train", workdir, *start)
    values = json.loads((workdir / "config.json").read_text())
    assert values["asked"]["data"]["source"] == "text" and values["data"]["source"] == str(site / "text")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    call(capsys, "evaluate", workdir)
    call(capsys, "generate", workdir, "--num_tokens=2")
    (workdir / "DONE").unlink()
    call(capsys, "train", workdir, *start)
    assert (workdir / "DONE").exists() and (workdir / "eval.jsonl").read_bytes() == before
    values["data"]["source"] = str(tmp_path / "gone")  # a whole project may move, its text with it
    tiny.edit_json(workdir / "config.json", lambda old: json.dumps(values))
    assert str(tmp_path / "gone") in call(capsys, "evaluate", workdir, code=3)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    monkeypatch.chdir(site)
    call(capsys, "evaluate", workdir)
    assert (workdir / "eval.jsonl").read_bytes() == before


def test_a_moved_text_is_named_by_flag_and_is_the_same(capsys, site, workdir, text, whole):
    err = call(capsys, "evaluate", workdir, code=3)
    assert "gone" in err and "--config.data.source=PATH" in err
    before = (workdir / "eval.jsonl").read_bytes()
    named = f"--config.data.source={text}"
    assert "notice" not in call(capsys, "evaluate", workdir, named)
    assert (workdir / "eval.jsonl").read_bytes() == before, "rows of the same text are its rows"
    call(capsys, "evaluate", workdir, named, "--lengths=48", "--protocol=nonoverlapping")
    first, last = tiny.rows(whole / "eval.jsonl")[0], tiny.rows(workdir / "eval.jsonl")[-1]
    assert (last["hash"], last["data_digest"], last["eval_len"]) == (first["hash"], first["data_digest"], 48)
    # Resumed, and taken for finished, wherever the text lies.
    train = [f"--config={site / 'tiny.py'}:t5", named]
    (workdir / "DONE").unlink()
    call(capsys, "train", workdir, *train)
    renamed = workdir.rename(workdir.parent / "t5-L16-s0")
    out = tiny.call(capsys, "sweep", *train, "--config.sweep.encodings=t5", f"--workdir={renamed.parent}", "--dry_run")[
        1
    ]
    assert "1 run, 1 of them finished" in out
    assert json.loads((renamed / "config.json").read_text())["data"]["source"] == str(text)


def test_a_preview_does_not_take_another_text_for_that_of_a_run(capsys, site, whole, tmp_path):
    """No text is read. A text that is still where the run found it has not moved to the place that is named now."""
    held, other = shutil.copytree(whole, tmp_path / "sweep" / "t5-L16-s0"), tmp_path / "other.txt"
    other.write_text("other words " * 999)
    words = [f"--config={site / 'tiny.py'}", "--config.sweep.encodings=t5", f"--workdir={held.parent}"]
    for flag, told in (("--dry_run", "1 run, {} of them finished"), ("--status", "{} of 1 runs are finished")):
        _, out, err = tiny.call(capsys, "sweep", *words, flag)
        assert told.format(1) in out and "notice" not in err
        _, out, err = tiny.call(capsys, "sweep", *words, flag, f"--config.data.source={other}")
        assert told.format(0) in out, out
        assert f"(data.source: '{site / 'text'}' -> '{other}')" in err


def test_a_finished_run_is_told_by_the_digest_of_its_text(site, whole, tmp_path):
    run = check_run(run_config(read_config_file(str(site / "tiny.py")).sections("t5")))
    folder, digest = RunFolder(whole), RunFolder(whole).read_config().text
    moved = dataclasses.replace(run, data=dataclasses.replace(run.data, source=str(tmp_path / "text")))
    assert folder.is_finished(dataclasses.replace(moved, text=digest))
    assert not folder.is_finished(dataclasses.replace(run, text="another"))


def test_another_text_is_refused_unless_asked_for(capsys, site, workdir, text):
    for path in text.iterdir():
        path.write_text("edited since " + path.read_text())
    tiny.edit_json(workdir / "config.json", lambda old: old.replace(str(text.parent / "gone"), str(text)))
    own = json.loads((workdir / "env.json").read_text())["text_digest"]
    err = call(capsys, "evaluate", workdir, code=4)
    assert own[:12] in err and "now " in err and f"--config.data.source={text}\n" in err
    err = call(capsys, "train", workdir, f"--config={site / 'tiny.py'}:t5", f"--config.data.source={text}", code=4)
    assert own[:12] in err and "trained on other text" in err
    before = tiny.rows(workdir / "eval.jsonl")
    words = [f"--config.data.source={text}", "--protocol=nonoverlapping"]
    assert call(capsys, "evaluate", workdir, *words).count("notice: run is measured on other text") == 1
    rows = tiny.rows(workdir / "eval.jsonl")
    assert rows[:3] == before and [row["eval_len"] for row in rows[3:]] == [16, 32]
    assert [row["own_text"] for row in rows] == [True] * 3 + [False] * 2
    assert [row["unigram_ppl"] is None for row in rows] == [False] * 3 + [True] * 2, "of the text of training alone"
    assert len({row["data_digest"] for row in rows}) == 2 and {row["hash"] for row in rows} == {before[0]["hash"]}
    call(capsys, "evaluate", workdir, *words)
    assert tiny.rows(workdir / "eval.jsonl") == rows


def test_the_tokenizer_of_a_run_lies_in_its_folder(capsys, workdir, tmp_path):
    train_bpe(["some text"], 300).save(tmp_path / "mine.json")
    name = json.dumps(str(tmp_path / "mine.json"))
    tiny.edit_json(workdir / "config.json", lambda old: old.replace('"bytes"', name))
    before = (workdir / "eval.jsonl").read_bytes()
    call(capsys, "evaluate", workdir)
    (tmp_path / "mine.json").unlink()
    call(capsys, "evaluate", workdir)
    assert (workdir / "eval.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("--config.train.steps=3", "keeps its train settings"),
        ("--config.model.num_layers=3", "keeps its model settings"),
        ("--config.encoding.name=rope", "keeps its encoding settings"),
        ("--config.data.tokenizer=bpe", "the tokenizer that it was trained with"),
        ("--config.data.sourc=x", "Nearest: data.source"),
        ("--config.eval.batch_tokens=many", "many"),
        ("--config.data.layout=pages", "data.layout='pages' is unknown"),
    ],
)
def test_only_the_text_and_what_is_measured_can_be_set_anew(capsys, whole, word, wanted):
    assert wanted in call(capsys, "evaluate", whole, word, code=2)
