"""Figures and tables of folders that hold more than one plain sweep: which runs are one curve, what each is called."""

import csv
import io
import itertools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from posx.encodings.grammar import parse
from posx.lab import plots
from posx.lab.config import RunConfig
from posx.lab.files.checksums import with_checksum
from posx.lab.plots import groups, look, palette
from posx.lab.results.columns import RUN_COLUMNS, make_table
from posx.lab.results.facts import settings_facts
from posx.lab.results.table import read_results
from tests.made_rows import AT_TRAIN, as_lines, as_table, cells, config, logged, position_row, row, start, words, write

Draw = Callable[..., dict[str, Figure]]
LENGTHS = (64, 128, 256)


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Draw:
    """`plot` with the figures themselves, by the names of their files, which are left empty."""

    def drawn(folder: pathlib.Path, what: str = "all") -> dict[str, Figure]:
        found: dict[str, Figure] = {}

        def keep(made: Figure, figures: pathlib.Path, name: str) -> list[pathlib.Path]:
            figures.mkdir(exist_ok=True)
            path = figures / f"{name}.png"
            path.touch()
            found[name] = made
            return [path]

        monkeypatch.setattr(look, "save_figure", keep)
        plots.plot(folder, what)
        return found

    return drawn


def put(
    folder: pathlib.Path, path: str, rows: list[dict[str, Any]], run: RunConfig | None = None, **settings: Any
) -> None:
    """Write the rows of a run with settings of its own, or the `config.json` of one that has no rows."""
    if run and not rows:
        start(folder / path, run)
        return
    settings = (dict(run.settings) if run else {}) | settings
    made = [one | {"run_id": pathlib.Path(path).name, "settings": one["settings"] | settings} for one in rows]
    (folder / path).mkdir(parents=True)
    (folder / path / "eval.jsonl").write_text(as_lines(made))


def measured(text: str = "rope", ppl: float = 4.0, seed: int = 0, lengths: Any = LENGTHS, **changes: Any) -> list[Any]:
    """Rows of one run: `ppl` at the training length, twice that at the next, and so on."""
    facts = {"encoding": text, "layers": [text]}
    scored = {"targets": "0a1b", "block_len": 256}
    rows = [row("rope", n, seed, ppl=ppl * n / 64, nll=math.log(ppl * n / 64)) for n in lengths]
    return [one | facts | scored | changes for one in rows]


def line(figure: Figure, label: str, axis: int = 0) -> Line2D:
    """The line in the axes that the legend calls `label`."""
    legend = figure.legends[0]
    (handle,) = [
        one for one, text in zip(legend.legend_handles, legend.get_texts(), strict=True) if text.get_text() == label
    ]
    assert isinstance(handle, Line2D)
    (found,) = [one for one in figure.axes[axis].lines if _drawn(one) == _drawn(handle) and len(one.get_xdata()) > 1]
    return found


def _drawn(one: Line2D) -> tuple[Any, ...]:
    return one.get_color(), str(one._unscaled_dash_pattern), one.get_marker()  # type: ignore[attr-defined]


def entries(figure: Figure) -> list[str]:
    """What the legend names."""
    return sorted(" ".join(text.get_text().split()) for text in figure.legends[0].get_texts())


def test_two_sweeps_under_one_folder_replace_nothing(tmp_path: pathlib.Path, draw: Draw) -> None:
    put(tmp_path, "first/rope-L64-s0", measured(ppl=4.0), config())
    put(tmp_path, "second/rope-L64-s0", measured(ppl=5.0), config(train__learning_rate=0.004))
    figure = draw(tmp_path)["extrapolation"]
    assert entries(figure) == ["rope, learning_rate=0.002", "rope, learning_rate=0.004"]
    assert list(line(figure, "rope, learning_rate=0.004").get_ydata()) == [5.0, 10.0, 20.0]
    table = plots.table(read_results(tmp_path))
    assert cells(table, "rope, learning_rate=0.002")[2] == "4.000"
    assert cells(table, "rope, learning_rate=0.004")[2] == "5.000"


def test_seeds_are_what_agrees_in_all_that_changes_results(tmp_path: pathlib.Path) -> None:
    put(tmp_path, "a", measured(ppl=4.0, seed=0), config(train__log_steps=5, data__cache_dir="/elsewhere"))
    put(tmp_path, "b", measured(ppl=5.0, seed=1), config(train__seed=1, eval__lengths=(64,), data__source="moved"))
    put(tmp_path, "c", measured(ppl=9.0, seed=2), config(train__seed=2, train__batch_size=32))
    table = plots.table(read_results(tmp_path))
    assert cells(table, "rope, batch_size=64")[1:3] == ["2", "4.500 ± 0.707"]
    assert cells(table, "rope, batch_size=32")[1:3] == ["1", "9.000"]


def test_the_same_run_twice_is_two_curves_named_by_path(tmp_path: pathlib.Path) -> None:
    for sweep, ppl in (("first", 4.0), ("again", 5.0)):
        for seed in (0, 1):
            put(tmp_path, f"{sweep}/rope-s{seed}", measured(ppl=ppl + seed, seed=seed), config(train__seed=seed))
    table = plots.table(read_results(tmp_path))
    assert cells(table, "rope, first")[1:3] == ["2", "4.500 ± 0.707"]
    assert cells(table, "rope, again")[1:3] == ["2", "5.500 ± 0.707"]
    put(tmp_path, "first/rope-s0-copy", measured(ppl=7.0), config())
    table = plots.table(read_results(tmp_path))
    assert cells(table, "rope, first/rope-s0-copy")[1:3] == ["1", "7.000"]


def test_a_hybrid_is_never_drawn_as_its_first_encoding(tmp_path: pathlib.Path, draw: Draw) -> None:
    put(tmp_path, "plain", measured(ppl=4.0), config())
    half = config(model__layer_policy=("encoding", "nope"))
    put(tmp_path, "hybrid", measured(ppl=5.0, layers=["rope", "nope"]), half)
    put(tmp_path, "third", measured(ppl=6.0, layers=["rope", "rope", "nope"]))
    figure = draw(tmp_path)["extrapolation"]
    assert entries(figure) == ["rope", "rope, nope", "rope, rope, nope"]
    assert line(figure, "rope").get_color() == palette.LOOKS["rope"].color != line(figure, "rope, nope").get_color()
    table = plots.table(read_results(tmp_path))
    assert [cells(table, name)[2] for name in ("rope", "rope, nope", "rope, rope, nope")] == ["4.000", "5.000", "6.000"]


