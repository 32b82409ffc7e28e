"""The memory bench's table and figure, from its stored points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchmarks import measure
from posx.plots import look

TINY = 64  # the length whose memory is what a process needs anyway
FIT_FROM = 4096
KIND_NAMES = {"forward": "forward", "gradient": "forward + backward", "model": "evaluation of one window"}
GREYS = {
    "posx-dense": ("#777777", (0.0, (4.0, 2.0))),
    "torch-sdpa-column": ("#0072B2", (0.0, (1.5, 1.5))),
    "torch-eager": ("#AAAAAA", (0.0, (1.5, 1.5))),
}


def growth(sizes: Mapping[int, float], start: int = FIT_FROM) -> float | None:
    """Slope of log bytes over log length from `start` tokens on; None for fewer than two lengths."""
    kept = [(length, size) for length, size in sizes.items() if length >= start and size > 0]
    if len(kept) < 2:
        return None
    lengths, values = np.log(np.array(kept, float)).T
    return float(np.polyfit(lengths, values, 1)[0])


def summarise(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per kind, encoding and contestant: {length: bytes above the tiny call}, what failed, the growth."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for point in report["points"]:
        key = (point["kind"], point["encoding"], point["contestant"])
        row = rows.setdefault(
            key, {**dict(zip(("kind", "encoding", "contestant"), key, strict=True)), "peaks": {}, "failed": {}}
        )
        if point["status"] == "ok":
            row["peaks"][point["length"]] = point["value"]
        else:
            row["failed"][point["length"]] = (point["status"], point["why"])
    for row in rows.values():
        floor = row["peaks"].get(TINY, 0)
        row["bytes"] = {n: peak - floor for n, peak in sorted(row["peaks"].items()) if n != TINY}
        row["growth"] = growth(row["bytes"])
    return list(rows.values())


def table(report: dict[str, Any]) -> str:
    """Markdown: a table per kind, MiB above the tiny call, then why points are missing."""
    settings, rows = report["settings"], summarise(report)
    lengths = sorted({n for row in rows for n in (*row["bytes"], *row["failed"])} - {TINY})
    call = "causal attention call" if not settings["model_layers"] else f"model of {settings['model_layers']} layers"
    what = f"one {call}, batch {settings['batch']}, {settings['heads']} heads of {settings['head_dim']}"
    lines = [
        f"{what}, {settings['dtype']}; encodings of training length {settings['train_len']}; {measure.place(report)}; "
        f"MiB that a fresh process held at most, above the same at length {TINY}; growth: from {FIT_FROM} tokens on"
    ]

    def shown(row: dict[str, Any], length: int) -> str:
        if length in row["bytes"]:
            return f"{row['bytes'][length] / 2**20:,.0f}"
        first = min(row["failed"], default=None)  # longer ones were not tried
        return "-" if first is None or length < first else row["failed"][first][0]

    for kind in dict.fromkeys(row["kind"] for row in rows):
        body = [
            [row["encoding"], row["contestant"], *(shown(row, length) for length in lengths),
             "-" if row["growth"] is None else f"{row['growth']:.2f}"]
            for row in rows if row["kind"] == kind
        ]  # fmt: skip
        head = ["encoding", "contestant", *(look.length_name(n) for n in lengths), "growth"]
        lines += ["", KIND_NAMES[kind], "", *measure.rows(head, body)]
    if report["left_out"]:
        lines += ["", f"NoPE's attention serves {', '.join(report['left_out'])}, which act on the embeddings alone"]
    for row in rows:
        for length, (status, why) in row["failed"].items():
            lines += ["", f"{status}: {row['contestant']}, {row['encoding']}, {row['kind']}, {length}: {why}"]
    return "\n".join(lines)


def panel(ax: Axes, report: dict[str, Any], kind: str) -> dict[str, Line2D]:
    """MiB against length on logarithmic axes, posx's linear executor in colour; the handles of the legend by name."""
    rows = [row for row in summarise(report) if row["kind"] == kind and row["bytes"]]
    ours = [row["contestant"] for row in rows if row["contestant"].startswith("posx-")]
    best = next((name for name in ("posx-blockwise", "posx-auto") if name in ours), ours[0])
    handles = {}
    for row in rows:
        drawn, name = look.look(row["encoding"]), row["contestant"]
        grey = name in GREYS and name != best
        # A rival's least memory: without a position encoding, but for the one that serves ALiBi alone.
        if name != best and not (grey and row["encoding"] == ("alibi" if name == "torch-sdpa-column" else "nope")):
            continue
        color, dashes = GREYS[name] if grey else (drawn.color, drawn.dashes)
        sizes = {n: size / 2**20 for n, size in row["bytes"].items() if size > 0}
        marker = "" if grey else drawn.marker
        (line,) = ax.plot(list(sizes), list(sizes.values()), color=color, linestyle=dashes, marker=marker)
        handles[f"{name}, {drawn.name}" if grey else drawn.name] = line
    everything = [(n, size / 2**20) for row in rows for n, size in row["bytes"].items() if size > 0]
    lengths = sorted({n for n, _ in everything})
    look.length_axis(ax, lengths, lengths[0])
    look.log_axis(ax, [size for _, size in everything])
    ax.set_xlabel("length (tokens)")
    ax.set_ylabel("MiB above the tiny call")
    return handles


def draw(report: dict[str, Any], path: Path) -> None:
    kinds = list(dict.fromkeys(point["kind"] for point in report["points"]))
    handles: dict[str, Line2D] = {}
    with look.style():
        made = look.figure(1.6 + 4.7 * len(kinds), 4.2)
        for place, kind in enumerate(kinds):
            ax = made.add_subplot(1, len(kinds), place + 1)
            ax.set_title(KIND_NAMES[kind])
            handles |= panel(ax, report, kind)
        look.legend(made, list(handles.values()), list(handles), 0.92, 0.88)
        look.headings(made, "Peak memory", ["a fresh process per point; grey and dotted: others"], lift=-0.04)
        look.save(made, path.parent, path.stem)
