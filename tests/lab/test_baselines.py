"""The baselines of curves: windows of L at test time, training at the longer length, and no context."""

import math
import pathlib
from typing import Any

import pytest
from matplotlib.figure import Figure

from posx.errors import WorkdirError
from posx.lab import plots
from posx.lab.plots import curves, groups, heat
from tests.made_rows import DIGEST, as_lines, as_table, cells, row, words

LENGTHS = (64, 128, 256)


def measured(text: str = "rope", train_len: int = 64, ppl: float = 4.0, **changes: Any) -> list[dict[str, Any]]:
    """Rows of a run with `ppl` at its training length, twice that in windows of twice the length and so on."""
    facts = {"train_len": train_len, "run_id": f"{text}-L{train_len}", "targets": "0a1b", "status": "ok"}
    facts |= {"hash": facts["run_id"]}
    return [row(text, n, ppl=ppl * n / train_len, **facts | changes) for n in LENGTHS]


def under_window(text: str, size: int, weights: str = "") -> list[dict[str, Any]]:
    """Rows of `text` on the weights of `measured(weights or text)` under a window, with a flat perplexity."""
    settings = {"model.mask_policy": [f"window(size={size})"], "parent.encoding": text, "parent.kind": f"all of {text}"}
    settings |= {
        "parent.hash": f"{weights or text}-L64",
        "encoding.name": text,
        "train.length": 64,
        "train.seed": 0,
        "data": DIGEST,
    }
    own = {"run_id": f"{text}@{size}", "settings": settings}
    return [one | {"ppl": 4.5, "nll": math.log(4.5)} for one in measured(text, **own)]


def panels(made: list[dict[str, Any]]) -> list[groups.Panel]:
    return groups.panels(as_table(made))


def legend(figure: Figure) -> dict[str, Any]:
    box = figure.legends[0]
    return dict(zip((text.get_text() for text in box.get_texts()), box.legend_handles, strict=True))


def test_windows_of_l_are_thin_lines_of_the_same_colour() -> None:
    made = [*measured("rope"), *measured("alibi"), *under_window("rope", 64), *under_window("alibi", 64)]
    (panel,) = panels(made)
    for figure in (curves.extrapolation(panel), curves.ratio(panel)):
        named = legend(figure)
        (thin,) = [text for text in named if text.startswith("thin:")]
        assert set(named) == {"alibi", "rope", thin}
        for text in ("alibi", "rope"):
            of_colour = [one for one in figure.axes[0].lines if one.get_color() == named[text].get_color()]
            narrow, wide = sorted(of_colour, key=lambda one: one.get_linewidth())
            assert narrow.get_linewidth() < wide.get_linewidth() and narrow.get_marker() in ("", "None")
            assert len(set(narrow.get_ydata())) == 1 < len(set(wide.get_ydata()))
    table = plots.table(as_table(made))
    assert cells(table, "rope under window(size=64)")[-1] == "1.000" and cells(table, "rope")[-1] == "4.000"


def test_failures_under_windows_of_l_are_named() -> None:
    """A thin line ended, or was the mean of other seeds, without a word."""
    *shorter, longest = under_window("rope", 64)
    longest |= {"status": "oom", "nll": None, "ppl": None, "bpb": None}
    (panel,) = panels([*measured("rope"), *shorter, longest])
    for figure, place in ((curves.extrapolation(panel), "256"), (curves.ratio(panel), "k = 4")):
        assert f"rope under window(size=64): out of memory at {place}" in words(figure)


def test_thin_lines_of_fewer_seeds_are_named() -> None:
    """A thin line of one seed lay below a curve of two, and its own seed did not."""
    second = measured("rope", ppl=6.0, run_id="rope-s1", hash="rope-s1", seed=1)
    (panel,) = panels([*measured("rope"), *second, *under_window("rope", 64)])
    for figure in (curves.extrapolation(panel), curves.ratio(panel)):
        assert "Thin lines of 1 of 2 runs of their curves, so seeds make part of the gap: rope" in words(figure)


