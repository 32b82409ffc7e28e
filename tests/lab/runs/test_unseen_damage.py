"""Damage that no file shows alone: forgotten rows, weights and tokenizers of others, folders in use, links."""

import dataclasses

import pytest

from posx.errors import WorkdirError
from posx.lab.plots import effects
from posx.lab.results.table import missing_runs
from posx.lab.runs import damage
from posx.lab.runs.damage import damages
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.text import with_saved_tokenizer
from tests import tiny
from tests.lab.runs.test_damage import KINDS, arrays, cut_arrays, flip, lines


def evaluate(capsys, workdir, *words):
    return tiny.call(capsys, "evaluate", f"--workdir={workdir}", *words)


@pytest.fixture
def child(capsys, workdir):
    """A run with the weights of `workdir` under other masks."""
    assert evaluate(capsys, workdir, "--lengths=16", "--protocol=nonoverlapping", "--masks=window(size=8)")[0] == 0
    (found,) = workdir.parent.glob("run@*")
    return found


def test_rows_that_are_gone_stay_named_until_measured(capsys, workdir):
    KINDS["row removed"][0](workdir)
    assert evaluate(capsys, workdir, "--lengths=16", "--protocol=nonoverlapping")[0] == 0
    assert [one.problem for one in damages(RunFolder(workdir))] == ["the row per_position at 32 is gone"]
    assert evaluate(capsys, workdir)[0] == 0
    assert damages(RunFolder(workdir)) == []


def test_an_exported_file_of_another_run_is_refused(capsys, workdir, child):
    """The file holds arrays of the same shapes, and is whole."""
    file = workdir / "m.safetensors"
    assert tiny.call(capsys, "export", f"--workdir={workdir}", f"--to={file}")[0] == 0
    (child / "weights.txt").write_text(str(file))
    own, held = RunFolder(child).hash, RunFolder(workdir).hash
    problem = f"that file is of the run {held}, not of {own}"
    code, out, _ = tiny.call(capsys, "verify", child)
    assert code == 1 and problem in out
    code, _, err = evaluate(capsys, child, "--lengths=32", "--protocol=nonoverlapping")
    assert code == 4 and problem in err
    assert evaluate(capsys, file, "--lengths=16", "--protocol=nonoverlapping")[0] == 0


def test_a_damaged_tokenizer_is_not_inherited(capsys, workdir):
    KINDS["tokenizer edited"][0](workdir)
    code, _, err = evaluate(capsys, workdir, "--lengths=16", "--masks=window(size=8)")
    assert code == 4 and "tokenizer.json does not match its checksum" in err
    assert not list(workdir.parent.glob("run@*"))


def test_a_damaged_tokenizer_replaces_no_lost_one(workdir):
    """A sweep would plan other runs, of the text in other tokens."""
    folder = RunFolder(workdir)
    run = folder.read_config()
    lost = dataclasses.replace(run, data=dataclasses.replace(run.data, tokenizer=str(workdir / "lost.json")))
    assert with_saved_tokenizer(folder, lost).data.tokenizer == str(folder.tokenizer_file)
    KINDS["tokenizer edited"][0](workdir)
    with pytest.raises(WorkdirError, match="does not match its checksum"):
        with_saved_tokenizer(folder, lost)


def test_a_child_with_another_tokenizer_is_refused(capsys, child):
    KINDS["tokenizer edited"][0](child)
    RunFolder(child).write_config(RunFolder(child).read_config())
    assert "is not that of" in tiny.call(capsys, "verify", child)[1]
    assert evaluate(capsys, child, "--lengths=32", "--protocol=nonoverlapping")[0] == 4


def test_damage_in_a_folder_in_use_is_named(workdir):
    flip(arrays(workdir))
    with RunFolder(workdir).hold():
        assert [one.path.name for one in damages(RunFolder(workdir))] == ["32"]


def test_steps_that_are_links_are_read_again(workdir, tmp_path, monkeypatch):
    monkeypatch.setattr(damage, "SETTLED_SECONDS", -1.0)
    step = workdir / "checkpoints" / "32"
    step.rename(tmp_path / "elsewhere")
    step.symlink_to(tmp_path / "elsewhere")
    assert damages(RunFolder(workdir)) == []
    flip(arrays(workdir))
    assert [one.path.name for one in damages(RunFolder(workdir))] == ["32"]


@pytest.mark.parametrize(
    "change", [lambda rows: [], lambda rows: [row.replace('"step": 32', '"step": 31') for row in rows]]
)
def test_a_run_without_a_whole_row_is_listed(workdir, change):
    lines(workdir, "eval.jsonl", change)
    assert missing_runs(workdir.parent) == {"run": ""}


def test_damaged_arrays_are_not_drawn_as_initialised(workdir, caplog):
    cut_arrays(workdir)
    assert effects.folder_encodings(workdir) == [] and "is not drawn" in caplog.text