def test_labels_name_what_differs_between_encodings(tmp_path: pathlib.Path, draw: Draw) -> None:
    put(tmp_path, "t5", measured("t5", ppl=4.0), config("t5", train__steps=30))
    put(tmp_path, "alibi", measured("alibi", ppl=5.0), config("alibi", train__steps=90, model__model_dim=96))
    for run in ("t5", "alibi"):
        (tmp_path / run / "metrics.jsonl").write_text(logged(5.5, 2.5))
    drawn = draw(tmp_path)
    names = ["alibi, model_dim=96, steps=90", "t5, model_dim=128, steps=30"]
    assert [entries(drawn[kind]) for kind in ("extrapolation", "ratio", "training")] == 3 * [names]
    table = plots.table(read_results(tmp_path))
    assert [cells(table, name)[2] for name in names] == ["5.000", "4.000"]


def test_a_setting_that_one_curve_has_otherwise_is_stated_once(tmp_path: pathlib.Path, draw: Draw) -> None:
    for text in ("rope", "t5", "nope", "alibi"):
        put(tmp_path, text, measured(text), config(text, train__learning_rate=0.004 if text == "t5" else 0.002))
    put(tmp_path, "t5-slow", measured("t5"), config("t5", train__learning_rate=0.002))
    note = "If a label does not say otherwise: learning_rate=0.002"
    figure, table = draw(tmp_path)["extrapolation"], plots.table(read_results(tmp_path))
    assert entries(figure) == ["alibi", "nope", "rope", "t5, learning_rate=0.002", "t5, learning_rate=0.004"]
    assert note in words(figure) and note in table


def test_settings_that_follow_from_others_are_not_named(tmp_path: pathlib.Path) -> None:
    """mlp_dim is four times model_dim unless it is set, and each encoding has a position_lr_multiplier of its own."""
    for seed, (text, width, asked) in enumerate((("rope", 128, 0), ("rope", 128, 512), ("t5", 64, 0))):
        made = config(text, train__seed=seed, model__model_dim=width, model__mlp_dim=asked)
        put(tmp_path, f"run{seed}", measured(text, seed=seed), made)
    table = plots.table(read_results(tmp_path))
    assert cells(table, "rope, model_dim=128")[1] == "2" and cells(table, "t5, model_dim=64")[1] == "1"
    put(tmp_path, "narrow", measured("t5"), config("t5", model__model_dim=64, model__mlp_dim=100))
    assert cells(plots.table(read_results(tmp_path)), "t5, mlp_dim=100")


def test_the_same_text_at_another_path_is_no_difference(tmp_path: pathlib.Path, draw: Draw) -> None:
    """Also of a run that has no rows, by the digest in its config.json."""
    for seed, (source, made) in enumerate((("/d/two", measured("alibi", data_source="/other/two")), ("/d/two", []))):
        put(tmp_path, f"s{seed}", made, config("alibi", data__source=source, train__seed=seed))
        (tmp_path / f"s{seed}" / "metrics.jsonl").write_text(logged(5.5, 2.5))
    assert entries(draw(tmp_path, "training")["training"]) == ["alibi (2 runs)"]


def test_texts_are_compared_by_content(tmp_path: pathlib.Path) -> None:
    """They are told apart by their digests if their paths and tokenizers are alike."""
    names = {"data_source": "novels", "tokenizer": "bytes"}
    for number, text in enumerate(("alibi", "rope", "t5")):
        put(tmp_path, text, measured(text, data_digest=f"{number % 2}" * 16, **names), data=f"{number % 2}" * 16)
    table = plots.table(read_results(tmp_path))
    assert cells(table, "alibi") and cells(table, "rope, text=111111111111")
    assert "If a label does not say otherwise: text=000000000000" in table
    put(tmp_path, "nope", measured("nope", data_digest="2" * 16, **names | {"tokenizer": "bpe-512"}), data="2" * 16)
    assert cells(plots.table(read_results(tmp_path)), "nope, tokenizer=bpe-512")


def test_runs_of_other_training_texts_share_their_held_out_text(tmp_path: pathlib.Path) -> None:
    """Their rows are compared, but they are no seeds of one curve."""
    for number, name in enumerate(("novels", "code")):
        put(tmp_path, name, measured(seed=number, data_source=f"{name}, held out v"), data=name)
    table = plots.table(read_results(tmp_path))
    assert cells(table, "rope, source=novels, held out v") and cells(table, "rope, source=code, held out v")
    assert "corpora" not in table


def test_another_text_has_no_layout_of_the_training_text(tmp_path: pathlib.Path) -> None:
    """`data_settings` are those of the text that the run was trained on."""
    names = {"data_source": "novels", "tokenizer": "bytes"}
    for number, (text, digest) in enumerate((("alibi", "0" * 16), ("rope", "1" * 16))):
        own = {"data_digest": digest, "own_text": not number, "data_settings": {"text_field": f"field{number}"}}
        rows = measured(text, **own, **names)
        put(tmp_path, text, rows, data="0" * 16)
    table = plots.table(read_results(tmp_path))
    assert "text=111111111111" in table and "text_field" not in table


def test_long_labels_that_differ_are_never_shown_alike(tmp_path: pathlib.Path, draw: Draw) -> None:
    """Neither in the legend nor in notes and tables, and a curve is called the same in all of them."""
    long = f"my_encodings:Mine({', '.join(f'field_{n}={{}}' for n in range(16))})"
    texts = [long.format(*range(8), middle, *range(9, 16)) for middle in (1, 2)]
    for number, text in enumerate(texts):
        failed = [one | {"status": "oom", "ppl": None, "nll": None} for one in measured(text, lengths=(128,))]
        put(tmp_path, f"run{number}", [*measured(text, lengths=(64,)), *failed])
    figure, table = draw(tmp_path)["extrapolation"], plots.table(read_results(tmp_path))
    names = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| my_")]
    assert len(set(names)) == 2 and max(map(len, names)) <= 160
    legend = ["".join(text.get_text().split()) for text in figure.legends[0].get_texts()]
    shown, said = [name.replace(" ", "") for name in names], "".join("".join(words(figure)).split())
    assert sorted(shown) == sorted(legend[:2]) and all(f"{name}:outofmemoryat128" in said for name in shown)


