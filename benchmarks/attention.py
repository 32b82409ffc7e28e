"""Seconds of one attention call, forward and with gradients, per encoding and length, posx beside torch, JAX and Flax.

Gradients are those of q, k, v and of every learned parameter. 8 heads of 64 by default, batch 1, causal, scale
1/sqrt(d). Encodings are resolved for --train_len tokens; tables that end repeat their last row. Contestants:

* `posx`, its heads over a device per core, and posx's executors on one device. `posx-every-tile` is blockwise without
  skipping, for encodings that fade.
* On accelerators, if they are named: `posx-wide-tiles`, blockwise with tiles of 512 x 1024, and `jax.nn-cudnn`, the
  kernel of cuDNN by JAX's own call, for bfloat16.
* `jax.nn` (dot_product_attention, XLA, causal flag) and `flax.nnx` (the same code beneath, but with a mask array), with
  a dense bias.
* torch's SDPA with a dense float mask, also compiled, or with one row as mask for ALiBi (`torch-sdpa-column`); flex
  attention, compiled (`torch-flex`); `torch-eager`.

Posx over devices, the rest of JAX, and torch have a process each, which work in turns. Encodings that act on the
embeddings alone are NoPE here and left out.

Useful FLOP/s count two products forward and four more backward over the visible pairs. "faster than dense XLA" is the
time of `jax.nn` over that of the row. If `jax.nn` does not serve the encoding, it is the time of posx's dense executor.
The last table compares posx with torch's forms, the fastest of which is the bar. Before the timing, every contestant's
output and gradients at --check_length are compared with posx's dense executor in float64.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import measure, report
from benchmarks.calls import KINDS, TOLERANCE, Case, contestants, in_attention, is_quadratic, separate
from benchmarks.report import cell, quartiles, ratios
from benchmarks.workers import Worker, WorkerError, side_by_side
from posx.plots import palette

KIND_NAMES = {"forward": "forward", "gradient": "forward + backward", "model": "evaluation of one window"}
OURS = ("posx", "posx-blockwise")  # the one that is shown if there is room for one
RIVALS = {
    "jax.nn": palette.Look("#555555", "", (0.0, (4.0, 2.0))),
    "torch-sdpa": palette.Look("#999999", "", (0.0, (1.5, 1.5))),
}  # fmt: skip
CEILING = palette.Look("#BBBBBB", "_")
MOST_CALLS = 100


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that the attention and memory benchmarks share."""
    measure.add_names(parser, "--contestants", contestants())
    parser.add_argument("--heads", type=measure.positive, default=8)
    parser.add_argument("--head_dim", type=measure.positive, default=64)
    parser.add_argument("--batch", type=measure.positive, default=1)
    parser.add_argument("--train_len", type=measure.positive, default=measure.TRAIN_LEN)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of q, k and v")
    parser.add_argument("--dense_limit", type=measure.positive, default=4096, help="longest for dense score matrices")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser)
    parser.set_defaults(contestants=separate())
    measure.add_rounds(parser, 5)
    parser.add_argument("--lengths", type=measure.lengths, default=[512, 1024, 2048, 4096])
    parser.add_argument("--turn_seconds", type=float, default=0.2, help="about what the calls of a turn take")
    more = "more than one tile of each executor"
    parser.add_argument("--check_length", type=measure.positive, default=600, help=more)


def first_case(options: argparse.Namespace) -> Case:
    sizes = ("heads", "head_dim", "batch", "train_len", "dtype")
    return Case("nope", 1, **{name: getattr(options, name) for name in sizes})


def start(names: list[str]) -> dict[str, Worker]:
    """Start the process of every contestant: posx over devices, the rest of JAX on one device, torch."""
    devices = {"posx": measure.cores(), "jax": 1, "torch": None}

    def kind(name: str) -> str:
        return "posx" if name == "posx" else "torch" if name.startswith("torch-") else "jax"

    made = {one: Worker("benchmarks.calls:Calls", devices=devices[one]) for one in {kind(name): 0 for name in names}}
    return {name: made[kind(name)] for name in names}


