"""Damage in the folder of a finished run: each is found and named, and mended by the command that made the run."""

import dataclasses
import json
import math
import os
import shutil

import pytest

from posx.lab import plots
from posx.lab.config.run import SCHEMA_VERSION
from posx.lab.files import manifests
from posx.lab.files.checksums import with_checksum
from posx.lab.plots import points
from posx.lab.results.table import read_results
from posx.lab.runs import damage
from posx.lab.runs.damage import damages
from posx.lab.runs.folder import RunFolder
from tests import tiny


def flip(path, keep_times=False):
    """Flip a bit in the middle of a file."""
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    if keep_times:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def arrays(folder, step=tiny.STEPS):
    """The file that holds most of a checkpoint's bytes."""
    files = [path for path in (folder / "checkpoints" / str(step)).rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def cut_arrays(folder, step=tiny.STEPS):
    """Cut all files that hold arrays of a checkpoint.

    Which of them holds the parameters, and which the state of the optimizer, differs from save to save.
    """
    for path in (folder / "checkpoints" / str(step) / "ocdbt.process_0" / "d").iterdir():
        path.write_bytes(path.read_bytes()[:1000])


def lines(folder, name, change):
    """Replace the lines of a file by `change` of them."""
    path = folder / name
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def edit(folder, name, old, new):
    path = folder / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def edit_row(folder, number, change):
    """Edit a row of `eval.jsonl` without renewing its checksum."""
    rows = tiny.rows(folder / "eval.jsonl")
    rows[number] = change(rows[number])
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def consistently(row):
    """Another loss, with all that follows from it."""
    made = {"nll": 2.0, "ppl": math.exp(2.0), "nll_interval": None, "bpb": None}
    return row | made | {"block_nll": [2.0 * row["num_targets"]]}


def of_another_run(folder):
    rows = tiny.rows(folder / "eval.jsonl")
    tiny.write_rows(folder / "eval.jsonl", [*rows, rows[0] | {"hash": "12345678", "eval_len": 48}])


def manifest_of_another_run(folder):
    path = manifests.manifest_path(folder / "checkpoints", tiny.STEPS)
    tiny.edit_json(path, lambda old: json.dumps(json.loads(old) | {"run": "12345678"}))


def log_of_another_run(folder):
    rows = tiny.rows(folder / "metrics.jsonl")
    tiny.write_rows(folder / "metrics.jsonl", [row | {"hash": "12345678"} for row in rows])


def other_weights(folder):
    rows = tiny.rows(folder / "eval.jsonl")
    tiny.write_rows(folder / "eval.jsonl", [row | {"weights": "0" * 16} for row in rows[:1]] + rows[1:])


#: {kind: (how it is made, file, words of the problem)}
KINDS = {
    "config cut": (lambda f: lines(f, "config.json", lambda x: x[: len(x) // 2]), "config.json", "cannot be read"),
    "config emptied": (lambda f: (f / "config.json").write_text(""), "config.json", "cannot be read"),
    "config removed": (lambda f: (f / "config.json").unlink(), "config.json", "it is missing beside DONE"),
    "config edited": (lambda f: edit(f, "config.json", '"stride": ', '"stride": 1'), "config.json", "edited"),
    "label edited": (lambda f: edit(f, "config.json", '"name": "t5"', '"name": "rope"'), "config.json", "edited"),
    "tokenizer edited": (lambda f: edit(f, "tokenizer.json", "}", " }"), "tokenizer.json", "checksum in config.json"),
    "tokenizer removed": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json", "missing"),
    "environment edited": (lambda f: edit(f, "env.json", '"num_devices": 1', '"num_devices": 2'), "env.json", "edited"),
    "end mark edited": (lambda f: edit(f, "DONE", f'"step": {tiny.STEPS}', '"step": 4'), "DONE", "edited"),
    "ppl edited": (lambda f: edit_row(f, 0, lambda row: row | {"ppl": 111.04}), "eval.jsonl", "ppl is 111.04, but exp"),
    "loss edited": (lambda f: edit_row(f, 0, consistently), "eval.jsonl", "edited or damaged"),
    "counts edited": (lambda f: edit_row(f, 0, lambda row: row | {"num_targets": 512}), "eval.jsonl", "bpb is"),
    "targets edited": (lambda f: edit_row(f, 0, lambda row: row | {"targets": "ab"}), "eval.jsonl", "edited or"),
    "row of another run": (of_another_run, "eval.jsonl", "it is of the run 12345678"),
    "row of other weights": (other_weights, "eval.jsonl", "other weights than checkpoint 32 has"),
    "row repeated": (lambda f: lines(f, "eval.jsonl", lambda x: [*x, x[0]]), "eval.jsonl", "it repeats line 1"),
    "row removed": (lambda f: lines(f, "eval.jsonl", lambda x: x[:-1]), "eval.jsonl", "per_position at 32 is gone"),
    "row cut": (lambda f: lines(f, "eval.jsonl", lambda x: [*x[:-1], x[-1][:90]]), "eval.jsonl", "it is cut"),
    "row of zeros": (lambda f: lines(f, "eval.jsonl", lambda x: [*x, "\0" * 99 + "\n"]), "eval.jsonl", "it is cut"),
    "rows removed": (lambda f: (f / "eval.jsonl").unlink(), "eval.jsonl", "the row nonoverlapping at 16 is gone"),
    "ledger removed": (lambda f: (f / "rows.json").unlink(), "rows.json", "is missing"),
    "log edited": (lambda f: edit(f, "metrics.jsonl", '"grad_norm": ', '"grad_norm": 1'), "metrics.jsonl", "edited"),
    "log of another run": (log_of_another_run, "metrics.jsonl", "it is of the run 12345678"),
    "log cut": (lambda f: lines(f, "metrics.jsonl", lambda x: x[:9]), "metrics.jsonl", "it ends at step 9, but DONE"),
    "a bit of an array": (lambda f: flip(arrays(f)), "32", "does not match its digest"),
    "a bit, times kept": (lambda f: flip(arrays(f), keep_times=True), "32", "does not match its digest"),
    "a bit of an older step": (lambda f: flip(arrays(f, 28)), "28", "does not match its digest"),
    "a bit of a manifest": (lambda f: flip(f / "checkpoints" / "32.json"), "32", "manifest: "),
    "a file removed": (lambda f: arrays(f).unlink(), "32", "is missing"),
    "a step removed": (lambda f: (f / "checkpoints" / "32.json").unlink(), "checkpoints", "DONE says step 32"),
    "checkpoints removed": (lambda f: shutil.rmtree(f / "checkpoints"), "checkpoints", "DONE says step 32"),
    "another run's step": (manifest_of_another_run, "32", "it is of the run 12345678"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_and_named(workdir, kind):
    make, name, problem = KINDS[kind]
    make(workdir)
    found = [one for one in damages(RunFolder(workdir)) if one.path.name == name and problem in one.problem]
    assert found, damages(RunFolder(workdir))
    assert str(found[0]).count("\n") == 0 and found[0].mend in str(found[0])


def test_a_run_of_another_version_has_one_remedy(workdir):
    edit(workdir, "config.json", f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 1')
    (found,) = [one for one in damages(RunFolder(workdir)) if one.path.name == "config.json"]
    assert "its schema_version is 1" in found.problem and str(found).endswith(f": {found.problem}. {found.mend}.")
    assert found.mend == "Train the run in another --workdir, or use the posx that made it"


def test_a_run_that_was_left_alone_has_no_damage(whole):
    assert damages(RunFolder(whole), thorough=True) == []


def test_files_that_nothing_touched_are_read_once(workdir, monkeypatch):
    monkeypatch.setattr(damage, "SETTLED_SECONDS", -1.0)
    folder, read = RunFolder(workdir), []
    problem_of = manifests.manifest_problem
    monkeypatch.setattr(manifests, "manifest_problem", lambda *words: read.append(words) or problem_of(*words))
    assert damages(folder) == damages(folder) == [] and len(read) == 2, "a checkpoint of two was read twice"
    assert damages(folder, thorough=True) == [] and len(read) == 4
    flip(arrays(workdir), keep_times=True)  # its size and its time of writing are as before
    assert len(damages(folder)) == 1


def test_bytes_that_are_no_text_are_no_crash(capsys, workdir):
    (workdir / damage.STAMP).write_bytes(b"\xff\x00")
    assert damages(RunFolder(workdir)) == []
    (workdir / "table.md").write_bytes(f"{plots.table(read_results(workdir))}\n".encode().replace(b"|", b"\xff", 1))
    assert "it is not the table of the stored rows" in tiny.call(capsys, "verify", workdir)[1]
    (workdir / "weights.txt").write_bytes(b"\xff\x00")
    code, out, _ = tiny.call(capsys, "verify", workdir)
    assert code == 1 and "weights.txt: cannot be read" in out
    assert tiny.call(capsys, "generate", f"--workdir={workdir}")[0] == 4


@pytest.mark.parametrize("kind", ["row removed", "rows removed"])
def test_figures_name_rows_that_are_gone(workdir, caplog, kind):
    KINDS[kind][0](workdir)
    read_results(workdir)
    assert "eval.jsonl: the row per_position at 32 is gone" in caplog.text


def test_figures_leave_out_rows_of_other_weights(workdir, caplog):
    rows = tiny.rows(workdir / "eval.jsonl")
    tiny.write_rows(workdir / "eval.jsonl", [row | {"weights": "0" * 16} for row in rows])
    assert read_results(workdir).empty and "other weights than checkpoint 32 has" in caplog.text


def test_figures_leave_out_the_log_of_another_run(workdir, caplog):
    stored = read_results(workdir)
    assert points.read_training(workdir, stored)[1]
    log_of_another_run(workdir)
    assert not points.read_training(workdir, stored)[1] and "it is of the run 12345678" in caplog.text


def test_a_log_names_its_run(whole):
    assert {row["hash"] for row in tiny.rows(whole / "metrics.jsonl")} == {RunFolder(whole).hash}


def test_an_edited_tokenizer_is_not_used(capsys, workdir):
    KINDS["tokenizer edited"][0](workdir)
    for words in (["generate"], ["export", f"--to={workdir / 'm.safetensors'}"]):
        code, _, err = tiny.call(capsys, *words, f"--workdir={workdir}")
        assert code == 4 and "tokenizer.json does not match its checksum" in err


def train(capsys, site, workdir):
    return tiny.call(capsys, "train", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}")


def test_the_same_command_mends_what_it_can(capsys, site, workdir, whole):
    """Settings are written again and rows are measured again. No damaged file is deleted."""
    before = tiny.rows(workdir / "eval.jsonl")
    for kind in ("config cut", "tokenizer edited", "ppl edited", "log edited"):
        KINDS[kind][0](workdir)
    cut, edited = (workdir / "config.json").read_text(), (workdir / "eval.jsonl").read_text().splitlines()[0]
    code, _, err = train(capsys, site, workdir)
    assert code == 0 and damages(RunFolder(workdir), thorough=True) == [], err
    assert "ppl is 111.04" in err and "config.json: cannot be read" in err
    again = tiny.rows(workdir / "eval.jsonl")
    assert [row["nll"] for row in again] == [row["nll"] for row in (*before[1:], before[0])]
    (old,) = workdir.glob("config.json.damaged-*")
    (rows,) = workdir.glob("eval.jsonl.damaged-*")
    assert (old.read_text(), rows.read_text()) == (cut, f"{edited}\n")


@pytest.mark.slow
def test_damaged_weights_are_trained_again_to_the_same_bits(capsys, site, workdir, whole):
    before = (workdir / "eval.jsonl").read_bytes()
    for step in (28, 32):
        flip(arrays(workdir, step))
    code, _, err = train(capsys, site, workdir)
    assert code == 0 and damages(RunFolder(workdir), thorough=True) == [], err
    assert "training starts again at step 0" in err and "checkpoint 32" in err
    assert tiny.digests(workdir) == tiny.digests(whole) and (workdir / "eval.jsonl").read_bytes() == before
    (steps,) = workdir.glob("checkpoints.damaged-*")
    assert sorted(path.name for path in steps.iterdir()) == ["28", "28.json", "32", "32.json"]


def test_rows_of_lost_weights_are_measured_again(capsys, site, workdir):
    """Weights that were trained again on another machine may differ by a bit. Their rows are of those weights."""
    other_weights(workdir)
    code, _, err = train(capsys, site, workdir)
    assert code == 0 and "line 1: it was measured with other weights than checkpoint 32 has" in err
    (weights,) = {row["weights"] for row in tiny.rows(workdir / "eval.jsonl")}
    assert weights == manifests.weights_digest(workdir / "checkpoints", 32)


def test_damaged_settings_beside_another_run_are_refused(capsys, site, workdir):
    (workdir / "config.json").write_text("{")
    words = ["train", f"--config={site / 'tiny.py'}:rope", f"--workdir={workdir}"]
    code, _, err = tiny.call(capsys, *words)
    own = tiny.rows(workdir / "eval.jsonl")[0]["hash"]
    assert code == 4 and f"Its checkpoints and rows are of the run {own}, not of this one" in err
    assert (workdir / "config.json").read_text() == "{"


def test_status_of_a_sweep_names_damage(capsys, site, workdir):
    words = ["sweep", f"--config={site / 'tiny.py'}", f"--workdir={workdir.parent}", "--config.sweep.encodings=t5"]
    (workdir / "status.json").write_text(json.dumps(with_checksum({"code": 7, "reason": "of a later evaluation"})))
    code, out, err = tiny.call(capsys, *words, "--status")
    assert code == 0 and "1 of 1 runs are finished" in out and "failed" not in out, err
    (workdir / "status.json").unlink()
    for kind, text in {
        "row removed": "the row per_position at 32 is gone",
        "a bit of an array": "does not match",
    }.items():
        KINDS[kind][0](workdir)
        code, out, _ = tiny.call(capsys, *words, "--status")
        assert code == 0 and "damaged: " in out and text in out and "0 of 1 runs are finished" in out, out


def test_verify_names_each_damage(capsys, whole, workdir):
    said = "1 run, 3 rows, 2 checkpoints: no damage\n"
    assert (
        tiny.call(capsys, "verify", workdir)[:2] == tiny.call(capsys, "verify", "--workdir", workdir)[:2] == (0, said)
    )
    sweep = shutil.copytree(whole, workdir.parent / "sweep" / "one").parent
    shutil.copytree(whole, sweep / "two")
    KINDS["ppl edited"][0](sweep / "two")
    KINDS["a bit, times kept"][0](sweep / "two")
    code, out, err = tiny.call(capsys, "verify", sweep.parent)
    first, second = out.splitlines()
    assert code == 1 and "two/checkpoints/32: " in first and "two/eval.jsonl, line 1: ppl is 111.04" in second
    assert "posx evaluate --workdir" in second and err.startswith("posx: 2 damaged parts found in 3 runs.")
    found = [json.loads(line) for line in tiny.call(capsys, "verify", sweep, "--json")[1].splitlines()]
    assert [one["line"] for one in found] == [0, 1] and found[1]["path"] == str(sweep / "two" / "eval.jsonl")
    assert tiny.call(capsys, "verify", sweep / "none")[0] == 4


def test_verify_checks_runs_with_the_weights_of_others(capsys, workdir):
    words = ["evaluate", f"--workdir={workdir}", "--lengths=16", "--protocol=nonoverlapping", "--masks=window(size=8)"]
    assert tiny.call(capsys, *words)[0] == 0
    (child,) = workdir.parent.glob("run@*")
    assert tiny.call(capsys, "verify", child)[0] == 0
    flip(arrays(workdir))
    code, out, _ = tiny.call(capsys, "verify", child)
    assert code == 1 and "checkpoints/32" in out, "the weights lie in the folder of the other run"
    run = RunFolder(workdir).read_config()
    RunFolder(workdir).write_config(dataclasses.replace(run, train=dataclasses.replace(run.train, seed=5)))
    assert "has the weights of the run" in tiny.call(capsys, "verify", child)[1]
    (child / "weights.txt").unlink()
    assert "weights.txt: it is missing, but the weights are those of run" in tiny.call(capsys, "verify", child)[1]


def test_verify_checks_exports_and_tables(capsys, workdir, tmp_path):
    assert tiny.call(capsys, "export", f"--workdir={workdir}", f"--to={workdir / 'm.safetensors'}")[0] == 0
    (workdir / "table.md").write_text(f"{plots.table(read_results(workdir))}\n")
    code, out, err = tiny.call(capsys, "verify", workdir)
    assert code == 0 and "1 exported model: no damage" in out, err
    edit(workdir, "table.md", "| t5 |", "| t6 |")
    workdir = workdir.rename(tmp_path / "my run")
    said = tiny.call(capsys, "verify", workdir)[1]
    assert "it is not the table of the stored rows" in said
    assert f"posx plot --workdir '{workdir}'" in said
    data = bytearray((workdir / "m.safetensors").read_bytes())
    data[-9] ^= 1
    (workdir / "m.safetensors").write_bytes(data)
    code, out, _ = tiny.call(capsys, "verify", workdir / "m.safetensors")
    assert code == 1 and "does not match its digest. Export the run again." in out


def test_an_older_checkpoint_is_not_evaluated_for_a_finished_run(capsys, workdir):
    """The weights of step 28 would be reported as those of the whole training. A run that is not finished resumes."""
    cut_arrays(workdir)
    (workdir / "eval.jsonl").unlink()
    for words in (["evaluate", "--lengths=16"], ["generate", "--prompt=ka"]):
        code, out, err = tiny.call(capsys, *words, f"--workdir={workdir}")
        assert (code, out) == (4, "") and f"ended at step {tiny.STEPS}, but that checkpoint is damaged" in err
    (workdir / "DONE").unlink()
    code, out, err = tiny.call(capsys, "generate", "--prompt=ka", f"--workdir={workdir}")
    assert code == 0 and "skipped" in err
