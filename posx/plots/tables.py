"""Stored rows as Markdown tables: perplexity and bits per byte at L, and R_k, a row for each curve of the figures."""

import contextlib
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from posx.plots import captions, look, rows
from posx.plots.groups import Panel, panels
from posx.plots.points import Curve, Point, bits_curves, perplexity_curves, ratio_curves

MOST_FACTORS = 8
_EMPTY, _HEAD = "-", "encoding | seeds"


def table(stored: Iterable[rows.Row], missing: Mapping[str, str] | None = None) -> str:
    """One Markdown table per training length and protocol; an empty string where there is nothing to show.

    Cells are means over the seeds that have a value, with the sample standard deviation over seeds where n > 1, and the
    95 % interval over text; "-" is what was not measured. Columns without any value are left out. `missing` are runs
    without a row, {path: why it failed}.
    """
    shown = [panel for panel in panels(stored) if panel.protocol != rows.PER_POSITION]
    return "\n\n".join(panel_table(panel, missing) for panel in shown)


def is_table(path: pathlib.Path) -> bool:
    """Tell whether a file is a table that posx wrote."""
    with contextlib.suppress(OSError):
        return _HEAD in path.read_text(encoding="utf-8", errors="replace")
    return False


def panel_table(panel: Panel, missing: Mapping[str, str] | None = None) -> str:
    """The table of one training length and protocol, under lines that state both, what was scored, and the spreads."""
    curves, columns = perplexity_curves(panel), _columns(panel)
    shown = {title: [_at(found[curve.label], x) for curve in curves] for title, (found, x) in columns.items()}
    points = [point for column in shown.values() for point in column]
    cells = {title: list(map(_cell, column)) for title, column in shown.items()}
    cells = {title: column for title, column in cells.items() if set(column) != {_EMPTY}}
    named = [
        (f"{curve.label} ({title})", column[n]) for n, curve in enumerate(curves) for title, column in shown.items()
    ]
    lines = [" · ".join([*captions.facts([panel]), *_spreads(points)])]
    if not _measured_at_train_len(panel):
        lines.append(f"**not measured at L = {panel.train_len}, so there are no ratios**")
    if warning := captions.mixture(panel.rows):
        lines.append(f"**{warning}**")
    body = [
        _line([_escaped(look.shown(curve.label)), _seeds(curve), *(column[n] for column in cells.values())])
        for n, curve in enumerate(curves)
    ]
    notes = [_escaped(note) for note in captions.no_intervals(named) + captions.fewer_runs(curves, "")]
    notes += [_escaped(note) for note in captions.notes([panel], [], missing)]
    if left := _without_column(panel, columns):
        notes.append(f"Measured too, in eval.jsonl: {', '.join(f'{length:.6g}' for length in left)} tokens")
    ruler = _line(["---", *["---:"] * (len(cells) + 1)])
    made = [*lines, "", _line([_HEAD, *cells]), ruler, *body]
    return "\n".join([*made, "", *notes] if notes else made)


def _without_column(panel: Panel, columns: dict[str, tuple[dict[str, Curve], float]]) -> list[int]:
    """Lengths from L on that were measured and have no column."""
    train_len = panel.train_len
    shown = {round(x * (train_len if title.startswith("R_") else 1)) for title, (_, x) in columns.items()}
    least = train_len if _measured_at_train_len(panel) else 0
    return sorted({row["eval_len"] for row in panel.rows if row["eval_len"] >= least} - shown)


def _measured_at_train_len(panel: Panel) -> bool:
    return any(row["eval_len"] == panel.train_len for row in panel.rows)


def _columns(panel: Panel) -> dict[str, tuple[dict[str, Curve], float]]:
    """{title: (curves by label, where they are read)}: at L and the ratios to it, or if L was not measured what was."""
    absolute, train_len = _by_label(perplexity_curves(panel)), panel.train_len
    if not _measured_at_train_len(panel):
        lengths = sorted({point.x for curve in absolute.values() for point in curve.points})
        kept = [train_len * factor for factor in _factors([length / train_len for length in lengths])]
        return {f"perplexity at {length:.6g}": (absolute, length) for length in kept}
    ratios = _by_label(ratio_curves(panel))
    factors = _factors(sorted({point.x for curve in ratios.values() for point in curve.points if point.x != 1}))
    return {
        f"perplexity at L = {train_len}": (absolute, train_len),
        f"bits per byte at {train_len}": (_by_label(bits_curves(panel)), train_len),
        **{f"R_{factor:.6g}": (ratios, factor) for factor in factors},
    }


def _by_label(curves: Sequence[Curve]) -> dict[str, Curve]:
    return {curve.label: curve for curve in curves}


def _factors(factors: Sequence[float]) -> list[float]:
    """The ratios that have a column: all, or of more than MOST_FACTORS the doublings (the rows keep the others)."""
    doublings = [factor for factor in factors if math.log2(factor) % 1 == 0]
    return list(factors) if len(factors) <= MOST_FACTORS else doublings or list(factors)


def _at(curve: Curve, x: float) -> Point:
    return next((point for point in curve.points if point.x == x), Point(x, ()))


def _spreads(points: Sequence[Point]) -> list[str]:
    """What stands behind the means, in words."""
    parts = ["± standard deviation over seeds"] if any(point.sd is not None for point in points) else []
    return parts + (["(95 % interval over text)"] if any(point.interval for point in points) else [])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escaped(text: str) -> str:
    """Text that Markdown shows literally."""
    for old, new in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("\\", "\\\\"),
        ("|", "\\|"),
        ("`", "\\`"),
        ("*", "\\*"),
    ):
        text = text.replace(old, new)
    return text


def _seeds(curve: Curve) -> str:
    few, many = curve.seeds
    return str(many) if few == many else f"{few} to {many}"


def _cell(point: Point) -> str:
    """Mean, spread over seeds, interval over text, and what failed: "4.55 ± 0.03 (4.47-4.63)", "undefined", "-"."""
    failed = " and ".join(sorted({captions.FAILURE_NAMES[kind] for kind in point.failures}))
    if not point.values:
        return failed or _EMPTY
    text = _number(point.mean) + (f" ± {_number(point.sd)}" if point.sd is not None else "")
    if point.interval:
        text += f" ({'-'.join(map(_number, point.interval))})"
    return f"{text} ({len(point.failures)} {failed})" if failed else text


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:,.1f}" if value < 1e6 else f"{value:.2e}"
