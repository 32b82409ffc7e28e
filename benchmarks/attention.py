"""Seconds of one attention call, forward and with gradients, per encoding and length, posx beside torch, JAX and Flax.

Gradients are those of q, k, v and of every learned parameter. 8 heads of 64 by default, batch 1, causal, scale
1/sqrt(d). Encodings are resolved for --train_len tokens; tables that end repeat their last row. Contestants:

* `posx`, its heads over a device per core, and posx's executors on one device. `posx-every-tile` is blockwise without
  skipping, for encodings that fade.
* On accelerators, if named, `posx-wide-tiles`: blockwise with tiles of 512 x 1024. Also `jax.nn-cudnn`: the kernel of
  cuDNN by JAX's own call, for bfloat16.
* `jax.nn` (dot_product_attention, XLA, causal flag) and `flax.nnx` (the same code beneath, but with a mask array), with
  a dense bias.
* torch's SDPA with a dense float mask, also compiled, or with one row as mask for ALiBi (`torch-sdpa-column`); flex
  attention, compiled (`torch-flex`); `torch-eager`.

Posx over devices, the rest of JAX, and torch have a process each, which work in turns. On an accelerator each of a few
encodings has these processes. They compile side by side, and are measured before the next few compile. Encodings that
act on the embeddings alone are NoPE here and left out.

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
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks import measure, report
from benchmarks.calls import KINDS, TOLERANCE, Case, contestants, in_attention, is_quadratic, separate
from benchmarks.report import cell, quartiles, ratios
from benchmarks.workers import Worker, WorkerError, side_by_side
from posx.machine.platforms import is_on_cpu

KIND_NAMES = {"forward": "forward", "gradient": "forward + backward", "model": "evaluation of one window"}
OURS = ("posx", "posx-blockwise")  # the one that is shown if there is room for one
MOST_CALLS = 100
Call = tuple[Case, str, Worker]  # a contestant with one encoding and length, and its process
#: Encodings that compile side by side on an accelerator, each in processes of its own.
COPIES = max(1, min(8, measure.cores() // 2))


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
    case, encodings = first_case(options), in_attention(options.encodings)
    stored: dict[str, Any] = {
        "case": dataclasses.asdict(case), "check_length": options.check_length, "checks": [], "problems": [],
        "left_out": [name for name in options.encodings if name not in encodings], "skipped": [], "groups": [],
    }  # fmt: skip
    parts = measure.in_parts(encodings, COPIES)
    with contextlib.ExitStack() as stack:
        copies = [start(options.contestants) for _ in range(1 if is_on_cpu() else min(COPIES, len(encodings)))]
        for worker in (worker for processes in copies for worker in processes.values()):
            stack.callback(worker.close)
        for length in options.lengths:
            before, ceiling, results = stored["groups"], [], []
            for few in parts:
                calls = [
                    (dataclasses.replace(case, encoding=encoding, length=length), name, worker)
                    for encoding, processes in zip(few, itertools.cycle(copies)) for name, worker in processes.items()
                ]  # fmt: skip
                if length == options.lengths[0]:
                    stored = stored | checked(calls, stored["checks"], options)
                turns, skipped = ready(calls, options)
                stored = stored | {"skipped": [*stored["skipped"], *skipped]}
                found: list[dict[str, Any]] = []
                for found in measured(turns, options.rounds, ceiling):
                    group = {"length": length, "ceiling": ceiling, "results": [*results, *found]}
                    save(stored := stored | {"groups": [*before, group]})
                results += found
                stored = stored | {"groups": [*before, {"length": length, "ceiling": ceiling, "results": [*results]}]}
    return stored


class Turn(NamedTuple):
    """The row of a contestant, and the function that returns the seconds of one of its calls."""

    row: dict[str, Any]
    take: Callable[[], float]


def checked(calls: Sequence[Call], before: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the checks of answers, those of `before` first, and the wrong ones in words."""

    def check(case: Case, name: str, worker: Worker) -> Any:
        return worker.call("check", name, dataclasses.asdict(dataclasses.replace(case, length=options.check_length)))

    checks = [*before, *filter(None, side_by_side(check, calls, lambda *call: call[2]))]
    wrong = [row for row in checks if not row["error"] <= TOLERANCE[options.dtype]]
    problems = [
        f"wrong: {row['contestant']} with {row['encoding']}, {row['answer']} is off by {row['error']:.1e} of its "
        "largest entry"
        for row in wrong
    ]
    return {"checks": checks, "problems": problems}


def ready(calls: Sequence[Call], options: argparse.Namespace) -> tuple[list[Turn], list[dict[str, Any]]]:
    """Return the turns of every contestant that has run its first calls, and the skipped."""
    turns, skipped = [], []

    def first_calls(case: Case, name: str, worker: Worker) -> dict[str, Any]:
        too_long = case.length > options.dense_limit and is_quadratic(name, case.encoding)
        return dict.fromkeys(KINDS, "longer than --dense_limit") if too_long else prepare(worker, name, case)

    found = side_by_side(first_calls, calls, lambda *call: call[2])
    for (case, name, worker), by_kind in zip(calls, found, strict=True):
        for kind, first in by_kind.items():
            row = {"contestant": name, "encoding": case.encoding, "kind": kind}
            if isinstance(first, str):
                skipped.append({**row, "length": case.length, "why": first})
                continue
            repeats = min(max(round(options.turn_seconds / first), 1), MOST_CALLS)
            take = functools.partial(worker.call, "turn", name, dataclasses.asdict(case), kind, repeats)
            turns.append(Turn({**row, "useful_flops": case.useful_flops(kind)}, take))
    return turns, skipped


def measured(turns: Sequence[Turn], rounds: int, ceiling: list[float]) -> Iterator[list[dict[str, Any]]]:
    """Take all turns of all rounds, and yield the rows so far after each. `ceiling` gets the rounds' ceilings."""

    def open_round() -> None:
        if len(ceiling) < rounds:
            ceiling.append(measure.fresh_ceiling())

    print(f"{len(turns)} contestants", file=sys.stderr)
    for times in measure.interleaved([turn.take for turn in turns], rounds, open_round):
        yield [{**turn.row, "seconds": found} for turn, found in zip(turns, times, strict=True) if found]


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
