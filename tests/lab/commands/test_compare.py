"""`posx compare`: verdicts on pairs of runs, and refusals of what cannot be compared."""

import functools
import json
import math
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest

from posx.evaluation import rise_difference
from posx.evaluation.differences import loss_difference
from posx.evaluation.statistics import BLOCK_LEN
from posx.lab import plots
from posx.lab.plots.verdicts import p_text
from posx.lab.report.content import content
from posx.lab.results.table import read_results
from tests import tiny
from tests.lab.commands import refused
from tests.made_rows import DIGEST, as_lines, config, logged, row, start

BLOCKS = 64
NAMES = ("alibi", "rope")


def reseeded(path, seed):
    edited(path, lambda row: row | {"settings": row["settings"] | {"train.seed": seed}})


def moved(near, far, row):
    """Return a row whose loss is higher in every block, by `near` at 64 tokens and by `far` at 128."""
    shift = {64: near, 128: far}[row["eval_len"]]
    blocks, nll = [one + shift * BLOCK_LEN for one in row["block_nll"]], row["nll"] + shift
    return row | {"nll": nll, "ppl": math.exp(nll), "block_nll": blocks}


def stored_rows(path):
    """Return the rows of a run by length."""
    return {row["eval_len"]: row for row in map(json.loads, (path / "eval.jsonl").read_text().splitlines())}


def put(folder, encoding, seed=0, shift=0.0, noise=0.02, **changes):
    """Write a run whose losses are those of one text, shifted."""
    rng = np.random.default_rng(0)
    text = 1.5 + 0.1 * rng.standard_normal(BLOCKS)
    own = shift + noise * np.random.default_rng([seed, len(encoding)]).standard_normal(BLOCKS)
    nll, count = (text + own) * BLOCK_LEN, BLOCKS * BLOCK_LEN
    made = {"num_targets": count, "max_targets": count, "block_nll": nll.tolist(), "block_len": BLOCK_LEN}
    made |= {
        "nll": nll.sum() / count,
        "ppl": math.exp(nll.sum() / count),
        "targets": "abc",
        "num_bytes": count,
    } | changes
    path = folder / f"{encoding}-L64-s{seed}"
    path.mkdir(parents=True)
    lines = [row(encoding, length, seed, **made) for length in (64, 128)]
    (path / "eval.jsonl").write_text(as_lines(lines))
    return str(path)


def compared(capsys, *words, measure="ppl"):
    """Return the comparisons of one measure."""
    code, out, err = tiny.call(capsys, "compare", *words, "--json")
    assert code == 0, err
    return [one for one in map(json.loads, out.splitlines()) if one["measure"] == measure]


def edited(path, change):
    """Rewrite the rows of a run as `change` returns them, without those that it returns None for."""
    file = Path(path) / "eval.jsonl"
    rows = filter(None, map(change, map(json.loads, file.read_text().splitlines())))
    file.write_text(as_lines(rows))


def test_compare_says_which_run_is_better(capsys, tmp_path):
    paths = [put(tmp_path, "alibi"), put(tmp_path, "rope", shift=-0.05), put(tmp_path, "t5", shift=-0.051)]
    found = {(one["one"], one["other"], one["eval_len"]): one for one in compared(capsys, *paths)}
    assert len(found) == 6
    assert found["alibi", "rope", 64]["checkpoints"]["word"] == "worse"
    assert found["rope", "t5", 128]["checkpoints"]["word"] == "not separated"
    one = found["alibi", "rope", 128]
    ends = one["checkpoints"]["low"], one["checkpoints"]["high"]
    assert ends[0] < one["effect"] < ends[1] and one["effect"] == pytest.approx(math.exp(0.05), abs=0.01)
    nothing = dict.fromkeys(("low", "high", "p", "adjusted_p"))
    assert one["method"] == nothing | {"family": 0, "word": "too few seeds (1)"} and one["over_seeds"] is None
    code, out, _ = tiny.call(capsys, "compare", paths[0], paths[1])
    assert code == 0 and "alibi against rope" in out and "1 pair of equal seeds" in out
    (line,) = (line for line in out.splitlines() if line.split()[:1] == ["64"])
    assert re.search(r" worse +- +-  too few seeds \(1\)$", line) and "needs 5 seeds of each" in out
    # A folder of runs stands for all of them.
    assert compared(capsys, str(tmp_path)) == list(found.values()) == compared(capsys, f"--workdir={tmp_path}")


