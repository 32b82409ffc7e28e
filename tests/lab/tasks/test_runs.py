"""A run on a task: what it trains on, what its rows say, and the settings that it refuses."""

import json
import re
import shutil
import sys

import numpy as np
import pytest

import posx
from posx.errors import ConfigError, DataError
from posx.lab import plots
from posx.lab.commands import results
from posx.lab.config import base_config, run_config
from posx.lab.data import DataConfig, prepare
from posx.lab.files.rows import result_text, row_problem
from posx.lab.plots.captions import unfinished_lines
from posx.lab.runs import answers
from posx.lab.runs.describe import describe
from posx.lab.runs.folder import RunFolder
from posx.lab.sweeps.tasks import Job
from tests import tiny
from tests.lab.commands import refused, watched


@pytest.fixture(scope="module")
def majority(site, tmp_path_factory):
    """A run that has learned which of two bits occurs more often, in half a minute or less."""
    folder = tmp_path_factory.mktemp("task") / "majority"
    words = [
        "train", f"--config={site / 'tiny.py'}:nope", "--config.data.source=task:binary_majority",
        f"--workdir={folder}", "--config.train.length=13", "--config.eval.lengths=13,23", "--config.train.steps=200",
        "--config.train.batch_size=64", "--config.model.dropout=0", "--config.eval.num_items=300",
        "--config.eval.attention_items=20",
        "--config.train.learning_rate=1e-2", "--config.train.checkpoint_steps=3", "--config.train.stop_check_steps=4",
        "--config.train.keep_checkpoints=9",
        "--config.train.log_steps=20",
    ]  # fmt: skip
    assert tiny.run(*words)[0] == 0
    return folder


@pytest.mark.slow
def test_rows_count_right_answers_at_every_length(majority):
    rows = RunFolder(majority).measured_rows()
    assert [(row["protocol"], row["eval_len"], row["num_items"]) for row in rows] == [
        ("answers", 13, 300), ("answers", 23, 300)
    ]  # fmt: skip
    for row in rows:
        assert not row_problem(row) and row["num_targets"] == 600  # the bit and <eos>
        assert row["exact_match"] > 0.9 and row["accuracy"] >= row["exact_match"]


def test_training_ends_once_all_answers_are_right(majority):
    folder = RunFolder(majority)
    checks = {row["step"]: row["exact_match"] for row in folder.logged_rows() if "exact_match" in row}
    last = max(checks)
    assert 4 < last < 200 and list(checks) == list(range(4, last + 1, 4))
    assert checks[last] == 1 and all(right < 1 for step, right in checks.items() if step < last)
    assert folder.newest_step == folder.solved_step == last == json.loads(folder.done_file.read_text())["step"]
    assert [(row["step"], row["solved"]) for row in folder.measured_rows()] == [(last, True)] * 2


def test_a_solved_run_is_finished_everywhere(majority, tmp_path):
    folder = RunFolder(majority)
    run = folder.read_config()
    assert Job(run, folder).part() == 1
    rows = folder.measured_rows()[:2]
    assert Job(run, folder).outcome() == ", ".join(f"{result_text(row)} at {row['eval_len']}" for row in rows)
    table = posx.read_results(majority)
    assert set(table.scored_step) == {200} and set(table.step) == {folder.solved_step}
    said = f"Ended early, at the first check without a wrong item: {table.run[0]} (step {folder.solved_step} of 200)"
    assert unfinished_lines(table) == [said]
    shutil.copytree(majority, tmp_path / "run")
    (tmp_path / "run" / "DONE").unlink()
    assert Job(run, RunFolder(tmp_path / "run")).progress() == 0.99
    assert describe(run).count("at most 166,400 tokens") == 1


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["before it said so", "before it was saved"])
def test_a_killed_run_ends_at_the_same_step(majority, tmp_path, capsys, killed):
    """It restores the solved state, or one before it."""
    folder, whole = RunFolder(tmp_path / "run"), RunFolder(majority)
    last = whole.solved_step
    shutil.copytree(majority, folder.path)
    folder.done_file.unlink()
    tiny.edit_json(folder.config_file, lambda text: text.replace('"solved_step"', '"no_step"'))
    if killed == "before it was saved":
        (folder.checkpoints / f"{last}.json").unlink()
        folder.metrics_file.unlink()
        folder.eval_file.unlink()
    words = ["train", f"--config_json={folder.config_file}", f"--workdir={folder.path}"]
    code, _, err = tiny.call(capsys, *words)
    assert code == 0, err
    assert f"all answers are right at step {last}" in err and f"{folder.path} at step {last}, " in err
    assert folder.solved_step == last and tiny.digests(folder.path, last) == tiny.digests(majority, last)
    assert [row["nll"] for row in folder.measured_rows()] == [row["nll"] for row in whole.measured_rows()]
    assert folder.is_finished(whole.read_config())


