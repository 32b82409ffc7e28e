"""Stored rows as Markdown tables: perplexity at L and R_k per encoding, in the order of the curves."""

from collections.abc import Sequence

from posx.plots import curves, look, rows
from posx.plots.rows import Curve, Panel, Point, Row


def table(stored: Sequence[Row]) -> str:
    """One Markdown table per training length and protocol; an empty string where there is nothing to show.

    Cells are means over the seeds that have a value, with the sample standard deviation over seeds where n > 1.
    """
    shown = [panel for panel in rows.panels(stored) if panel.protocol != rows.PER_POSITION]
    return "\n\n".join(panel_table(panel) for panel in shown)


def panel_table(panel: Panel) -> str:
    """The table of one training length and protocol, under a line that states both and what was scored."""
    absolute = rows.perplexity_curves(panel)
    ratios = {(curve.encoding, curve.detail): curve for curve in rows.ratio_curves(panel)}
    factors = [point.x for point in next(iter(ratios.values())).points if point.x != 1] if ratios else []
    header = ["encoding", "seeds", f"perplexity at L = {panel.train_len}", *[f"R_{factor:.6g}" for factor in factors]]
    lines = [
        " · ".join(curves.facts(panel.rows, panel.train_len, panel.protocol)).replace(
            " (line: mean, band: lowest to highest)", ""
        )
    ]
    if warning := curves.mixture(panel.rows):
        lines.append(f"**{warning}**")
    lines += ["", _line(header), _line(["---", *["---:"] * (len(header) - 1)])]
    for curve in absolute:
        at_train = next((point for point in curve.points if point.x == panel.train_len), Point(panel.train_len, ()))
        others = [point for point in ratios[curve.encoding, curve.detail].points if point.x != 1]
        lines.append(_line([_name(curve), _seeds(curve), _cell(at_train), *map(_cell, others)]))
    return "\n".join(lines)


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
    """Mean, with its spread over seeds where there are several, and what failed: "4.55 ± 0.03", "undefined", "-"."""
    failed = " and ".join(sorted({curves.FAILURE_NAMES[kind] for kind in point.failures}))
    if not point.values:
        return failed or "-"
    text = _number(point.mean) + (f" ± {_number(point.sd)}" if point.sd is not None else "")
    return f"{text} ({len(point.failures)} {failed})" if failed else text


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:,.1f}" if value < 1e6 else f"{value:.2e}"
