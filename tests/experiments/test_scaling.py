"""The statistic of the study of sizes, on constructed cells."""

import numpy as np
import pytest
import scipy.stats

from experiments.anchors import Anchor
from experiments.scaling.cells import (
    Cell,
    groups,
    kendall,
    load_runs,
    pick,
    read_cells,
    slope,
    swaps,
    tau,
    tau_of_single_seeds,
)
from experiments.scaling.measured import lengths, power
from experiments.scaling.orders import claims
from experiments.scaling.published import published
from tests.experiments.readme import of_markdown

NAMES = tuple(f"e{number}" for number in range(12))


def cell(at_length, ratios, width=64, train_len=64, noise=0.0, seeds=3):
    """A cell with these perplexities at L and these R_4, with noise of a standard deviation over seeds."""
    near = np.asarray(at_length, float)[:, None] * np.exp(
        noise * np.random.default_rng(width).normal(size=(len(at_length), seeds))
    )
    values = np.stack([near, near, near * np.asarray(ratios, float)[:, None], near], axis=-1)
    return Cell(width, train_len, NAMES[: len(at_length)], values, 12 * 4 * width**2, f"{width}")


def test_tau_is_that_of_scipy():
    one, other = np.random.default_rng(0).normal(size=(2, 50, 9))
    expected = [scipy.stats.kendalltau(a, b).statistic for a, b in zip(one, other, strict=True)]
    np.testing.assert_allclose(kendall(one, other), expected)
    other[0, 2] = np.nan
    kept = np.arange(9) != 2
    assert kendall(one[0], other[0]) == pytest.approx(scipy.stats.kendalltau(one[0, kept], other[0, kept]).statistic)


def test_equal_orders_are_confirmed_and_a_clear_swap_refutes():
    levels, ratios = 4 * 1.03 ** np.arange(12), 1.3 ** np.arange(12)
    small = cell(levels, ratios, noise=0.003)
    large = cell(levels / 1.2, ratios**0.5, width=128, noise=0.003)
    verdicts = [claim[3] for claim in claims([small, large])]
    assert (verdicts[0], verdicts[3]) == ("confirmed", "confirmed") and set(verdicts[1:3]) == {"not run"}
    swapped = cell(levels[[1, 0, *range(2, 12)]], ratios, width=128, noise=0.003)
    assert swaps(small, swapped, 1) == ["`e0` and `e1`"] and not swaps(small, swapped, 4)
    assert next(claims([small, swapped]))[3] == "refuted"
    alone = swapped._replace(values=swapped.values[:, :1])
    assert next(claims([small, alone]))[2:] == ("tau 0.97", "too few seeds")


def test_cells_are_compared_by_name():
    """The order of the runs does not matter. Encodings that one cell lacks are left out."""
    levels, ratios = 4 * 1.03 ** np.arange(12), 1.3 ** np.arange(12)
    small, large = cell(levels, ratios), cell(levels, ratios, width=128)
    turned = pick(large, large.encodings[:3:-1])
    assert tau(small, turned, 1)[0] == tau_of_single_seeds(small, turned, 4) == 1 and not swaps(small, turned, 1)
    assert next(claims([small, turned]))[3] == "confirmed"


def test_groups_are_close_at_both_cells():
    ratios = [0.98, 0.99, 1.0, 1.2, 1.3, 1.4]
    small, large = cell([4, 4.1, 4.2, 5, 6, 7], ratios), cell([3, 3.1, 3.05, 3.1, 6, 7], ratios[::-1], width=128)
    assert groups(small, large, 1) == {"near the best": ["e0", "e1", "e2"]}
    assert groups(small, large, 4) == {"level": [], "failing": []}
    assert groups(small, small, 4) == {"level": ["e0", "e1", "e2"], "failing": ["e3", "e4", "e5"]}


def test_differences_below_the_noise_confirm_nothing():
    """Their order is chance: tau over seeds of one cell is as low as that over sizes."""
    alike = np.full(12, 4.0)
    small, large = (cell(alike, np.ones(12), width=width, noise=0.005) for width in (64, 128))
    middle, low, _ = tau(small, large, 1)
    assert next(claims([small, large]))[3] == "open" and low < 0.4 and abs(middle) < 0.6
    assert abs(tau_of_single_seeds(small, small, 1)) < 0.4


