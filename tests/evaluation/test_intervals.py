"""Intervals over text: how often they cover, when there is none, and what may be paired."""

import math

import numpy as np
import pytest

from experiments.intervals import coverage as study
from posx.errors import ConfigError
from posx.evaluation import Nonoverlapping, evaluate, interval, loss_difference, rise_difference
from posx.evaluation.statistics import T_QUANTILE, half_width, horizon

rng = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("targets", "length", "stretch"),
    [(262144, 500, 0), (262144, 2000, 0), (65536, 50, 0), (65536, 500, 0), (65536, 2000, 2048), (32768, 2000, 1024)],
)
def test_intervals_cover_what_they_should_where_one_is_owed(targets, length, stretch):
    """Text in one stretch, and in 32 that know nothing of each other; blocks taken as independent fail both."""
    series = study.simulate(targets, length, stretch, 1000, np.random.default_rng(0))
    given, cover, _ = study.coverage(series)
    assert given > 0.99 and 0.92 <= cover <= 0.97
    if length > 50:
        assert study.independent_blocks(series, merged=1) < cover - 0.02


@pytest.mark.parametrize(("targets", "length"), [(65536, 2000), (16384, 2000), (8192, 500), (4096, 500), (4096, 50000)])
def test_too_little_text_misleads_no_more_often_than_enough(targets, length):
    """An interval that is there and wrong is as rare as with enough text: mostly there is none."""
    given, _, wrong = study.coverage(study.simulate(targets, length, 0, 1000, np.random.default_rng(1)))
    assert wrong < 0.09 and given < 1


def test_few_blocks_give_no_interval():
    for n in (1, 2, 4, 8, 15):
        assert interval(rng.standard_normal(n), np.full(n, 256)) is None
    drift = np.linspace(0, 1, 200)
    assert interval(drift, np.full(200, 256)) is None, "what drifts from end to end has no correlation length"
    assert interval(rng.standard_normal(200), np.full(200, 256)) is not None


def test_the_quantile_is_students():
    t = np.linspace(-T_QUANTILE, T_QUANTILE, 200_001)
    density = math.gamma(4.5) / (math.sqrt(8 * math.pi) * math.gamma(4)) * (1 + t**2 / 8) ** -4.5
    assert np.trapezoid(density, t) == pytest.approx(0.95, abs=1e-6)


def test_an_interval_is_that_of_the_mean_over_targets():
    """In units of the sums over the counts, whatever the last block's size, and blind to what all blocks share."""
    sums, counts = 5 * rng.standard_normal(64) + 700, np.append(np.full(63, 256), 17)
    sums[-1] *= 17 / 256
    low, high = interval(sums, counts)
    assert (low + high) / 2 == pytest.approx(sums.sum() / counts.sum())
    assert interval(3 * sums, counts) == pytest.approx((3 * low, 3 * high))
    assert interval(sums + 2 * counts, counts) == pytest.approx((low + 2, high + 2))


def row(sums, **changes):
    made = {
        "run_id": "rope", "protocol": "nonoverlapping", "eval_len": 64, "status": "ok", "targets": "a", "block_len": 50,
        "num_targets": 50 * len(sums), "nll": float(np.mean(sums)) / 50, "block_nll": list(sums),
    }  # fmt: skip
    return made | changes


def shown(gap):
    """The ratio of perplexities and the ends of its interval."""
    return gap.effect()[0], *gap.effect(gap.half)


def test_pairs_take_out_what_a_passage_costs_both():
    hard = rng.uniform(0, 200, 60)
    a, b = hard + 50 * 0.10 + rng.normal(0, 0.5, 60), hard
    ratio, low, high = shown(loss_difference([row(a)], [row(b)]))
    assert ratio == pytest.approx(math.exp((a - b).sum() / 3000))
    half = half_width(a - b, np.full(60, 50))
    assert (low, high) == pytest.approx((ratio * math.exp(-half), ratio * math.exp(half)))
    assert high - low < 0.02 < 0.2 < np.subtract(*reversed(interval(a, np.full(60, 50))))
    assert shown(loss_difference([row(b)], [row(b)])) == (1.0, 1.0, 1.0)
    for blocks in (1, 8):
        assert loss_difference([row(a[:blocks])], [row(b[:blocks])]).over_text is None, "too few blocks"