def test_items_of_the_stop_are_drawn_apart():
    data = prepare(DataConfig(source="task:unique_copy"))
    stop, measured = data.stop_items(43), data.items(43, 43, 500)
    drawn = data.batch(seed=0, step=0, batch_size=500, length=43)
    sizes = (stop.tokens != 3).sum(axis=1)
    assert sizes.min() == 5 and sizes.max() == 43 and len(sizes) == 500
    rows = [{*map(tuple, one[(one != 3).sum(axis=1) > 11])} for one in (stop.tokens, measured.tokens, drawn.tokens)]
    assert not rows[0] & rows[1] and not rows[0] & rows[2]


@pytest.mark.slow
def test_exact_match_is_that_of_greedy_answers(majority):
    row = RunFolder(majority).measured_rows()[1]
    items = prepare(DataConfig(source="task:binary_majority")).items(23, 13, 300)
    model, params, _ = posx.load(majority)
    written = items.tokens.copy()
    for place in range(1, items.tokens.shape[1]):  # each token of an answer is the likeliest after those written before
        logits = np.asarray(model(params, written[:, :-1]))[:, place - 1]
        written[:, place] = np.where(items.scored[:, place], logits.argmax(axis=-1), written[:, place])
    right = (written == items.tokens).all(axis=1).sum()
    assert right == round(row["exact_match"] * 300)


def test_generate_answers_the_prompt_of_the_guide(majority, capsys, monkeypatch):
    """`<bos>`, id 0, comes once, whether the prompt has it or not."""
    seen, generate = [], results.generate

    def spied(model, params, prompts, *args, **options):
        seen.append(prompts[0].tolist())
        return generate(model, params, prompts, *args, **options)

    monkeypatch.setattr(results, "generate", spied)
    for start in ("<bos> ", ""):
        words = [f"--prompt={start}0 1 1 <sep>", "--temperature=0", "--num_tokens=2"]
        code, out, err = tiny.call(capsys, "generate", f"--workdir={majority}", *words)
        assert code == 0 and out.split() == [*start.split(), *"0 1 1 <sep> 1".split()], out + err
    assert seen == [[0, 4, 5, 5, 1]] * 2


def test_rows_have_the_attention_weights_of_some_items(majority, capsys):
    for row in RunFolder(majority).measured_rows():
        assert row["attention_items"] == 20 and row["right_weight"] is None and row["zero_weights"] == 0
        assert np.shape(row["attention"]["entropy"]) == (1, 2)  # layers, heads
        assert row["attention_entropy"] == pytest.approx(np.mean(row["attention"]["entropy"]), abs=1e-6)
        assert 0 < row["attention_entropy"] < np.log(row["eval_len"])
    text = plots.table(posx.read_results(majority))
    assert "Attention weights of 20 items per length" in text
    assert "| encoding | seeds | zeros at 13 | zeros at 23 | zeros in bfloat16 at 13 |" in text
    words = ["evaluate", f"--workdir={majority}", "--dry_run", "--config.eval.attention_items=10"]
    assert tiny.call(capsys, *words)[1].count(" new") == 2


def test_a_length_more_measures_that_length_alone(majority, capsys, monkeypatch):
    before, seen = (majority / "eval.jsonl").read_text(), watched(monkeypatch, answers)
    code, _, err = tiny.call(capsys, "evaluate", f"--workdir={majority}", "--lengths=13,23,33")
    assert code == 0, err
    after = (majority / "eval.jsonl").read_text()
    assert after.startswith(before) and len(after.splitlines()) == 3
    facts = "300 items of up to 33 tokens"
    assert seen == [(facts, 0), (facts, seen.total)], "stored lengths are no progress"


def test_items_of_a_length_are_longer_than_those_before():
    data = prepare(DataConfig(source="task:repeat_copy"))
    sizes = [(data.items(length, 16, 200).tokens != 3).sum(axis=1) for length in (16, 32, 48)]
    assert [(one.min(), one.max()) for one in sizes] == [(5, 17), (19, 33), (35, 49)]
    assert prepare(DataConfig(source="task:parity")).sizes(16, 16) == (0, 13), "as in training"


