"""Figures and tables from stored rows, when all went well and when runs are missing, torn, failed or oddly named."""

import itertools
import math
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest

from posx.errors import ConfigError, WorkdirError
from posx.evaluation import interval, loss_difference
from posx.evaluation.statistics import row_blocks
from posx.lab import plots
from posx.lab.plots import curves, groups, heat, look, palette, points
from posx.lab.results.columns import RUN_COLUMNS, make_table
from posx.lab.results.facts import settings_facts
from posx.lab.results.table import missing_runs, read_results
from tests.made_rows import (
    AT_TRAIN,
    FIVE,
    LENGTHS,
    L,
    as_lines,
    as_table,
    cells,
    config,
    logged,
    position_row,
    row,
    start,
    sweep_rows,
    words,
    write,
)


def panels(made: list[dict[str, Any]]) -> list[groups.Panel]:
    return groups.panels(as_table(made))


def table_of(made: list[dict[str, Any]]) -> str:
    return plots.table(as_table(made))


def used(folder: pathlib.Path) -> pd.DataFrame:
    """The rows that figures use."""
    table = read_results(folder)
    return table[table.left_out == ""]


def one_curve(made: list[dict[str, Any]], encoding: str) -> groups.Curve:
    """The perplexity curve of one encoding of a single panel."""
    (panel,) = panels([one for one in made if one["protocol"] != "per_position"])
    return next(curve for curve in points.perplexity_curves(panel) if curve.label == encoding)


@pytest.mark.slow
def test_all_draws_every_figure_that_the_rows_allow(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path, sweep_rows())
    (folder / f"alibi_L{L}_s0" / "metrics.jsonl").write_text(logged(5.5, 2.5))
    written = plots.plot(folder)
    kinds = ("extrapolation", "ratio", "per_position", "training")
    assert [path.name for path in written] == [f"{kind}.{end}" for kind in kinds for end in ("png", "svg")]
    assert all(path.parent == folder / "figures" and path.stat().st_size > 5000 for path in written)
    assert sorted(path.name for path in (folder / "figures").iterdir()) == sorted(path.name for path in written)