def test_labels_can_be_typed(tmp_path: pathlib.Path, draw: Draw) -> None:
    texts = ["rope", "rope(base=500000)", "rope(base=500000)+alibi", "my_module:Mine(gain=3)"]
    for number, text in enumerate(texts):
        put(tmp_path, f"run{number}", measured(text, ppl=4.0 + number), config())
    assert entries(draw(tmp_path)["ratio"]) == sorted(texts) and all(map(parse, texts))


def test_labels_name_fields_of_an_encoding_only_beside_its_text(tmp_path: pathlib.Path) -> None:
    """One text is resolved in two ways by two versions of posx, or for two sizes, which the label names anyway."""
    for distance in (32, 64):
        settings = {"encoding.name": "t5", "encoding.max_distance": distance}
        put(tmp_path / "versions", f"t{distance}", measured("t5"), **settings)
        put(tmp_path / "sizes", f"t{distance}", measured("t5"), **settings, **{"model.model_dim": distance})
    versions, sizes = (plots.table(read_results(tmp_path / name)) for name in ("versions", "sizes"))
    assert cells(versions, "t5, max_distance=32") and cells(versions, "t5, max_distance=64")
    assert cells(sizes, "t5, model_dim=32") and cells(sizes, "t5, model_dim=64")


def test_rows_of_another_version_are_left_out_with_a_line(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, "a", [*measured(schema_version=3), *measured("alibi")])
    put(tmp_path, "b", measured("t5", schema_version=9))
    assert set(read_results(tmp_path).encoding) == {"alibi"}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 6 and "a/eval.jsonl, line 1: it is a row of version 3" in said[0]


def test_a_path_is_spelt_out_only_if_its_last_word_is_ambiguous(tmp_path: pathlib.Path) -> None:
    for rate in (1, 2):
        both = {"train.dropout": 0.1 * rate, "model.dropout": 0.2 * rate, "model.depth": rate}
        put(tmp_path, f"run{rate}", measured(ppl=float(rate)), **both)
    assert cells(plots.table(read_results(tmp_path)), "rope, depth=1, model.dropout=0.2, train.dropout=0.1")


def test_losses_per_position_are_of_the_longest_windows_alone(tmp_path: pathlib.Path, draw: Draw) -> None:
    """A run measured at two lengths, twice at each, is no pair of seeds, and its omissions are named once."""
    long = position_row("rope") | {"targets": "ff"}
    edges = [*(edge for edge in long["position_edges"] if edge < 255), 256]
    bins = {"position_nll": [9.0] * (len(edges) - 1), "position_targets": [64] * (len(edges) - 1)}
    short = [long | {"eval_len": 256, "position_edges": edges, **bins, "targets": name} for name in ("aa", "bb")]
    put(tmp_path, "rope-s0", [long | {"targets": "cc"}, long, *short])
    figure = draw(tmp_path)["per_position"]
    assert any("1 seed" in text for text in words(figure)) and entries(figure) == ["rope"]
    assert not figure.axes[0].collections, "no band over two rows of one run"
    assert max(line(figure, "rope").get_ydata()) < 5
    assert "rope-s0: windows of 256 tokens left out, those of 1,024 are drawn" in words(figure)
    assert "rope-s0: 1 row left out, scored on other targets (not comparable)" in words(figure)


def test_length_labels_keep_a_gap(tmp_path: pathlib.Path, draw: Draw) -> None:
    for train in (64, 1024):
        lengths = [round(train * factor) for factor in (1, 1.0625, 1.125, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8)]
        rows = [one | {"eval_len": n} for n, one in zip(lengths, measured(lengths=[64] * 11), strict=True)]
        put(tmp_path, f"{train}", [one | {"train_len": train} for one in rows], config(train__length=train))
    for name, figure in draw(tmp_path).items():
        figure.draw_without_rendering()
        for ax in figure.axes:
            boxes = [label.get_window_extent() for label in ax.get_xticklabels() if label.get_text()]
            gaps = [second.x0 - first.x1 for first, second in itertools.pairwise(boxes)]
            assert min(gaps, default=9.0) >= 0.08 * figure.dpi, name


def test_losses_in_shorter_windows_are_named_as_on_other_targets(tmp_path: pathlib.Path, draw: Draw):
    """Learned tables end at L, so theirs are of windows that start more often."""
    short = position_row("tupe")
    bins = {name: short[name][:24] for name in ("position_nll", "position_targets")}
    put(tmp_path, "rope-s0", [position_row("rope")])
    put(tmp_path, "tupe-s0", [short | bins | {"eval_len": 64, "position_edges": [*short["position_edges"][:24], 64]}])
    said = words(draw(tmp_path, "per_position")["per_position"])
    assert any("In windows of 64 tokens, so on other targets" in text and "tupe" in text for text in said)


def test_what_is_left_of_the_last_bin_joins_its_neighbour(tmp_path: pathlib.Path, draw: Draw) -> None:
    edges = [0, *range(1, 130)]
    losses = [2.0] * 128 + [8.0]  # one position, 64 targets: noise
    bins = {"position_edges": edges, "position_nll": losses, "position_targets": [64] * 129}
    put(tmp_path, "rope-s0", [position_row("rope") | bins | {"eval_len": 129}])
    drawn = line(draw(tmp_path, "per_position")["per_position"], "rope").get_ydata()
    assert max(drawn) < 2.6, "merged, by its targets"
    assert drawn[-1] > 2.0, "and not dropped"


def test_rows_left_out_are_named_where_the_others_are_shown(tmp_path: pathlib.Path, draw: Draw) -> None:
    others = measured(ppl=9.0, lengths=(64, 128), targets="ff")
    put(tmp_path, "sweep/rope-s0", [*measured(), *others])
    put(tmp_path, "sweep/alibi-s0", measured("alibi"))
    note = "sweep/rope-s0: 2 rows left out, scored on other targets (not comparable)"
    drawn = draw(tmp_path)
    assert note in words(drawn["extrapolation"]) and note in words(drawn["ratio"])
    assert note in plots.table(read_results(tmp_path)) and "alibi-s0" not in plots.table(read_results(tmp_path))


def test_rows_on_other_targets_never_replace_the_runs_own(tmp_path: pathlib.Path) -> None:
    look = measured(ppl=9.0, lengths=(64, 96, 128, 256), targets="ff", max_targets=512)
    own = measured(max_targets=4096)
    put(tmp_path, "rope-s0", [*own, *look], config("rope", eval__num_targets=4096))
    found = read_results(tmp_path)
    left_out = found.left_out == "scored on other targets (not comparable)"
    assert set(found.max_targets[~left_out]) == {4096} and left_out.sum() == 4


