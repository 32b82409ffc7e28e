"""Differences between runs of several seeds: intervals, p-values and Holm's correction agree with known values."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.intervals import coverage as study
from experiments.intervals import unpaired
from experiments.intervals import verdicts as families
from posx.errors import ConfigError
from posx.evaluation.differences import (
    ROUNDING,
    Difference,
    StandardError,
    holm,
    judge,
    loss_difference,
    rise_difference,
)
from posx.evaluation.statistics import COSINES

BLOCKS, BLOCK_LEN = 64, 256
rng = np.random.default_rng(0)


def row(losses):
    """Return a row whose blocks have these losses in nats a token."""
    sums = np.asarray(losses) * BLOCK_LEN
    facts = {"targets": "t", "block_len": BLOCK_LEN, "num_targets": BLOCKS * BLOCK_LEN}
    return facts | {"block_nll": sums.tolist(), "nll": float(sums.sum()) / (BLOCKS * BLOCK_LEN)}


def rows(seeds, spread, shift=0.0):
    text = rng.normal(2.0, 0.1, BLOCKS)
    return [row(text + shift + rng.normal(0, spread) + rng.normal(0, 0.01, BLOCKS)) for _ in range(seeds)]


def test_pairs_of_seeds_have_the_t_test_of_scipy():
    ours, theirs = rows(5, 0.1), rows(5, 0.1, shift=0.2)
    found = loss_difference(ours, theirs, paired=True)._replace(text=StandardError(0.0, COSINES))
    known = stats.ttest_rel(*([one["nll"] for one in side] for side in (ours, theirs)))
    assert found.p == pytest.approx(known.pvalue, rel=1e-6)
    low, high = known.confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high), rel=1e-9)


def test_seeds_without_partners_have_the_t_of_each_side():
    ours, theirs = rows(3, 0.1), rows(6, 0.02, shift=0.2)
    found = loss_difference(ours, theirs)
    errors = [stats.sem([one["nll"] for one in side]) for side in (ours, theirs)]
    for level in (0.05, 0.05 / 30):
        sides = [error * stats.t.isf(level / 2, freedom) for error, freedom in zip(errors, (2, 5), strict=True)]
        half = math.hypot(found.text.size * stats.t.isf(level / 2, 8), *sides)
        assert found.half_at(level) == pytest.approx(half, rel=1e-9)
    assert found.half_at(found.p) == pytest.approx(abs(found.mean), rel=1e-8)
    assert found.over_seeds == pytest.approx(math.hypot(*(errors * stats.t.isf(0.025, [2, 5]))), rel=1e-9)


def test_few_unpaired_seeds_are_wrong_in_five_percent_at_most():
    """Two seeds that spread three times as much as five others. Welch's t has a verdict on 11 % of equal runs."""
    draw = np.random.default_rng(0)

    def side(seeds, spread):
        losses = (2 + draw.normal(0, spread) + draw.normal(0, 1e-4, BLOCKS) for _ in range(seeds))
        return [row(one) for one in losses]

    differences = [loss_difference(side(2, 0.3), side(5, 0.1)) for _ in range(400)]
    assert sum(one.p < 0.05 for one in differences) <= 20
    assert all((one.p < 0.05) == (abs(one.mean) > one.half) for one in differences)


def test_the_study_of_unpaired_seeds_has_the_interval_of_posx():
    found, variances = unpaired.drawn((2, 5), 3.0, 1.0, 20, np.random.default_rng(0))
    half = unpaired.half_widths((2, 5), variances, 0.01)["posx"]
    for mean, (text, *seeds), expected in zip(found, np.sqrt(variances).T, half, strict=True):
        errors = tuple(map(StandardError, seeds, (1, 4)))
        assert Difference(mean, StandardError(text, COSINES), errors, "").half_at(0.01) == pytest.approx(expected)


def test_one_seed_has_the_interval_over_text_alone():
    (one,), (other,) = rows(1, 0), rows(1, 0, shift=0.003)
    found = loss_difference([one], [other])
    assert found.half == found.over_text and found.over_seeds is None
    assert found.p == pytest.approx(2 * stats.t.sf(abs(found.mean) / found.text.size, 8))


