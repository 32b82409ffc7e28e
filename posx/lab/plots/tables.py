"""Stored rows as Markdown tables: perplexity and bits per byte at L, and R_k, a row for each curve of the figures."""

import contextlib
import dataclasses
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from posx.evaluation.answers import Answers
from posx.lab.plots import baselines, captions, look
from posx.lab.plots.groups import Curve, Panel, Point, choose_places, group_by_rule, panels
from posx.lab.plots.points import (
    answer_curves,
    bits_curves,
    perplexity_curves,
    ratio_curves,
    triangle_curves,
    weight_curves,
)
from posx.lab.results.columns import FAILED
from posx.lab.results.table import PER_POSITION

_EMPTY, _HEAD = "-", "encoding | seeds"
#: The numbers of attention weights by the titles of their columns.
WEIGHTS = {
    "weight on the right token": "right_weight", "zeros": "zero_weights", "zeros in bfloat16": "zero_weights_bfloat16",
    "entropy": "attention_entropy", "weight beyond L": "far_weight",
}  # fmt: skip


def cell(point: Point) -> str:
    """Return mean, spread over seeds, interval over text, and failures: "4.55 ± 0.03 (4.47-4.63)", "undefined", "-"."""
    failed = " and ".join(sorted({FAILED[kind] for kind in point.failures}))
    if not point.values:
        return failed or _EMPTY
    write = _share if point.is_share else _number
    text = write(point.mean) + (f" ± {write(statistics.stdev(point.values))}" if point.values[1:] else "")
    if point.interval:
        text += f" ({'-'.join(map(write, point.interval))})"
    return f"{text} ({len(point.failures)} {failed})" if failed else text


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:,.1f}" if value < 1e6 else f"{value:.2e}"


def _share(value: float) -> str:
    """Return a share with four decimals, or up to six if it would read as 0 or 1 and is neither."""
    digits = next((n for n in (4, 5, 6) if 0 < round(value, n) < 1), 4)
    return f"{value:.{digits}f}"


class RowTable(NamedTuple):
    """The table of one training length and protocol, of all training lengths of a protocol, or of a training.

    Attributes:
      panel: its rows, those of the shortest training length; None of a training, which has no rows.
      facts: what was scored, and the meaning of the spreads.
      warnings: why its numbers do not compare.
      columns: the title of each column of numbers.
      lines: (curve, {title: point}) of each row.
      notes: results that the table leaves out.
      write: returns the text of a cell.
    """

    panel: Panel | None
    facts: list[str]
    warnings: list[str]
    columns: list[str]
    lines: list[tuple[Curve, dict[str, Point]]]
    notes: list[str]
    write: Callable[[Point], str] = cell


def tables(stored: pd.DataFrame, missing: Mapping[str, str] | None = None) -> list[RowTable]:
    """Return a table for each training length and protocol that has perplexities.

    missing: {path of a run without rows: why it failed}.
    """
    return panel_tables([panel for panel in panels(stored, missing) if panel.protocol != PER_POSITION])


def panel_tables(windows: Iterable[Panel]) -> list[RowTable]:
    """Return a table for each training length and protocol, and one of its attention weights if they were read.

    If encodings were trained at several lengths, a table of all training lengths follows for each protocol of text.
    """
    windows = list(windows)
    made = [one for panel in windows for one in (_table(panel), *_weight_tables(panel))]
    several = [own for own in group_by_rule(windows).values() if len(own) > 1 and own[0].protocol != Answers.name]
    return made + [_triangle_table(own) for own in several]


def table(stored: pd.DataFrame, missing: Mapping[str, str] | None = None) -> str:
    """Return the `tables` of rows as Markdown; an empty string if there is nothing to show."""
    return as_markdown(tables(stored, missing))


def as_markdown(made: Iterable[RowTable]) -> str:
    """Return tables as Markdown.

    A cell is the mean over the seeds that have a value, their sample standard deviation if n > 1, and the 95 % interval
    over text. "-" was not measured. Empty columns are left out.
    """
    return "\n\n".join(map(_markdown, made))


def is_table(path: pathlib.Path) -> bool:
    """Tell whether a file is a table that posx wrote."""
    with contextlib.suppress(OSError):
        return _HEAD in path.read_text(encoding="utf-8", errors="replace")
    return False


def _table(panel: Panel) -> RowTable:
    curves = (answer_curves if panel.protocol == Answers.name else perplexity_curves)(panel)
    columns = _columns(panel, curves)
    named = [(f"{one.label} ({title})", points[one.label]) for one in curves for title, points in columns.items()]
    spreads = _spreads(named, "items" if panel.protocol == Answers.name else "text")
    warnings = [] if _has_train_len(panel) else [f"not measured at L = {panel.train_len}, so there are no ratios"]
    if warning := captions.mixture(panel.rows):
        warnings.append(warning)
    kept = [title for title, points in columns.items() if any(cell(point) != _EMPTY for point in points.values())]
    notes = [*captions.no_intervals(named), *captions.fewer_runs(curves, ""), *captions.notes([panel], [])]
    notes += baselines.no_context_note([panel])
    # The lengths from L on that have no column.
    least = panel.train_len if _has_train_len(panel) else 0
    units = {title: panel.train_len if title.startswith("R_") else 1 for title in columns}
    shown = {round(point.x * units[title]) for title in columns for point in columns[title].values()}
    if left := sorted({length for length in panel.rows.eval_len if length >= least} - shown):
        notes.append(f"Measured too, in eval.jsonl: {', '.join(map(look.plain_number, left))} tokens")
    lines = [(curve, {title: columns[title][curve.label] for title in kept}) for curve in curves]
    return RowTable(panel, [*captions.subtitle([panel]), *spreads], warnings, kept, lines, notes)