def test_rows_on_another_text_never_replace_the_runs_own(tmp_path: pathlib.Path, draw: Draw) -> None:
    """As `posx evaluate --config.data.source=OTHER` appends them."""
    put(tmp_path, "rope-s0", [*measured(), *measured(ppl=9.0, data_digest="other", own_text=False, targets="ff")])
    own = config("alibi")
    put(
        tmp_path,
        "alibi-s0",
        [*measured("alibi", ppl=9.0, data_digest="other", own_text=False, targets="ff"), *measured("alibi")],
        own,
    )
    figure = draw(tmp_path)["extrapolation"]
    note = "alibi-s0, rope-s0, each: 3 rows left out, measured on other text (not comparable)"
    assert note in words(figure) and 9.0 not in set(read_results(tmp_path).query("left_out == ''").ppl)
    assert not any("corpora" in text for text in words(figure))


def test_rows_on_another_text_alone_make_no_seed_of_the_others(tmp_path: pathlib.Path) -> None:
    """A protocol that a run was measured under on other text only: beside its own text those rows are no part of it."""
    other = measured(ppl=9.0, protocol="sliding", stride=16, data_digest="other", own_text=False, targets="ff")
    put(tmp_path, "a", [*measured(), *other], config())
    sliding = measured(seed=1, protocol="sliding", stride=16)
    put(tmp_path, "b", [*measured(ppl=5.0, seed=1), *sliding], config(train__seed=1))
    first, second = plots.table(read_results(tmp_path)).split("\n\nSliding")
    assert cells(first, "rope")[1:3] == ["2", "4.500 ± 0.707"] and cells(second, "rope")[1:3] == ["1", "4.000"]


def test_rows_of_an_earlier_step_are_left_out_and_named(tmp_path: pathlib.Path, draw: Draw) -> None:
    """As `posx evaluate` leaves them that was called before a run was resumed."""
    early = measured(ppl=9.0, step=500, lengths=(64, 128, 192, 256))
    put(tmp_path, "rope-s0", [*early, *measured(step=1200)], config(train__steps=1200))
    put(tmp_path, "alibi-s0", measured("alibi", step=500), config("alibi", train__steps=1200))
    figure = draw(tmp_path)["extrapolation"]
    assert list(line(figure, "rope, step=1200").get_xdata()) == [64, 128, 256]
    assert "rope-s0: 4 rows left out, measured earlier in training" in words(figure)
    note = "Measured before the end of training: alibi-s0 (step 500 of 1,200)"
    assert note in words(figure) and note in plots.table(read_results(tmp_path))
    for line_ in csv.DictReader(io.StringIO(plots.format_table(tmp_path, "csv"))):
        assert line_["warning"] == (note if line_["encoding"] == "alibi, step=500" else "")


def test_seeds_slid_with_other_strides_are_not_averaged(tmp_path: pathlib.Path, draw: Draw) -> None:
    for seed, stride in enumerate((16, 32)):
        made = measured(ppl=4.0 + seed, seed=seed, protocol="sliding", stride=stride)
        put(tmp_path, f"rope-s{seed}", made, config(train__seed=seed))
    assert set(draw(tmp_path, "ratio")) == {"ratio-sliding-s16", "ratio-sliding-s32"}
    assert [cells(one, "rope")[1:3] for one in plots.table(read_results(tmp_path)).split("\n\nSliding")] == [
        ["1", "4.000"],
        ["1", "5.000"],
    ]


def test_targets_are_chosen_for_each_stride(tmp_path: pathlib.Path, draw: Draw) -> None:
    """A look with another stride and other targets takes no rows from the figure of the first."""
    for seed in (0, 1):
        made = measured(seed=seed, protocol="sliding", stride=16)
        other = measured(seed=seed, protocol="sliding", stride=32, targets="ff") if seed else []
        put(tmp_path, f"rope-s{seed}", [*made, *other], config(train__seed=seed))
    table = plots.table(read_results(tmp_path))
    assert [cells(one, "rope")[1] for one in table.split("\n\nSliding")] == ["2", "1"] and "left out" not in table


def test_no_ratio_is_formed_across_sets_of_targets() -> None:
    """Rows that were put together by hand: read from a folder they are of one set."""
    made = as_table([*measured(lengths=(64, 128)), *measured(lengths=(256,), targets="another")])
    assert cells(plots.table(made), "encoding")[4:] == ["R_2"] and "scored on different targets" in plots.table(made)


def test_lengths_that_only_some_seeds_were_measured_at_are_named(tmp_path: pathlib.Path, draw: Draw) -> None:
    """The mean jumps there, whatever length does."""
    put(tmp_path, "a", measured(ppl=4.0), config())
    put(tmp_path, "b", measured(ppl=9.0, seed=1, lengths=(64, 128)), config(train__seed=1))
    drawn, table = draw(tmp_path), plots.table(read_results(tmp_path))
    assert "rope: 1 of 2 runs measured at 256" in words(drawn["extrapolation"]) and "1 of 2 runs" in table
    assert "rope: 1 of 2 runs measured at k = 4" in words(drawn["ratio"])


def test_a_length_that_was_not_measured_is_no_gap(tmp_path: pathlib.Path, draw: Draw) -> None:
    """A failure is one."""
    put(tmp_path, "a", measured("rope", lengths=(64, 96, 128, 192, 256)))
    put(tmp_path, "b", measured("alibi", lengths=(64, 256)))
    failed = measured("t5", lengths=(64, 128, 256))
    failed[1] |= {"status": "oom", "ppl": None, "nll": None}
    put(tmp_path, "c", failed)
    figure = draw(tmp_path, "extrapolation")["extrapolation"]
    assert list(line(figure, "alibi").get_xdata()) == [64, 256] and np.isfinite(line(figure, "alibi").get_ydata()).all()
    assert list(line(figure, "t5").get_xdata()) == [64, 128, 256]
    assert np.isnan(line(figure, "t5").get_ydata()).tolist() == [False, True, False]
    table = plots.table(read_results(tmp_path))
    assert cells(table, "encoding")[4:] == ["R_1.5", "R_2", "R_3", "R_4"]
    assert cells(table, "alibi")[4:] == ["-", "-", "-", "4.000"] and cells(table, "t5")[5] == "out of memory"


