"""Steps and seconds to a training loss, of constructed logs, and their table."""

import itertools
import json
import math

import numpy as np
import pytest

from posx.lab import plots
from posx.lab.files.checksums import with_checksum
from posx.lab.plots import curves
from posx.lab.plots.convergence import convergence_tables, final_loss, first_reached, smooth_losses
from posx.lab.plots.points import Logged, read_log, read_training
from posx.lab.results.table import read_results
from tests.made_rows import UNDISTURBED, cells, config, logged, row, start, write

WINDOW = 10


def log_of(losses, ends):
    """The log of a loss for each step, with rows at the steps `ends`, of half a second each."""
    spans = itertools.pairwise([0, *ends])
    return [Logged(high, float(np.mean(losses[low:high])), 64 * high, high / 2) for low, high in spans]


def test_smoothed_losses_are_means_over_equal_steps():
    """Rows may lie any number of steps apart. A run that ends with NaN has no loss at its end."""
    losses = np.random.default_rng(0).normal(3, 1, 40)
    log = log_of(losses, [5, 10, 12, 20, 22, 30, 40])
    expected = [math.nan, *(losses[end - WINDOW : end].mean() for end in (10,))]
    assert smooth_losses(log, WINDOW)[:2] == pytest.approx(expected, nan_ok=True)
    assert smooth_losses(log, WINDOW)[[3, 4, 6]] == pytest.approx([losses[a : a + 10].mean() for a in (10, 12, 30)])
    assert math.isnan(final_loss([*log, Logged(41, math.nan, 0, 0)], WINDOW))


def test_a_loss_is_reached_at_its_crossing_or_never():
    """5 - step / 100 has the mean 4.0 over the steps 95 to 104, so that the row at 110 is the first below 4."""
    falling = log_of(5 - np.arange(200) / 100, range(10, 201, 10))
    assert first_reached(falling, 4.0, WINDOW) == falling[10]
    assert first_reached(falling, 3.0, WINDOW) is None
    assert first_reached([*falling[:-1], Logged(200, math.nan, 0, 0)], 4.0, WINDOW) is None


def test_a_dip_below_a_loss_has_not_reached_it():
    losses = np.full(200, 5.0)
    losses[50:70], losses[150:] = 1.0, 2.0
    assert first_reached(log_of(losses, range(10, 201, 10)), 3.0, WINDOW).step == 160


def test_noise_does_not_move_a_crossing_far():
    """One curve falls twice as fast as another, on the same noise of 1 nat a step: it needs half of the steps."""
    steps, noise = np.arange(4000), np.random.default_rng(1).normal(0, 1, 4000)
    slow, fast = (log_of(2 + 3 * np.exp(-steps / scale) + noise, range(20, 4001, 20)) for scale in (4000, 2000))
    assert abs(first_reached(fast, final_loss(slow, 200), 200).step - 2000) < 300
    below = next(one.step for one in fast if one.loss <= slow[-1].loss)
    assert any(one.loss > slow[-1].loss for one in fast if one.step > below + 200)  # single rows cross it many times


def put_runs(folder, rates, planned=100, ends=(), **facts):
    """Write runs of two seeds: losses fall from 3 at a rate of their own, and the text of seed 1 is harder by 1 nat.

    ends: {(encoding, seed): the step at which its log ends}, of runs whose settings and rows have `facts`.
    """
    for (name, rate), seed in itertools.product(rates.items(), (0, 1)):
        made, end = config(name, train__seed=seed, train__steps=planned), dict(ends).get((name, seed), planned)
        own = facts if (name, seed) in ends else {}
        write(folder, [row(name, 64, seed) | {"settings": made.settings | own} | own])
        run = folder / f"{name}_L64_s{seed}"
        start(run, made)
        log = log_of(3 + seed - rate * np.arange(end) / 100, range(10, end + 1, 10))
        lines = ({"step": one.step, "loss": one.loss, "tokens": one.tokens} | UNDISTURBED for one in log)
        speed = {"tokens_per_second": 128.0 if seed else 64.0}
        (run / "metrics.jsonl").write_text("".join(json.dumps(with_checksum(line | speed)) + "\n" for line in lines))