def test_torn_and_repeated_and_unordered_lines(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lines = [
        row("alibi", 128, ppl=9.0),
        row("alibi", 64),
        row("alibi", 128, ppl=4.4),
        row("alibi", 128, stride=32, ppl=4.2),
    ]
    text = as_lines(lines) + "not json\n[1]\n" + as_lines([row("alibi", 256)])[:-9]
    (run / "eval.jsonl").write_text(text)
    found = read_results(run)
    assert sorted(zip(found.eval_len, found.stride, found.ppl, strict=True))[1:] == [
        (128, 32, 4.2),
        (128, 128, 4.4),
    ]
    assert len(found) == 3


def test_a_curve_never_mixes_sets_of_targets(tmp_path: pathlib.Path) -> None:
    """A later look at a few lengths with fewer targets must not replace single points of the sweep's own curve."""
    whole = [row("alibi", length, targets="all", ppl=4.0) for length in (64, 128, 256)]
    look_again = [row("alibi", length, targets="few", ppl=9.0) for length in (64, 128)]
    assert set(used(write(tmp_path, [*whole, *look_again])).ppl) == {4.0}


def test_undefined_is_a_gap_that_is_named(tmp_path: pathlib.Path) -> None:
    made = [row(name, length) for name in ("learned", "alibi") for length in LENGTHS]
    curve = one_curve(made, "learned")
    assert [math.isnan(point.mean) for point in curve.points] == [length > L for length in LENGTHS]
    figure = curves.extrapolation(panels(made)[0])
    drawn = [line for line in figure.axes[0].lines if line.get_color() == palette.LOOKS["learned"].color]
    assert np.isnan(np.asarray(drawn[0].get_ydata(), float)).tolist() == [length > L for length in LENGTHS]
    assert "learned: undefined at 128, 256, 512, 1024" in words(figure)
    assert table_of(made).count("undefined") == 4


@pytest.mark.parametrize("ppl", ["inf", None, math.nan, math.inf, 1e300])
def test_values_that_are_not_finite_or_huge_leave_the_axes_alone(tmp_path: pathlib.Path, ppl: Any) -> None:
    made = [row("rope", length) for length in LENGTHS[:-1]]
    made.append(row("rope", 1024, ppl=ppl, nll=None, status="ok" if ppl == 1e300 else "nonfinite"))
    figure = curves.extrapolation(panels(made)[0])
    assert all(0 < ax.get_ylim()[1] < 1e6 for ax in figure.axes)


def test_mean_and_band_over_the_seeds_that_exist(tmp_path: pathlib.Path) -> None:
    made = [row("alibi", 64, seed, ppl=4.0 + seed) for seed in range(3)]
    made += [row("alibi", 128, 0, ppl=5.0), row("alibi", 128, 1, status="oom", ppl=None), row("alibi", 256, 0, ppl=6.0)]
    at_train, at_double, at_four = one_curve(made, "alibi").points
    assert (at_train.mean, at_train.low, at_train.high) == (5.0, 4.0, 6.0)
    assert (at_double.mean, at_double.failures) == (5.0, ("oom",))
    figure = curves.extrapolation(panels(made)[0])
    assert "alibi (n = 1 to 3)" in words(figure) and "alibi: out of memory at 128 (1 of 2 runs)" in words(figure)
    assert len(figure.axes[0].collections) == 1
    assert at_four.values == (6.0,)


def test_a_caption_says_the_fewest_and_the_most_seeds() -> None:
    made = [row("alibi", length, seed) for length in (64, 128) for seed in range(5)]
    made += [row("shaw", length, seed) for length in (64, 128) for seed in range(3)]
    figure = curves.extrapolation(panels(made)[0])
    assert any("3 to 5 seeds" in text for text in words(figure)) and "shaw (n = 3)" in words(figure)
    assert "3 to 5 seeds" in table_of(made)


def test_one_seed_has_no_band(tmp_path: pathlib.Path) -> None:
    figure = curves.extrapolation(panels([row("alibi", length) for length in LENGTHS])[0])
    assert all(not ax.collections for ax in figure.axes)
    assert "alibi" in words(figure)


def test_runs_that_differ_in_more_than_the_seed_are_not_averaged() -> None:
    made = [row("rope", 64, run_id="wide", ppl=3.0), row("rope", 64, run_id="narrow", ppl=5.0)]
    made.append(row("alibi", 64, settings={"encoding.num_heads": 4}))
    (panel,) = panels(made)
    found = [(curve.label, curve.points[0].mean) for curve in points.perplexity_curves(panel)]
    assert found[0] == ("rope, narrow", 5.0) and ("rope, wide", 3.0) in found
    values = [
        row("t5", 64, 0, run_id=f"t{n}", settings={"encoding.scaled": True, "encoding.buckets": n}) for n in (8, 32)
    ]
    labels = [curve.label for curve in points.perplexity_curves(panels(values)[0])]
    assert labels == ["t5, buckets=32", "t5, buckets=8"]


HOSTILE = ["$\\nosuch{$", "_hidden", "a\nb\t<script>alert(1)</script>|", "x" * 10_000, "\u202eevil 位置\x00", ""]


@pytest.mark.slow
def test_hostile_names_are_shown_literally(tmp_path: pathlib.Path) -> None:
    made = [dict(row("alibi", length), run_id=name, encoding=name) for name in HOSTILE for length in (64, 128)]
    folder = write(tmp_path, made)
    written = plots.plot(folder)
    assert len(written) == 4
    (panel,) = groups.panels(read_results(folder), missing_runs(folder))
    shown = words(curves.extrapolation(panel))
    assert "_hidden" in shown and "$\\nosuch{$" in shown and "(no name)" in shown
    assert any(text.startswith("\\u202eevil \\u") for text in shown)
    assert max(len(text) for text in shown) < 200
    table = plots.table(read_results(folder))
    assert "<script" not in table and all(line.count(" | ") == 4 for line in table.splitlines() if line.startswith("|"))


@pytest.mark.slow
def test_svg_bytes_do_not_change(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path, sweep_rows(FIVE[:3]))
    first = {path.name: path.read_bytes() for path in plots.plot(folder, "extrapolation")}
    again = {path.name: path.read_bytes() for path in plots.plot(folder, "extrapolation")}
    assert first == again


def test_the_users_matplotlib_settings_neither_matter_nor_change(tmp_path: pathlib.Path) -> None:
    import matplotlib

    folder = write(tmp_path, [row("alibi", length) for length in LENGTHS])
    plain = plots.plot(folder, "ratio")[1].read_bytes()
    with matplotlib.rc_context({"font.size": 31.0, "axes.linewidth": 9.0}):
        assert plots.plot(folder, "ratio")[1].read_bytes() == plain
        assert matplotlib.rcParams["font.size"] == 31.0


@pytest.mark.parametrize(("asked", "backend"), [("nonsense", None), pytest.param("svg", "svg", marks=pytest.mark.slow)])
def test_figures_do_not_depend_on_mplbackend(tmp_path: pathlib.Path, asked: str, backend: str | None) -> None:
    """Jupyter and Colab set it for the commands that a notebook starts; a usable one stays the user's."""
    folder = write(tmp_path, [row("alibi", length) for length in LENGTHS])
    plain = plots.plot(folder, "ratio")[1].read_bytes()
    program = (
        "import pathlib, sys; from posx.lab import plots; plots.plot(sys.argv[1], 'ratio'); import matplotlib, os\n"
        "print(os.environ['MPLBACKEND'], matplotlib.get_backend(auto_select=False))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env={**os.environ, "MPLBACKEND": asked}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == [asked, str(backend)], done.stderr
    assert (folder / "figures" / "ratio.svg").read_bytes() == plain


@pytest.mark.slow
def test_an_encoding_has_one_colour_everywhere() -> None:
    made = sweep_rows()
    panel, at = panels([one for one in made if one["protocol"] == "nonoverlapping"])[0], panels(made)[1]
    facts = [settings_facts({}) | {"run": name, "method": name, "train_len": 0} for name in AT_TRAIN]
    runs = make_table(facts, RUN_COLUMNS).set_index("run", drop=False)
    training = curves.training(runs, {name: [(0, 5.0), (1, 2.0)] for name in AT_TRAIN}, {})
    for name in AT_TRAIN:
        color = palette.LOOKS[name].color
        for figure in (
            curves.extrapolation(panel),
            curves.ratio(panel),
            training,
            *([curves.per_position(at)] if name != "learned" else []),
        ):
            legend = figure.legends[0] if figure.legends else None
            assert legend is not None
            drawn: dict[str, Any] = dict(
                zip((text.get_text() for text in legend.get_texts()), legend.legend_handles, strict=True)
            )
            assert drawn[name].get_color() == color
            assert any(line.get_color() == color for line in figure.axes[0].lines)
    fixed = palette.LOOKS.values()
    assert len({one.color for one in fixed}) == len({one.marker for one in fixed}) == 10
    assert palette.look("my.module:Mine") == palette.look("my.module:Mine")


def test_different_texts_are_called_incomparable() -> None:
    made = [row("alibi", 64), row("rope", 64, data_digest="another", targets="another")]
    (panel,) = panels(made)
    warning = "different corpora: not comparable"
    assert (
        warning in words(curves.extrapolation(panel))
        and warning in words(curves.ratio(panel))
        and warning in table_of(made)
    )
    assert warning not in words(curves.extrapolation(panels(made[:1])[0]))


def test_table_numbers() -> None:
    made = [
        row("rope", 64, 0, ppl=4.0, bpb=2.0),
        row("rope", 128, 0, ppl=6.0),
        row("rope", 64, 1, ppl=5.0, bpb=2.5),
        row("rope", 128, 1, ppl=10.0),
    ]
    made += [row("alibi", 64, 0, ppl=4.5, bpb=2.2), row("alibi", 128, 0, status="oom", ppl=None)]
    table = table_of(made)
    assert cells(table, "encoding") == ["encoding", "seeds", "perplexity at L = 64", "bits per byte at 64", "R_2"]
    # 6/4 and 10/5, then their mean
    assert cells(table, "rope") == ["rope", "2", "4.500 ± 0.707", "2.250 ± 0.354", "1.750 ± 0.354"]
    assert cells(table, "alibi") == ["alibi", "1", "4.500", "2.200", "out of memory"]
    assert "± standard deviation over seeds" in table
    assert "No intervals: no losses of common blocks of text are stored" in table
    assert table_of([]) == ""


def test_a_table_of_many_lengths_has_columns_for_the_doublings() -> None:
    lengths = (64, 68, 72, 80, 96, 128, 192, 256, 384, 512)
    assert cells(table_of([row("rope", n) for n in lengths]), "encoding")[4:] == ["R_2", "R_4", "R_8"]
    assert cells(table_of([row("rope", n) for n in lengths[:6]]), "encoding")[4:] == [
        "R_1.0625", "R_1.125", "R_1.25", "R_1.5", "R_2",
    ]  # fmt: skip


def measured(encoding: str, length: int, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A row with the sums that intervals are made of: what a passage costs, twice as much of it for `rope`."""
    rng = np.random.default_rng(7)
    passages = 256 * (1.5 + 0.2 * rng.standard_normal(256)) * (1.1 if encoding == "rope" else 1)
    longer = 256 * 0.02 * math.log2(length / L) * (1 + 0.3 * rng.standard_normal(256))
    sums = passages + longer + np.random.default_rng(seed).normal(0, 3, 256)
    nll = float(sums.sum() / 65536)
    facts = {
        "targets": "0a1b2c", "block_len": 256, "num_targets": 65536, "num_bytes": 32768,
        "num_separators": 4,
        "num_documents": 5, "num_stretches": 32, "nll": nll, "ppl": math.exp(nll), "bpb": 2 * nll / math.log(2),
        "block_nll": [round(float(x), 3) for x in sums],
    }  # fmt: skip
    return row(encoding, length, seed, **facts) | changes


def test_intervals_and_documents_stand_in_the_table() -> None:
    made = [measured(name, length) for name in ("rope", "alibi") for length in (64, 128)]
    table = table_of(made)
    assert "65,536 targets scored per length, 32 stretches of 5 documents" in table
    assert "(95 % interval over text)" in table and "±" not in table
    at_train, _, bits, ratio = made[0], *cells(table, "rope")[2:]
    low, high = interval(*row_blocks(at_train))
    assert cells(table, "rope")[2] == f"{at_train['ppl']:.3f} ({math.exp(low):.3f}-{math.exp(high):.3f})"
    assert bits == f"{at_train['bpb']:.3f} ({2 * low / math.log(2):.3f}-{2 * high / math.log(2):.3f})"
    pair = loss_difference([made[1]], [made[0]])
    assert ratio == "{:.3f} ({:.3f}-{:.3f})".format(pair.effect()[0], *pair.effect(pair.half))


def test_intervals_of_several_seeds_are_of_their_mean() -> None:
    made = [measured("rope", length, seed) for length in (64, 128) for seed in range(3)]
    assert re.fullmatch(r"\d\.\d{3} ± 0\.\d{3} \(\d\.\d{3}-\d\.\d{3}\)", cells(table_of(made), "rope")[2])
    (point, _) = one_curve(made, "rope").points
    sums = np.mean([row_blocks(one)[0] for one in made[:3]], axis=0)
    low, high = interval(sums, np.full(256, 256))
    assert np.log(point.interval) == pytest.approx(np.log(point.mean) + np.array([low - high, high - low]) / 2)
    figure = curves.extrapolation(panels(made)[0])
    assert len(figure.axes[0].collections) == 2, "a band for the seeds, bars for the text"
    shown = [text for text in words(figure) if "Bars" in text]
    assert len(shown) == 1 and "lowest to highest, dots: each" in shown[0] and "95 % interval over text" in shown[0]
    dots = [list(zip(*line.get_data(), strict=True)) for line in figure.axes[0].lines if line.get_marker() == "."]
    seeds = [(float(row["eval_len"]), row["ppl"]) for row in made]
    np.testing.assert_allclose(sorted(dots[0]), sorted(seeds))


def test_figures_show_intervals_as_bars_and_bits_as_an_axis() -> None:
    made = [measured(name, length) for name in ("rope", "alibi") for length in (64, 128, 256)]
    (panel,) = panels(made)
    figure = curves.extrapolation(panel)
    assert "bits per byte" in words(figure) and any("32 stretches of 5 documents" in text for text in words(figure))
    (curve,) = [curve for curve in points.perplexity_curves(panel) if curve.label == "rope"]
    bars = [bar.get_segments() for bar in figure.axes[0].collections]
    assert [[end[1] for end in bar] for bar in bars[0]] == [pytest.approx(point.interval) for point in curve.points]
    ratio = curves.ratio(panel)
    assert len(ratio.axes[0].collections) == 2 and any("interval of the ratio" in text for text in words(ratio))
    full, bits = figure.axes[0], figure.axes[0].child_axes[0]
    figure.draw_without_rendering()
    assert np.array(bits.get_ylim()) == pytest.approx(2 * np.log2(full.get_ylim()))
    no_bytes = [one | {"num_bytes": None, "bpb": None} for one in made]
    assert "bits per byte" not in words(curves.extrapolation(panels(no_bytes)[0]))


def test_bits_per_byte_that_count_separators_are_no_curve() -> None:
    """Older rows have the separators' loss in their bits; where separators are many, perplexity has another scale."""
    old = [{name: value for name, value in measured("rope", 64).items() if name != "num_separators"}]
    assert "bits per byte" not in table_of(old) and "bits per byte" in table_of([measured("rope", 64)])
    table = table_of([*old, measured("alibi", 64)])
    assert cells(table, "rope")[3] == "-" and re.fullmatch(r"\d\.\d{3} \(.*\)", cells(table, "alibi")[3])
    many = [measured("rope", 64, num_separators=1000)]
    assert re.fullmatch(r"\d\.\d{3}", cells(table_of(many), "rope")[3]), "the interval is that of all targets"
    for made, drawn in ((old, False), (many, False), ([measured("rope", 64)], True)):
        assert ("bits per byte" in words(curves.extrapolation(panels(made)[0]))) is drawn


def test_too_little_text_and_unpaired_rows_have_no_interval() -> None:
    short = [
        one | {"num_targets": 2048, "block_nll": one["block_nll"][:8]} for one in map(measured, ["rope"] * 2, (64, 128))
    ]
    assert "No intervals: too little text" in table_of(short)
    assert any("No intervals: too little text" in text for text in words(curves.ratio(panels(short)[0])))
    other = [measured("rope", 64), measured("rope", 128, block_len=512)]
    assert "(" in cells(table_of(other), "rope")[2] and "(" not in cells(table_of(other), "rope")[4]


def test_a_cell_without_an_interval_is_named_with_its_reason() -> None:
    made = [measured("rope", 64, num_separators=1000), measured("rope", 128), row("alibi", 64), row("alibi", 128)]
    table = table_of(made)
    stored = "alibi (perplexity at L = 64), alibi (bits per byte at 64), alibi (R_2): no losses of common blocks"
    assert f"No interval for {stored} of text are stored" in table
    assert "No interval for rope (bits per byte at 64): separators between documents count in the losses" in table


def test_runs_on_different_targets_are_called_incomparable(tmp_path: pathlib.Path) -> None:
    made = [measured("alibi", 64), measured("rope", 64, targets="another")]
    assert "scored on different targets" in table_of(made)
    assert "scored on different targets" in table_of([made[0], row("rope", 64)]), "rows of before digests"
    assert "different" not in table_of(made[:1]) + table_of([row("rope", 64), row("alibi", 64)])


@pytest.mark.parametrize(
    ("of_one", "of_other", "comparable"),
    [
        ({"max_targets": 0}, {}, True),
        ({"max_targets": 0}, {"num_bytes": 9000}, False),
        ({"max_targets": 8192}, {}, False),
    ],
)
def test_bits_per_byte_of_two_tokenizers_need_one_whole_text(of_one, of_other, comparable) -> None:
    made = [row("rope", 64, **of_one), row("alibi", 64, tokenizer="bpe", **of_one | of_other)]
    table = table_of(made)
    assert "different tokenizers: perplexities are not comparable" in table
    assert ("nor are bits per byte" in table) != comparable


def test_rows_on_other_targets_are_left_out_and_named(tmp_path: pathlib.Path) -> None:
    """A run measured before targets were spread, and again after: the new rows are one curve, the old ones another."""
    old = [row("alibi", length, targets="0f", ppl=9.0) for length in (64, 128)]
    new = [measured("alibi", length, ppl=4.0) for length in (64, 128)]
    folder = write(tmp_path, [*old, *new])
    assert set(used(folder).targets) == {new[0]["targets"]}
    assert "2 rows left out, scored on other targets (not comparable)" in plots.table(read_results(folder))
    again = [measured("alibi", 64, ppl=5.0, block_len=512)]
    assert set(used(write(tmp_path, again)).block_len) == {new[0]["block_len"]}


def test_no_value_at_the_training_length() -> None:
    made = [row("rope", 128), row("rope", 256)]
    assert "rope: no value at L, so no ratio" in words(curves.ratio(panels(made)[0]))
    table = table_of(made)
    assert cells(table, "encoding") == ["encoding", "seeds", "perplexity at 128", "perplexity at 256"]
    assert "**not measured at L = 64, so there are no ratios**" in table and len(cells(table, "rope")) == 4


def test_cumulative_perplexity_weighs_bins_by_their_targets() -> None:
    made = row(
        "rope", 4, protocol="per_position", position_edges=[0, 1, 4], position_nll=[2.0, 1.0], position_targets=[10, 30]
    )
    (panel,) = panels([made])
    local, running = (
        points.average_bins(panel, of)[0].points for of in (points.local_loss, points.cumulative_perplexity)
    )
    assert [(point.x, point.mean) for point in local] == [(1.0, 2.0), (pytest.approx(math.sqrt(8)), 1.0)]
    assert [point.x for point in running] == [1.0, 4.0]
    assert [point.mean for point in running] == pytest.approx([math.exp(2.0), math.exp((20 + 30) / 40)])


def test_maps_weigh_distances_by_their_tokens(tmp_path: pathlib.Path) -> None:
    """Of two seeds, at 64 and 128 tokens. A task without distances has no map."""
    known = {"protocol": "answers", "stride": None, "num_items": 8, "distance_edges": [0, 1, 2, 4]}
    made = [
        row("rope", 64, **known, distance_accuracy=[None, 1.0, 0.5], distance_targets=[0, 4, 4]),
        row("rope", 64, 1, **known, distance_accuracy=[None, None, 1.0], distance_targets=[0, 0, 12]),
        row("rope", 128, **known | {"distance_edges": [0, 1]}, distance_accuracy=[0.25], distance_targets=[4]),
    ]
    (panel,) = panels(made)
    np.testing.assert_array_equal(
        heat.bin_shares(panel.curves[0], [64, 128]), [[np.nan, 0.25], [1.0, np.nan], [14 / 16, np.nan]]
    )
    figure = curves.distance_map(panel)
    assert {"rope", "0", "1", "2-3", "64", "128"} <= set(words(figure))
    assert figure.axes[0].lines[0].get_ydata()[0] == 2.5, "above the bin of 2 to 3, the longest at L"
    assert any("distances that no item of L = 64 tokens has" in text for text in words(figure))
    (without,) = panels([row("rope", 64, protocol="answers")])
    assert [curves.draws("distance_map", one) for one in (panel, without)] == [True, False]


def test_each_map_has_its_own_line_and_names_its_failures() -> None:
    """Distances of 2 to 3 tokens are beyond training in one map and not in the other."""
    known = {"protocol": "answers", "num_items": 8, "exact_match": 0.5, "distance_edges": [0, 1, 2, 4]}
    shares = {"alibi": [1.0, 1.0, 0.5], "rope": [1.0, 1.0, None], "nope": [1.0, 1.0, 1.0]}
    made = [
        row(name, length, **known, distance_accuracy=own, distance_targets=[4 if share else 0 for share in own])
        for name, own in shares.items() for length in (64, 128) if (name, length) != ("nope", 64)
    ]  # fmt: skip
    made += [row("rope", 256, protocol="answers", status="oom", ppl=None, nll=None, bpb=None)]
    figure = curves.distance_map(panels(made)[0])
    levels = {ax.get_title(): ax.lines[0].get_ydata()[0] for ax in figure.axes if ax.lines}
    assert levels == {"alibi": 2.5, "nope": 6.5, "rope": 1.5}
    said = " ".join(words(figure))
    assert "rope: out of memory at 256" in said
    assert "no item of L = 64 tokens has, or of 64 tokens or more in maps without such items" in said


def test_seeds_that_answer_the_same_items_narrow_no_interval() -> None:
    known = {"protocol": "answers", "stride": None, "num_items": 100, "accuracy": 0.5}
    made = [row("rope", 64, seed, **known, exact_match=share) for seed, share in enumerate((0.25, 0.5, 0.75))]
    (panel,) = panels(made)
    ((point,),) = (curve.points for curve in points.answer_curves(panel))
    assert (point.mean, point.interval) == (0.5, pytest.approx((0.4038, 0.5962), abs=1e-4))
    assert "(95 % interval over items)" in table_of(made)


def test_a_seed_without_an_interval_leaves_none() -> None:
    """A run with all hidden tokens right has no interval. The mean of the others is that of other runs."""
    known, masked = {"protocol": "answers", "stride": None, "num_items": 100}, {"train.objective": "masked"}
    made = [
        row("rope", 64, seed, **known, accuracy=share, accuracy_interval=ends, settings=masked | {"train.seed": seed})
        for seed, share, ends in ((0, 1.0, None), (1, 0.4, (0.38, 0.42)))
    ]
    for own, wanted in ((made, None), (made[1:], (0.38, 0.42))):
        (panel,) = panels(own)
        ((point,),) = (curve.points for curve in points.answer_curves(panel))
        assert point.interval == wanted


def test_other_items_at_each_length_make_no_ratio() -> None:
    known = {"protocol": "answers", "stride": None, "targets": "items", "num_items": 8, "exact_match": 0.5}
    (panel,) = panels([row("rope", length, **known) for length in (64, 128)])
    assert [point.values for curve in points.ratio_curves(panel) for point in curve.points] == [(), ()]


def test_training_curve_takes_the_last_row_of_a_step(tmp_path: pathlib.Path) -> None:
    start(tmp_path, config())
    (tmp_path / "metrics.jsonl").write_text(
        logged(3, step=2) + logged(5, step=1, attempt=2) + logged(4, step=2, attempt=2) + '{"step": 3, "lo'
    )
    runs, logs = points.read_training(tmp_path, make_table([]))
    ((run, losses),) = logs.items()
    assert (runs.method[run], points.average_log(losses)) == ("rope", [(1.0, 5.0, 0.0, 0.0), (2.0, 4.0, 0.0, 0.0)])
    assert [path.name for path in plots.plot(tmp_path, "training")] == ["training.png", "training.svg"]


def test_what_cannot_be_drawn_says_why(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'extrapolation'"):
        plots.plot(tmp_path, "extrapolate")
    with pytest.raises(WorkdirError, match="no rows to plot"):
        plots.plot(tmp_path)
    with pytest.raises(WorkdirError, match="does not exist"):
        plots.plot(tmp_path / "nowhere")
    folder = write(tmp_path / "one", [row("alibi", 64)])
    with pytest.raises(WorkdirError, match="by the protocol per_position"):
        plots.plot(folder, "per_position")
    assert not (folder / "figures").exists()


def answer_row() -> dict[str, Any]:
    made = row("rope", 64, protocol="answers", num_items=8, num_targets=8, exact_match=0.5, bpb=None)
    return {name: value for name, value in made.items() if name != "stride"}


@pytest.mark.parametrize(
    ("made", "what", "said"),
    [
        ([row("rope", 64)], "answers", "answers needs runs of a task. The rows here are of nonoverlapping$"),
        ([row("rope", 64)], "distance_map", "distance_map needs runs of a task whose answers are read from one place"),
        ([answer_row()], "distance_map", "read from one place each. The rows here are of answers$"),
        ([answer_row()], "ratio", "ratio needs runs of a text, in .*The rows here are of answers$"),
        (
            [row("rope", 64)],
            "ratio",
            "ratio needs runs of a text, in windows longer than L, .*with posx evaluate",
        ),
        (
            [position_row("rope")],
            "extrapolation",
            "by another protocol than per_position. The rows here are of per_position. Measure .*evaluate",
        ),
        ([row("rope", 64)], "per_position", "of nonoverlapping. Measure .* --protocol per_position$"),
        ([answer_row()], "per_position", "per_position needs runs of a text.* of answers$"),
    ],
)
def test_rows_of_another_protocol_are_named(tmp_path: pathlib.Path, made: Any, what: str, said: str) -> None:
    """The rows exist, so nothing says that `eval.jsonl` has none. A task's rows are never of a text."""
    with pytest.raises(WorkdirError, match=said) as caught:
        plots.plot(write(tmp_path, made), what)
    assert "no usable line" not in str(caught.value)


def test_rows_by_position_alone_make_no_table(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, [position_row("rope")])
    assert {path.stem for path in plots.plot(folder)} == {"per_position"} and not (folder / "table.md").exists()
    with pytest.raises(WorkdirError, match="posx evaluate") as caught:
        plots.format_table(folder, "csv")
    for text in (capsys.readouterr().err, str(caught.value)):
        assert "by per_position alone" in text and "perplexity yet" not in text


def test_one_length_has_no_ratios_to_draw(tmp_path: pathlib.Path) -> None:
    (short, whole) = (panels([row("rope", n) for n in lengths])[0] for lengths in ((32, 64), (64, 128)))
    assert [curves.draws("ratio", one) for one in (short, whole)] == [False, True]
    assert all(curves.draws("extrapolation", one) for one in (short, whole))


def test_runs_without_a_measurement_leave_no_table(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not an empty one, nor that of earlier rows, but the command that measures them."""
    folder = write(tmp_path / "my runs", [row("alibi", 64)])
    (run,) = folder.iterdir()
    start(run, config("alibi"))
    plots.plot(folder)
    assert (folder / "table.md").is_file()
    (run / "eval.jsonl").unlink()
    command = f"posx evaluate --workdir '{folder}'"
    with pytest.raises(WorkdirError, match=re.escape(command)):
        plots.plot(folder)
    (run / "metrics.jsonl").write_text(logged(5.5))
    assert [path.name for path in plots.plot(folder)] == ["training.png", "training.svg"]
    assert not (folder / "table.md").exists() and command in capsys.readouterr().err


@pytest.mark.slow
def test_failed_single_and_pending_runs_are_drawn(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path, [row("learned", length, status="oom", ppl=None, nll=None) for length in (64, 128)])
    (folder / "rope-pending").mkdir()
    (folder / "rope-pending" / "config.json").write_text("{}")
    assert len(plots.plot(folder)) == 4
    (panel,) = groups.panels(read_results(folder), missing_runs(folder))
    shown = words(curves.extrapolation(panel))
    assert "no finite perplexity" in shown and "No results yet: rope-pending" in shown
    assert len(plots.plot(write(tmp_path / "point", [row("rope", 64)]))) == 2, "no ratios"


@pytest.mark.parametrize("low", [1, 2.2, 4.1, 6.3, 9.9, 11.5])
def test_log_axes_have_ticks_near_both_ends(low: float) -> None:
    """A curve from 4.1 to 13.5 has a tick above 10."""
    for ratio in (1.05, 1.3, 2.5, 3.3, 4.4, 15, 1e5, 1e9):
        ax = look.figure(4, 3).subplots()
        look.log_axis(ax, [low, low * math.sqrt(ratio), low * ratio])
        (bottom, top), ticks = ax.get_ylim(), ax.get_yticks()
        bare = math.log(max(ticks[0] / bottom, top / ticks[-1])) / math.log(top / bottom)
        assert bare <= 0.25 and 4 <= len(ticks) <= 9, (ratio, ticks)


@pytest.mark.parametrize(
    "curves",
    [
        [(text, 0) for text in ("rope", "alibi", "t5", "mine:LearnedBase", "mine:GatedLog")],
        [(f"rope(base={base})", 0) for base in range(6)],
        [("rope", rate) for rate in range(6)],
        [*((f"mine:E{n}", 0) for n in range(6)), ("nope", 0), ("alibi", 0)],
    ],
    ids=["own", "variants", "settings", "many"],
)
def test_colours_of_one_figure_differ(curves: list[tuple[str, int]]) -> None:
    """CIE76 differences in sRGB of at least 20: 2.3 is just noticeable."""
    colors = [one.color for one in palette.looks(curves).values()]
    assert min(math.dist(_lab(a), _lab(b)) for a, b in itertools.combinations(colors, 2)) >= 20


def _lab(color: str) -> tuple[float, float, float]:
    rgb = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    x, y, z = (
        0.4124 * r + 0.3576 * g + 0.1805 * b, 0.2126 * r + 0.7152 * g + 0.0722 * b,
        0.0193 * r + 0.1192 * g + 0.9505 * b,
    )  # fmt: skip
    fx, fy, fz = (c ** (1 / 3) if c > 0.008856 else 7.787 * c + 16 / 116 for c in (x / 0.9505, y, z / 1.089))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)
