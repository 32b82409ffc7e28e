"""Peak memory of one attention call per encoding, contestant and length, or (--model) of a model's evaluation window.

Each point is a new process that makes one call and reports the most it ever held (VmHWM), above the same process at
length 64. Inputs, outputs and gradients are part of it. "growth" is the slope of log memory over log length from 4096
tokens on: 1 is linear, 2 quadratic. A point over --limit_gib is killed and shown as oom, one over --limit_seconds as
timeout. Longer ones of that row are not tried. Dense score matrices stop at --dense_limit.

With --model a window of N tokens goes through `posx.lab.runs.scores.model_scores` of a model with random weights.
It has 4 layers, 8 heads of 32 and executor "auto" (--contestants may name posx's others). Points that --out holds
already, made with the same settings, stay. Failed points are tried again, points out of memory or time only under a
higher limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from benchmarks import measure, report, workers
from benchmarks.attention import KIND_NAMES, add_sizes, first_case
from benchmarks.calls import KINDS, Case, contestants, in_attention, is_quadratic, separate
from posx.lab.config.sections import ModelConfig
from posx.lab.model import make_model
from posx.lab.plots import look, palette
from posx.lab.runs.scores import Way, model_scores

TINY = 64  # at this length a process has little more than what it needs anyway
FIT_FROM = 4096
GREYS = {
    "posx-dense": palette.Look("#777777", "", (0.0, (4.0, 2.0))),
    "torch-sdpa-column": palette.Look("#0072B2", "", (0.0, (1.5, 1.5))),
    "torch-eager": palette.Look("#AAAAAA", "", (0.0, (1.5, 1.5))),
}
LADDER = [1024, 2048, 4096, 8192, 16384, 32768]
LAYERS = 4
Point = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser)
    parser.add_argument("--lengths", type=measure.lengths, help="default: 1k to 32k, with --model 32768")
    parser.add_argument("--model", action="store_true", help="evaluate a window through a model")
    parser.add_argument("--limit_gib", type=float, default=8.0)
    parser.add_argument("--limit_seconds", type=float, default=300.0)
    parser.set_defaults(head_dim=None)


def attention_peak(contestant: str, kind: str, case: dict[str, Any]) -> int:
    """Make one call, and return the most bytes that this process held."""
    call = contestants()[contestant](Case(**case))
    if call is None:
        raise ValueError(f"{contestant} does not serve {case['encoding']}")
    getattr(call, kind)()
    return measure.peak_rss()


def model_peak(contestant: str, kind: str, case: dict[str, Any]) -> int:
    """Evaluate one batch of windows, and return the most bytes that this process held."""
    sizes, executor = Case(**case), contestant.removeprefix("posx-")
    config = ModelConfig(LAYERS, sizes.dims.model_dim, sizes.heads, dtype=sizes.dtype)
    model = make_model(config, measure.at_any_length(sizes.encoding), 257, sizes.train_len)
    tokens = np.random.default_rng(0).integers(256, size=(sizes.batch, sizes.length + 1)).astype(np.int32)
    np.asarray(model_scores(model, model.init(jax.random.key(0)), Way(executor))(tokens))
    return measure.peak_rss()


def sizes(options: argparse.Namespace) -> Case:
    """Fill in the width of a head: 32 in a model, so that 8 of them make 256, else 64."""
    filled = {**vars(options), "head_dim": options.head_dim or (32 if options.model else 64)}
    return first_case(argparse.Namespace(**filled))


def series(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yield (contestant, encoding, kind) of every row to measure."""
    if options.model:
        ours = [name for name in options.contestants or ["posx-auto"] if name.startswith("posx-")]
        yield from ((contestant, encoding, "model") for encoding in options.encodings for contestant in ours)
        return
    for encoding in in_attention(options.encodings):
        tiny = dataclasses.replace(sizes(options), encoding=encoding, length=TINY)
        for contestant in options.contestants or separate():
            if contestants()[contestant](tiny) is not None:
                yield from ((contestant, encoding, kind) for kind in KINDS)


def measure_point(contestant: str, encoding: str, kind: str, length: int, options: argparse.Namespace) -> Point:
    limits = {"limit_bytes": options.limit_gib * 2**30, "limit_seconds": options.limit_seconds}
    case = dataclasses.replace(sizes(options), encoding=encoding, length=length)
    what = model_peak if kind == "model" else attention_peak
    result = workers.fresh(what, contestant, kind, dataclasses.asdict(case), **limits)
    key = {"contestant": contestant, "encoding": encoding, "kind": kind, "length": length}
    return key | result | {"limit_gib": options.limit_gib, "limit_seconds": options.limit_seconds}