def test_runs_measured_before_their_end_are_named(capsys, tmp_path):
    """A process that was killed half way leaves weights that `posx evaluate` measures."""
    paths = [put(tmp_path, "alibi"), put(tmp_path, "rope", shift=0.05)]
    edited(Path(paths[1]), lambda row: row | {"step": 400, "settings": row["settings"] | {"train.steps": 1000}})
    note = "notice: Measured before the end of training: rope-L64-s0 (step 400 of 1,000)"
    for words in ([], ["--json"]):
        assert note in tiny.call(capsys, "compare", *paths, *words)[2]


def test_runs_evaluated_in_other_precisions_are_named(capsys, tmp_path):
    """On a CPU both names mean full float32. A row of a GPU without a name is of posx before it had the setting."""
    said = "Evaluated in different precisions of float32 products: default (alibi-L64-s0), highest (rope-L64-s0)"
    alibi, rope = put(tmp_path, "alibi"), put(tmp_path, "rope", shift=0.05)
    for device, other, differ in (("cpu", "default", False), ("H100", "default", True), ("H100", None, True)):
        edited(Path(rope), lambda row, device=device: row | {"precision": "highest", "env": {"device": device}})
        how = {"precision": other} if other else {}
        edited(Path(alibi), lambda row: {n: x for n, x in row.items() if n != "precision"})
        edited(Path(alibi), lambda row, device=device, how=how: row | {"env": {"device": device}} | how)
        assert (f"notice: {said}" in tiny.call(capsys, "compare", alibi, rope)[2]) == differ
        assert (said in plots.table(read_results(tmp_path))) == differ


def test_compare_counts_the_spread_of_seeds(capsys, tmp_path):
    """A difference of checkpoints may be less than seeds differ, and four seeds say nothing of a method."""
    for seed in range(5):
        put(tmp_path, "alibi", seed, shift=(0.0, 0.2, -0.2, 0.1, -0.1)[seed])
        put(tmp_path, "rope", seed, shift=-0.05)
    (one, _) = compared(capsys, str(tmp_path))
    assert one["seeds"] == [5, 5] and one["checkpoints"]["word"] == "worse"
    assert one["method"]["word"] == "not separated" and one["method"]["low"] < 1 < one["method"]["high"]
    (four, _) = compared(capsys, *(str(tmp_path / f"{name}-L64-s{seed}") for name in NAMES for seed in range(1, 5)))
    assert (four["method"]["word"], four["method"]["family"]) == ("too few seeds (4)", 0)
    assert four["method"]["low"] < four["effect"] < four["method"]["high"] and 0 < four["method"]["p"] < 1


def test_equal_seeds_are_compared_in_pairs(capsys, tmp_path):
    """Seeds that move both runs by 0.2 nats do not blur a difference of 0.05 that each of them shows."""
    for seed in range(5):
        put(tmp_path, "alibi", seed, shift=(0.0, 0.2, -0.2, 0.1, -0.1)[seed])
        put(tmp_path, "rope", seed, shift=(-0.051, 0.15, -0.249, 0.05, -0.151)[seed])
    (one, _) = compared(capsys, str(tmp_path), "--lengths=64,128")
    stored = [
        json.loads((tmp_path / f"{n}-L64-s{s}/eval.jsonl").open().readline())["nll"] for n in NAMES for s in range(5)
    ]
    gaps = [a - b for a, b in zip(stored[:5], stored[5:], strict=True)]
    mean, half = statistics.fmean(gaps), 2.77644511 * statistics.stdev(gaps) / math.sqrt(5)  # t of 4 degrees of freedom
    assert one["effect"] == pytest.approx(math.exp(mean), rel=1e-9) and one["pairing"] == "by seed"
    assert one["over_seeds"] == pytest.approx([math.exp(mean - half), math.exp(mean + half)], rel=1e-8)
    over_text = math.log(one["checkpoints"]["high"]) - mean
    assert math.log(one["method"]["high"]) - mean == pytest.approx(math.hypot(half, over_text), rel=1e-6)
    assert one["method"]["word"] == one["checkpoints"]["word"] == "worse"
    reseeded(tmp_path / "rope-L64-s2", 7)
    (one, _) = compared(capsys, str(tmp_path))
    assert (one["pairing"], one["method"]["word"], one["seeds"]) == ("unpaired", "not separated", [5, 5])
    shutil.rmtree(tmp_path / "alibi-L64-s4")
    code, out, err = tiny.call(capsys, "compare", str(tmp_path))
    assert code == 0 and "3 pairs of equal seeds" in out and "too few seeds (3)" in out
    assert "alibi, seed 2, as rope has no results of this seed" in err
    assert "rope, seed 7, 4, as alibi has no results" in err