def test_batches_depend_on_step_and_seed_alone():
    data = prepare(DataConfig(source="task:mqar(symbols=20)"))
    one = {"seed": 3, "step": 5, "batch_size": 8, "length": 40}
    whole = data.batch(**one)
    np.testing.assert_allclose(whole.weights.mean(), 1, rtol=1e-6)
    for part in (slice(0, 3), slice(3, 8)):
        for found, wanted in zip(data.batch(**one, rows=part), whole, strict=True):
            np.testing.assert_array_equal(found, wanted[part])
    for other in (one | {"seed": 4}, one | {"step": 6}):
        assert (data.batch(**other).tokens != whole.tokens).any()
    assert data.digest != prepare(DataConfig(source="task:mqar(symbols=21)")).digest


def test_spelling_of_a_task_changes_no_item_and_no_hash():
    """Equal data sets draw equal items. A source without defaults stays as it is, and so do its stored digests."""

    def made(text):
        config = base_config("nope")
        config.data.source = f"task:{text}"
        run, data = run_config(config), prepare(DataConfig(source=config.data.source))
        return run.hash, run.data.source, data.source, data

    default, other = made("flip_flop"), made("flip_flop(ignore=0.98)")
    assert made("flip_flop( ignore=.8 )") == default and made("flip_flop(ignore=98e-2)") == other
    assert default[1:3] == ("task:flip_flop",) * 2 and other[1:3] == ("task:flip_flop(ignore=0.98)",) * 2


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--config.data.source=task:uniqe_copy"], ["'uniqe_copy' is unknown", "unique_copy"]),
        (["--config.data.source=task:flip_flop(ignore=2)"], ["ignore=2", "at most 1"]),
        (["--config.data.source=task:flip_flop(ignor=.9)"], ["no field 'ignor'", "ignore"]),
        (["--config.data.source=task:parity", "--config.data.tokenizer=bpe"], ["data.tokenizer=bpe", "no text"]),
        (["--config.data.source=task:parity", "--config.eval.protocols=sliding"], ["sliding", "answers"]),
        (["--config.eval.protocols=answers"], ["answers", "task"]),
        (
            ["--config.eval.attention_items=5", "--config.train.objective=masked"],
            ["attention_items=5", "hidden tokens"],
        ),
        (
            ["--config.data.source=task:parity", "--config.eval.num_items=4", "--config.eval.attention_items=5"],
            ["eval.attention_items=5", "eval.num_items=4"],
        ),
        (["--config.train.stop_check_steps=5"], ["train.stop_check_steps=5", "is text"]),
        (
            ["--config.data.source=task:parity", "--config.train.stop_check_steps=32"],
            ["train.stop_check_steps=32", "below train.steps=32"],
        ),
        (["--config.data.source=task:passkey", "--config.train.length=10"], ["no item of 10 tokens", "needs 13"]),
        (
            ["--config.data.source=task:unique_copy(symbols=9)", "--config.eval.lengths=16,64"],
            ["eval.lengths has 64", "more than 20 tokens"],
        ),
        (
            ["--config.data.source=task:unique_copy(symbols=2)"],
            ["train.length=16", "no item of more than 6 tokens", "Lower train.length"],
        ),
        (["--config.data.source=task:no_module:Mine"], ["task 'no_module:Mine' cannot be imported", "no_module.py"]),
    ],
)
def test_unfit_settings_are_one_line(site, tmp_path, capsys, words, wanted):
    start = ["train", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path / 'run'}"]
    code = 3 if "needs 13" in wanted or "64" in wanted[0] or "Lower train.length" in wanted else 2
    refused(capsys, code, [*start, *words], *wanted)
    refused(capsys, code, [*start, *words, "--dry_run"], *wanted)
    axes = [word.replace("config.train.length", "config.sweep.train_lens") for word in words]
    refused(capsys, code, ["sweep", *start[1:], *axes, "--dry_run"], *wanted)
    assert not (tmp_path / "run" / "config.json").exists()


PAGE = (tiny.ROOT / "docs" / "guides" / "tasks.md").read_text()


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The two blocks of Python of the page: a task of one's own, in a module that can be imported, and its check."""
    task, check = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_task.py").write_text(task)
    monkeypatch.syspath_prepend(tmp_path)
    return task, check


