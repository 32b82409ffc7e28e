"""Two runs are the same if and only if their resolved settings are: through the commands, as a user meets it."""

import json
import shutil

import pytest

from posx.lab.data import train_bpe
from posx.lab.results.table import read_results
from tests import tiny
from tests.made_rows import as_lines

STEPS = ("--config.train.steps=3", "--config.eval.lengths=16", "--config.eval.protocols=nonoverlapping")


@pytest.fixture
def sweep(capsys, site):
    """Return a function that runs a sweep of one job at a time, and gives (exit code, output, errors)."""

    def run(workdir, *words):
        own = ("--config.sweep.encodings=rope",) if not any("encodings" in word for word in words) else ()
        common = (f"--config={site / 'tiny.py'}", f"--workdir={workdir}", "--jobs=1")
        return tiny.call(capsys, "sweep", *common, *STEPS, *own, *words)

    return run


def runs(workdir):
    return sorted(path.parent.name for path in workdir.glob("*/config.json"))


@pytest.mark.slow
def test_changed_tokenizer_file_makes_another_run_that_finishes(sweep, tmp_path):
    tokenizer, word = tmp_path / "tok.json", f"--config.data.tokenizer={tmp_path / 'tok.json'}"
    train_bpe(["some words and some more words of a text"] * 3, 270).save(tokenizer)
    assert sweep(tmp_path / "w", word)[0] == 0
    train_bpe(["other letters: quick brown foxes jump over lazy dogs"] * 3, 265).save(tokenizer)
    code, _, err = sweep(tmp_path / "w", word)
    assert code == 0 and "1 folder name is taken" in err and len(runs(tmp_path / "w")) == 2
    code, _, err = sweep(tmp_path / "w", word)
    assert code == 0 and "1 of 1 runs are finished already" in err
    tokenizer.unlink()  # each folder has its own
    code, out, _ = sweep(tmp_path / "w", word, "--status")
    assert code == 0, out


@pytest.mark.slow
def test_finished_run_is_found_beside_an_unfinished_copy(sweep, tmp_path):
    assert sweep(tmp_path)[0] == 0
    (tmp_path / "rope-L16-s0.bak").mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(tmp_path / "rope-L16-s0" / name, tmp_path / "rope-L16-s0.bak" / name)
    code, _, err = sweep(tmp_path)
    assert code == 0 and "1 of 1 runs are finished already" in err


@pytest.mark.slow
def test_config_json_reads_its_own_text_from_any_directory(capsys, site, tmp_path, monkeypatch):
    for name in ("a", "b"):
        shutil.copytree(site / "text", tmp_path / name / "text")
    (tmp_path / "b" / "text" / "00.txt").write_text("other words " * 200)
    monkeypatch.chdir(tmp_path / "a")
    first = ("train", f"--config={site / 'tiny.py'}:rope", "--config.data.source=text", f"--workdir={tmp_path / 'one'}")
    assert tiny.call(capsys, *first, *STEPS)[0] == 0
    monkeypatch.chdir(tmp_path / "b")
    words = ("train", f"--config_json={tmp_path / 'one' / 'config.json'}", f"--workdir={tmp_path / 'two'}")
    assert tiny.call(capsys, *words, "--config.train.seed=1")[0] == 0
    one, two = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two"))
    assert two["text"] == one["text"] and two["data"]["source"] == str(tmp_path / "a" / "text")
    (tmp_path / "a" / "text" / "00.txt").write_text("changed since " * 200)
    code, _, err = tiny.call(capsys, *words[:2], f"--workdir={tmp_path / 'three'}")
    assert code == 3 and "has changed since the settings of this run were written" in err


def test_rows_of_another_run_in_a_folder_are_left_out(whole, tmp_path, caplog):
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / "eval.jsonl"
    rows = tiny.rows(path)
    others = [row | {"hash": "00000000", "eval_len": 64, "ppl": 1.0} for row in rows[:1]]
    path.write_text(as_lines((*rows, *others)))  # the last row does not say whose folder it is
    assert set(read_results(tmp_path).hash) == {rows[0]["hash"]}
    assert f"line {len(rows) + 1}: it is of the run 00000000, but config.json is of {rows[0]['hash']}" in caplog.text
    (tmp_path / "run" / "config.json").unlink()
    path.write_text(as_lines((*others, *rows)))
    assert (read_results(tmp_path).left_out == "of another run (not comparable)").sum() == 1


def test_run_is_labelled_by_the_encoding_of_its_layers(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / "eval.jsonl"
    rows = [row | {"encoding": "alibi", "layers": ["t5"]} for row in tiny.rows(path)]
    path.write_text(as_lines(rows))
    assert set(read_results(tmp_path).method) == {"t5"}


def test_runs_trained_on_other_text_are_no_seeds_of_one_curve(whole, tmp_path):
    for number, name in enumerate(("a", "b")):
        shutil.copytree(whole, tmp_path / name)
        rows = tiny.rows(whole / "eval.jsonl")
        for row in rows:
            row["settings"] |= {"train.seed": number, "data": f"{number}" * 64}
        (tmp_path / name / "eval.jsonl").write_text(as_lines(rows))
    kinds = set(read_results(tmp_path).kind)
    assert len(kinds) == 2
