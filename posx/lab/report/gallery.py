"""The catalogue as a page: the curve of each encoding, and sliders for its numbers, computed ahead as tables.

The page's script only looks values up: nothing is evaluated from data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from posx.contract import acting_hooks
from posx.encodings import ENCODINGS, Dims, Encoding, build
from posx.errors import ConfigError
from posx.lab.plots import effects
from posx.lab.plots.palette import look
from posx.lab.report.page import write_page

#: The factors by which a slider multiplies the default of a number.
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
#: Sliders of an encoding, heads of a curve, and points of a line.
MOST_SLIDERS, MOST_HEADS, MOST_POINTS = 3, 4, 512


def write_gallery(dims: Dims, out: Path) -> int:
    """Write the gallery to `out`. Return the number of encodings.

    Raises:
      ConfigError: the extra `report` is not installed.
      WorkdirError: `out` cannot be written.
    """
    shown = [entries for name in ENCODINGS if (entries := entry(name, dims)) is not None]
    sizes = f"{dims.num_heads} heads of {dims.head_dim} channels, L = {dims.train_len}"
    write_page(
        "posx: position encodings", {"sizes": sizes, "train_len": dims.train_len, "encodings": shown}, "gallery", out
    )
    return len(shown)


def entry(name: str, dims: Dims) -> dict[str, Any] | None:
    """Return an encoding with its curves at each place of each slider; None if it does not fit the sizes."""
    try:
        encoding = build(name, dims)
    except ConfigError:
        return None
    text = inspect.getdoc(type(encoding)) or ""
    start = {"curves": list(_curves(name, encoding, dims))}
    sliders = [slider for field in _numbers(encoding) if (slider := _slider(name, encoding, field, dims, start))]
    return {
        "name": name, "text": text, "color": look(name).color, "beyond": encoding.about.beyond,
        "paper": encoding.about.paper, "sliders": sliders[:MOST_SLIDERS], "note": _note(encoding), **start,
    }  # fmt: skip


def _note(encoding: Encoding) -> str:
    """Return why an encoding may have no curve."""
    hooks = ", ".join(acting_hooks(encoding))
    return f"No curve without a trained model or a text: it acts on {hooks}." if hooks else "It acts on nothing."


def _numbers(encoding: Encoding) -> list[str]:
    """Return the fields with a number that a user can set, but those of sizes."""
    sizes = {field.name for field in dataclasses.fields(Dims)}
    fields = [field.name for field in dataclasses.fields(encoding) if field.init and field.name not in sizes]
    return [name for name in fields if type(getattr(encoding, name)) in (int, float) and getattr(encoding, name)]


def _slider(name: str, encoding: Encoding, field: str, dims: Dims, start: dict[str, Any]) -> dict[str, Any] | None:
    """Return the values of a field and the curves at each; None if it changes no curve."""
    value = getattr(encoding, field)
    curves_at = {value: start["curves"]}
    others = sorted({type(value)(value * factor) for factor in FACTORS} - {value})
    for one in (*others[:1], *others[-1:], *others[1:-1]):  # the ends tell if any changes something
        with contextlib.suppress(ConfigError):  # out of the field's range
            curves_at[one] = list(_curves(name, build({"name": name, field: one}, dims), dims))
        if len(curves_at) > 2 and all(curves == start["curves"] for curves in curves_at.values()):
            return None
    if all(curves == start["curves"] for curves in curves_at.values()):
        return None
    places = [{"value": one, "curves": curves_at[one]} for one in sorted(curves_at)]
    return {"field": field, "at": sorted(curves_at).index(value), "places": places}


def _curves(name: str, encoding: Encoding, dims: Dims) -> Iterator[dict[str, Any]]:
    """Yield what an encoding does at each distance or position, as initialised."""
    subject = effects.initial(name, encoding, dims)
    if (added := effects.embedding_vectors(subject)) is not None:
        products = added @ added.T
        means = np.array([np.diagonal(products, n).mean() for n in range(len(products) // 2)])
        yield _curve("inner product of the added vectors", "distance in tokens", np.arange(len(means)), means[None])
    if (whole := effects.content_free(subject, min(subject.num_positions, effects.MOST_POSITIONS))) is not None:
        values = effects.content_free_by_distance(subject, whole)
        title = f"added to logits{subject.pair_note('mean over pairs')}"
        yield _curve(title, "distance in tokens", np.arange(values.shape[1]), values)
    if (match := effects.match_by_distance(subject)) is not None:
        yield _curve(f"product of a vector with itself{subject.pair_note('last query')}", "distance in tokens", *match)
    for title, numbers in (
        ("logit scale", effects.logit_scales(subject)), ("weight of the sink", effects.sink_weights(subject)),
    ):  # fmt: skip
        if numbers is not None:
            yield _curve(title, "position of the query", np.arange(numbers.shape[1]), numbers)
    for title, length in effects.relative_lengths(subject).items():
        yield _curve(f"length of the vectors {title}", "distance in tokens", np.arange(len(length)), length[None])


def _curve(title: str, x_title: str, x: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    """Return lines [head, n], one if all heads are alike. The title says what is left out.

    Long lines keep evenly spaced places up to the last, or the first ones if they turn too fast for that, as RoPE's do.
    """
    heads = values[:1] if np.allclose(values, values[:1], atol=1e-6) else values[:MOST_HEADS]
    title += f", heads 1 to {len(heads)} of {len(values)}" if 1 < len(heads) < len(values) else ""
    kept = np.linspace(0, len(x) - 1, min(MOST_POINTS, len(x))).round().astype(int)
    if any(np.abs(np.interp(x, x[kept], line[kept]) - line).max() > 0.02 * np.ptp(line) for line in heads):
        kept, title = np.arange(MOST_POINTS), f"{title}, the first {MOST_POINTS} places"
    lines = [[float(f"{value:.4g}") for value in line[kept]] for line in np.asarray(heads, np.float64)]
    return {"title": title, "x_title": x_title, "x": x[kept].tolist(), "lines": lines}
