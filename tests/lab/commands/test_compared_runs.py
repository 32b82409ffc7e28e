"""The runs behind a number: which are the seeds of one curve, on which text and at which step, and what each is called.

`posx compare`, `posx table` and the page of `posx report` read the same runs.
"""

import dataclasses
import json
import math
import os

import numpy as np
import pytest

from posx.errors import ConfigError
from posx.evaluation import holm, loss_difference, rise_difference
from posx.evaluation.statistics import BLOCK_LEN
from posx.lab import plots
from posx.lab.report.content import content
from posx.lab.results.table import read_results
from tests import tiny
from tests.lab.commands import refused
from tests.made_rows import DIGEST, as_lines, cells, config, logged, row, start

BLOCKS, STEPS = 64, 1200
ONE_PLACE = {"num_stretches": 1, "num_documents": 1}


def put(path, encoding="alibi", seed=0, lengths=(64, 128), train_len=64, shift=0.0, **facts):
    """Append the rows of a run, whose settings are those of a real one; the text of training is facts["data"]."""
    run = config(encoding, train__seed=seed, train__length=train_len, train__steps=STEPS)
    noise = np.random.default_rng([seed, len(encoding)]).standard_normal(BLOCKS)
    text = 1.5 + 0.1 * np.random.default_rng(0).standard_normal(BLOCKS)
    sums, count = (text + shift + 0.02 * noise) * BLOCK_LEN, BLOCKS * BLOCK_LEN
    made = {"num_targets": count, "max_targets": count, "num_bytes": count, "block_len": BLOCK_LEN, "targets": "abc"}
    made |= {"block_nll": sums.tolist(), "nll": sums.sum() / count, "ppl": math.exp(sums.sum() / count)}
    made |= {"settings": dict(run.settings) | {"data": facts.pop("data", run.text)}, "layers": [encoding]}
    made |= {"step": STEPS, "train_len": train_len, "code": dict(run.code)} | facts
    path.mkdir(parents=True, exist_ok=True)
    with open(path / "eval.jsonl", "a") as file:
        file.write(as_lines(row("rope", n, seed, **made) | {"encoding": encoding} for n in lengths))
    return str(path)


def seeds(folder, *encodings, count=2, **facts):
    for encoding in encodings:
        for seed in range(count):
            put(folder / f"{encoding}-s{seed}", encoding, seed, shift=0.05 * len(encoding) + 0.01 * seed, **facts)


def compared(capsys, *words):
    """Return the comparisons at 64 tokens, and what is said beside them."""
    code, out, err = tiny.call(capsys, "compare", *words, "--json", "--lengths=64")
    assert code == 0, err
    return list(map(json.loads, out.splitlines())), err


def test_seeds_at_other_steps_are_no_seeds_of_one_curve(capsys, tmp_path):
    """As evaluated while one training went on: a run at step 500 is not averaged with a finished one."""
    seeds(tmp_path, "alibi")
    put(tmp_path / "rope-s0", "rope", 0, step=500)
    put(tmp_path / "rope-s1", "rope", 1)
    found, err = compared(capsys, str(tmp_path))
    pairs = {(one["one"], one["other"]): one["seeds"] for one in found}
    assert pairs["alibi", "rope, step=500"] == pairs["alibi", "rope, step=1200"] == [1, 1]
    assert "Measured before the end of training: rope-s0 (step 500 of 1,200)" in err
    assert cells(plots.table(read_results(tmp_path)), "rope, step=500")[1] == "1"


def test_rows_before_a_nan_do_not_stand_for_the_seed(capsys, caplog, tmp_path):
    """`posx evaluate` measures a run whose training ended with NaN by its last checkpoint."""
    seeds(tmp_path, "alibi", "rope")
    start(tmp_path / "rope-s2", config("rope", train__seed=2, train__steps=STEPS))
    (tmp_path / "rope-s2" / "metrics.jsonl").write_text(logged(2.0, "nan"))
    settings = json.loads((tmp_path / "rope-s2" / "config.json").read_text())
    put(tmp_path / "rope-s2", "rope", 2, step=500, hash=settings["hash"])
    put(tmp_path / "alibi-s2", "alibi", 2)
    refused(capsys, 2, ["compare", str(tmp_path)], "rope, seed 2: ended with NaN. Train this seed again")
    assert "rope-s2: training ended with NaN at step 1. Rows of earlier steps do not count" in caplog.text
    table = plots.table(read_results(tmp_path))
    assert cells(table, "rope")[1] == "2" and "(1 ended with NaN)" in cells(table, "rope")[2]