def attempt_rows(number, losses, start=0):
    """Rows of an attempt after the step `start` from {step: loss}."""
    facts = {"attempt": number, "attempt_start": start}
    return [{"step": step, "loss": loss} | facts for step, loss in losses.items()]


#: {what a later attempt repeats: (rows in the order of writing, {step: loss} that count)}.
ATTEMPTS = {
    "a NaN": ((attempt_rows(1, {20: 3.0, 40: 3.0, 53: "nan"}), attempt_rows(2, {60: 2.0}, 40)), {20: 3, 40: 3, 60: 2}),
    "a NaN and a row": (
        (attempt_rows(1, {20: 3.0, 40: 3.0, 53: "nan"}), attempt_rows(2, {40: 2.0, 60: 2.0}, 20)),
        {20: 3, 40: 2, 60: 2},
    ),
    "rows before a NaN at once": (
        (attempt_rows(1, {10: 3.0, 20: 3.0, 30: 3.0}), attempt_rows(2, {25: "nan"}, 10)), {10: 3, 25: None},
    ),
    "rows of other log steps": (
        (attempt_rows(1, {10: 3.0, 20: 3.0, 30: 3.0, 40: 3.0}), attempt_rows(2, {40: 2.0, 60: 2.0}, 20)),
        {10: 3, 20: 3, 40: 2, 60: 2},
    ),
    "steps of an attempt before the last": (
        (attempt_rows(1, {10: 3.0, 20: 3.0}), attempt_rows(2, {25: 2.0}, 20), attempt_rows(3, {20: 1.0}, 10)),
        {10: 3, 20: 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("repeated", ATTEMPTS)
def test_repeated_steps_count_once(tmp_path, repeated):
    attempts, expected = ATTEMPTS[repeated]
    rows = itertools.chain(*attempts)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(with_checksum(row)) + "\n" for row in rows))
    log = read_log(tmp_path)
    assert {row.step: None if math.isnan(row.loss) else row.loss for row in log} == expected
    assert math.isfinite(final_loss(log, 20)) == (None not in expected.values())


@pytest.mark.slow
def test_table_compares_runs_of_one_seed(tmp_path):
    """Against the encoding of the median loss. The seconds are the tokens of each run by its own speed."""
    put_runs(tmp_path, {"alibi": 2.0, "rope": 1.0, "t5": 0.5})
    table = plots.format_table(tmp_path, "markdown").partition("Steps to a training loss")[2]
    assert (
        "that at which rope ends, 2.555 (2.055 to 3.055) nats per token after 100 steps and 75 (50 to 100) s" in table
    )
    assert "which saw the same batches" in table and "do not compare if runs shared a machine" in table
    assert cells(table, "alibi")[1:] == ["2", "1.61 (1.11 to 2.11)", "60", "45 (30 to 60)"]
    assert cells(table, "rope")[3:] == ["100", "75 (50 to 100)"]
    assert cells(table, "t5")[3:] == ["not reached", "not reached"]
    plots.plot(tmp_path)
    assert table in (tmp_path / "table.md").read_text()
    numbers = json.loads(plots.format_table(tmp_path, "json"))["numbers"]
    assert [(x["mean"], x["unit"], x["failed"]) for x in numbers if x["column"].startswith("steps to the loss")] == [
        (60, "steps", None), (100, "steps", None), (None, "steps", "unreached"),
    ]  # fmt: skip


def test_a_run_that_ended_with_nan_is_no_target(tmp_path):
    """The reference's seed 1 has no last loss: the others have no number for that seed. A run without one is last."""
    put_runs(tmp_path, {"alibi": 2.0, "rope": 1.0, "t5": 0.5})
    for name in ("rope_L64_s1", "t5_L64_s0", "t5_L64_s1"):
        with (tmp_path / name / "metrics.jsonl").open("a") as file:
            file.write(logged("nan", step=101))
    runs, logs = read_training(tmp_path, read_results(tmp_path))
    (table,) = convergence_tables(runs, logs)
    found = {
        curve.label: [(point.values, point.failures) for point in points.values()] for curve, points in table.lines
    }
    assert list(found) == ["alibi", "rope", "t5"] and found["alibi"][1] == ((60,), ())
    assert found["t5"][0] == ((), ("diverged", "diverged"))
    assert found["rope"][1] == ((100,), ()) and found["t5"][1] == ((), ("unreached",))


def test_a_run_that_solved_its_task_early_is_the_best(tmp_path):
    """It ended before a window of the planned steps was over."""
    ends = {("t5", 0): 40, ("t5", 1): 30}
    facts = {"train.stop_check_steps": 10, "solved": True}
    put_runs(tmp_path, {"alibi": 0.05, "rope": 0.1, "t5": 6.0}, planned=1000, ends=ends, **facts)
    table = plots.format_table(tmp_path, "markdown").partition("Steps to a training loss")[2]
    assert "means of the last 10 steps" in table and cells(table, "t5")[1] == "2"
    assert cells(table, "t5")[3] == "30" and cells(table, "rope")[3] == "1,000"
    assert "the first check without a wrong item: t5_L64_s0 (step 40 of 1,000), t5_L64_s1 (step 30 of 1,000)" in table


def test_a_run_that_was_interrupted_is_no_target(tmp_path):
    """The loss of T5 at step 60 lies between those of the others at step 100."""
    put_runs(tmp_path, {"alibi": 2.0, "rope": 1.0, "t5": 2.5}, ends={("t5", 0): 60, ("t5", 1): 60, ("alibi", 1): 60})
    table = plots.format_table(tmp_path, "markdown").partition("Steps to a training loss")[2]
    assert cells(table, "t5") == ["t5", "0", *["not finished"] * 3]
    assert cells(table, "alibi")[1:4] == ["1", "1.11, 1 of 2 not finished", "60, 1 of 2 not finished"]
    assert cells(table, "rope")[3] == "100" and "loss of rope" in table


def test_tables_of_two_tokenizers_name_them(tmp_path):
    """Equal headings, and equal keys in CSV, would make two texts look like one. The figure of losses warns."""
    put_runs(tmp_path, {"alibi": 2.0, "rope": 1.0})
    ends = dict.fromkeys(itertools.product(("t5", "nope"), (0, 1)), 100)
    put_runs(tmp_path, {"t5": 2.0, "nope": 1.0}, ends=ends, data="b" * 64, tokenizer="wordlevel")
    text = plots.format_table(tmp_path, "markdown")
    heads = [line for line in text.splitlines() if line.startswith("Steps to a training loss")]
    assert len({head.partition("trained at")[2] for head in heads}) == 2
    assert "tokenizer wordlevel" in heads[-1] and "bbbbbbbbbbbb" in heads[-1] and "wordlevel" not in heads[0]
    numbers = [x for x in json.loads(plots.format_table(tmp_path, "json"))["numbers"] if x["unit"] == "steps"]
    assert {(x["tokenizer"], x["text"][0]) for x in numbers if x["encoding"] in ("t5", "nope")} == {("wordlevel", "b")}
    runs, logs = read_training(tmp_path, read_results(tmp_path))
    losses = {run: [(1.0, 3.0), (2.0, 2.0)] for run in logs}
    for own, warns in ((runs, True), (runs[runs.method.isin(["t5", "nope"])], False)):
        drawn = curves.training(own, {run: losses[run] for run in own.run}, {})
        assert any("losses are not comparable" in text.get_text() for text in drawn.texts) is warns