def test_windows_of_one_length_stand_side_by_side():
    """R_4 of L = 64 and L of 256 are windows of 256 tokens. A width with one training length is left out."""
    short, long = (cell([4.0, 5.0], [2.0, 0.5], train_len=length)._replace(name=f"{length}") for length in (64, 256))
    made = lengths([short, long, cell([4.0, 5.0], [2.0, 0.5], width=128)])
    assert "128" not in made
    assert [[float(each.split()[0]) for each in line[1:]] for line in of_markdown(made)] == [[8.0, 4.0], [2.5, 5.0]]


def test_the_slope_is_that_of_a_line_through_the_sizes():
    widths, powers = (64, 128, 256), np.linspace(-0.2, 0.3, 12)
    cells = [cell(np.full(12, 4.0), (12.0 * 4 * width**2) ** powers, width=width) for width in widths]
    np.testing.assert_allclose(slope(cells, [one.values for one in cells], 4), powers)


def test_power_is_the_share_of_t_tests():
    """Here the table estimates the deviation of a difference from 200 encodings that are near the best."""
    noise = 0.006
    random, names = np.random.default_rng(1), tuple(f"e{number}" for number in range(200))
    near = 4 * np.exp(noise * random.normal(size=(200, 3)))
    (line,) = of_markdown(power([Cell(64, 64, names, np.stack([near] * 4, axis=-1), 1e6, "64")]))
    assert float(line[2].rstrip("%")) / 100 == pytest.approx(noise * 2**0.5, rel=0.1)
    for count, said in ((3, line[3]), (5, line[4])):
        draws = np.log(1.02) + float(line[2].rstrip("%")) / 100 * random.normal(size=(20_000, count))
        found = np.mean(scipy.stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05)
        assert float(said.rstrip("%")) / 100 == pytest.approx(found, abs=0.02)


def test_levels_of_the_largest_width():
    ratios = np.array([1.0, 1.01, 2.0, 3.0])
    small = cell(np.arange(4, 8), ratios)
    kept, risen = (cell(np.arange(4, 8), r, width=256) for r in (ratios, [1.0, 1.2, 2.0, 1.05]))
    assert [claim[3] for claim in claims([small, kept])][6:8] == ["confirmed", "confirmed"]
    assert [claim[3] for claim in claims([small, risen])][6:8] == ["refuted", "refuted"]


def test_published_orders_are_set_beside_the_cells():
    """Equal published numbers are no pair, and an anchor without a pair is left out."""
    names = ("alibi", "t5", "rope", "nope")
    here = cell([4.2, 4.0, 4.1, 5.0], [1.0, 0.9, 3.0, 2.0])._replace(encodings=names)
    anchor = Anchor("P", "s", "t", "", "1 B", 64, "nonoverlapping", "", [64, 128, 256], {
        "alibi": [10, 9, 8], "t5": [10, 9, 9], "rope": [11, 20, 40], "learned": [9, 9, 9]})  # fmt: skip
    two = Anchor("Q", "s", "t", "", "1 B", 64, "nonoverlapping", "", [64, 256], {"alibi": [1, 1], "t5": [2, 2]})
    lines = [line.split(" | ") for line in published([here], [anchor, two]).splitlines()[2:]]
    assert [line[1:] for line in lines] == [
        ["PPL at L", "`alibi` 10, `t5` 10, `rope` 11", "1 of 2", "`alibi` < `rope`", "yes |"],
        ["R_4", "`alibi` 0.8, `t5` 0.9, `rope` 3.636", "2 of 3", "`alibi` < `t5`", "yes |"],
        ["PPL at L", "`alibi` 1, `t5` 2", "0 of 1", "`alibi` < `t5`", "yes |"],
        ["PPL at L", "random orders: 2 ± 1, at most 3", "1 of 3", "", " |"],
        ["PPL at L", "random orders: 0 ± 0, at most 1", "1 of 1", "", " |"],
        ["R_4", "random orders: 2 ± 1, at most 3", "2 of 3", "", " |"],
        ["R_4", "random orders: 0 ± 0, at most 1", "1 of 1", "", " |"],
    ]  # fmt: skip


def test_a_cell_that_lacks_an_encoding_is_not_shown():
    """A study that stops between two runs leaves such a cell."""
    runs = [run for run in load_runs() if (run["part"], run["encoding"]) != ("64x128", "t5")]
    assert {one.part for one in read_cells(load_runs())} - {one.part for one in read_cells(runs)} == {"64x128"}