def test_other_windows_are_curves_of_their_own() -> None:
    made = [*measured("rope"), *under_window("rope", 32)]
    assert set(legend(curves.extrapolation(panels(made)[0]))) == {"rope", "rope under window(size=32)"}


def test_a_window_on_other_weights_is_no_baseline() -> None:
    made = [*measured("rope"), *measured("alibi"), *under_window("alibi", 64, weights="rope")]
    assert set(legend(curves.extrapolation(panels(made)[0]))) == {"alibi", "rope", "alibi under window(size=64)"}


def test_models_trained_at_longer_lengths_are_open_markers() -> None:
    made = [*measured("rope"), *measured("alibi"), *measured("rope", 128, 3.0), *measured("rope", 256, 2.0)]
    first, *_, last = panels(made)
    for figure, scale in ((curves.extrapolation(first), (1, 1)), (curves.ratio(first), (64, 4.0))):
        (marks,) = [one for one in figure.axes[0].lines if one.get_markerfacecolor() == "white" and one.get_marker()]
        assert marks.get_markeredgecolor() == legend(figure)["rope"].get_color()
        assert [x * scale[0] for x in marks.get_xdata()] == [128, 256]
        assert [y * scale[1] for y in marks.get_ydata()] == [3.0, 2.0]
        assert "open: trained at that length" in legend(figure)
    assert "open: trained at that length" not in legend(curves.extrapolation(last))


def test_open_markers_above_the_frame_are_named() -> None:
    """The legend names open markers only if one is drawn, in either panel."""
    flat = [measured(text)[0] | {"eval_len": n} for text in ("rope", "alibi") for n in LENGTHS]
    for longer, in_legend in ((3.9, True), (5.0, True), (9.0, False)):
        (panel, *_) = panels([*flat, *measured("rope", 256, longer)[-1:]])
        figure = curves.extrapolation(panel)
        assert ("open: trained at that length" in legend(figure)) == in_legend
        assert ("Leaves the frame at its top: open markers of rope" in words(figure)) == (longer > 4)


def test_models_trained_beyond_the_axes_are_no_baseline() -> None:
    (panel, *_) = panels([*measured("rope"), *(one | {"eval_len": 512} for one in measured("rope", 512)[:1])])
    for figure in (curves.extrapolation(panel), curves.ratio(panel)):
        assert set(legend(figure)) == {"rope"}


def test_models_measured_on_other_targets_are_named_not_drawn() -> None:
    figure = curves.extrapolation(panels([*measured("rope"), *measured("rope", 128, targets="2c3d")])[0])
    assert set(legend(figure)) == {"rope"}
    assert "Not drawn: models trained at 128 tokens, measured on other targets" in words(figure)


def test_open_markers_say_which_failed_runs_they_leave_out() -> None:
    runs = [(seed, f"rope-L128-s{seed}") for seed in range(3)]
    longer = [one for seed, run in runs for one in measured("rope", 128, 3.0, seed=seed, run_id=run, hash=run)]
    longer[1] |= {"status": "nonfinite", "nll": None, "ppl": None, "bpb": None}
    (panel, _) = panels([*measured("rope"), *longer])
    for figure in (curves.extrapolation(panel), curves.ratio(panel)):
        assert "Open markers without the runs that failed: rope at 128 (1 of 3 runs)" in words(figure)


@pytest.mark.parametrize(("level", "is_drawn"), [(10.0, True), (18.5, True), (40.0, False)])
def test_perplexity_without_context_never_squeezes_curves(level: float, is_drawn: bool) -> None:
    plain, figure = (curves.extrapolation(panels(measured(unigram_ppl=own))[0]) for own in (None, level))
    (low, high), (bottom, top) = (one.axes[0].get_ylim() for one in (plain, figure))
    assert math.log(top / bottom) <= 1.3 * math.log(high / low)
    assert ("no context" in words(figure)) == is_drawn and "no context" not in words(plain)
    (note,) = [text for text in words(figure) if text.startswith("No context: perplexity")]
    assert f"{level:g}" in note and ("outside the frame" in note) != is_drawn