def test_too_little_text_gives_no_verdict(capsys, tmp_path):
    """A factor of 45 on 16 blocks: nothing is said of other text, and never that the two are not separated."""
    for name, shift in (("alibi", 0.0), ("rope", 3.8)):
        for seed in range(2):
            path = put(tmp_path, name, seed, shift=shift)
            edited(path, lambda row: row | {"num_targets": 16 * BLOCK_LEN, "block_nll": row["block_nll"][:16]})
    (one, _) = compared(capsys, str(tmp_path))
    assert one["reason"] == "too few blocks of text (16 of at least 32)" and one["effect"] < 0.03
    for question, word in (("checkpoints", "no interval"), ("method", "too few seeds (2)")):
        assert one[question] == dict.fromkeys(("low", "high", "p", "adjusted_p")) | {"family": 0, "word": word}
    assert one["over_seeds"][1] < 1
    _, out, _ = tiny.call(capsys, "compare", str(tmp_path))
    assert out.count("  no interval  ") == out.count("  too few blocks of text (16 of at least 32)") == 3
    assert "not separated" not in out


def test_a_run_without_its_loss_gives_no_verdict(capsys, tmp_path):
    for seed in range(2):
        for name in ("alibi", "rope", "t5"):
            put(tmp_path, name, seed)
    edited(tmp_path / "alibi-L64-s1", lambda row: row if row["eval_len"] == 64 else None)
    nan = {"status": "nonfinite", "ppl": None, "nll": None, "block_nll": None}
    edited(tmp_path / "rope-L64-s0", lambda row: row | nan if row["eval_len"] == 64 else row)
    near, far = (one for one in compared(capsys, str(tmp_path)) if (one["one"], one["other"]) == NAMES)
    assert near["reason"] == "rope, seed 0: not finite" and near["effect"] is near["over_seeds"] is None
    assert far["reason"] == "alibi, seed 1: not measured"
    assert {one["checkpoints"]["word"] for one in (near, far)} == {"no interval"}


def test_order_of_runs_does_not_decide_an_interval(capsys, tmp_path):
    """One run was told to score all of the text, and the other as many targets as the text has."""
    few = {"num_stretches": 1, "num_documents": 1}
    words = []
    for folder, all_of_first in (("one", True), ("other", False)):
        for name, whole in (("alibi", all_of_first), ("rope", not all_of_first)):
            put(tmp_path / folder, name, shift=0.05 * (name == "rope"), **few | ({"max_targets": 0} if whole else {}))
        words.append(compared(capsys, str(tmp_path / folder))[0]["checkpoints"]["word"])
    assert words == ["better", "better"]
    for name in NAMES:
        put(tmp_path / "few", name, shift=0.05 * (name == "rope"), **few)
    assert compared(capsys, str(tmp_path / "few"))[0]["reason"].startswith("too few places")


def test_words_print_no_value_on_the_other_side(capsys, tmp_path):
    """A p-value just below 0.05 is not printed as 0.05, nor a ratio of e^-12 as 0."""
    assert [p_text(p) for p in (0.0497, 0.05, 0.0503, 0.04999996, 0.0, 1e-14)] == [
        "0.0497", "0.05", "0.05", "0.04999996", "0", "1e-14",
    ]  # fmt: skip
    paths = [put(tmp_path, "alibi"), put(tmp_path, "rope", shift=0.007214555740356444)]
    (one,) = compared(capsys, *paths, "--lengths=64")
    assert 0.0495 < one["checkpoints"]["adjusted_p"] < 0.05 and one["checkpoints"]["word"] == "better"
    assert "  0.0497  better" in tiny.call(capsys, "compare", *paths, "--lengths=64")[1]
    far = put(tmp_path, "t5", shift=12.0)
    (line, *_) = [line for line in tiny.call(capsys, "compare", paths[0], far)[1].splitlines() if " 64 " in line]
    assert "6.1" in line and "e-06" in line and "0.0000" not in line


