"""The rows of a run: what they say, which targets they are of, and what is measured again or not."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest

import posx
from posx.lab import plots
from posx.lab.files import manifests
from posx.lab.files.rows import ROW_VERSION
from posx.lab.runs.folder import RunFolder
from posx.lab.sweeps.tasks import Job
from posx.lab.training.checkpoints import Checkpoints
from tests import tiny


@pytest.fixture
def workdir(whole, tmp_path):
    """A copy of the finished run, in a folder of its own as a sweep has them."""
    return shutil.copytree(whole, tmp_path / "sweep" / "run")


def evaluated(capsys, workdir, *words: str) -> str:
    """Standard error of `posx evaluate`."""
    code, _, err = tiny.call(capsys, "evaluate", f"--workdir={workdir}", *words)
    assert code == 0, err
    return err


def rows_of(workdir, protocol: str) -> list[dict]:
    return [row for row in tiny.rows(workdir / "eval.jsonl") if row["protocol"] == protocol]


def rewrite(workdir, rows: list[dict]) -> None:
    tiny.write_rows(workdir / "eval.jsonl", rows)


def test_rows_name_what_can_be_typed(capsys, workdir):
    path = workdir / "config.json"
    values = json.loads(path.read_text())
    distance = values["layers"][0]["max_distance"]
    values["asked"]["encoding"]["max_distance"] = distance  # as if it had been asked for
    tiny.edit_json(path, lambda old: json.dumps(values))
    evaluated(capsys, workdir, "--lengths=64", "--protocol=nonoverlapping")
    row = tiny.rows(workdir / "eval.jsonl")[-1]
    assert row["encoding"] == f"t5(max_distance={distance})" and row["layers"] == [row["encoding"]]
    assert row["schema_version"] == ROW_VERSION and row["hash"] == values["hash"]


def test_rows_say_the_versions_that_they_were_measured_with(capsys, workdir, monkeypatch):
    trained = json.loads((workdir / "env.json").read_text())
    monkeypatch.setattr(posx, "__version__", "9.9.9")
    evaluated(capsys, workdir, "--lengths=16,24", "--protocol=nonoverlapping")
    before, *_, last = (row["env"] for row in rows_of(workdir, "nonoverlapping"))
    assert before == {n: trained["versions"][n] for n in ("posx", "jax", "jaxlib")} | {"device": trained["device"]}
    assert last == before | {"posx": "9.9.9"}
    printed = tiny.call(
        capsys, "evaluate", f"--workdir={workdir}", "--lengths=16,24", "--protocol=nonoverlapping", "--json"
    )[1]
    assert [json.loads(line)["env"]["posx"] for line in printed.splitlines()] == [before["posx"], "9.9.9"]


def test_a_run_is_named_by_what_decides_its_weights(capsys, workdir, whole):
    first = tiny.rows(whole / "eval.jsonl")[0]
    assert first["layers"] == [first["encoding"]] == ["t5"] and first["anchor"] == 32
    evaluated(capsys, workdir, "--lengths=64", "--protocol=nonoverlapping", "--config.eval.batch_tokens=512")
    last = tiny.rows(workdir / "eval.jsonl")[-1]
    assert last["eval_len"] == last["anchor"] == 64 and last["hash"] == first["hash"]
    run = RunFolder(workdir).read_config()
    assert first["settings"]["encoding.name"] == "t5" and first["settings"]["data"] == run.text
    assert first["own_text"] and first["data_digest"] == run.held_out != run.text
    reseed(workdir, 5)
    evaluated(capsys, workdir, "--lengths=48", "--protocol=nonoverlapping")
    assert tiny.rows(workdir / "eval.jsonl")[-1]["hash"] != first["hash"]


def reseed(workdir, seed: int) -> None:
    """Make the folder that of a run with another seed and the same weights."""
    folder = RunFolder(workdir)
    run = folder.read_config()
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, seed=seed))
    folder.write_config(run)
    for step in manifests.steps(folder.checkpoints):
        path = manifests.manifest_path(folder.checkpoints, step)
        tiny.edit_json(path, lambda old: json.dumps(json.loads(old) | {"run": run.hash}))


def test_rows_of_another_run_or_version_are_measured_again(capsys, workdir):
    before = tiny.rows(workdir / "eval.jsonl")
    rewrite(workdir, [row | {"schema_version": 3} for row in before])
    evaluated(capsys, workdir)
    assert [row["nll"] for row in tiny.rows(workdir / "eval.jsonl")] == [row["nll"] for row in before]
    (aside,) = workdir.glob("eval.jsonl.damaged-*")
    assert [row["schema_version"] for row in tiny.rows(aside)] == [3] * len(before)


@pytest.mark.slow
def test_a_run_has_one_set_of_targets_whatever_is_asked_when(capsys, workdir):
    """Those of the longest windows ever: a longer one moves them, and what was there is measured again."""
    words = ("--protocol=sliding,nonoverlapping",)
    assert "notice" not in evaluated(capsys, workdir, "--lengths=16,32", *words)
    err = evaluated(capsys, workdir, "--lengths=64", *words)
    said = "sliding: windows of 64 tokens change which tokens are scored. Measuring 16, 32 again"
    assert err.count("notice") == 1 and said in err
    found = rows_of(workdir, "sliding")
    assert [(row["eval_len"], row["anchor"]) for row in found] == [(16, 32), (32, 32), (16, 64), (32, 64), (64, 64)]
    assert len({row["targets"] for row in found[2:]}) == 1 != len({row["targets"] for row in found[1:]})
    # Stretches of whole blocks serve all three lengths here: nothing moved, so nothing was measured twice.
    found = rows_of(workdir, "nonoverlapping")
    assert [row["eval_len"] for row in found] == [16, 32, 64] and len({row["targets"] for row in found}) == 1
    before = (workdir / "eval.jsonl").read_bytes()
    for lengths in ("16", "16,32", "64"):
        assert "notice" not in evaluated(capsys, workdir, f"--lengths={lengths}", *words)
    assert (workdir / "eval.jsonl").read_bytes() == before


def test_other_number_of_targets_is_another_measurement(capsys, workdir):
    err = evaluated(capsys, workdir, "--lengths=16,64", "--protocol=sliding,nonoverlapping", "--num_targets=512")
    assert err.count("notice") == 1 and "nonoverlapping: rows with other targets or strides (256 targets" in err
    before = tiny.rows(workdir / "eval.jsonl")
    assert "notice" not in evaluated(capsys, workdir, "--protocol=nonoverlapping"), "what was there is as it was"
    assert tiny.rows(workdir / "eval.jsonl") == before


def test_an_executor_that_is_asked_for_is_asked_itself(capsys, workdir):
    """Whoever compares executors must not compare a number with itself."""
    before = len(tiny.rows(workdir / "eval.jsonl"))
    for _ in range(2):
        evaluated(capsys, workdir, "--lengths=16", "--protocol=nonoverlapping", "--executor=dense")
    rows = tiny.rows(workdir / "eval.jsonl")
    assert [row["executor"] for row in rows[before:]] == ["dense"] and rows[0]["executor"] == "auto"
    evaluated(capsys, workdir, "--lengths=16", "--protocol=nonoverlapping")
    assert len(tiny.rows(workdir / "eval.jsonl")) == before + 1


def test_the_training_length_is_always_measured(capsys, workdir):
    evaluated(capsys, workdir, "--lengths=32", "--protocol=sliding")
    evaluated(capsys, workdir, "--lengths=32", "--protocol=nonoverlapping", "--num_targets=512")
    assert [row["eval_len"] for row in rows_of(workdir, "sliding")] == [16, 32]
    assert [row["eval_len"] for row in rows_of(workdir, "nonoverlapping")[2:]] == [16, 32]
    code, _, err = tiny.call(
        capsys, "evaluate", f"--workdir={workdir}", "--lengths=8", "--protocol=nonoverlapping", "--num_targets=8"
    )
    assert code == 2 and "eval.num_targets=8" in err and "less than the longest window, of 16 tokens" in err


def old_figure(folder, kind: str):
    """The PNG of a figure that was drawn in `folder` once."""
    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    for end in ("png", "svg"):
        (figures / f"{kind}.{end}").write_text("old")
    return figures / f"{kind}.png"


@pytest.mark.slow
def test_figures_and_tables_follow_the_rows(capsys, workdir):
    """Those of a sweep as well; none are made where there were none, and a folder of other pictures is no figures."""
    stale, other = old_figure(workdir.parent, "extrapolation"), workdir / "figures" / "photo.png"
    other.parent.mkdir()
    other.write_text("old")
    evaluated(capsys, workdir, "--lengths=64", "--protocol=nonoverlapping")
    assert stale.read_bytes().startswith(b"\x89PNG") and [path.name for path in other.parent.iterdir()] == ["photo.png"]


@pytest.mark.slow
def test_table_is_drawn_again_without_figures_and_compared(capsys, workdir):
    """The printed table holds the rows of the command; which file holds more is said."""
    plots.plot(workdir)
    shutil.rmtree(workdir / "figures")
    code, out, err = tiny.call(capsys, "evaluate", f"--workdir={workdir}", "--lengths=64", "--protocol=nonoverlapping")
    table = (workdir / "table.md").read_text()
    assert code == 0 and "R_4" in table and "R_2" in table and not (workdir / "figures").exists()
    assert "R_4" in out and "R_2" not in out
    assert f"only the rows of this command. All stored rows on the same targets are in {workdir / 'table.md'}" in err
    code, out, err = tiny.call(
        capsys, "evaluate", f"--workdir={workdir}", "--lengths=16,32,64", "--protocol=nonoverlapping"
    )
    assert code == 0 and out.startswith((workdir / "table.md").read_text().splitlines()[0]) and "R_2" in out


@pytest.mark.slow
def test_what_is_not_of_posx_in_the_folders_above_is_left_alone(capsys, workdir):
    own = {workdir.parent / "table.md": "mine", workdir.parent / "figures" / "training.png": "mine too"}
    for path, text in own.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    top = old_figure(workdir.parents[1], "ratio")
    evaluated(capsys, workdir, "--lengths=64", "--protocol=nonoverlapping")
    assert {path: path.read_text() for path in own} == own
    assert top.read_bytes().startswith(b"\x89PNG"), "a folder of sweeps follows its rows as well"


def test_settings_wrong_for_one_run_of_a_sweep_start_nothing(capsys, workdir):
    shutil.copytree(workdir, workdir.parent / "shorter")
    folder = RunFolder(workdir.parent / "shorter")
    run = folder.read_config()
    folder.write_config(dataclasses.replace(run, train=dataclasses.replace(run.train, length=8)))
    before = (workdir / "eval.jsonl").read_bytes()
    words = ("--lengths=16,32", "--protocol=sliding", "--stride=16")
    code, _, err = tiny.call(capsys, "evaluate", f"--workdir={workdir.parent}", *words)
    assert code == 2 and "eval.stride=16" in err and (workdir / "eval.jsonl").read_bytes() == before


JUNK = [
    '{"protocol": "sliding"}', '{"eval_len": 16, "train_len": 16, "encoding": 7, "protocol": "sliding"}', "[]", "null",
    '{"eval_len": true, "train_len": 16, "encoding": "rope", "protocol": "sliding", "status": "ok"}',
    '{"eval_len": 16, "train_len": 16, "encoding": "rope", "protocol": "nonoverlapping", "status": 7}', "{",
    '{"step": null, "attempt": null}', '{"step": 3}', '{"start": 5, "step": "x", "attempt": 2}', "[" * 9000,
]  # fmt: skip


def test_junk_among_the_rows_of_a_run_changes_nothing(capsys, workdir):
    run = RunFolder(workdir)
    logged, measured, before = run.logged_rows(), run.measured_rows(), run.eval_file.read_text()
    for path in (run.eval_file, run.metrics_file):
        path.write_text("\n".join([*JUNK, path.read_text(), *JUNK, ""]))
    (workdir / "DONE").unlink()
    assert (run.logged_rows(), run.measured_rows()) == (logged, measured)
    run.usual_start()
    evaluated(capsys, workdir)
    assert run.measured_rows() == measured and run.eval_file.read_text() == before
    job = Job(run.read_config(), run)
    assert (
        job.outcome().startswith("ppl ") and job.state() == "run evaluating, 3 rows measured" and 0 < job.progress() < 1
    )


@pytest.mark.slow
def test_damaged_rows_are_measured_again(capsys, workdir):
    """Their fields may be missing, or of a type that is not theirs."""
    stored = rows_of(workdir, "nonoverlapping")
    for name in ("block_len", "max_targets", "stride", "targets"):
        rewrite(workdir, [stored[0] | {name: None}, *stored[1:]])
        evaluated(capsys, workdir, "--protocol=nonoverlapping")
        assert rows_of(workdir, "nonoverlapping")[-1]["nll"] == stored[0]["nll"]


def test_rows_that_cannot_be_read_are_one_line(capsys, workdir):
    (workdir / "eval.jsonl").unlink(missing_ok=True)
    (workdir / "eval.jsonl").mkdir()
    code, _, err = tiny.call(capsys, "evaluate", f"--workdir={workdir}")
    assert code == 4 and err.strip().splitlines()[-1].endswith("eval.jsonl cannot be read: Is a directory")


def test_half_written_files_of_killed_process_are_removed(workdir):
    left = [
        workdir / ".config.json.4999999.part",
        workdir / "checkpoints" / ".8.json.4999998.part",
    ]  # no such processes
    alive = workdir / f".table.md.{os.getpid()}.part"
    for path in (*left, alive):
        path.write_text("{")
    run = RunFolder(workdir)
    with run.hold():
        Checkpoints(run.checkpoints).save(99, {"x": np.zeros(2, np.float32)})
    assert alive.exists() and not any(path.exists() for path in left)
