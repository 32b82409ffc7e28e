"""Pictures of the encodings themselves, computed from their own code: a row of panels for each encoding.

Distances and positions in tokens, biases in logits (before the softmax).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from posx.contract import acting_hooks, walk_chain
from posx.encodings import Rope
from posx.encodings.frequencies import Geometric
from posx.lab.plots import effects, look
from posx.lab.plots.effects import Subject

_HEAD_COLORS = ("#332288", "#0072B2", "#56B4E9", "#009E73", "#8A8A1F", "#E69F00", "#D55E00", "#882255")
_LINES = (("#0072B2", "-"), ("#D55E00", (0, (5, 2))), ("#009E73", (0, (1.5, 1.5))))
#: Hooks that no panel shows, because their effect depends on the text.
_NOT_DRAWN = ("features", "score")
_WIDTH, _HEIGHT, _LINE = 3.9, 3.0, 0.7  # of a panel with its labels, and of a row without them, in inches
_DISTANCE = "distance r = i - j"
Draw = Callable[[Axes], None]


def encodings(subjects: Sequence[Subject]) -> Figure:
    """Draw a row of panels for each encoding: its terms in embeddings and logits, and its effect on q and k."""
    rows = [(subject, _panels(subject)) for subject in subjects]
    columns = max(1, *(len(panels) for _, panels in rows))
    width = 0.9 + _WIDTH * columns
    height = sum(_HEIGHT if panels else _LINE for _, panels in rows)
    made, top = look.figure(width, height), height
    for subject, panels in rows:
        made.text(0.15 / width, (top - 0.3) / height, look.one_line(subject.name, 60), size=11.5, weight="bold")
        made.text(0.15 / width, (top - 0.36) / height, _facts(subject, panels), size=8.5, color="#555555", va="top")
        for right, draw in enumerate(panels):
            corner = (0.7 + _WIDTH * right) / width, (top - _HEIGHT + 0.6) / height
            draw(made.add_axes((*corner, (_WIDTH - 1.25) / width, (_HEIGHT - 1.35) / height)))
        top -= _HEIGHT if panels else _LINE
    lengths = ", ".join(f"{length}" for length in sorted({subject.dims.train_len for subject in subjects}))
    text = f"Computed from the encodings; dashed: L = {lengths}; positions and distances in tokens, biases in logits"
    look.headings(made, "Effects of the encodings on embeddings and logits", [text])
    return made


def _facts(subject: Subject, panels: Sequence[Draw]) -> str:
    """Return a line on the hooks of an encoding, its hooks that are not drawn, and the origin of its arrays."""
    sites, dims = acting_hooks(subject.encoding), subject.dims
    parts = [f"acts on {', '.join(sites) or 'nothing'}"]
    if hidden := [site for site in sites if site in _NOT_DRAWN or not panels]:
        parts.append(f"depends on the text: {', '.join(hidden)}")
    if subject.encoding.axes > 1:
        parts.append(f"drawn along the first of {subject.encoding.axes} axes")
    if panels and "features" in sites and ("token_bias" in sites or effects.logit_scales(subject) is not None):
        parts.append("drawn for a layer input of zeros")
    parts += [f"{dims.num_heads} heads of {dims.head_dim}, L = {dims.train_len}", look.one_line(subject.origin, 80)]
    return " · ".join(parts)


def _panels(subject: Subject) -> list[Draw]:
    """Return a function for each panel of an encoding, which draws it."""
    draws: list[Draw] = []

    def add(draw: Callable[..., None], *values: Any) -> None:
        draws.append(lambda ax: draw(ax, *values))

    train_len, n = subject.dims.train_len, subject.num_positions
    if (added := effects.embedding_vectors(subject)) is not None:
        limit = float(np.abs(added).max())
        add(_show, added, "RdBu_r", "added to embeddings", "channel", "position", limit)
        add(_show, added @ added.T, "cividis", "inner products of the added vectors", "position q", "position p")
    if (whole := effects.content_free(subject, min(n, effects.MOST_POSITIONS))) is not None:
        values, head = effects.content_free_by_distance(subject, whole), (len(whole) - 1) // 2
        title = f"added to logits{subject.pair_note('mean over pairs')}"
        add(_heads, np.arange(values.shape[1]), values, train_len, title, "bias")
        seen = np.where(np.tri(whole.shape[1], dtype=bool), whole[head], np.nan)
        add(_show, seen, "cividis", f"added to logits, head {head + 1}", "key j", "query i")
    if (match := effects.match_by_distance(subject)) is not None:
        title = f"q·k of one vector as query and key{subject.pair_note('last query')}"
        add(_heads, *match, train_len, title, "mean over unit vectors")
    for part in walk_chain(subject.encoding):
        if isinstance(part, Rope) and part.frequencies == Geometric():  # the bound is of its frequencies
            bound = {"": effects.rope_bound(part.rotary_dim or subject.dims.head_dim, np.arange(n), part.base)}
            title = f"RoFormer's bound on q·k, base = {part.base:g}"
            add(_lines, np.arange(n), bound, train_len, title, "relative upper bound", _DISTANCE, 0.0)
    if (factors := effects.logit_scales(subject)) is not None:
        of = "position of the query i"
        add(_heads, np.arange(n), factors, train_len, "logit scale", "factor", of)
    if (weights := effects.sink_weights(subject)) is not None:
        title, of = "weight of the sink, zero vectors", "position of the query i"
        add(_heads, np.arange(weights.shape[1]), weights, train_len, title, "weight", of, 0.0)
    if lengths := effects.relative_lengths(subject):
        title = "length of the vectors of each distance"
        add(_lines, np.arange(n), lengths, train_len, title, "length, mean over heads")
    if not draws and (changed := effects.random_token_change(subject)) is not None:
        arrays = ""
        if np.nanmax(np.abs(changed)) < 1e-6:  # arrays that start at zero
            arrays, changed = " and arrays", effects.random_token_change(effects.with_random_arrays(subject))
        if changed is not None and (limit := float(np.nanmax(np.abs(changed)))) > 1e-6:
            head = (len(changed) - 1) // 2
            title = f"change of logits, random tokens{arrays}, head {head + 1}"
            add(_show, changed[head], "RdBu_r", title, "key j", "query i", limit)
    return draws


def _show(ax: Axes, values: np.ndarray, colors: str, title: str, x: str, y: str, limit: float | None = None) -> None:
    """Draw a matrix as an image with its colour bar. `limit` makes the colours symmetric about 0."""
    low = None if limit is None else -limit
    image = ax.imshow(values, cmap=colors, aspect="auto", interpolation="nearest", vmin=low, vmax=limit)
    ax.set(title=title, xlabel=x, ylabel=y)
    ax.grid(False)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.05, pad=0.03)
    bar.outline.set_visible(False)
    bar.locator, bar.formatter = MaxNLocator(5), ScalarFormatter()
    bar.formatter.set_powerlimits((-2, 4))  # long numbers would run into the next panel
    bar.ax.tick_params(labelsize=8.5)


def _lines(
    ax: Axes, at: np.ndarray, lines: dict[str, np.ndarray], train_len: int, title: str, y: str, x: str = _DISTANCE,
    bottom: float | None = None,
) -> None:  # fmt: skip
    for (name, values), (color, dashes) in zip(lines.items(), _LINES, strict=False):
        ax.plot(at, values, color=color, linestyle=dashes, linewidth=1.4, label=name)
    _mark(ax, train_len)
    ax.set(title=title, xlabel=x, ylabel=y)
    if any(lines):
        ax.legend(loc="best", fontsize=8)
    if bottom is not None:
        ax.set_ylim(bottom=bottom)


def _heads(
    ax: Axes, at: np.ndarray, values: np.ndarray, train_len: int, title: str, y: str, x: str = _DISTANCE,
    bottom: float | None = None,
) -> None:  # fmt: skip
    """Draw one curve per head [head, n], named at its right end; one nameless curve if several heads are alike."""
    values = np.where(np.isfinite(values), values, np.nan)
    alike = len(values) == 1 or np.allclose(values, values[:1], atol=1e-6, equal_nan=True)
    values = values[:1] if alike else values
    colors = [_HEAD_COLORS[n % len(_HEAD_COLORS)] for n in range(len(values))]
    for line, color in zip(values, colors, strict=True):
        ax.plot(at, line, color=color, linewidth=1.4)
    low, high = ax.get_ylim()
    low = low if bottom is None else bottom
    gap = 0.07 * (high - low)
    heights = look.spread([float(value) for value in np.nan_to_num(values[:, -1], nan=low)], gap)
    free = bottom
    for head in np.argsort(heights) if free is not None else ():  # no name leaves the axes at the bottom
        heights[head] = max(heights[head], free)
        free = heights[head] + gap
    for head, (height, color) in enumerate(zip(heights, colors, strict=True) if not alike else ()):
        style: dict[str, Any] = {"va": "center", "size": 8, "color": color}
        ax.text(1.01, height, f"head {head + 1}", transform=ax.get_yaxis_transform(), **style)
    ax.set_ylim(min(low, *heights), max(high, *heights))
    ax.set_xlim(at[0], at[-1])
    _mark(ax, train_len)
    ax.set(title=title, xlabel=x, ylabel=y)


def _mark(ax: Axes, train_len: int) -> None:
    ax.axvline(train_len, color="#888888", linewidth=1.0, dashes=(4, 3), zorder=1)