def stays(point: Point, options: argparse.Namespace) -> bool:
    """Return whether a stored point need not be measured again."""
    limit = {"oom": "limit_gib", "timeout": "limit_seconds"}.get(point["status"])
    return point["status"] == "ok" or (limit is not None and point[limit] >= getattr(options, limit))


def run(options: argparse.Namespace, save: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    lengths = options.lengths or ([32768] if options.model else LADDER)
    settings = {**dataclasses.asdict(sizes(options)), "model_layers": LAYERS if options.model else 0}
    left_out = [] if options.model else [n for n in options.encodings if n not in in_attention(options.encodings)]
    earlier = measure.stored(options.out)
    had = earlier.get("points", []) if earlier.get("settings") == settings else []
    points = {_key(point): point for point in had if stays(point, options)}

    def part() -> dict[str, Any]:
        return {"settings": settings, "left_out": left_out, "points": list(points.values())}

    for contestant, encoding, kind in series(options):
        for length in [TINY, *lengths]:
            key = (contestant, encoding, kind, length)
            if length > options.dense_limit and is_quadratic(contestant, encoding):
                break
            if key not in points:
                print(*key, file=sys.stderr)
                points[key] = measure_point(*key, options)
                save(part())
            if points[key]["status"] != "ok":
                break
    return part()


def _key(point: Point) -> tuple[Any, ...]:
    return point["contestant"], point["encoding"], point["kind"], point["length"]


def growth(sizes: Mapping[int, float], start: int = FIT_FROM) -> float | None:
    """Return the slope of log bytes over log length from `start` tokens on; None for fewer than two lengths."""
    kept = [(length, size) for length, size in sizes.items() if length >= start and size > 0]
    if len(kept) < 2:
        return None
    lengths, values = np.log(np.array(kept, float)).T
    return float(np.polyfit(lengths, values, 1)[0])


def summarise(stored: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per kind, encoding and contestant: {length: bytes above the tiny call}, failures, growth."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for point in stored["points"]:
        key = {name: point[name] for name in ("kind", "encoding", "contestant")}
        row = rows.setdefault(tuple(key.values()), key | {"peaks": {}, "failed": {}})
        if point["status"] == "ok":
            row["peaks"][point["length"]] = point["value"]
        else:
            row["failed"][point["length"]] = (point["status"], point["why"])
    for row in rows.values():
        floor = row["peaks"].get(TINY, 0)
        row["bytes"] = {n: peak - floor for n, peak in sorted(row["peaks"].items()) if n != TINY}
        row["growth"] = growth(row["bytes"])
    return list(rows.values())


def table(stored: dict[str, Any]) -> str:
    """Format a table per kind, MiB above the tiny call, then the reasons of missing points."""
    settings, rows = stored["settings"], summarise(stored)
    lengths = sorted({n for row in rows for n in (*row["bytes"], *row["failed"])} - {TINY})
    call = "causal attention call" if not settings["model_layers"] else f"model of {settings['model_layers']} layers"
    what = f"one {call}, batch {settings['batch']}, {settings['heads']} heads of {settings['head_dim']}"
    lines = [
        f"{what}, {settings['dtype']}; encodings of training length {settings['train_len']}; {report.place(stored)}; "
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
        lines += ["", KIND_NAMES[kind], "", *report.rows(head, body)]
    if stored["left_out"]:
        lines += ["", f"NoPE's attention serves {', '.join(stored['left_out'])}, which act on the embeddings alone"]
    for row in rows:
        for length, (status, why) in row["failed"].items():
            lines += ["", f"{status}: {row['contestant']}, {row['encoding']}, {row['kind']}, {length}: {why}"]
    return "\n".join(lines)


def panel(stored: dict[str, Any], kind: str) -> report.Panel:
    """Return MiB against length, posx's linear executor in colour."""
    rows = [row for row in summarise(stored) if row["kind"] == kind and row["bytes"]]
    ours = [row["contestant"] for row in rows if row["contestant"].startswith("posx-")]
    best = next((name for name in ("posx-blockwise", "posx-auto") if name in ours), ours[0])
    curves = []
    for row in rows:
        name, encoding = row["contestant"], row["encoding"]
        points = {n: size / 2**20 for n, size in row["bytes"].items() if size > 0}
        if name == best:
            curves.append(report.Curve(encoding, points, palette.look(encoding)))
        # A rival's least memory: without a position encoding, but for the one that serves ALiBi alone.
        elif name in GREYS and encoding == ("alibi" if name == "torch-sdpa-column" else "nope"):
            curves.append(report.Curve(f"{name}, {encoding}", points, GREYS[name]))
    return report.Panel(curves, "MiB above the tiny call", is_log=True)