def test_a_difference_of_rises_is_the_ratio_of_two_r_k():
    hard = rng.uniform(0, 200, 60)
    near_a, near_b, far_b = (hard + rng.normal(0, 0.5, 60) for _ in range(3))
    far_a = hard + 50 * 0.03 + rng.normal(0, 0.5, 60)
    rows = [row(sums, eval_len=n) for sums, n in zip((far_a, near_a, far_b, near_b), (128, 64) * 2, strict=True)]

    def rises(far_a, near_a, far_b, near_b):
        return rise_difference([(far_a, near_a)], [(far_b, near_b)])

    found, r_a, r_b = (
        shown(gap) for gap in (rises(*rows), *(loss_difference([f], [n]) for f, n in (rows[:2], rows[2:])))
    )
    assert found[0] == pytest.approx(r_a[0] / r_b[0])
    half = half_width(far_a - near_a - far_b + near_b, np.full(60, 50))
    assert found[1:] == pytest.approx((found[0] * math.exp(-half), found[0] * math.exp(half)))
    assert found[1] > 1 and shown(rises(*rows[2:], *rows[2:])) == (1.0, 1.0, 1.0)
    for n in range(4):
        other = [made | {"targets": "b"} if n == place else made for place, made in enumerate(rows)]
        with pytest.raises(ConfigError, match="scored different targets"):
            rises(*other)
    for order in ((1, 0, 3, 2), (0, 1, 3, 2), (0, 1, 2, 0)):
        with pytest.raises(ConfigError, match="R_k needs rows at kL and L tokens"):
            rises(*(rows[n] for n in order))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"targets": "b"}, "scored different targets"),
        ({"block_len": 25}, "scored different targets"),
        ({"status": "undefined", "block_nll": None}, "no losses to pair: its status is undefined"),
        ({"targets": None, "max_targets": 3000}, "scored different targets"),
    ],
)
def test_rows_that_cannot_be_paired_are_refused_in_one_line(changes, words):
    a = row(np.ones(60))
    for pair in ((a, a | changes), (a | changes, a)):
        with pytest.raises(ConfigError, match=words) as caught:
            loss_difference(*([one] for one in pair))
        assert "\n" not in str(caught.value) and "rope (nonoverlapping at 64)" in str(caught.value)


def test_rows_of_evaluate_pair_and_hold_their_own_interval():
    stream = rng.integers(0, 5, 20_001)
    table = np.log(np.array([0.1, 0.15, 0.2, 0.25, 0.3], np.float32))

    def model(tokens):
        return table[tokens[:, 1:]] - 0.5 / np.arange(1, tokens.shape[1], dtype=np.float32)

    short, long = evaluate(model, stream, Nonoverlapping(8192), (16, 64))
    ratio, low, high = shown(loss_difference([long], [short]))
    assert low < ratio < high < 1, "longer windows have fewer targets near their start"
    assert short["nll_interval"][0] < short["nll"] < short["nll_interval"][1]
    (other,) = evaluate(model, stream, Nonoverlapping(4096), [16])
    with pytest.raises(ConfigError, match="different targets"):
        loss_difference([other], [short])


def test_a_horizon_ends_where_perplexity_first_leaves_it() -> None:
    assert horizon({1: 1.0, 2: 1.009, 4: 1.02, 8: 1.0}) == 2, "what comes back later does not count"
    assert horizon({0.5: 1.2, 1: 1.0, 1.25: 1.02}) == 1, "lengths below the training length are not asked"
    assert horizon({1: 1.0, 2: 0.97, 4: float("nan"), 8: 0.97}) == 2, "a length that failed is no length it holds to"


@pytest.mark.parametrize(("places", "has"), [
    ({"num_stretches": 4, "num_documents": 4, "max_targets": 3000}, False),
    ({"num_stretches": 1, "num_documents": 1, "max_targets": 3000}, False),
    ({"num_stretches": 8, "num_documents": 1, "max_targets": 3000}, True),
    ({"num_stretches": 1, "num_documents": 8, "max_targets": 3000}, True),
    ({"num_stretches": 1, "num_documents": 1, "max_targets": 0}, True),
    ({"num_stretches": 1, "num_documents": 1, "max_targets": 4000}, True),
])  # fmt: skip
def test_few_places_of_a_text_give_no_interval_and_no_p(places, has):
    """The whole text, of which no other targets could be chosen, is never too few places."""
    sums = rng.normal(100, 5, (2, 60))
    one, other = (row(values, **places) for values in sums)
    gap = loss_difference([one], [other])
    assert gap.mean == pytest.approx(one["nll"] - other["nll"])
    assert [found is not None for found in (gap.over_text, gap.p)] == [has] * 2
    few = f"too few places of the text ({places['num_stretches']} stretch"
    assert gap.no_interval == "" if has else gap.no_interval.startswith(few)