def test_curves_outside_the_close_view_are_named(tmp_path: pathlib.Path, draw: Draw) -> None:
    put(tmp_path, "a", measured("rope", ppl=4.0))
    put(tmp_path, "b", measured("nope", ppl=7.0))
    put(tmp_path, "c", measured("alibi", ppl=5.5))
    assert "Outside the right panel: nope" in words(draw(tmp_path)["extrapolation"])
    put(tmp_path, "d", measured("nope", ppl=8.0), config("nope", train__steps=30))
    put(tmp_path, "e", measured("nope", ppl=9.0), config("nope", train__steps=60))
    outside = "Outside the right panel: nope, steps=60; nope, steps=30; nope"
    said = [text for text in words(draw(tmp_path)["extrapolation"]) if "Outside" in text]
    assert said == [outside]


def test_one_figure_across_training_lengths(tmp_path: pathlib.Path, draw: Draw) -> None:
    for length, batch in ((64, 64), (128, 64), (256, 16)):
        for text in ("rope", "alibi"):
            asked = config(text, train__length=length, train__batch_size=batch)
            put(tmp_path, f"{text}-L{length}", measured(text, lengths=(64, 128, 256, 512), train_len=length), asked)
    drawn = draw(tmp_path)
    assert set(drawn) == {f"{kind}-L{n}" for kind in ("extrapolation", "ratio") for n in (64, 128, 256)} | {
        "extrapolation-lengths", "triangle",
    }  # fmt: skip
    figure = drawn["extrapolation-lengths"]
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["alibi", "rope"]
    assert entries(figure) == ["L = 128 batch_size=64", "L = 256 batch_size=16", "L = 64 batch_size=64"]
    for ax in figure.axes:
        curves = [one for one in ax.lines if len(one.get_xdata()) == 4]
        marks = [one for one in ax.lines if len(set(one.get_xdata())) == 1]
        assert len(curves) == 3 and [one.get_xdata()[0] for one in marks] == [64, 128, 256]
        assert (ax.get_xlim(), ax.get_ylim()) == (figure.axes[0].get_xlim(), figure.axes[0].get_ylim())
    assert "Tokens per training step differ: 4,096 (L = 64, L = 256), 8,192 (L = 128)" in words(figure)


