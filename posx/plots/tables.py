"""Stored rows as Markdown tables: perplexity and bits per byte at L, and R_k, per encoding as the curves stand."""

import math
from collections.abc import Sequence

from posx.plots import captions, look, rows
from posx.plots.points import Curve, Point, bits_curves, perplexity_curves, ratio_curves
from posx.plots.rows import Panel, Row

MOST_FACTORS = 8


def table(stored: Sequence[Row]) -> str:
    """One Markdown table per training length and protocol; an empty string where there is nothing to show.

    Cells are means over the seeds that have a value, with the sample standard deviation over seeds where n > 1, and the
    95 % interval over text.
    """
    shown = [panel for panel in rows.panels(stored) if panel.protocol != rows.PER_POSITION]
    return "\n\n".join(panel_table(panel) for panel in shown)


def panel_table(panel: Panel) -> str:
    """The table of one training length and protocol, under lines that state both, what was scored, and the spreads."""
    absolute, bits, ratios = perplexity_curves(panel), _by_name(bits_curves(panel)), _by_name(ratio_curves(panel))
    factors = _factors([point.x for curve in list(ratios.values())[:1] for point in curve.points if point.x != 1])
    header = ["encoding", "seeds", f"perplexity at L = {panel.train_len}", f"bits per byte at {panel.train_len}"]
    header += [f"R_{factor:.6g}" for factor in factors]
    body, shown = [], []
    for curve in absolute:
        name = curve.encoding, curve.detail
        cells = [_at(curve, panel.train_len), _at(bits[name], panel.train_len)]
        cells += [_at(ratios[name], factor) for factor in factors]
        body.append(_line([_name(curve), _seeds(curve), *map(_cell, cells)]))
        shown += cells
    facts = captions.facts(panel.rows, panel.train_len, panel.protocol)
    lines = [" · ".join([*facts, *_spreads(shown), *captions.no_intervals(panel.rows, shown)])]
    if warning := captions.mixture(panel.rows):
        lines.append(f"**{warning}**")
    return "\n".join([*lines, "", _line(header), _line(["---", *["---:"] * (len(header) - 1)]), *body])


def _by_name(curves: Sequence[Curve]) -> dict[tuple[str, str], Curve]:
    return {(curve.encoding, curve.detail): curve for curve in curves}


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


def _name(curve: Curve) -> str:
    name = look.look(curve.encoding).name
    text = look.shown(f"{name} {curve.detail}" if curve.detail else name, 60)
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
        return failed or "-"
    text = _number(point.mean) + (f" ± {_number(point.sd)}" if point.sd is not None else "")
    if point.interval:
        text += f" ({'-'.join(map(_number, point.interval))})"
    return f"{text} ({len(point.failures)} {failed})" if failed else text


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:,.1f}" if value < 1e6 else f"{value:.2e}"
