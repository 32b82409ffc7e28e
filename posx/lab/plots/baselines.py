"""The baselines of a curve: the same weights under windows of L, training at the longer length, and no context.

They are drawn thin or as open markers. A baseline above the frame of the curves is not drawn in full.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from posx.lab.plots import captions, look
from posx.lab.plots.groups import Curve, Panel, common_names
from posx.lab.results.columns import finite_perplexity

#: {label of a curve: {abscissa: value of the models of its encoding that were trained there}}.
Longer = Mapping[str, Mapping[float, float]]
_GREY = "#777777"
_THIN: dict[str, Any] = {"linewidth": 0.9, "alpha": 0.75}
_SAME = 1e-3  # in share: a protocol that weighs targets has slightly other frequencies at each length
_NEAR = 0.15  # of the height of a log axis: the level without context may extend the frame by so much


def split_windows(curves: Iterable[Curve]) -> tuple[list[Curve], list[Curve]]:
    """Return the curves, and those of the same weights under windows of L."""
    own, windows = list[Curve](), list[Curve]()
    for curve in curves:
        (windows if curve.window_of else own).append(curve)
    return own, windows


def longer_perplexities(panel: Panel) -> dict[str, dict[float, float]]:
    """Return the perplexity of each encoding in windows of a longer training length, if it was trained at that length.

    It is the mean over seeds, on the targets of the panel. Returns {label: {length in tokens: perplexity}}.
    """
    perplexities: dict[str, dict[float, float]] = {}
    for label, length, rows in _longer_rows(panel):
        values = finite_perplexity(rows)[rows.targets.isin(_targets(panel))].dropna()
        if len(values):
            perplexities.setdefault(label, {})[float(length)] = float(values.mean())
    return perplexities


def longer_notes(panel: Panel) -> list[str]:
    """Return a line on the longer training lengths that are drawn, if their models read more tokens a step.

    Another line names those that are not drawn, because their models were measured on other targets. A third one names
    markers that are means of the runs which did not fail.
    """
    known = [(length, rows.targets[finite_perplexity(rows).notna()]) for _, length, rows in _longer_rows(panel)]
    drawn = {length for length, targets in known if targets.isin(_targets(panel)).any()}
    others = sorted({length for length, targets in known if len(targets)} - drawn)
    shown = [curve for one in (panel, *panel.longer) if one is panel or one.train_len in drawn for curve in one.curves]
    names = ", ".join(map(look.length_name, others))
    partial = [
        f"{label} at {look.length_name(length)} ({lost} of {len(rows)} runs)"
        for label, length, rows in _longer_rows(panel)
        if length in drawn and 0 < (lost := int(finite_perplexity(rows).isna().sum())) < len(rows)
    ]
    return [
        *(captions.tokens_per_step(shown) if drawn else []),
        *([f"Not drawn: models trained at {names} tokens, measured on other targets"] if others else []),
        *([f"Open markers without the runs that failed: {captions.join_names(partial, 'markers')}"] if partial else []),
    ]


def _targets(panel: Panel) -> set[str]:
    return {*panel.rows.targets[finite_perplexity(panel.rows).notna()]}


def _longer_rows(panel: Panel) -> Iterator[tuple[str, int, pd.DataFrame]]:
    """Yield (label of a curve, longer training length, rows of its encoding trained and measured at that length).

    Lengths beyond the axes, which end at the longest window of the panel, are left out.
    """
    names = common_names([panel, *panel.longer])
    labels = {names[panel.train_len, curve.label]: curve.label for curve in split_windows(panel.curves)[0]}
    for longer in (one for one in panel.longer if one.train_len <= panel.rows.eval_len.max()):
        for curve in split_windows(longer.curves)[0]:
            if (name := names[longer.train_len, curve.label]) in labels:
                yield labels[name], longer.train_len, curve.rows[curve.rows.eval_len == longer.train_len]


def as_ratios(values: Longer, at_train: Mapping[str, float], train_len: int) -> dict[str, dict[float, float]]:
    """Return `longer_perplexities` values over the perplexity at L of each curve, against multiples of L."""
    return {
        label: {length / train_len: value / at_train[label] for length, value in own.items()}
        for label, own in values.items()
        if label in at_train
    }


def no_context(panels: Sequence[Panel]) -> float | None:
    """Return the perplexity of the targets by token frequencies alone; None if rows have none, or several."""
    known = _levels(panels)
    return float(known.iloc[0]) if len(known) and _agree(known) else None


def no_context_note(panels: Sequence[Panel], ax: Axes | None = None) -> list[str]:
    """Return a line on the perplexity without context, which says if it is not drawn: outside the axes, or several."""
    known, quantity = _levels(panels), captions.perplexity_name(panels[0].protocol)
    if not len(known):
        return []
    several = not _agree(known)
    level = f"{known.min():.4g} to {known.max():.4g}" if several else f"{known.iloc[0]:.4g}"
    where = ", which differ, so no line is drawn" if several else ""
    where = where or (", outside the frame" if ax and not _shows(ax, float(known.iloc[0])) else "")
    texts = "texts" if several else "text"
    return [f"No context: {quantity} {level}, by token frequencies of the training {texts} alone{where}"]


def _levels(panels: Sequence[Panel]) -> pd.Series:
    rows = captions.panel_rows(panels)
    return rows.unigram_ppl[rows.status == "ok"].dropna()


def _agree(levels: pd.Series) -> bool:
    return bool(levels.max() <= levels.min() * (1 + _SAME))


def _shows(ax: Axes, level: float) -> bool:
    low, high = ax.get_ylim()
    return low <= level <= high


def visible(axes: Iterable[Axes], trained: Longer) -> bool:
    """Tell whether one of the axes shows an open marker."""
    return any(_shows(ax, value) for ax in axes for own in trained.values() for value in own.values())


def hidden_markers(trained: Longer, top: float) -> list[str]:
    """Return names of the open markers above the `top` of the frame, for each curve."""
    return [f"open markers of {label}" for label, own in trained.items() if max(own.values()) > top]


def frame_values(
    values: Sequence[float], windows: Sequence[Curve], trained: Longer, level: float | None
) -> list[float]:
    """Return the values of curves, with those of their baselines that need no much larger frame on a log axis."""
    if not values:
        return []
    points = [point.mean for curve in windows for point in curve.points]
    points += [value for own in trained.values() for value in own.values()]
    low, high = min(values), max(values)
    margin = (high / low) ** _NEAR
    near = [level] if level and low / margin <= level <= high * margin else []
    return [*values, *(value for value in points if math.isfinite(value) and value <= high), *near]


def draw_windows(ax: Axes, windows: Iterable[Curve]) -> None:
    """Draw the curves of the same weights under windows of L, thin and behind all others."""
    for curve in windows:
        x, y = [point.x for point in curve.points], [point.mean for point in curve.points]
        ax.plot(x, y, color=curve.look.color, linestyle=curve.look.dashes, zorder=1.8, **_THIN)


def draw_retrained(ax: Axes, curves: Iterable[Curve], trained: Longer) -> None:
    """Draw an open marker for each curve and length at which its encoding was trained too."""
    for curve in curves:
        if own := trained.get(curve.label):
            ax.plot([*own], [*own.values()], **_open(curve.look.marker, curve.look.color), zorder=3.2)


def draw_no_context(ax: Axes, level: float | None, named: bool = True) -> None:
    """Draw the perplexity without context as a thin line with its name at the left, if it lies within the axes."""
    if level and _shows(ax, level):
        ax.axhline(level, color=_GREY, linewidth=0.8, zorder=1)
        place: dict[str, Any] = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points"}
        style: dict[str, Any] = {"ha": "left", "va": "bottom", "size": 8, "color": "#555555", "zorder": 1}
        ax.annotate("no context" if named else "", (0.08, level), xytext=(0, 1), **place, **style)


def handles(windows: Sequence[Curve], has_open: bool = False) -> list[tuple[Line2D, str]]:
    """Return the entries of the legend for the baselines in use. has_open: whether open markers are among them."""
    made = []
    if windows:
        made.append((Line2D([], [], color=_GREY, **_THIN), "thin: the same weights,\n  attention to the last L tokens"))
    if has_open:
        made.append((Line2D([], [], **_open("s", _GREY)), "open: trained at that length"))
    return made


def _open(marker: str, color: str) -> dict[str, Any]:
    style: dict[str, Any] = {"linestyle": "", "marker": marker, "markersize": 5.5, "markeredgewidth": 1.1}
    return style | {"markerfacecolor": "white", "markeredgecolor": color}