def test_the_figure_across_lengths_names_what_differs(tmp_path: pathlib.Path, draw: Draw) -> None:
    """In titles; what follows from the length, in the legend of lengths."""
    for number, (length, text, width) in enumerate((
        (64, "rope", 128), (128, "rope", 128), (64, "alibi", 96), (128, "alibi", 128)
    )):  # fmt: skip
        asked = config(text, train__length=length, train__steps=64 * 500 // length, model__model_dim=width)
        put(tmp_path, f"{number}", measured(text, train_len=length), asked)
    figure = draw(tmp_path)["extrapolation-lengths"]
    titles = ["alibi, model_dim=128", "alibi, model_dim=96", "rope"]
    assert [ax.get_title(loc="left") for ax in figure.axes if ax.get_visible()] == titles
    assert entries(figure) == ["L = 128 steps=250", "L = 64 steps=500"]
    assert "If a label does not say otherwise: model_dim=128" in words(figure)


@pytest.mark.slow
def test_long_titles_stay_clear_of_other_panels(tmp_path: pathlib.Path, draw: Draw) -> None:
    long = ("my_encodings:AnotherOfThem(gain=3)", "alibi+my_encodings:Mine(first=1, second=2)", "rope", "t5", "alibi")
    for number, text in enumerate(long):
        for length, width in ((64, 64), (128, 64), (64, 128), (128, 128)):
            asked = config(train__length=length, model__model_dim=width, train__steps=1000 + width)
            put(tmp_path, f"{number}-{length}-{width}", measured(text, train_len=length), asked)
    figure = draw(tmp_path)["extrapolation-lengths"]
    figure.draw_without_rendering()
    panels = [ax for ax in figure.axes if ax.get_visible()]
    titles = [ax._left_title.get_window_extent() for ax in panels]
    assert max(title.get_text().count("\n") for title in (ax._left_title for ax in panels)) >= 2
    for number, (ax, title) in enumerate(zip(panels, titles, strict=True)):
        others = [one.get_window_extent() for one in panels if one is not ax] + titles[number + 1 :]
        assert not any(title.overlaps(other) for other in others)


def test_figure_across_lengths_stays_if_a_run_has_more_protocols(tmp_path: pathlib.Path, draw: Draw) -> None:
    for length in (64, 128):
        put(tmp_path, f"rope-L{length}", measured(train_len=length), config(train__length=length))
    put(tmp_path, "alibi", [*measured("alibi"), *measured("alibi", protocol="sliding", stride=16)], config("alibi"))
    assert "extrapolation-lengths" in draw(tmp_path, "extrapolation")


def test_one_figure_per_training_length_and_protocol(tmp_path: pathlib.Path, draw: Draw) -> None:
    made = [row("alibi", length, run_id=f"a{train}", train_len=train, protocol=protocol, stride=stride)
            for train in (32, 64) for length in (64, 128)
            for protocol, stride in (("nonoverlapping", length), ("sliding", 16), ("sliding", 8))]  # fmt: skip
    names = set(draw(write(tmp_path, made), "extrapolation"))
    rules = ("", "-sliding-s8", "-sliding-s16")
    assert names == {f"extrapolation-{which}{rule}" for which in ("L32", "L64", "lengths") for rule in rules}


def test_a_chosen_stride_is_a_rule_of_its_own(tmp_path: pathlib.Path, draw: Draw) -> None:
    """Windows of 64 and 128 tokens. Strides of half a window are one rule, 16 for both is another."""
    half, chosen = [32, 64], [16, 16]

    def made(train_len: int, strides: list[int]) -> list[Any]:
        facts = {"run_id": f"a{train_len}", "train_len": train_len, "protocol": "hf_strided"}
        return [row("alibi", n, stride=stride, **facts) for n, stride in zip((64, 128), strides, strict=True)]

    ends = {
        "other": ([*made(32, chosen), *made(64, half)], ["L32-hf_strided-s16", "L64-hf_strided"]),
        "alike": ([*made(32, half), *made(64, half)], ["L32-hf_strided", "L64-hf_strided", "lengths-hf_strided"]),
        "both": ([*made(32, half), *made(32, chosen)], ["hf_strided", "hf_strided-s16"]),
    }
    for name, (rows, expected) in ends.items():
        (tmp_path / name).mkdir()
        found = draw(write(tmp_path / name, rows), "extrapolation")
        assert set(found) == {f"extrapolation-{end}" for end in expected}, name


def test_another_protocol_or_stride_renames_no_figure(tmp_path: pathlib.Path, draw: Draw) -> None:
    names = []
    for number, (protocol, stride) in enumerate((("nonoverlapping", 64), ("sliding", 16), ("sliding", 8))):
        put(tmp_path, f"{number}", measured(lengths=(64, 128), protocol=protocol, stride=stride))
        names.append(set(draw(tmp_path, "ratio")))
    assert names[0] == {"ratio"} and names[1] == {"ratio", "ratio-sliding-s16"}
    assert names[2] == {"ratio", "ratio-sliding-s16", "ratio-sliding-s8"}


def test_tokens_per_step_are_stated_where_they_differ(tmp_path: pathlib.Path, draw: Draw) -> None:
    put(tmp_path, "a", measured(), config())
    put(tmp_path, "b", measured("alibi"), config("alibi"))
    assert not any("Tokens per" in text for text in words(draw(tmp_path)["extrapolation"]))
    put(tmp_path, "c", measured("t5"), config("t5", train__batch_size=16))
    note = "Tokens per training step differ: 1,024 (t5, batch_size=16), 4,096 (alibi, rope)"
    assert note in words(draw(tmp_path)["ratio"]) and note in plots.table(read_results(tmp_path))


def test_figures_and_table_are_of_the_same_rows(tmp_path: pathlib.Path, draw: Draw) -> None:
    put(tmp_path, "a", [*measured(), *measured(protocol="sliding", stride=16)])
    figures = tmp_path / "figures"
    figures.mkdir()
    for name in ("ratio-L64.svg", "extrapolation-sliding-s8.png", "per_position.png", "training.svg"):
        (figures / name).touch()
    others = {"ratio-mine.png", "notes.txt", "encodings.png"}
    for name in others:
        (figures / name).touch()
    (tmp_path / "ratio-L64.svg").touch()
    kept = {path.name for path in figures.iterdir()}
    drawn = draw(tmp_path, "ratio")
    assert {path.name for path in figures.iterdir()} == kept - {"ratio-L64.svg"} | {f"{name}.png" for name in drawn}
    drawn = draw(tmp_path)
    assert {path.name for path in figures.iterdir()} == others | {f"{name}.png" for name in drawn}
    assert (tmp_path / "ratio-L64.svg").exists()
    assert (tmp_path / "table.md").read_text() == plots.table(read_results(tmp_path)) + "\n"


def test_no_two_curves_are_drawn_alike() -> None:
    fields = [f"rope(base={base})" for base in range(8)]
    chains = [f"{first}+{second}" for first in AT_TRAIN for second in ("alibi", "my.module:Mine(gain=3)")]
    texts = [*AT_TRAIN, *fields, *chains, "rope, nope", "rope, rope, nope"]
    drawn = palette.looks([(text, rate) for text in texts for rate in (1, 2)])
    assert len({(one.color, str(one.dashes)) for one in drawn.values()}) == len(drawn)
    assert len({(one.marker, str(one.dashes)) for one in drawn.values()}) == len(drawn)
    for name, fixed in palette.LOOKS.items():
        assert (drawn[name, 1].color, drawn[name, 1].marker) == (fixed.color, fixed.marker)
        assert palette.looks([(text, 1) for text in texts])[name, 1] == fixed
    assert drawn["rope(base=0)", 1].color == palette.LOOKS["rope"].color
    assert drawn["rope+alibi", 1].color not in {one.color for one in palette.LOOKS.values()}


def test_dashes_stand_for_the_varied_setting(tmp_path: pathlib.Path, draw: Draw) -> None:
    """The same value has the same dashes in all encodings; the colour stands for the encoding."""
    texts = ("t5", "alibi", "learned", "my_encoding:Mine")
    for text in texts:
        for rate in (0.001, 0.003):
            run = f"{text[:5]}-{rate}"
            put(tmp_path, run, measured(text, ppl=4.0 + rate), config(train__learning_rate=rate))
            (tmp_path / run / "metrics.jsonl").write_text(logged(5.5, 2.5))
    drawn = draw(tmp_path)
    for kind in ("extrapolation", "ratio", "training"):
        labels = [f"{text}, learning_rate={rate}" for text in texts for rate in (0.001, 0.003)]
        colors, dashes, _ = zip(*(_drawn(line(drawn[kind], label)) for label in labels), strict=True)
        assert set(dashes[::2]) == {dashes[0]} != {dashes[1]} == set(dashes[1::2])
        assert colors[::2] == colors[1::2] and len(set(colors)) == len(texts)
        assert [text.get_text() for text in drawn[kind].legends[0].get_texts()] == sorted(labels)


def test_one_curve_is_drawn_once(tmp_path: pathlib.Path, draw: Draw) -> None:
    put(tmp_path, "a", measured("rope"))
    assert len([ax for ax in draw(tmp_path)["extrapolation"].axes if ax.get_xlabel()]) == 1
    put(tmp_path, "b", measured("alibi", ppl=5.0))
    assert len([ax for ax in draw(tmp_path)["extrapolation"].axes if ax.get_xlabel()]) == 2


def test_a_curve_looks_the_same_in_every_figure(tmp_path: pathlib.Path, draw: Draw) -> None:
    """Also in those that not all curves are in."""
    for number, text in enumerate(("rope(base=1)", "rope(base=2)", "rope(base=3)")):
        losses = [position_row("rope") | {"encoding": text, "layers": [text]}]
        put(tmp_path, f"run{number}", measured(text) + losses * (number > 0))
        (tmp_path / f"run{number}" / "metrics.jsonl").write_text(logged(5.5, 2.5))
    drawn = draw(tmp_path)
    for text in ("rope(base=2)", "rope(base=3)"):
        assert len({_drawn(line(figure, text)) for figure in drawn.values()}) == 1 and len(drawn) == 4
        assert all(line(figure, text).get_marker() not in ("", "None") for figure in drawn.values()), "not colour alone"


def test_the_targets_that_all_runs_have_are_used(tmp_path: pathlib.Path, draw: Draw) -> None:
    """Also where a run's own evaluation has others."""
    own = measured("t5", ppl=9.0, targets="ff", max_targets=4096)
    put(tmp_path, "t5", [*own, *measured("t5", ppl=4.0, max_targets=8192)], config("t5", eval__num_targets=4096))
    put(tmp_path, "alibi", measured("alibi", ppl=5.0, max_targets=8192), config("alibi", eval__num_targets=8192))
    figure, table = draw(tmp_path)["extrapolation"], plots.table(read_results(tmp_path))
    assert [cells(table, name)[2] for name in ("t5", "alibi")] == ["4.000", "5.000"]
    assert list(line(figure, "t5").get_ydata()) == [4.0, 8.0, 16.0]
    assert "t5: 3 rows left out, scored on other targets (not comparable)" in words(figure)
    assert not any("different targets" in text for text in words(figure))


def test_a_run_on_other_targets_has_no_value_there(tmp_path: pathlib.Path, draw: Draw) -> None:
    """The targets are those that most runs have, and the command under the figure gives them to all."""
    for text in ("rope", "nope"):
        put(tmp_path, text, measured(text, max_targets=8192), config(text, eval__num_targets=8192))
    others = measured("alibi", ppl=5.0, targets="ff", max_targets=4096, anchor=512)
    put(tmp_path, "alibi", others, config("alibi", eval__num_targets=4096))
    figure, table = draw(tmp_path)["extrapolation"], plots.table(read_results(tmp_path))
    assert cells(table, "alibi")[1:3] == ["0", "on other targets"] and cells(table, "rope")[2] == "4.000"
    assert "alibi (no value)" in entries(figure) and "alibi: on other targets at 64, 128, 256" in words(figure)
    command = (
        f"To compare all runs: posx evaluate --workdir {tmp_path} --protocol nonoverlapping --lengths 64,128,256,512 "
        "--num_targets 8192"
    )
    assert command in table and not any("different targets" in text for text in words(figure))


def test_advice_covers_windows_that_are_left_out(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run keeps the targets of its longest window, so all runs need that length, in a folder that can be pasted."""
    for text in ("rope", "nope"):
        put(tmp_path / "my runs", text, measured(text, max_targets=256, anchor=256))
    moved = measured("nope", lengths=(64, 1024), targets="ff", max_targets=256, anchor=1024)
    put(tmp_path / "my runs", "nope2", [*measured("nope", max_targets=256, anchor=256), *moved])
    put(tmp_path / "my runs", "alibi", measured("alibi", targets="ee", max_targets=512, anchor=512))
    monkeypatch.chdir(tmp_path)
    table = plots.table(read_results(tmp_path / "my runs"))
    command = "posx evaluate --workdir 'my runs' --protocol nonoverlapping --lengths 64,128,256,512,1024"
    assert f"{command} --num_targets 1024" in table, "as many targets as the longest window has"


def test_a_run_that_ended_with_nan_stands_in_table_and_figures(tmp_path: pathlib.Path, draw: Draw) -> None:
    put(tmp_path, "good", measured("alibi"), config("alibi", train__learning_rate=1e-3))
    put(tmp_path, "bad", [], config("alibi", train__learning_rate=1e30))
    log = logged(5.5, 5.4) + logged(5.4, grad_norm="nan", step=2)
    (tmp_path / "bad" / "metrics.jsonl").write_text(log)
    drawn, table = draw(tmp_path), (tmp_path / "table.md").read_text()
    assert cells(table, "alibi, learning_rate=1e+30")[1:3] == ["0", "ended with NaN"]
    assert cells(table, "alibi, learning_rate=0.001")[2] == "4.000"
    for text in (table, *(" ".join(words(drawn[kind])) for kind in ("extrapolation", "ratio"))):
        assert "Training ended with NaN: bad at step 2" in text and "No results" not in text
    assert "alibi, learning_rate=1e+30 (no value)" in entries(drawn["extrapolation"])
    assert "ended with NaN" in entries(drawn["training"])


def test_training_figure_shows_every_run_and_its_end(tmp_path: pathlib.Path, draw: Draw) -> None:
    """A run that learns a text by heart pushes no other out of the frame, and one that explodes is named."""
    for text, losses in {"alibi": [5.0, 4.0, 3.0], "nope": [5.0, 0.01, 0.0001], "t5": [5.0, 1e9, "nan"]}.items():
        put(tmp_path, text, measured(text), config(text))
        (tmp_path / text / "metrics.jsonl").write_text(logged(*losses))
    figure = draw(tmp_path, "training")["training"]
    low, high = figure.axes[0].get_ylim()
    assert low < 0.0001 and 5 < high < 1e6
    (end,) = [one for one in figure.axes[0].lines if len(one.get_xdata()) == 1]
    assert (*end.get_xdata(), *end.get_ydata()) == (1, high) and not end.get_clip_on()
    assert "Leaves the frame at its top: t5" in words(figure)


def test_every_kind_of_failure_has_its_mark(tmp_path: pathlib.Path, draw: Draw) -> None:
    put(tmp_path, "good", measured("rope"), config("rope"))
    failed = [one | {"status": "nonfinite", "ppl": None, "nll": None} for one in measured("alibi")]
    put(tmp_path, "none", failed, config("alibi"))
    put(tmp_path, "bad", [], config("t5"))
    (tmp_path / "bad" / "metrics.jsonl").write_text(logged("nan", step=1))
    legend = draw(tmp_path, "extrapolation")["extrapolation"].legends[0]
    names = [text.get_text() for text in legend.get_texts()]
    marks = dict(zip(names, (one.get_marker() for one in legend.legend_handles), strict=True))
    assert marks["ended with NaN"] != marks["not finite"]


def test_extreme_perplexities_are_drawn(tmp_path: pathlib.Path, draw: Draw) -> None:
    put(tmp_path, "high", measured("rope", ppl=1e300))
    put(tmp_path, "low", measured("alibi", ppl=1e-300))
    top, bottom = (draw(tmp_path)["extrapolation"].axes[0].get_ylim()[n] for n in (1, 0))
    assert 0 < bottom < top < math.inf


def test_values_off_the_frame_are_named(tmp_path: pathlib.Path, draw: Draw) -> None:
    put(tmp_path, "a", measured("rope"))
    put(tmp_path, "b", [*measured("t5", lengths=(64, 128)), *measured("t5", ppl=1e9, lengths=(256,))])
    drawn = draw(tmp_path)
    assert all("Leaves the frame at its top: t5" in words(drawn[kind]) for kind in ("extrapolation", "ratio"))


def test_labels_of_the_loss_axis_are_where_they_say(tmp_path: pathlib.Path, draw: Draw) -> None:
    """Perplexities of 98 to 103 have ticks at halves."""
    for number, text in enumerate(("rope", "alibi")):
        put(tmp_path, text, [one | {"ppl": 98.0 + 5 * number, "nll": None} for one in measured(text)])
    axis = draw(tmp_path, "extrapolation")["extrapolation"].axes[0]
    ticks = axis.get_yticks().tolist()
    assert [float(label.get_text()) for label in axis.get_yticklabels()] == ticks and len(ticks) >= 4


def test_figures_without_a_place_for_nan_runs_name_them(tmp_path: pathlib.Path, draw: Draw) -> None:
    put(tmp_path, "good", [*measured("alibi"), position_row("alibi")], config("alibi"))
    (tmp_path / "good" / "metrics.jsonl").write_text(logged(5.5, step=1))
    put(tmp_path, "bad", [], config("alibi", train__learning_rate=1e30))
    (tmp_path / "bad" / "metrics.jsonl").write_text(logged("nan", step=1, grad_norm="nan"))
    drawn = draw(tmp_path)
    for kind in ("training", "per_position"):
        assert "bad failed: training ended with NaN at step 1" in words(drawn[kind]), kind


def test_seeds_without_losses_by_position_are_named(tmp_path: pathlib.Path, draw: Draw) -> None:
    """The figure had the mean of the other seeds, without a word."""
    for seed in range(3):
        own = position_row("rope", seed)
        gone = {"status": "oom"} | dict.fromkeys(("nll", "ppl", "bpb", "position_nll"))
        put(tmp_path, f"rope-s{seed}", [own | gone if seed == 1 else own], config("rope", train__seed=seed))
    assert "rope-s1 failed: out of memory in windows of 1,024 tokens" in words(draw(tmp_path)["per_position"])


def test_a_failed_run_is_named_with_its_reason(tmp_path: pathlib.Path, draw: Draw) -> None:
    put(tmp_path, "good", measured("alibi"), config("alibi"))
    put(tmp_path, "bad", [], config("rope"))
    (tmp_path / "bad" / "status.json").write_text(json.dumps(with_checksum({"code": 3, "reason": "the disk is full"})))
    assert "bad failed: the disk is full" in words(draw(tmp_path)["ratio"])
    assert "bad failed: the disk is full" in (tmp_path / "table.md").read_text()


def test_runs_without_results_are_named_by_path(tmp_path: pathlib.Path, draw: Draw) -> None:
    put(tmp_path, "first/rope-s0", measured(), config())
    put(tmp_path, "second/rope-s0", [], config())
    assert "No results yet: second/rope-s0" in words(draw(tmp_path)["extrapolation"])


def test_runs_of_other_position_learning_rates_are_no_seeds() -> None:
    def run(seed: int, rate: float, decayed: tuple[str, ...] = ()) -> dict[str, Any]:
        settings = {"train.seed": seed, "train.position_lr_multiplier": rate}
        facts = settings_facts(settings | ({"train.decayed": [*decayed]} if decayed else {}))
        return facts | {"run": f"t5-s{seed}", "method": "t5", "train_len": 64}

    runs = [run(0, 1.0), run(1, 1.0), run(2, 10.0), run(3, 10.0), run(4, 10.0, ("0.table",))]
    found = groups.seeds_of_curves(make_table(runs, RUN_COLUMNS).set_index("run", drop=False))
    assert sorted("".join(run[-1] for run in own.run) for own in found) == ["01", "23", "4"]
    names = [
        "t5, decayed=('0.table',), position_lr_multiplier=10.0",
        *(f"t5, position_lr_multiplier={n}.0" for n in (1, 10)),
    ]
    assert sorted(groups.labels(found)) == names


def test_masked_runs_share_no_figure_with_runs_of_next_tokens(tmp_path: pathlib.Path, draw: Draw) -> None:
    for objective in ("next_token", "masked"):
        own = {"protocol": "pseudo_perplexity", "bpb": None, "targets": "2c3d"} if objective == "masked" else {}
        put(tmp_path, objective, measured(**own), config(train__objective=objective))
        (tmp_path / objective / "metrics.jsonl").write_text(logged(5.5, 2.5))
    drawn = draw(tmp_path)
    for kind, name in (("extrapolation", "pseudo_perplexity"), ("ratio", "pseudo_perplexity"), ("training", "masked")):
        for figure in (drawn[kind], drawn[f"{kind}-{name}"]):
            assert len(entries(figure)) == 1
    assert "Pseudo-perplexity at and beyond the training length" in words(drawn["extrapolation-pseudo_perplexity"])
    axes = ("extrapolation", True), ("extrapolation-pseudo_perplexity", False)
    assert all(("bits per byte" in words(drawn[name])) == has_bits for name, has_bits in axes)
    assert drawn["training-masked"].axes[0].get_ylabel() == "training loss (nats per masked token)"
    first, second = plots.table(read_results(tmp_path)).split("\n\n| encoding")[1:]
    assert "| perplexity at L = 64 |" in first and "| pseudo-perplexity at L = 64 |" in second
    assert "bits per byte" not in second


def test_a_run_of_a_task_that_ended_with_nan_shares_the_figure(tmp_path: pathlib.Path, draw: Draw) -> None:
    task = config(data__source="task:parity")
    rows = measured(protocol="answers", num_items=8, num_targets=8, exact_match=0.5, bpb=None)
    put(tmp_path, "good", [{name: x for name, x in one.items() if name != "stride"} for one in rows], task)
    start(tmp_path / "bad", config("nope", data__source="task:parity"))
    (tmp_path / "bad" / "metrics.jsonl").write_text(logged(5.5, math.nan))
    drawn = draw(tmp_path)
    assert drawn.keys() == {"answers", "training"}
    assert entries(drawn["answers"]) == ["ended with NaN", "nope (no value)", "rope"]


@pytest.mark.parametrize(
    ("protocol", "settings"),
    [("pseudo_perplexity", {"train__objective": "masked"}), ("answers", {"data__source": "task:parity"})],
)
def test_runs_that_ended_with_nan_are_rows_of_their_own_protocol(
    tmp_path: pathlib.Path, draw: Draw, protocol: str, settings: dict[str, Any]
) -> None:
    start(tmp_path / "bad", config(**settings))
    (tmp_path / "bad" / "metrics.jsonl").write_text(logged(5.5, math.nan))
    stored = read_results(tmp_path)
    assert list(stored.protocol) == [protocol] and list(stored.status) == ["diverged"]
    assert "training" in {name.partition("-")[0] for name in draw(tmp_path)}