def _triangle_table(panels: Sequence[Panel]) -> RowTable:
    """Return perplexity by training length, a row for each encoding and length, and by evaluation length."""
    rows, quantity = captions.panel_rows(panels), captions.perplexity_name(panels[0].protocol)
    lines = [
        (
            dataclasses.replace(curve, label=f"{name}, L = {train_len}"),
            {f"{quantity} at {look.plain_number(point.x)}": point for point in curve.points},
        )
        for (name, train_len), curve in triangle_curves(panels).items()
    ]
    named = [(f"{one.label} ({title})", point) for one, points in lines for title, point in points.items()]
    facts = ["Training length against evaluation length", *captions.subtitle(panels), *_spreads(named, "text")]
    warnings = [warning] if (warning := captions.mixture(rows)) else []
    notes = [*captions.no_intervals(named), *baselines.no_context_note(panels)]
    return RowTable(panels[0], facts, warnings, [*lines[0][1]], lines, notes)


def _spreads(named: Sequence[tuple[str, Point]], scored: str) -> list[str]:
    """Return the meaning of the spreads of points. scored: what the intervals are over."""
    spreads = ["± standard deviation over seeds"] if any(len(point.values) > 1 for _, point in named) else []
    return spreads + ([f"(95 % interval over {scored})"] if any(point.interval for _, point in named) else [])


def _weight_tables(panel: Panel) -> Iterator[RowTable]:
    """Yield the table of the attention weights of a panel, if some were read."""
    rows = panel.rows[panel.rows.attention_items.notna()]
    kept = choose_places(set(rows.eval_len), panel.train_len)
    curves = {title: weight_curves(panel, name) for title, name in WEIGHTS.items()}
    columns = {f"{title} at {look.plain_number(n)}": _find_point(own, n) for title, own in curves.items() for n in kept}
    columns = {title: points for title, points in columns.items() if any(point.values for point in points.values())}
    if columns:
        items = " to ".join(f"{n:,}" for n in sorted({rows.attention_items.min(), rows.attention_items.max()}))
        read = [one for one in curves["zeros"] if one.points]
        lines = [(one, {title: columns[title][one.label] for title in columns}) for one in read]
        noun = "items" if panel.protocol == Answers.name else "windows"
        facts = [f"Attention weights of {items} {noun} per length", *captions.subtitle([panel])[1:]]
        yield RowTable(panel, facts, [], [*columns], lines, [])


def _markdown(made: RowTable) -> str:
    lines = [_escape(" · ".join(made.facts)), *(f"**{warning}**" for warning in made.warnings)]
    lines += ["", _line([_HEAD, *map(_escape, made.columns)]), _line(["---", *["---:"] * (len(made.columns) + 1)])]
    for curve, points in made.lines:
        lines.append(_line([_escape(look.one_line(curve.label)), seed_count(curve), *map(made.write, points.values())]))
    return "\n".join([*lines, "", *map(_escape, made.notes)] if made.notes else lines)


def seed_count(curve: Curve) -> str:
    """Return the number of seeds of a curve's points: "3", or "2 to 3"."""
    return " to ".join(map(str, dict.fromkeys(curve.seeds)))


def _has_train_len(panel: Panel) -> bool:
    return bool((panel.rows.eval_len == panel.train_len).any())


def _columns(panel: Panel, curves: Sequence[Curve]) -> dict[str, dict[str, Point]]:
    """Return {title: {label: point}}: at L and the ratios to L, or all measured lengths if L is not among them.

    For a task, the share of right answers at each length. curves: of perplexity, or of right answers.
    """
    of_answers, train_len = panel.protocol == Answers.name, panel.train_len
    quantity = "right" if of_answers else captions.perplexity_name(panel.protocol)
    if of_answers or not _has_train_len(panel):
        kept = choose_places(set(panel.rows.eval_len), train_len)
        return {f"{quantity} at {look.plain_number(length)}": _find_point(curves, length) for length in kept}
    ratios = ratio_curves(panel)
    factors = choose_places({point.x for curve in ratios for point in curve.points if point.x != 1})
    shorter = choose_places({length for length in panel.rows.eval_len if length < train_len})
    return {
        **{f"{quantity} at {length}": _find_point(curves, length) for length in shorter},
        f"{quantity} at L = {train_len}": _find_point(curves, train_len),
        f"bits per byte at {train_len}": _find_point(bits_curves(panel), train_len),
        **{f"R_{look.plain_number(factor)}": _find_point(ratios, factor) for factor in factors},
    }


def _find_point(curves: Sequence[Curve], x: float) -> dict[str, Point]:
    return {curve.label: next((point for point in curve.points if point.x == x), Point(x, ())) for curve in curves}


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escape(text: str) -> str:
    """Return text that Markdown shows literally."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\|`*])", r"\\\1", text)