def test_labels_name_the_text_of_training(capsys, tmp_path):
    """Both were scored on one text: own of the first, named for the second. Only the text of training differs."""
    common = {"data_source": "books", "data_digest": "5" * 16}
    seeds(tmp_path / "own", "rope", data="1" * 16, **common)
    seeds(tmp_path / "named", "rope", data="2" * 16, own_text=False, **common)
    (one,), _ = compared(capsys, str(tmp_path))
    assert (one["one"], one["other"]) == ("rope, text=111111111111", "rope, text=222222222222")
    seeds(tmp_path / "third", "rope", data="3" * 16, own_text=False, data_source="b2", data_digest="5" * 16)
    found, _ = compared(capsys, str(tmp_path))
    assert len(found) == 3 and {one["pairing"] for one in found} == {"by seed"}
    assert {name[:11] for one in found for name in (one["one"], one["other"])} == {"rope, text="}


def test_the_source_of_a_run_is_that_of_its_first_row(capsys, tmp_path):
    """A longer window was measured with other training text named, but the same validation text."""
    put(tmp_path / "a", "rope", data="1" * 16, data_source="novels, held out v")
    put(tmp_path / "a", "rope", lengths=(256,), data="1" * 16, data_source="code, held out v")
    put(tmp_path / "b", "rope", data="2" * 16, data_source="code, held out v")
    (one,), _ = compared(capsys, str(tmp_path))
    assert (one["one"], one["other"]) == ("rope, source=novels, held out v", "rope, source=code, held out v")


def test_an_imported_model_has_no_seed(capsys, tmp_path):
    """So it is compared with the mean of all seeds, not with the one whose number its settings have."""
    seeds(tmp_path, "alibi", count=3)
    put(tmp_path / "model", "rope", own_text=False, data="imported 12ab")
    (one,), err = compared(capsys, str(tmp_path))
    assert (one["pairing"], one["seeds"]) == ("unpaired", [3, 1]) and "has no results of this seed" not in err
    assert (one["method"]["word"], one["checkpoints"]["word"]) == ("no seeds (imported)", "worse")
    failed = {"status": "oom", "ppl": None, "nll": None, "block_nll": None}
    put(tmp_path / "other", "t5", own_text=False, data="imported 34cd", **failed)
    reasons = {one["reason"] for one in compared(capsys, str(tmp_path))[0]}
    assert reasons == {"", "t5, model=34cd: out of memory"}


def test_runs_are_compared_on_the_text_that_most_have(capsys, tmp_path):
    """A tuned run has rows of its tuning text, and of the text that the other run was measured on."""
    seeds(tmp_path, "rope")
    tuned = {"data": "7" * 16}
    seeds(tmp_path, "alibi", data_digest="8" * 16, targets="tuning", **tuned)
    seeds(tmp_path, "alibi", own_text=False, **tuned)
    (one,), err = compared(capsys, str(tmp_path))
    assert one["pairing"] == "by seed" and one["reason"] == "" and one["text"] == DIGEST
    assert f"16,384 targets, text {DIGEST}, 2 pairs" in tiny.call(capsys, "compare", str(tmp_path))[1]
    assert "alibi-s0, alibi-s1, each: 2 rows left out, measured on other text" in err
    assert "corpora" not in plots.table(read_results(tmp_path))
    # A seed without results is of the curve whose other seeds were measured on that text.
    failed = dataclasses.replace(config("alibi", train__seed=2, train__steps=STEPS), text="7" * 16)
    start(tmp_path / "alibi-s2", failed)
    (tmp_path / "alibi-s2" / "metrics.jsonl").write_text(logged(2.0, "nan"))
    put(tmp_path / "rope-s2", "rope", 2)
    refused(capsys, 2, ["compare", str(tmp_path)], "alibi, text=777777777777, seed 2: ended with NaN")


def test_a_link_to_a_run_or_sweep_is_no_run(capsys, tmp_path):
    seeds(tmp_path / "sweep", "alibi", "rope")
    os.symlink(tmp_path / "sweep", tmp_path / "latest")
    os.symlink(tmp_path / "sweep" / "rope-s1", tmp_path / "sweep" / "best")
    (one,), _ = compared(capsys, str(tmp_path))
    assert (one["one"], one["other"], one["seeds"], one["pairing"]) == ("alibi", "rope", [2, 2], "by seed")


def test_lengths_of_other_runs_are_refused_with_a_reason(capsys, tmp_path):
    put(tmp_path / "a", "alibi", lengths=(32, 64), train_len=32, targets="one")
    put(tmp_path / "b", "rope", lengths=(128, 256), train_len=128)
    refused(capsys, 2, ["compare", str(tmp_path)], "alibi, length=32 and rope, length=128 scored other targets")