def test_a_seed_that_ended_with_nan_is_not_dropped(capsys, tmp_path):
    """The seeds that are left would be a choice: neither the command nor the page judges them, in any window."""
    for seed in range(3):
        for name, shift in (("alibi", 0.0), ("t5", 0.05), ("rope", -0.05)):
            settings = config(name, train__seed=seed)
            path = Path(put(tmp_path, name, seed, shift=shift + 0.001 * seed * len(name)))
            facts = {"layers": [name], "code": dict(settings.code), "settings": settings.settings}
            edited(path, lambda row, facts=facts: row | facts)
    assert compared(capsys, str(tmp_path))[0]["checkpoints"]["word"] == "worse"
    (path / "eval.jsonl").unlink()
    start(path, settings)
    (path / "metrics.jsonl").write_text(logged(2.0, "nan"))
    for folders in ([str(tmp_path)], [str(tmp_path), str(path)]):
        every = [one for measure in ("ppl", "R_k") for one in compared(capsys, *folders, measure=measure)]
        found = [one for one in every if "rope" in (one["one"], one["other"])]
        assert (
            len(found) == 6 and len(every) == 9 and {one["reason"] for one in found} == {"rope, seed 2: ended with NaN"}
        )
        words = {(one["checkpoints"]["word"], one["method"]["word"], *one["seeds"], one["effect"]) for one in found}
        assert words == {("no interval", "too few seeds (3)", 3, 3, None)}
    none = [None, None, None]
    row = [None, [*none, "no interval"], [*none, "too few seeds (3)"], found[0]["reason"]]
    assert [line[3:] for line in content([tmp_path])["verdicts"]].count(row) == 6
    for seed in range(3):
        shutil.rmtree(tmp_path / f"t5-L64-s{seed}")
    refused(capsys, 2, ["compare", str(tmp_path)], "rope, seed 2: ended with NaN. Train this seed again")
    path = tmp_path / "alibi-L64-s2"
    (path / "eval.jsonl").unlink()
    start(path, config("alibi", train__seed=2))
    (path / "metrics.jsonl").write_text(logged(2.0, "nan"))
    refused(capsys, 2, ["compare", str(tmp_path)], "alibi, seed 2: ended with NaN, and 1 more. Train this seed again")


def test_a_single_run_is_compared_with_its_own_seed(capsys, tmp_path):
    """Better than the run of its seed by 0.05 nats, and worse than the mean of three seeds, two of them lucky."""
    for seed, shift in enumerate((0.2, 0.0, 0.0)):
        put(tmp_path, "rope", seed, shift=shift)
    single = put(tmp_path, "alibi", shift=0.15)
    (one, _) = compared(capsys, str(tmp_path))
    assert (one["checkpoints"]["word"], one["seeds"], one["pairing"]) == ("better", [1, 1], "by seed")
    assert one == compared(capsys, single, str(tmp_path / "rope-L64-s0"))[0]
    assert "rope, seed 1, 2, as alibi has no results of this seed" in tiny.call(capsys, "compare", str(tmp_path))[2]
    reseeded(single, 7)
    (one, _) = compared(capsys, str(tmp_path))
    assert (one["checkpoints"]["word"], one["seeds"], one["pairing"]) == ("worse", [1, 3], "unpaired")
    assert one["method"]["word"] == "too few seeds (1)" and one["method"]["low"] is None


def test_a_copy_is_no_second_seed(capsys, tmp_path):
    for name in NAMES:
        put(tmp_path, name, shift=0.05 * len(name))
        shutil.copytree(tmp_path / f"{name}-L64-s0", tmp_path / f"{name}-L64-s1")
        reseeded(tmp_path / f"{name}-L64-s1", 1)
    (one, _) = compared(capsys, str(tmp_path))
    assert "seeds 0 and 1 of alibi have equal losses" in one["reason"]
    assert one["checkpoints"]["word"] == "no interval" and one["checkpoints"]["p"] is one["method"]["p"] is None