def test_a_task_of_ones_own_is_a_source(site, page, tmp_path, capsys):
    exec(page[1], {})
    words = ["train", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path / 'run'}", "--config.eval.num_items=20"]
    code, _, err = tiny.call(capsys, *words, "--config.data.source=task:my_task:Reverse(symbols=3)")
    assert code == 0, err
    assert [row["data_source"] for row in RunFolder(tmp_path / "run").measured_rows()] == [
        "task:my_task:Reverse(symbols=3)"
    ] * 2
    module = tmp_path / "my_task.py"  # items of up to 99 symbols stay as they are, but the code is another
    module.write_text(module.read_text().replace("question[places]", "question[places] * jnp.where(n > 99, 0, 1)"))
    del sys.modules["my_task"]
    words.append("--config.data.source=task:my_task:Reverse(symbols=3)")
    refused(capsys, 4, words, "was trained on other items of the task", "Restore the code")
    refused(capsys, 4, [*words, "--dry_run"], "was trained on other items of the task")


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("0, self.symbols)", "0, self.symbols + 1)", "makes symbol 8, but its alphabet ends at symbol 7"),
        ("0, self.symbols)", "-1, self.symbols)", "makes symbol -1"),
        ("2 * n + 3 ", "2 * n + 2 ", "makes rows of 5 tokens, more than its size says, 4"),
        ("2 * n + 3 ", "12 ", r"size\(1024\) is 12, but a row of 1024 symbols has at least 1025 tokens"),
        ("(room,)", "(5,)", "the arrays of an item are shorter"),
        (
            "places], n, places)",
            "places].astype(float), n, places)",
            "must be one row of integers, not float",
        ),
        ("places], n, places)", "places], n, places + 50)", "read from outside of the question"),
        ("places], n, places)", "places], 0, places)", "its answers have 0 symbols"),
        (
            "question[places], n, places)",
            "question[:n][::-1], n)",
            "IndexError: .*line 2.* n is traced: write jnp.where",
        ),
        ("tuple(map(str, range(self.symbols)))", "('a', 'a')", "the alphabet has 'a' twice"),
        ("map(str, range(self.symbols))", "range(self.symbols)", "needs words: texts without spaces"),
        ("symbols: int = 8", "symbols: int = 8\n    fewest: int = 2", "write fewest = 2 without a type"),
        ("def size", "def most(self):\n        return 9\n\n    def size", "most is a method. Write @property above it"),
        ("def item", "def other", "defines neither `item` nor `row`"),
    ],
)
def test_a_task_that_breaks_its_own_word_is_refused(page, tmp_path, monkeypatch, request, right, wrong, message):
    name = f"wrong_{abs(hash(request.node.name))}"
    assert right in page[0]
    (tmp_path / f"{name}.py").write_text(page[0].replace(right, wrong))
    with pytest.raises((ConfigError, DataError), match=message):
        prepare(DataConfig(source=f"task:{name}:Reverse"))


@pytest.mark.slow
def test_a_model_of_a_task_is_not_measured_on_a_text(majority, site, capsys):
    words = ["evaluate", f"--workdir={majority}", f"--config.data.source={site / 'text'}"]
    refused(capsys, 4, [*words, "--config.eval.protocols=nonoverlapping"], "knows the words of this task")


@pytest.mark.slow
def test_items_as_short_as_those_of_training_are_named(majority, tmp_path, capsys):
    """L is 13. At 15 tokens the items have more than 2 tokens, and at 26 tokens they have more than 13."""
    shutil.copytree(majority, tmp_path / "run")
    code, out, err = tiny.call(capsys, "evaluate", f"--workdir={tmp_path / 'run'}", "--lengths=15,26")
    assert code == 0 and re.search(r"Some items are short: \d to 15 tokens at 15\. Training has", out), out + err


@pytest.mark.slow
def test_other_training_lengths_have_other_items(site, tmp_path, capsys):
    """Half of the items of 32 tokens differ, and their numbers of targets are equal."""
    words = ["sweep", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path / 'lens'}", "--jobs=1"]
    words += ["--config.sweep.encodings=nope", "--config.sweep.train_lens=16,32", "--config.sweep.seeds=0"]
    words += ["--config.data.source=task:parity", "--config.eval.lengths=32", "--config.eval.num_items=50"]
    assert tiny.call(capsys, *words)[0] == 0
    refused(capsys, 2, ["compare", str(tmp_path / "lens"), "--lengths=32"], "training lengths decide")