def test_swapped_rises_have_the_spread_of_their_seeds():
    far, near = ([row(rng.normal(2.0, 0.1, BLOCKS)) for _ in range(2)] for _ in range(2))
    swapped = rise_difference([(near[0], far[0]), (near[1], far[1])], [(far[0], far[0]), (far[1], far[1])], paired=True)
    gaps = [a["nll"] - b["nll"] for a, b in zip(near, far, strict=True)]
    assert swapped.mean == pytest.approx(sum(gaps) / 2)
    assert swapped.seeds == (pytest.approx((abs(gaps[0] - gaps[1]) / 2, 1)),)


def test_p_reaches_a_level_when_the_interval_does():
    """For any mixture of both sources, p is below a level if and only if the interval of that level leaves out 0."""
    for _ in range(500):
        text, *sizes = 10 ** rng.uniform(-9, 1, rng.integers(1, 4))
        seeds = tuple(StandardError(rng.choice([size, 0.0]), rng.integers(1, 9)) for size in sizes)
        one = Difference(rng.normal() * 10 ** rng.uniform(-8, 1), StandardError(text, COSINES), seeds, "")
        for level in (0.05, 0.05 / 110, 0.9, 1e-40):
            assert (one.p < level) == (abs(one.mean) > one.half_at(level))
        if 0 < one.p < 0.9:
            assert one.half_at(one.p) == pytest.approx(abs(one.mean), rel=1e-6)
    none = StandardError(0.0, COSINES)
    for mean, p, half in ((0.0, 1, 0.0), (ROUNDING / 2, 1, ROUNDING), (1.0, 0, ROUNDING)):
        one = Difference(mean, none, (none,), "")
        assert (one.p, one.half) == (p, half)
    assert Difference(1.0, none, (), "").p == 0 and Difference(1.0, None, (none,), "few").p is None