def run(options: argparse.Namespace, save: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    start_case, encodings = first_case(options), in_attention(options.encodings)
    processes = start(options.contestants)
    with contextlib.ExitStack() as stack:
        for worker in processes.values():
            stack.callback(worker.close)
        checked = [dataclasses.replace(start_case, encoding=name, length=options.check_length) for name in encodings]
        found = [
            worker.call("check", name, dataclasses.asdict(case)) for case in checked
            for name, worker in processes.items()
        ]  # fmt: skip
        checks = [row for row in found if row]
        wrong = [row for row in checks if not row["error"] <= TOLERANCE[options.dtype]]
        stored: dict[str, Any] = {
            "case": dataclasses.asdict(start_case), "check_length": options.check_length, "checks": checks,
            "problems": [f"wrong: {row['contestant']} with {row['encoding']}, {row['answer']} is off by "
                         f"{row['error']:.1e} of its largest entry" for row in wrong],
            "left_out": [name for name in options.encodings if name not in encodings], "skipped": [], "groups": [],
        }  # fmt: skip
        for length in options.lengths:
            cases, before = (
                [dataclasses.replace(start_case, encoding=name, length=length) for name in encodings],
                stored,
            )
            for group, skipped in one_length(cases, processes, options):
                stored = before | {"groups": [*before["groups"], group], "skipped": [*before["skipped"], *skipped]}
                save(stored)
    return stored


def one_length(
    cases: list[Case], processes: dict[str, Worker], options: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Measure every contestant with every encoding in turns. Yield this length's numbers so far, and the skipped."""
    length, keys, turns, skipped = cases[0].length, [], [], []
    calls = [(case, name) for case in cases for name in processes]

    def first_calls(case: Case, name: str) -> dict[str, Any]:
        too_long = length > options.dense_limit and is_quadratic(name, case.encoding)
        return dict.fromkeys(KINDS, "longer than --dense_limit") if too_long else prepare(processes[name], name, case)

    ready = side_by_side(first_calls, calls, lambda _, name: processes[name])
    for (case, name), by_kind in zip(calls, ready, strict=True):
        for kind, first in by_kind.items():
            if isinstance(first, str):
                who = {"contestant": name, "encoding": case.encoding}
                skipped.append({**who, "length": length, "kind": kind, "why": first})
                continue
            repeats = min(max(round(options.turn_seconds / first), 1), MOST_CALLS)
            keys.append((case, name, kind))
            turns.append(functools.partial(processes[name].call, "turn", name, dataclasses.asdict(case), kind, repeats))
    ceiling: list[float] = []
    print(f"length {length}: {len(turns)} contestants", file=sys.stderr)
    for times in measure.interleaved(turns, options.rounds, before=lambda: ceiling.append(measure.fresh_ceiling())):
        results = [
            {"contestant": name, "encoding": case.encoding, "kind": kind, "useful_flops": case.useful_flops(kind),
             "seconds": found}
            for (case, name, kind), found in zip(keys, times, strict=True) if found
        ]  # fmt: skip
        yield {"length": length, "ceiling": list(ceiling), "results": results}, skipped


def prepare(worker: Worker, name: str, case: Case) -> dict[str, Any]:
    """Return {kind: seconds of one call, or why it is not measured}."""
    try:
        return worker.call("prepare", name, dataclasses.asdict(case)) or {}
    except WorkerError as error:
        return dict.fromkeys(KINDS, str(error))


def summarise(stored: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per length, kind, encoding and contestant. Ratios are None without a counterpart.

    `over` holds each form of torch's time over the row's, `best` the fastest form.
    """
    rows = []
    for group in stored["groups"]:
        times = {(r["kind"], r["encoding"], r["contestant"]): r["seconds"] for r in group["results"]}
        ceiling = statistics.median(group["ceiling"])
        for result in group["results"]:
            kind, encoding, name = result["kind"], result["encoding"], result["contestant"]
            dense = times.get((kind, encoding, "jax.nn")) or times.get((kind, encoding, "posx-dense"))
            middle = statistics.median(result["seconds"])
            rivals = {
                who: theirs for (what, of, who), theirs in times.items()
                if (what, of) == (kind, encoding) and who.startswith("torch-")
            }  # fmt: skip
            rows.append({
                "length": group["length"], "kind": kind, "encoding": encoding, "contestant": name,
                "seconds": quartiles(result["seconds"]),
                "flops": result["useful_flops"] / middle,
                "share": result["useful_flops"] / middle / ceiling,
                "over_dense": ratios(dense, result["seconds"]),
                "to_nope": ratios(result["seconds"], times.get((kind, "nope", name))),
                "best": min(rivals, key=lambda who: statistics.median(rivals[who]), default=None),
                "over": {who: ratios(theirs, result["seconds"]) for who, theirs in rivals.items()},
            })  # fmt: skip
    return sorted(rows, key=lambda row: (row["length"], row["kind"]))  # sorting keeps the contestants' order


def table(stored: dict[str, Any]) -> str:
    """Format a table per length and kind, the check of the answers, and the skipped contestants."""
    case, rows = stored["case"], summarise(stored)
    ceiling = quartiles(flops / 1e9 for group in stored["groups"] for flops in group["ceiling"])
    lines = [
        f"one causal attention call, batch {case['batch']}, {case['heads']} heads of {case['head_dim']}, "
        f"{case['dtype']}, encodings of training length {case['train_len']}; {report.place(stored)}; float32 matmul "
        f"ceiling {cell(ceiling, ',.0f')} GFLOP/s; {len(stored['groups'][0]['ceiling'])} rounds: median [quartiles]"
    ]
    for length, kind in dict.fromkeys((row["length"], row["kind"]) for row in rows):
        body = [
            [
                row["encoding"], row["contestant"], cell(tuple(1e3 * s for s in row["seconds"]), ".2f"),
                f"{row['flops'] / 1e9:.0f}", f"{row['share']:.2f}", cell(row["over_dense"], ".2f"),
                cell(row["to_nope"], ".2f"),
            ]
            for row in rows if (row["length"], row["kind"]) == (length, kind)
        ]  # fmt: skip
        head = ["encoding", "contestant", "ms", "useful GFLOP/s", "share", "faster than dense XLA", "time / its NoPE's"]
        lines += ["", f"L = {length}, {KIND_NAMES[kind]}", "", *report.rows(head, body)]
    lines += against_torch(rows)
    worst = max(stored["checks"], key=lambda row: row["error"])
    lines += [
        "",
        f"{len(stored['checks'])} pairs of contestant and encoding checked against float64 at length "
        f"{stored['check_length']}; largest deviation {worst['error']:.1e} of the largest entry "
        f"({worst['contestant']}, {worst['encoding']}, {worst['answer']})",
    ]
    if stored["left_out"]:
        lines.append(f"NoPE's attention serves {', '.join(stored['left_out'])}, which act on the embeddings alone")
    for row in stored["skipped"]:
        kind = f", {KIND_NAMES[row['kind']]}" if "kind" in row else ""
        lines.append(f"not measured: {row['contestant']}, {row['encoding']}, {row['length']}{kind}: {row['why']}")
    return "\n".join(lines)


def against_torch(rows: list[dict[str, Any]]) -> list[str]:
    """Compare posx with every form of torch. The best form of a call is marked."""
    ours = next((name for name in OURS if any(row["contestant"] == name for row in rows)), None)
    body = []
    for row in rows:
        for who, ratio in sorted(row["over"].items()) if row["contestant"] == ours else ():
            best = who == row["best"]
            body.append([
                str(row["length"]), KIND_NAMES[row["kind"]], row["encoding"], f"{who}{', best' if best else ''}",
                cell(ratio, ".2f"),
            ])  # fmt: skip
    head = ["length", "kind", "encoding", "rival", f"{ours} is faster by"]
    return ["", f"{ours} against torch", "", *report.rows(head, body)] if body else []


def linear_executor(stored: dict[str, Any]) -> str:
    """Choose the contestant of posx for figures: over all devices if it was measured, else blockwise, else any."""
    found = [row["contestant"] for group in stored["groups"] for row in group["results"]]
    return next(name for name in (*OURS, *found) if name in found and name.startswith("posx"))


def draw(stored: dict[str, Any], path: Path) -> None:
    """Draw useful FLOP/s against length, forward and with gradients: posx in colour, NoPE by others in grey."""
    rows, executor, case = summarise(stored), linear_executor(stored), stored["case"]
    lengths = [group["length"] for group in stored["groups"]]
    ceiling = statistics.median(flops for group in stored["groups"] for flops in group["ceiling"]) / 1e9

    def curves(kind: str) -> Iterator[report.Curve]:
        ours = [(executor, encoding) for encoding in dict.fromkeys(row["encoding"] for row in rows)]
        for who, encoding in [*((who, "nope") for who in RIVALS), *ours]:
            line = [r for r in rows if (r["contestant"], r["encoding"], r["kind"]) == (who, encoding, kind)]
            label, drawn = (f"{who}, NoPE", RIVALS[who]) if who in RIVALS else (encoding, palette.look(encoding))
            if line:
                yield report.Curve(label, {row["length"]: row["flops"] / 1e9 for row in line}, drawn)
        yield report.Curve("float32 matmul ceiling", dict.fromkeys(lengths, ceiling), CEILING)

    sizes = f"one causal call, {case['heads']} heads of {case['head_dim']}, {case['dtype']}, {stored['cores']} cores"
    panels = {KIND_NAMES[kind]: report.Panel([*curves(kind)], "useful GFLOP/s (median)") for kind in KINDS}
    report.panels(path, panels, f"Attention with {executor.replace('-', ' ')}", [sizes])
