"""The cost of each encoding against length in one picture, from the JSON files of the other benchmarks.

Like Figure 2 of ALiBi's paper: training speed and attention's forward speed relative to NoPE's in the same run (both
posx, both per round), and the peak memory of attention with gradients. Training takes one or more reports, one per
length. Their models may differ only in the length. Nothing is measured.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchmarks import attention, memory, report, train
from benchmarks.report import Spread
from benchmarks.train import Shape
from posx.plots import look

Curves = dict[str, dict[int, Spread]]
Report = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train", type=_paths, required=True, help="reports of `train`, with commas")
    parser.add_argument("--attention", type=Path, required=True, help="a report of `attention`")
    parser.add_argument("--memory", type=Path, required=True, help="a report of `memory`")
    parser.add_argument("--figure", type=Path, required=True, help="picture; written as .png and .svg")


def _paths(text: str) -> list[Path]:
    return [Path(word) for word in text.split(",")]


def read(options: argparse.Namespace) -> tuple[list[Report], Report, Report]:
    calls, peaks = (json.loads(path.read_text()) for path in (options.attention, options.memory))
    return [json.loads(path.read_text()) for path in options.train], calls, peaks


def training_curves(reports: Sequence[Report]) -> Curves:
    """Return {encoding: {length: tokens/s relative to NoPE's}}."""
    curves: Curves = {}
    for stored in reports:
        for row in train.summarise(stored):
            if row["step_time_to_nope"]:
                curves.setdefault(row["encoding"], {})[Shape(**stored["shape"]).length] = row["step_time_to_nope"]
    return {name: _speeds(times) for name, times in curves.items()}


def forward_curves(report: Report) -> Curves:
    """Return {encoding: {length: forward speed of posx's linear executor relative to NoPE's}}."""
    executor, curves = attention.linear_executor(report), Curves()
    for row in attention.summarise(report):
        if (row["kind"], row["contestant"]) == ("forward", executor) and row["to_nope"]:
            curves.setdefault(row["encoding"], {})[row["length"]] = row["to_nope"]
    return {name: _speeds(times) for name, times in curves.items()}


def _speeds(times: dict[int, Spread]) -> dict[int, Spread]:
    """Invert ratios of times: the quartiles of speeds change places."""
    return {length: (1 / middle, 1 / high, 1 / low) for length, (middle, low, high) in sorted(times.items())}


def _ratio_panel(ax: Axes, curves: Curves) -> dict[str, Line2D]:
    handles = {}
    for encoding, points in curves.items():
        drawn = look.look(encoding)
        middle, low, high = zip(*points.values(), strict=True)
        errors = [[m - x for m, x in zip(middle, low, strict=True)], [x - m for m, x in zip(middle, high, strict=True)]]
        bars = ax.errorbar(
            list(points), middle, yerr=errors, color=drawn.color, marker=drawn.marker, linestyle=drawn.dashes,
            elinewidth=0.8, capsize=1.5,
        )  # fmt: skip
        handles[encoding] = bars.lines[0]
    lengths = sorted({length for points in curves.values() for length in points})
    look.length_axis(ax, lengths, lengths[0])
    ax.set_ylim(bottom=0)
    ax.set_xlabel("length (tokens)")
    ax.set_ylabel("speed relative to NoPE")
    return handles


def _sizes(case: dict[str, Any]) -> str:
    return f"{case['heads']} heads of {case['head_dim']}, batch {case['batch']}"


def draw(reports: tuple[list[Report], Report, Report], path: Path) -> None:
    trained, calls, peaks = reports
    models = {str(Shape(**report["shape"]).at_length(1)) for report in trained}
    if len(models) > 1:
        raise SystemExit(f"the training reports are of different models: {'; '.join(sorted(models))}")
    shape = Shape(**trained[0]["shape"])
    panels = {
        "training step": functools.partial(_ratio_panel, curves=training_curves(trained)),
        "attention, forward": functools.partial(_ratio_panel, curves=forward_curves(calls)),
        "peak memory, attention forward + backward": functools.partial(memory.panel, stored=peaks, kind="gradient"),
    }
    lines = [
        f"training: {shape.layers} layers, width {shape.width}, {shape.heads} heads, {shape.tokens} tokens a step; "
        f"attention: {_sizes(calls['case'])}; memory: {_sizes(peaks['settings'])}",
        f"medians, whiskers: quartiles; {calls['cores']} cores; "
        "encodings that act on the embeddings alone cost in attention what NoPE costs",
    ]
    report.panels(path, panels, "The cost of an encoding", lines)