def test_holm_multiplies_by_the_hypotheses_left():
    """The numbers of p.adjust(p, "holm") in R."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.5]) == [1.0, 1.0] and holm([]) == []


def test_verdicts_on_equal_methods_are_wrong_in_few_calls():
    """Of 475 calls, 8 % is three standard errors above 5 %. The trained weights do differ, by their seeds."""
    draws = np.random.default_rng(0)
    every = [families.separated(judge(families.draw([0, 0, 0], 5, draws))) for _ in range(475)]
    checkpoints, methods = np.mean([one.any(axis=0) for one in every], axis=0)
    assert checkpoints > 0.7 and methods < 0.08


def test_five_seeds_show_three_spreads():
    draws = np.random.default_rng(0)
    for paired in (True, False):
        found = [families.separated(judge(families.draw([3, 0], 5, draws, paired)))[0] for _ in range(100)]
        assert all(np.mean(found, axis=0) > 0.8)


def test_few_seeds_give_no_verdict_on_a_method():
    """A difference of 50 spreads, whose p is tiny: three seeds count neither as a verdict nor in its family."""
    draws = np.random.default_rng(0)
    few, many, alone = (families.draw([50, 0], seeds, draws)[0] for seeds in (3, 5, 1))
    verdicts = judge([few, many, alone, few._replace(text=None)])
    checkpoints, methods = zip(*verdicts, strict=True)
    assert [one.word for one in checkpoints] == ["worse"] * 3 + ["no interval"]
    assert [one.word for one in methods] == [
        "too few seeds (3)", "worse", "too few seeds (1)", "too few seeds (3)",
    ]  # fmt: skip
    assert {one.family for one in checkpoints} == {3} and {one.family for one in methods} == {1}
    assert methods[0].p < 0.01 and 1 < methods[0].low < methods[0].high and methods[1].adjusted_p == methods[1].p
    assert methods[2].low is methods[2].p is None is methods[0].adjusted_p
    assert checkpoints[2].p == pytest.approx(alone.p) and [one.p for one in checkpoints[:3]] == pytest.approx(
        [2 * stats.t.sf(abs(one.mean) / one.text.size, COSINES) for one in (few, many, alone)]
    )


def test_missing_intervals_name_the_text_that_is_missing():
    (one,), (other,) = rows(1, 0), rows(1, 0)
    few = [short | {"block_nll": short["block_nll"][:31], "num_targets": 31 * BLOCK_LEN} for short in (one, other)]
    assert loss_difference(few[:1], few[1:]).no_interval == "too few blocks of text (31 of at least 32)"
    drift = row(np.linspace(2, 2.5, BLOCKS))
    assert "neighbouring blocks are alike" in loss_difference([drift], [row(np.full(BLOCKS, 2.0))]).no_interval
    assert loss_difference([one], [other]).no_interval == ""


def test_intervals_over_text_and_seeds_cover():
    found = study.of_seeds(3, "normal", "equal", 500, np.random.default_rng(0))
    assert all(0.92 <= found[name] <= 0.97 for name in ("seeds", "text"))
    assert all(0.94 <= found[name] for name in ("both", "R_k", "unpaired"))


def answers(right):
    wrong = np.add.reduceat((~right).astype(int), np.arange(0, len(right), 16)).tolist()
    return {"targets": "t", "num_items": len(right), "exact_match": right.mean(), "block_wrong": wrong}


def test_one_pair_of_answers_has_the_interval_of_agresti_and_min():
    """On one item in each block, where the variance over blocks is that over items but for n / (n - 1)."""
    ours, theirs = np.ones(2000, bool), np.ones(2000, bool)
    ours[16 * np.arange(4)], theirs[16 * np.arange(4, 30)] = False, False
    found = loss_difference([answers(ours)], [answers(theirs)])
    assert found.mean == pytest.approx((4 - 26) / 2000)
    spread = (30 - 22**2 / 125) * 125 / 124
    assert found.text.size == pytest.approx(math.sqrt(spread + 1) / 2000, rel=1e-12) and found.text.freedom == 124
    low, high = found.effect(found.half)
    assert low < 22 / 2000 < high and found.effect() == pytest.approx((22 / 2000, 22 / 2000))


def test_one_function_of_a_task_is_no_question():
    """Equal losses do not count in the correction, as for a text. Equal answers with other losses do."""
    right = np.random.default_rng(0).random((3, 2000)) < np.array([[0.8], [0.84], [0.8]])
    worse, better, _ = (answers(one) | {"nll": 0.5} for one in right)
    known = loss_difference([better], [worse])
    for nll, family in ((0.5, 1), (0.6, 2)):
        verdicts = [one for one, _ in judge([known, loss_difference([worse], [worse | {"nll": nll}])])]
        assert [one.family for one in verdicts] == [family] * 2 and verdicts[1].word == "not separated"
        assert verdicts[0].adjusted_p == pytest.approx(family * known.p) and verdicts[1].p == 1


@pytest.mark.parametrize("share", [0.5, 0.9, 0.998])
def test_equal_models_of_a_task_are_seldom_separated(share):
    random = np.random.default_rng(0)
    right = random.random((2, 400, 2000)) < share
    pairs = [loss_difference([answers(one)], [answers(other)]) for one, other in zip(*right, strict=True)]
    assert np.mean([abs(one.mean) > one.half for one in pairs]) < 0.075


def hidden(right):
    """The row of items whose hidden tokens are answered right, bool [items, tokens]."""
    wrong = np.add.reduceat((~right).sum(axis=1), np.arange(0, len(right), 16)).tolist()
    blocks = [16 * right.shape[1]] * (len(right) // 16)
    return answers(right.all(axis=1)) | {"accuracy": right.mean(), "block_wrong": wrong, "block_hidden": blocks}


def test_hidden_tokens_are_judged_one_by_one():
    """Hardly an item is right as a whole, and the tokens of one item are alike."""
    random = np.random.default_rng(0)
    hard = random.random((2, 400, 512, 1))
    right = random.random((2, 400, 512, 20)) < 0.4 + 0.4 * hard
    pairs = [loss_difference([hidden(one)], [hidden(other)]) for one, other in zip(*right, strict=True)]
    assert np.mean([abs(one.mean) > one.half for one in pairs]) < 0.075
    better = loss_difference([hidden(right[0, 0] | (random.random((512, 20)) < 0.2))], [hidden(right[1, 0])])
    assert better.effect()[0] == pytest.approx(0.08, abs=0.03) and -better.mean > better.half


def test_hidden_tokens_are_not_paired_with_whole_items():
    right = np.random.default_rng(0).random((512, 20)) < 0.9
    with pytest.raises(ConfigError, match="scored different targets"):
        loss_difference([hidden(right)], [answers(right.all(axis=1))])


@pytest.mark.parametrize("few", [1000, 1995], ids=["other blocks", "as many blocks"])
def test_answers_to_fewer_items_are_not_paired(few):
    every = np.arange(2000) % 3 > 0
    with pytest.raises(ConfigError, match="scored different targets"):
        loss_difference([answers(every)], [answers(every[:few])])