def test_equal_runs_are_not_separated(capsys, tmp_path):
    put(tmp_path, "alibi", noise=0)
    put(tmp_path, "rope", noise=0)
    put(tmp_path, "t5", noise=0, shift=1e-8)
    found = {(one["one"], one["other"]): one for one in compared(capsys, str(tmp_path)) if one["eval_len"] == 64}
    same, rounded = found["alibi", "rope"], found["alibi", "t5"]
    assert list(same["checkpoints"].values()) == [1, 1, 1, None, 0, "not separated"] and same["effect"] == 1
    assert (same["reason"], rounded["reason"]) == ("all losses are equal", "equal up to rounding")
    rounded = rounded["checkpoints"]
    assert (rounded["word"], rounded["p"]) == ("not separated", 1) and rounded["low"] < 1 < rounded["high"]


def test_windows_of_l_are_compared_with_their_own_weights(capsys, tmp_path):
    """In windows of 64 tokens they are the same function, so only their losses at 128 and R_2 count in the family."""
    for name in NAMES:
        put(tmp_path, name, shift=0.1 * len(name), hash=name)
    before = compared(capsys, str(tmp_path))[0]["checkpoints"]
    for name in NAMES:
        settings = {"encoding.name": name, "train.length": 64, "train.seed": 0, "data": DIGEST, "parent.hash": name}
        settings |= {"model.mask_policy": ["window(size=64)"]}
        path = put(tmp_path / "windows", name, shift=0.1 * len(name), hash=f"{name} under a window", settings=settings)
        edited(path, lambda row: row if row["eval_len"] == 64 else moved(0, -0.05, row))
    made = compared(capsys, str(tmp_path))
    pairs = [tuple(one[side].removesuffix(" under window(size=64)") for side in ("one", "other")) for one in made]
    assert pairs == 2 * [("alibi", "alibi")] + 2 * [NAMES] + 2 * [("rope", "rope")]
    assert before["family"] == 2 and {one["checkpoints"]["family"] for one in made} == {2 + 2 * 2}


def test_compare_judges_rises_beyond_the_training_length(capsys, tmp_path):
    """R_2 of one is 1.05 times that of the other, while its perplexity at 2 L is lower."""
    for seed in range(5):
        for name, near, far in (("alibi", -0.2, -0.15), ("rope", 0.0, 0.0)):
            path = put(tmp_path, name, seed)
            edited(path, functools.partial(moved, near + 0.1 * seed, far + 0.1 * seed + 0.0001 * seed * len(name)))
    (found,) = compared(capsys, str(tmp_path), measure="R_k")
    assert (found["k"], found["eval_len"], found["method"]["word"]) == (2, 128, "worse")
    assert found["effect"] == pytest.approx(math.exp(0.05), rel=1e-3) and found["method"]["low"] > 1
    rows = {(name, n): row for name in NAMES for n, row in stored_rows(tmp_path / f"{name}-L64-s0").items()}
    (alone,) = compared(capsys, *(str(tmp_path / f"{name}-L64-s0") for name in NAMES), measure="R_k")
    gap = rise_difference(*([tuple(rows[name, n] for n in (128, 64))] for name in NAMES))
    ends = alone["checkpoints"]["low"], alone["checkpoints"]["high"]
    assert (alone["effect"], *ends) == pytest.approx((gap.effect()[0], *gap.effect(gap.half)), rel=1e-5)
    assert [one["eval_len"] for one in compared(capsys, str(tmp_path), "--lengths=128")] == [128]
    assert len(compared(capsys, str(tmp_path), "--lengths=128", measure="R_k")) == 1