def test_unlike_levels_without_context_are_a_note() -> None:
    made = [*measured("rope", unigram_ppl=9.0), *measured("alibi", unigram_ppl=12.5)]
    figure = curves.extrapolation(panels(made)[0])
    assert "No context: perplexity 9 to 12.5, by" in " ".join(words(figure)) and "no context" not in words(figure)


@pytest.mark.parametrize(("share", "is_said"), [(0.12, True), (0.5, False), (None, False)])
def test_long_windows_of_short_documents_are_a_note(share: float | None, is_said: bool) -> None:
    figure = curves.extrapolation(panels(measured("rope", own_context=share))[0])
    assert any("12% in windows of" in text for text in words(figure)) is is_said


def test_triangle_has_a_number_or_a_reason_in_each_cell() -> None:
    gone = {"status": "undefined", "nll": None, "ppl": None, "bpb": None}
    long = measured("rope", 256, 2.5)[1:]
    learned = [*measured("learned")[:1], *(one | gone for one in measured("learned")[1:])]
    figure = heat.triangle(panels([*measured("rope"), *long, *learned]))
    first, second = figure.axes[:2]
    texts = [[text.get_text().replace("\n", " ") for text in ax.texts] for ax in (first, second)]
    assert [ax.get_title() for ax in (first, second)] == ["learned", "rope"]
    assert texts[0] == ["4.00", "undefined", "undefined", *3 * ["not measured"]]
    assert texts[1] == ["4.00", "8.00", "16.0", "not measured", "1.25", "2.50"]
    boxed = [patch.get_x() + 0.46 for patch in second.patches]
    assert boxed == [0, 2], "the training lengths"


def test_triangle_says_which_seeds_a_mean_leaves_out() -> None:
    gone = {"status": "oom", "nll": None, "ppl": None, "bpb": None}
    runs = [(n, seed, f"rope-L{n}-s{seed}") for n in (64, 128) for seed in range(3)]
    made = [one for n, seed, run in runs for one in measured("rope", n, 2.0, seed=seed, run_id=run, hash=run)]
    made = [one | gone if (one["seed"], one["train_len"], one["eval_len"]) == (1, 64, 256) else one for one in made]
    figure = heat.triangle(panels(made))
    said = " ".join(" ".join(words(figure)).split())
    assert "rope, L = 64: out of memory at 256 (1 of 3 runs)" in said


def test_triangle_has_a_column_for_each_training_length() -> None:
    lengths = (*(2**n for n in range(5, 13)), 96)
    made = [measured("rope", unigram_ppl=6.0)[0], measured("rope", 96, 3.0)[-1]]
    made = [one | {"eval_len": n} for one in made for n in lengths]
    first, *_, bar = heat.triangle(panels(made)).axes
    shown = [text.get_text() for text in first.get_xticklabels()]
    assert shown[:4] == ["32", "64", "96", "128"] and len(first.patches) == 2
    assert bar._colorbar.extend == "max", "values above the level without context"
    assert "| perplexity at 96 |" in plots.table(as_table(made))


def test_triangle_of_one_training_length_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "eval.jsonl").write_text(as_lines(measured("rope")))
    with pytest.raises(
        WorkdirError, match="triangle needs runs of a text, of at least two training lengths .* of nonoverlapping$"
    ):
        plots.plot(tmp_path, "triangle")


def test_triangle_is_a_table_of_all_training_lengths() -> None:
    made = as_table([*measured("rope"), *measured("rope", 128, 3.0)])
    table = plots.table(made)
    assert cells(table, "rope, L = 64")[2:] == ["4.000", "8.000", "16.000"]
    assert cells(table, "rope, L = 128")[2:] == ["1.500", "3.000", "6.000"]
    assert "rope, L = 64" not in plots.table(made[made.train_len == 64])
