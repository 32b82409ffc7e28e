"""The cost of each encoding against length in one picture, from the JSON files of the other benchmarks.

Like Figure 2 of ALiBi's paper, it shows training speed and attention's forward speed relative to NoPE's. NoPE is posx's
too, and measured in the same round. The third panel shows the peak memory of attention with gradients. Training takes
one or more reports, one per length. Their models may differ only in the length. Nothing is measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import attention, memory, report, train
from benchmarks.report import Spread
from benchmarks.train import Shape
from posx.lab.plots import palette

Curves = dict[str, dict[int, Spread]]
Report = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train", type=_paths, required=True, help="reports of `train`, with commas")
    parser.add_argument("--attention", type=Path, required=True, help="a report of `attention`")
    parser.add_argument("--memory", type=Path, required=True, help="a report of `memory`")
    parser.add_argument("--figure", type=Path, required=True, help="picture; written as .png and .svg")


def _paths(text: str) -> list[Path]:
    return [Path(word) for word in text.split(",")]


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


def _panel(curves: Curves) -> report.Panel:
    drawn = [report.Curve(name, points, palette.look(name)) for name, points in curves.items()]
    return report.Panel(drawn, "speed relative to NoPE")


def _sizes(case: dict[str, Any]) -> str:
    return f"{case['heads']} heads of {case['head_dim']}, batch {case['batch']}"


def draw(options: argparse.Namespace) -> None:
    paths = (options.attention, options.memory, *options.train)
    calls, peaks, *trained = (json.loads(path.read_text()) for path in paths)
    models = {str(Shape(**report["shape"]).at_length(1)) for report in trained}
    if len(models) > 1:
        raise SystemExit(f"the training reports are of different models: {'; '.join(sorted(models))}")
    shape = Shape(**trained[0]["shape"])
    panels = {
        "training step": _panel(training_curves(trained)),
        "attention, forward": _panel(forward_curves(calls)),
        "peak memory, attention forward + backward": memory.panel(peaks, "gradient"),
    }
    lines = [
        f"training: {shape.layers} layers, width {shape.width}, {shape.heads} heads, {shape.tokens} tokens a step; "
        f"attention: {_sizes(calls['case'])}; memory: {_sizes(peaks['settings'])}",
        f"medians, whiskers: quartiles; {calls['cores']} cores; "
        "encodings that act on the embeddings alone cost in attention what NoPE costs",
    ]
    report.panels(options.figure, panels, "The cost of an encoding", lines)
