"""`posx evaluate --dry_run`: the rows that a command measures, and their cost."""

import json
import re
import shutil

import jax
import pytest

from posx.lab import config
from posx.lab.commands import estimate, evaluate
from posx.lab.config import EvalConfig
from posx.lab.data import ByteTokenizer
from posx.lab.files.rows import SCORES
from posx.lab.model import make_model
from posx.lab.runs.cost import COMPILING, EVALUATION_MEMORY, pass_cost
from posx.lab.runs.describe import count, expected_cost
from posx.lab.runs.folder import RunFolder
from posx.lab.sweeps.tasks import Evaluation
from tests import tiny
from tests.lab.commands import refused


def table(out: str) -> dict[tuple[str, int], list[str]]:
    """Return the cells of the printed table, {(protocol, length): cells from the targets on}."""
    rows = [re.split(r"\s{2,}", line) for line in out.splitlines()]
    return {(row[1], int(row[2].replace(",", ""))): row[3:] for row in rows if len(row) == 10 and row[2] != "length"}


def test_dry_run_of_evaluate_says_what_is_stored_and_shared(capsys, workdir):
    words = ["evaluate", f"--workdir={workdir}", "--lengths=16,32", "--num_targets=512", "--dry_run"]
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    code, out, err = tiny.call(capsys, *words[:3], "--dry_run")
    assert code == 0 and out.splitlines()[-1].endswith("nothing to compute"), err
    assert {cells[-1] for cells in table(out).values()} == {"stored"}
    assert tiny.call(capsys, *words[:3], "--config.eval.protocols=()", "--dry_run")[:2] == (0, out), "the usual ones"
    code, out, err = tiny.call(capsys, *words)
    assert code == 0, err
    rows = table(out)
    assert {row: (cells[0], cells[1], cells[-1]) for row, cells in rows.items()} == {
        ("nonoverlapping", 16): ("512", "32", "new"), ("nonoverlapping", 32): ("512", "16", "new"),
        ("per_position", 32): ("512", "16", "in the pass of nonoverlapping"),
    }  # fmt: skip
    assert "3 rows, 0 of them stored" in out and "FLOP, up to" in out
    assert before == {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    assert tiny.call(capsys, *words[:-1], "--json")[0] == 0
    measured = {(row["protocol"], row["eval_len"]): row for row in tiny.rows(workdir / "eval.jsonl")[3:]}
    for row, cells in rows.items():
        done = measured[row]
        facts = f"{done['num_targets']}", f"{done['num_windows']}", f"{done['num_documents']} of 1"
        assert tuple(cells[:3]) == facts
    assert {cells[-1] for cells in table(tiny.call(capsys, *words)[1]).values()} == {"stored"}
    longer = [word.replace("16,32", "16,300") for word in words]
    out = tiny.call(capsys, *longer)[1]  # one stretch instead of two
    states = {length: cells[-1] for (name, length), cells in table(out).items() if name == "nonoverlapping"}
    assert states == {300: "new", **dict.fromkeys((16, 32), "stored on other targets, measured again")}
    assert "rows, 0 of them stored" in out


def test_dry_run_of_evaluate_schedules_as_the_evaluation_would(capsys, workdir, monkeypatch):
    tasks, engine = [], estimate.LocalEngine
    monkeypatch.setattr(estimate, "LocalEngine", lambda given, jobs: tasks.extend(given) or engine(given, jobs))
    assert tiny.call(capsys, "evaluate", f"--workdir={workdir}", "--dry_run")[0] == 0
    assert [task.speed for task in tasks] == [evaluate._core_speed(tasks[0].run)]


def test_dry_run_of_evaluate_fails_as_the_evaluation_would(capsys, workdir):
    words = ["evaluate", f"--workdir={workdir}", "--dry_run"]
    refused(
        capsys, 3, [*words, "--lengths=16,1000", "--num_targets=2000"], "has 613 tokens, but eval.lengths needs 1000"
    )
    shutil.rmtree(workdir / "checkpoints")
    refused(capsys, 4, words, "holds no checkpoint yet")


def test_costs_of_an_evaluation_are_those_of_its_programs():
    """Operations and memory are compared with XLA's own count of the compiled program."""
    sizes = config.ModelConfig(num_layers=4, model_dim=128, num_heads=4)
    model = make_model(sizes, "nope", ByteTokenizer.vocab_size, 256)
    cost = pass_cost(model, EvalConfig(batch_tokens=2048), 256, 20)
    assert (cost.batch, cost.windows) == (8, 20)
    from posx.lab.runs.scores import Way, score_rows

    tokens = jax.ShapeDtypeStruct((8, 257), "int32")
    made = score_rows.lower(model, Way("dense"), 1, model.abstract(), tokens).compile()
    future = 8 * 256 * 2 * 4 * 128 * 256  # operations on the future half of the square, which dense attention computes
    assert cost.flops + 3 * future == pytest.approx(3 * made.cost_analysis()["flops"], rel=0.03)  # three batches
    made = score_rows.lower(model, Way("blockwise"), 1, model.abstract(), tokens).compile()
    held = cost.memory - EVALUATION_MEMORY - 2 * 4 * count(model)
    assert held == pytest.approx(made.memory_analysis().temp_size_in_bytes, rel=0.2)
    assert cost.seconds(1e-9) == COMPILING + 1e-9 * cost.flops
    assert [cost.seconds(1e-9, done) for done in (0, 8, 20)] == [
        0.0, COMPILING + 1e-9 * cost.flops / 3, COMPILING + 1e-9 * cost.flops,
    ]  # fmt: skip


def test_progress_of_an_evaluation_weighs_rows_by_operations(workdir):
    folder = RunFolder(workdir)
    run = folder.read_config()
    rows = (workdir / "eval.jsonl").read_text().splitlines(keepends=True)
    (workdir / "eval.jsonl").write_text("")
    task = Evaluation(run, folder)
    weights = expected_cost(run).rows
    assert weights["per_position", 32] == 0 and task.progress() == 0
    (workdir / "eval.jsonl").write_text(rows[0])
    short, long = weights["nonoverlapping", 16], weights["nonoverlapping", 32]
    assert task.progress() == pytest.approx(0.99 * short / (short + long)) and short < long
    (workdir / "eval.jsonl").write_text("".join(rows))
    assert task.progress() == pytest.approx(0.99)
    left = [Evaluation(run, folder, speed=speed).cost for speed in (1e9, 2e9)]
    assert left[0].flops == 0 and task.cost.flops == 0, "stored rows cost nothing"
    (workdir / "eval.jsonl").write_text(rows[0])
    left = [Evaluation(run, folder, speed=speed).cost for speed in (1e9, 2e9)]
    assert [cost.flops for cost in left] == [long, long] and left[0].lengths == 1
    work = [cost.seconds(1) - cost.start - COMPILING for cost in left]
    assert work == pytest.approx([long / 1e9, long / 2e9])
    bad = json.loads(rows[0]) | dict.fromkeys(SCORES) | {"status": "oom"}
    tiny.write_rows(workdir / "eval.jsonl", [bad])
    assert folder.measured_rows() and task.progress() == 0, "it is computed again"
    last = Evaluation(run, folder, workdir / "eval.jsonl")
    assert last.cost.flops == short + long and last.outcome() == "1 row"
