"""`posx compare`: verdicts on pairs of runs, and refusals of what cannot be compared."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from posx.evaluation.statistics import BLOCK_LEN, loss_difference
from tests import tiny
from tests.commands import refused
from tests.made_rows import as_lines, row

BLOCKS = 64


def put(folder, encoding, seed=0, shift=0.0, noise=0.02, **changes):
    """Write a run whose losses are those of one text, shifted."""
    rng = np.random.default_rng(0)
    text = 1.5 + 0.1 * rng.standard_normal(BLOCKS)
    own = shift + noise * np.random.default_rng([seed, len(encoding)]).standard_normal(BLOCKS)
    nll, count = (text + own) * BLOCK_LEN, BLOCKS * BLOCK_LEN
    made = {"num_targets": count, "max_targets": count, "block_nll": nll.tolist(), "block_len": BLOCK_LEN}
    made |= {"nll": nll.sum() / count, "ppl": math.exp(nll.sum() / count), "targets": "abc"} | changes
    path = folder / f"{encoding}-L64-s{seed}"
    path.mkdir(parents=True)
    lines = [row(encoding, length, seed, **made) for length in (64, 128)]
    (path / "eval.jsonl").write_text(as_lines(lines))
    return str(path)


def compared(capsys, *words):
    code, out, err = tiny.call(capsys, "compare", *words, "--json")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_compare_says_which_run_is_better(capsys, tmp_path):
    paths = [put(tmp_path, "alibi"), put(tmp_path, "rope", shift=-0.05), put(tmp_path, "t5", shift=-0.051)]
    found = {(one["one"], one["other"], one["eval_len"]): one for one in compared(capsys, *paths)}
    assert len(found) == 6
    assert found["alibi", "rope", 64]["word"] == "worse"
    assert found["rope", "t5", 128]["word"] == "not separated"
    one = found["alibi", "rope", 128]
    assert one["low"] < one["ratio"] < one["high"] and one["ratio"] == pytest.approx(math.exp(0.05), abs=0.01)
    code, out, _ = tiny.call(capsys, "compare", paths[0], paths[1])
    assert code == 0 and "alibi against rope" in out and "worse (one seed)" in out and "not over seeds" in out
    # A folder of runs stands for all of them.
    assert compared(capsys, str(tmp_path)) == list(found.values()) == compared(capsys, f"--workdir={tmp_path}")


def test_compare_counts_the_spread_of_seeds(capsys, tmp_path):
    """A difference that one seed shows may be less than seeds differ."""
    for seed in range(3):
        put(tmp_path, "alibi", seed, shift=(0.0, 0.2, -0.2)[seed])
        put(tmp_path, "rope", seed, shift=-0.05)
    (one, _) = compared(capsys, str(tmp_path))
    assert one["seeds"] == [3, 3] and one["word"] == "not separated"
    (alone, _) = compared(capsys, *(str(tmp_path / f"{name}-L64-s0") for name in ("alibi", "rope")))
    assert alone["seeds"] == [1, 1] and alone["word"] == "worse"


def test_strides_of_one_protocol_are_not_mixed(capsys, tmp_path):
    """Both score the same targets of a window, each with other context."""
    strided = {"protocol": "hf_strided", "stride": 16}
    both, one = put(tmp_path, "alibi", **strided), put(tmp_path, "rope", shift=-0.05, **strided)
    other = put(tmp_path / "other", "alibi", shift=-0.2, **strided | {"stride": 32})
    with open(Path(both) / "eval.jsonl", "a") as file:
        file.write((Path(other) / "eval.jsonl").read_text())
    found = compared(capsys, both, one)
    assert [(row["stride"], row["word"]) for row in found] == [(16, "worse")] * 2


def test_half_of_each_window_is_no_stride_of_its_own(capsys, tmp_path):
    for encoding in ("alibi", "rope"):
        path = Path(put(tmp_path, encoding, protocol="hf_strided")) / "eval.jsonl"
        rows = [one | {"stride": one["eval_len"] // 2} for one in map(json.loads, path.read_text().splitlines())]
        path.write_text(as_lines(rows))
    code, out, err = tiny.call(capsys, "compare", str(tmp_path))
    assert code == 0 and out.count("alibi against rope") == 1 and ", stride" not in out, err


def test_differences_have_the_intervals_of_text_and_seeds():
    """Welch's interval and that of paired seeds, where Student's t has a closed form: 2 and 1 degrees of freedom."""
    count, text = BLOCKS * BLOCK_LEN, np.random.default_rng(1).standard_normal(BLOCKS)

    def rows(*losses):
        sums = [(loss + 0.1 * (text - text.mean())) * BLOCK_LEN for loss in losses]
        facts = {"block_len": BLOCK_LEN, "num_targets": count, "targets": 1}
        return [facts | {"block_nll": own.tolist(), "nll": own.sum() / count} for own in sums]

    ours, theirs = rows(2.0, 2.3), rows(2.1, 2.4)
    found = loss_difference(ours, theirs)
    assert found.mean == pytest.approx(-0.1)
    welch = 0.95 * math.sqrt(2 / (1 - 0.95**2)) * math.sqrt(2 * 0.045 / 2)
    assert found.over_seeds == pytest.approx(welch, rel=1e-6)
    assert found.half == pytest.approx(math.hypot(found.over_text, found.over_seeds))
    assert loss_difference(ours[:1], theirs).over_seeds is None
    paired = loss_difference(ours, rows(2.1, 2.5), paired=True)
    assert paired.over_seeds == pytest.approx(math.tan(0.475 * math.pi) * 0.05, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data_digest": "other"}, "were measured on other texts"),
        ({"tokenizer": "bpe"}, "have other tokenizers"),
        ({"eval_len": 96}, "no protocol and window in common"),
        ({"targets": "xyz"}, "scored other targets"),
        ({"status": "oom", "ppl": None}, "have no perplexity in common"),
    ],
)
def test_compare_refuses_what_cannot_be_compared(capsys, tmp_path, changes, reason):
    paths = [put(tmp_path, "alibi"), put(tmp_path, "rope")]
    file = tmp_path / "rope-L64-s0" / "eval.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text(as_lines(line | changes for line in lines))
    refused(capsys, 2, ["compare", *paths], reason, "alibi", "rope")


def test_compare_needs_two_kinds_of_runs_with_results(capsys, tmp_path):
    put(tmp_path, "alibi")
    put(tmp_path, "alibi", seed=1)
    refused(capsys, 2, ["compare", str(tmp_path)], "two are needed")
    (tmp_path / "empty").mkdir()
    refused(capsys, 4, ["compare", str(tmp_path / "empty")], "no run has results")
    refused(capsys, 4, ["compare", str(tmp_path / "none")], "does not exist")
    refused(capsys, 2, ["compare"], "--workdir is missing")