def test_runs_without_results_are_named_beside_verdicts(capsys, tmp_path):
    seeds(tmp_path, "alibi", "rope")
    start(tmp_path / "rope-s2", config("rope", train__seed=2))
    _, err = compared(capsys, str(tmp_path))
    assert "notice: No results yet: rope-s2" in err


def test_missing_runs_of_several_folders_name_their_folder(capsys, tmp_path):
    for folder, encoding in (("a", "alibi"), ("b", "rope")):
        put(tmp_path / folder / f"{encoding}-s0", encoding)
        start(tmp_path / folder / "t5-s0", config("t5"))
    _, err = compared(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    said = "No results yet: a/t5-s0, b/t5-s0"
    assert f"notice: {said}" in err
    assert said in content([tmp_path / "a", tmp_path / "b"])["panels"][0]["notes"]


def test_other_tokenizers_of_one_name_are_no_other_text(capsys, tmp_path):
    for number, encoding in enumerate(("alibi", "rope")):
        put(tmp_path / encoding, encoding, tokenizer="bpe-512", data_digest=f"{number}" * 16, targets=f"{number}")
    refused(capsys, 2, ["compare", str(tmp_path)], "were measured on other texts, or tokenizers of one name")


def test_equal_targets_of_other_files_are_compared(capsys, tmp_path):
    """The digest of a text has that of its tokenizer, which another library may have written."""
    for number, encoding in enumerate(("alibi", "rope")):
        put(tmp_path / encoding, encoding, tokenizer="bpe-512", data_digest=f"{number}" * 16)
    judged, _ = compared(capsys, str(tmp_path))
    assert judged and all(one["effect"] for one in judged)


def test_page_and_table_count_the_same_seeds(tmp_path):
    seeds(tmp_path, "alibi", "rope", count=3)
    (tmp_path / "rope-s2" / "eval.jsonl").unlink()
    put(tmp_path / "rope-s2", "rope", 2, targets="other")
    table = plots.table(read_results(tmp_path))
    page = content([tmp_path])
    (panel,) = page["panels"]
    names = [page["curves"][n]["label"] for n in panel["table"]["curves"]]
    shown = {name: seeds["text"] for name, (seeds, *_) in zip(names, panel["table"]["body"], strict=True)}
    assert shown == {name: cells(table, name)[1] for name in ("alibi", "rope")} == {"alibi": "3", "rope": "2"}


def test_page_shows_the_seeds_that_ended_with_nan(tmp_path):
    """The copies are those of posx table, and the training of an encoding without any results can be drawn."""
    seeds(tmp_path, "alibi", "rope")
    for run, encoding, seed in (("rope-s2", "rope", 2), ("t5-s0", "t5", 0)):
        start(tmp_path / run, config(encoding, train__seed=seed, train__steps=STEPS))
        (tmp_path / run / "metrics.jsonl").write_text(logged(2.0, "nan", tokens=4096))
    page = content([tmp_path])
    assert page["copies"] == {form: plots.format_table(tmp_path, form) for form in page["copies"]}
    (panel,) = page["panels"]
    names = [page["curves"][n]["label"] for n in panel["table"]["curves"]]
    lines = dict(zip(names, panel["table"]["body"], strict=True))
    assert lines["rope"][0]["text"] == "2" and "(1 ended with NaN)" in lines["rope"][1]["text"]
    horizons = {name: line[-1] and line[-1]["text"] for name, line in lines.items()}
    assert horizons == {"alibi": ">= 2", "rope": None, "t5": None}
    assert lines["t5"][1] == {"value": None, "text": "ended with NaN"} and names[-1] == "t5"
    assert {run["curve"] for run in page["training"]} <= {*panel["curves"]}
    assert "Training ended with NaN: rope-s2 at step 1, t5-s0 at step 1" in panel["notes"]


def test_every_protocol_shows_the_seeds_that_ended_with_nan(tmp_path):
    """Sliding windows had the mean of the other seeds, their number and their horizon, without a word."""
    seeds(tmp_path, "alibi", "rope")
    for stride in (16, 32):
        seeds(tmp_path, "alibi", "rope", protocol="sliding", stride=stride)
    start(tmp_path / "rope-s2", config("rope", train__seed=2, train__steps=STEPS))
    (tmp_path / "rope-s2" / "metrics.jsonl").write_text(logged(2.0, "nan"))
    shown = plots.table(read_results(tmp_path)).split("Trained at")[1:]
    assert len(shown) == 3 and all("(1 ended with NaN)" in cells(one, "rope")[2] for one in shown)
    for panel in content([tmp_path])["panels"]:
        assert [line[-1] and line[-1]["text"] for line in panel["table"]["body"]] == [None, ">= 2"], panel["title"]


def test_a_seed_that_failed_at_l_is_counted_in_every_ratio(tmp_path):
    """R_2 had the mean and the spread of the other seeds, and did not say that one of three had failed."""
    seeds(tmp_path, "rope", count=3)
    failed = {"status": "nonfinite", "ppl": None, "nll": None, "block_nll": None}
    put(tmp_path / "rope-s1", "rope", 1, lengths=(64,), **failed)
    line = cells(plots.table(read_results(tmp_path)), "rope")
    assert line[1] == "2 to 3" and line[-1].endswith("(1 not finite)")


def test_a_failed_seed_ends_the_horizon(tmp_path):
    """The seeds that are left would be a choice."""
    seeds(tmp_path, "alibi", count=2)
    failed = {"status": "nonfinite", "ppl": None, "nll": None, "block_nll": None}
    put(tmp_path / "alibi-s0", "alibi", 0, lengths=(256,))
    put(tmp_path / "alibi-s1", "alibi", 1, lengths=(256,), **failed)
    (line,) = content([tmp_path])["panels"][0]["table"]["body"]
    assert line[-1] == {"value": 2, "text": "2"} and line[-2]["text"].endswith("(1 not finite)")


def test_equal_means_of_unequal_blocks_are_no_equal_losses(capsys, tmp_path):
    for encoding in ("alibi", "rope"):
        put(tmp_path / encoding, encoding)
    lines = [json.loads(line) for line in (tmp_path / "alibi" / "eval.jsonl").read_text().splitlines()]
    blocks = np.array(lines[0]["block_nll"]) + np.tile([20, -20, -10, 10], BLOCKS // 4)
    (tmp_path / "rope" / "eval.jsonl").unlink()
    put(tmp_path / "rope", "rope", block_nll=blocks.tolist())
    (one,), _ = compared(capsys, str(tmp_path))
    verdict = one["checkpoints"]
    assert one["effect"] == pytest.approx(1, abs=1e-9) and verdict["low"] < 0.999
    assert (verdict["word"], one["reason"], verdict["p"]) == ("not separated", "", 1)


def test_no_order_of_rows_decides_an_interval(tmp_path):
    """One seed was told to score all of the text, the other as many targets as the text has."""
    for name, places in (("alibi", (0, 1)), ("rope", (1, 0))):
        for seed, place in enumerate(places):
            put(tmp_path / f"{name}-s{seed}", name, seed, **ONE_PLACE | ({"max_targets": 0} if place else {}))
    table = plots.table(read_results(tmp_path))
    assert "(" in cells(table, "alibi")[2] and "(" in cells(table, "rope")[2] and "No interval" not in table
    one, other = (json.loads((tmp_path / f"rope-s{n}" / "eval.jsonl").open().readline()) for n in range(2))
    assert (
        loss_difference([one], [other], paired=False).over_text
        and loss_difference([other], [one], paired=False).over_text
    )


def test_pairs_of_other_seeds_are_refused():
    def made(seed, length=64):
        return {
            "seed": seed, "eval_len": length, "targets": "t", "block_len": 256, "num_targets": 64 * 256, "nll": 2.0,
            "block_nll": [512.0] * 64,
        }  # fmt: skip

    ours, theirs = [made(0), made(1)], [made(1), made(0)]
    for wrong in (theirs, theirs[:1]):
        with pytest.raises(ConfigError, match="paired=True: the seeds are"):
            loss_difference(ours, wrong, paired=True)
    assert loss_difference(ours, theirs).mean == loss_difference(ours, theirs[::-1], paired=True).mean == 0
    with pytest.raises(ConfigError, match="a row of each side"):
        loss_difference([], theirs)
    rises = [(made(seed, 128), made(seed)) for seed in range(2)]
    assert rise_difference(rises, rises, paired=True).mean == 0
    with pytest.raises(ConfigError, match="paired=True"):
        rise_difference(rises, rises[::-1], paired=True)
    for wrong in ([pair[::-1] for pair in rises], [(made(seed, 256), made(seed)) for seed in range(2)]):
        with pytest.raises(ConfigError, match="with one k"):
            rise_difference(rises, wrong)
    mixed = [(far | {"hash": "a"}, near | {"hash": "b"}) for far, near in rises]
    with pytest.raises(ConfigError, match="two rows of one run, but these are of a and b"):
        rise_difference(rises, mixed)


def test_holm_refuses_what_is_no_p_value():
    for wrong in (None, math.nan, 1.5, -0.1):
        with pytest.raises(ConfigError, match="is no p-value"):
            holm([0.01, wrong])