def test_a_rise_counts_at_the_longer_of_two_lengths(capsys, tmp_path):
    """R_2 of L = 32 and L = 64 is measured at 64 and at 128 tokens: it is a verdict at 128, in either order."""
    for short, long in (NAMES, NAMES[::-1]):
        edited(put(tmp_path / short, short), lambda row: row | {"train_len": 32, "eval_len": row["eval_len"] // 2})
        put(tmp_path / short, long)
        runs = [str(tmp_path / short / f"{name}-L64-s0") for name in (short, long)]
        (found,) = compared(capsys, *runs, "--lengths=128", measure="R_k")
        assert (found["k"], found["eval_len"]) == (2, 128)
        assert not compared(capsys, *runs, "--lengths=64", measure="R_k")


def test_words_and_json_give_one_answer(capsys, tmp_path):
    """Holm's correction counts all comparisons that answer a question, so none of R_2, which is equal for all.

    The words print the p of the JSON.
    """
    for seed in range(5):
        for n, name in enumerate(("alibi", "rope", "t5", "nope")):
            own = (0.25, 0.2512, 0.315, 0.2)[n] + 0.004 * (seed * n % 3)
            put(tmp_path, name, seed, shift=0.1 * seed + own, noise=0.002)
    shutil.rmtree(tmp_path / "t5-L64-s4")
    found = compared(capsys, str(tmp_path)) + compared(capsys, str(tmp_path), measure="R_k")
    _, out, _ = tiny.call(capsys, "compare", str(tmp_path))
    lines = [line for line in out.splitlines() if line.split()[:1] in (["64"], ["128"], ["R_2"])]
    assert len(lines) == 18 and "of the column: 12 of these checkpoints, 6 of the method." in out
    ppl = [one for one in found if one["measure"] == "ppl"]
    for question, able in (("checkpoints", ppl), ("method", [one for one in ppl if "t5" not in one.values()])):
        chances = sorted(one[question]["p"] for one in able)
        assert {one[question]["family"] for one in found} == {len(chances)}
        for one in able:
            verdict, rank = one[question], chances.index(one[question]["p"])
            expected = max((len(chances) - n) * p for n, p in enumerate(chances[: rank + 1]))
            assert verdict["adjusted_p"] == pytest.approx(min(1, expected))
            assert (verdict["p"] < 0.05) == (not verdict["low"] <= 1 <= verdict["high"])
            decided = {True: "better" if one["effect"] < 1 else "worse", False: "not separated"}
            assert verdict["word"] == decided[verdict["adjusted_p"] < 0.05]
            assert any(f"  {verdict['adjusted_p']:.2g}  {verdict['word']}" in line for line in lines)
    assert len({one["method"]["word"] for one in able}) == 3
    lost = [one[name] for one in found for name in ("checkpoints", "method")]
    lost = sum(one["word"] == "not separated" and one["p"] < 0.05 for one in lost)
    assert lost and f'Alone, {lost} of the "not separated" would have p below 0.05' in out
    left = [one["method"] for one in found if "t5" in one.values()]
    assert {(one["word"], one["adjusted_p"]) for one in left} == {("too few seeds (4)", None)} and len(left) == 9
    assert {one["checkpoints"]["family"] for one in compared(capsys, str(tmp_path), "--lengths=64")} == {6}
    refused(capsys, 2, ["compare", str(tmp_path), "--lengths=65"], "--lengths=65", "no two runs")
    refused(capsys, 2, ["compare", str(tmp_path), "--protocol=slide"], "protocol 'slide' is unknown")


def test_strides_of_one_protocol_are_not_mixed(capsys, tmp_path):
    """Both score the same targets of a window, each with other context."""
    strided = {"protocol": "hf_strided", "stride": 16}
    both, one = put(tmp_path, "alibi", **strided), put(tmp_path, "rope", shift=-0.05, **strided)
    other = put(tmp_path / "other", "alibi", shift=-0.2, **strided | {"stride": 32})
    with open(Path(both) / "eval.jsonl", "a") as file:
        file.write((Path(other) / "eval.jsonl").read_text())
    found = compared(capsys, both, one)
    assert [(row["stride"], row["checkpoints"]["word"]) for row in found] == [(16, "worse")] * 2


def test_half_of_each_window_is_no_stride_of_its_own(capsys, tmp_path):
    for encoding in ("alibi", "rope"):
        path = Path(put(tmp_path, encoding, protocol="hf_strided")) / "eval.jsonl"
        rows = [one | {"stride": one["eval_len"] // 2} for one in map(json.loads, path.read_text().splitlines())]
        path.write_text(as_lines(rows))
    code, out, err = tiny.call(capsys, "compare", str(tmp_path))
    assert code == 0 and out.count("alibi against rope") == 1 and ", stride" not in out, err


def test_differences_have_the_intervals_of_text_and_seeds():
    """Unpaired and paired intervals of two seeds, where Student's t has a closed form: 1 degree of freedom."""
    count, text = BLOCKS * BLOCK_LEN, np.random.default_rng(1).standard_normal(BLOCKS)

    def rows(*losses):
        sums = [(loss + 0.1 * (text - text.mean())) * BLOCK_LEN for loss in losses]
        facts = {"block_len": BLOCK_LEN, "num_targets": count, "targets": 1}
        return [facts | {"block_nll": own.tolist(), "nll": own.sum() / count} for own in sums]

    ours, theirs = rows(2.0, 2.3), rows(2.1, 2.4)
    found = loss_difference(ours, theirs)
    assert found.mean == pytest.approx(-0.1)
    cauchy = math.tan(0.475 * math.pi)
    assert found.over_seeds == pytest.approx(cauchy * math.sqrt(2 * 0.045 / 2), rel=1e-6)
    assert found.half == pytest.approx(math.hypot(found.over_text, found.over_seeds))
    assert loss_difference(ours[:1], theirs).over_seeds is None
    paired = loss_difference(ours, rows(2.1, 2.5), paired=True)
    assert paired.over_seeds == pytest.approx(cauchy * 0.05, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data_digest": "other", "targets": "xyz"}, "were measured on other texts"),
        ({"tokenizer": "bpe"}, "have other tokenizers"),
        ({"tokenizer": "bpe"}, "bits per byte"),
        ({"eval_len": 96}, "no protocol and window in common"),
        ({"targets": "xyz"}, "scored other targets"),
        ({"status": "oom", "ppl": None}, "rope, seed 0: out of memory"),
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
    refused(capsys, 2, ["compare", str(tmp_path)], "the same settings but for the seed (alibi)")
    (tmp_path / "empty").mkdir()
    refused(capsys, 4, ["compare", str(tmp_path / "empty")], "no run has results")
    refused(capsys, 4, ["compare", str(tmp_path / "none")], "does not exist")
    refused(capsys, 2, ["compare"], "--workdir is missing")


def answer(folder, encoding, seed, right, **changes):
    """Write a run of a task that answers these items right, bool [n]."""
    wrong = np.add.reduceat((~right).astype(int), np.arange(0, len(right), 16)).tolist()
    facts = {"protocol": "answers", "num_items": len(right), "exact_match": right.mean(), "block_wrong": wrong}
    facts |= changes
    nll = 0.1 + 0.01 * seed + 0.001 * len(encoding)
    path = put(folder, encoding, seed, **facts, nll=nll, ppl=math.exp(nll), block_nll=None, stride=1)
    edited(
        path, lambda row: {name: value for name, value in row.items() if name not in ("block_len", "num_bytes", "bpb")}
    )


def test_right_answers_to_a_task_are_compared(capsys, tmp_path):
    """By their share, over the same items and over seeds: a difference, which is turned with the order of the two."""
    items = np.random.default_rng(0).random((5, 2000))
    for seed, own in enumerate(items):
        answer(tmp_path, "alibi", seed, own < 0.60 + 0.01 * seed)
        answer(tmp_path, "rope", seed, own < 0.75 + 0.01 * seed)
    found = compared(capsys, str(tmp_path), measure="right")
    assert [one["eval_len"] for one in found] == [64, 128] and not compared(capsys, str(tmp_path), measure="R_k")
    for one in found:
        assert one["effect"] == pytest.approx(-0.15, abs=0.02) and one["num_targets"] == 2000
        for verdict in (one["checkpoints"], one["method"]):
            assert verdict["word"] == "worse" and verdict["low"] < one["effect"] < verdict["high"] < 0
    printed = tiny.call(capsys, "compare", str(tmp_path))[1]
    assert re.search(r"64 +-0\.1[45]\d\d +-0\.\d{4} to -0\.\d{4}", printed)
    for text in ("2,000 items", "over items", "on other items of the task", "right answers above 0 favour the first"):
        assert text in printed


def test_hidden_tokens_are_compared_as_tables_show_them(capsys, tmp_path):
    """By the share of right tokens: hardly an item is right as a whole."""
    shares = {"alibi": 0.7, "rope": 0.8}
    for encoding, share in shares.items():
        right = np.random.default_rng(0).random((512, 20)) < share
        wrong = np.add.reduceat((~right).sum(axis=1), np.arange(0, 512, 16)).tolist()
        tokens = {"num_targets": right.size, "max_targets": 512, "block_wrong": wrong, "block_hidden": [16 * 20] * 32}
        answer(tmp_path, encoding, 0, right.all(axis=1), accuracy=right.mean(), **tokens)
        shares[encoding] = float(right.mean())
    for one in compared(capsys, str(tmp_path), measure="right"):
        assert one["effect"] == pytest.approx(shares["alibi"] - shares["rope"])
        assert one["checkpoints"]["word"] == "worse"


def test_runs_that_answer_all_right_are_not_separated(capsys, tmp_path):
    """They are no copies of each other, and four wrong items are chance: the exact test has p = 0.125."""
    right = np.ones(2000, bool)
    for seed in range(5):
        answer(tmp_path, "alibi", seed, right)
        answer(tmp_path, "rope", seed, right)
        answer(tmp_path, "t5", seed, np.arange(2000) % 500 != 7)
    found = {(one["one"], one["other"]): one for one in compared(capsys, str(tmp_path), measure="right")}
    assert len(found) == 3 and {one["checkpoints"]["word"] for one in found.values()} == {"not separated"}
    assert found["alibi", "rope"]["effect"] == 0 and found["alibi", "rope"]["checkpoints"]["p"] == 1
    assert found["alibi", "t5"]["effect"] == pytest.approx(0.002)
    assert found["alibi", "t5"]["checkpoints"]["p"] == pytest.approx(0.074, abs=0.005)


def test_the_report_has_the_right_answers_and_verdicts_of_a_task(capsys, tmp_path):
    items = np.random.default_rng(0).random(2000)
    for encoding, share in (("alibi", 0.6), ("rope", 0.75)):
        answer(tmp_path, encoding, 0, items < share)
    made = content([tmp_path])
    shares = {encoding: float((items < share).mean()) for encoding, share in (("alibi", 0.6), ("rope", 0.75))}
    (panel,) = made["panels"]
    assert {point["measure"] for point in panel["points"]} == {"right"} and len(panel["points"]) == 4
    assert panel["table"]["head"][2:] == ["right at 64", "right at 128"]
    right = [cells for _, *cells in panel["table"]["body"]]
    names = [made["curves"][n]["label"] for n in panel["table"]["curves"]]
    assert names == ["rope", "alibi"] and [far["value"] for _, far in right] == pytest.approx(
        [shares[n] for n in names]
    )
    assert all(near["text"].startswith(f"{near['value']:.4f} (") for near, _ in right)
    known = {one["eval_len"]: one["effect"] for one in compared(capsys, str(tmp_path), measure="right")}
    for verdict in made["verdicts"]:
        _, _, length, _, measure = made["places"][verdict[2]]
        assert measure == "right" and verdict[3] == pytest.approx(known[length])
        assert known[length] == pytest.approx(shares["alibi"] - shares["rope"])


def test_answers_without_their_blocks_are_refused(capsys, tmp_path):
    for encoding in NAMES:
        put(tmp_path, encoding, protocol="answers", num_items=8, exact_match=0.5, block_nll=None)
    refused(capsys, 2, ["compare", str(tmp_path)], "store no losses or answers of blocks")


def test_the_script_of_the_guide_gives_the_same_numbers(capsys, tmp_path, monkeypatch):
    for seed in range(5):
        for name, shift in (("alibi", 0.0), ("rope", 0.1), ("t5", 0.12)):
            put(tmp_path / "runs/fair", name, seed, shift=shift + 0.1 * seed)
    monkeypatch.chdir(tmp_path)
    guide = (Path(__file__).parents[3] / "docs/guides/compare.md").read_text(encoding="utf-8")
    script = guide.rpartition("```python\n")[2].partition("```")[0].replace("32)", "64)")
    capsys.readouterr()
    exec(compile(script, "compare.md", "exec"), {})
    known = []
    printed = capsys.readouterr().out.splitlines()
    for one in compared(capsys, "runs/fair", "--lengths=64"):
        known.append(f"{one['one']} against {one['other']}: {one['effect']:.4f}")
        for name in ("checkpoints", "method"):
            low, high, _, p, _, word = one[name].values()
            known.append(f"  {name}: {low:.4f}-{high:.4f}, p = {p:.2g}, {word}")
    assert printed == known and len(known) == 9
