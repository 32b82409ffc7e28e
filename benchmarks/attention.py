"""Seconds of one attention call, forward and with gradients, per encoding and length, posx beside torch, JAX and Flax.

Gradients are those of q, k, v and of every learned parameter. 8 heads of 64 unless told otherwise, batch 1, causal,
scale 1/sqrt(d); encodings are resolved for --train_len tokens, tables that end repeat their last row. Contestants:
`posx`, its heads over a device per core; posx's executors on one device, and for encodings that fade `posx-every-tile`,
blockwise that skips nothing; `jax.nn` (dot_product_attention, XLA, causal flag) and `flax.nnx` (the same code beneath,
but with a mask array), with a dense bias; torch's SDPA with a dense float mask, also compiled, or, for ALiBi, with one
row as mask (`torch-sdpa-column`); flex attention, compiled (`torch-flex`); `torch-eager`. Posx over devices, all else
of JAX, and torch have a process each, which work in turns. Encodings that act on the embeddings alone are NoPE here
and left out.

Useful FLOP/s count two products forward and four more backward over the visible pairs. "faster than dense XLA" is the
time of `jax.nn`, where it serves the encoding, else of posx's dense executor, over that of the row. The last table is
of posx against torch's forms, the fastest of which is the bar. First of all, every contestant's output and gradients at
--check_length are held against posx's dense executor in float64.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import measure, workers
from benchmarks.attention_report import draw, summarise, table
from benchmarks.attention_worker import KINDS
from benchmarks.calls import TOLERANCE, Case, contestants, in_attention, is_quadratic, separate
from benchmarks.workers import Worker, WorkerError
from posx.config.model import DTYPES

__all__ = ["add_arguments", "draw", "run", "summarise", "table"]
MOST_CALLS = 100


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """What the attention and memory benches have in common."""
    parser.add_argument("--contestants", type=names, help=f"names with commas, of: {', '.join(contestants())}")
    parser.add_argument("--heads", type=measure.positive, default=8)
    parser.add_argument("--head_dim", type=measure.positive, default=64)
    parser.add_argument("--batch", type=measure.positive, default=1)
    parser.add_argument("--train_len", type=measure.positive, default=measure.TRAIN_LEN)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of q, k and v")
    parser.add_argument("--dense_limit", type=measure.positive, default=4096, help="longest for dense score matrices")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser)
    parser.set_defaults(contestants=separate())
    measure.add_rounds(parser, 5)
    parser.add_argument("--lengths", type=measure.lengths, default=[512, 1024, 2048, 4096])
    parser.add_argument("--turn_seconds", type=float, default=0.2, help="what the repeated calls of a turn take, about")
    parser.add_argument(
        "--check_length", type=measure.positive, default=600, help="more than one tile of each executor"
    )


def names(text: str) -> list[str]:
    chosen, known = text.split(","), contestants()
    for name in chosen:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; known: {', '.join(known)}")
    return chosen


def first_case(options: argparse.Namespace) -> Case:
    sizes = ("heads", "head_dim", "batch", "train_len", "dtype")
    return Case("nope", 1, **{name: getattr(options, name) for name in sizes})


def start(names: list[str]) -> dict[str, Worker]:
    """The process of every contestant: posx over devices, all else of JAX on one device, torch."""
    devices = {"posx": measure.cores(), "jax": 1, "torch": None}

    def kind(name: str) -> str:
        return "posx" if name == "posx" else "torch" if name.startswith("torch-") else "jax"

    made = {one: Worker("attention_worker:Calls", devices=devices[one]) for one in {kind(name): 0 for name in names}}
    return {name: made[kind(name)] for name in names}


def run(options: argparse.Namespace, save: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    start_case, encodings = first_case(options), in_attention(options.encodings)
    processes = start(options.contestants)
    with contextlib.ExitStack() as stack:
        stack.enter_context(workers.closing(list(processes.values())))
        checked = [dataclasses.replace(start_case, encoding=name, length=options.check_length) for name in encodings]
        found = [
            worker.call("check", name, dataclasses.asdict(case)) for case in checked
            for name, worker in processes.items()
        ]  # fmt: skip
        checks = [row for row in found if row]
        wrong = [row for row in checks if not row["error"] <= TOLERANCE[options.dtype]]
        report: dict[str, Any] = {
            "case": dataclasses.asdict(start_case), "check_length": options.check_length, "checks": checks,
            "problems": [f"wrong: {row['contestant']} with {row['encoding']}, {row['answer']} is off by "
                         f"{row['error']:.1e} of its largest entry" for row in wrong],
            "left_out": [name for name in options.encodings if name not in encodings], "skipped": [], "groups": [],
        }  # fmt: skip
        for length in options.lengths:
            cases = [dataclasses.replace(start_case, encoding=name, length=length) for name in encodings]
            group, skipped = one_length(cases, processes, options)
            report["groups"].append(group)
            report["skipped"] += skipped
            save(report)
    return report


def one_length(
    cases: list[Case], processes: dict[str, Worker], options: argparse.Namespace
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Every contestant with every encoding, interleaved: this length's numbers, and who did not take part."""
    length, keys, turns, skipped = cases[0].length, [], [], []
    for case in cases:
        for name, worker in processes.items():
            too_long = length > options.dense_limit and is_quadratic(name, case.encoding)
            ready = dict.fromkeys(KINDS, "longer than --dense_limit") if too_long else prepare(worker, name, case)
            for kind, first in ready.items():
                if isinstance(first, str):
                    skipped.append(
                        {"contestant": name, "encoding": case.encoding, "length": length, "kind": kind, "why": first}
                    )
                    continue
                repeats = min(max(round(options.turn_seconds / first), 1), MOST_CALLS)
                keys.append((case, name, kind))
                turns.append(functools.partial(worker.call, "turn", name, dataclasses.asdict(case), kind, repeats))
    ceiling: list[float] = []
    print(f"length {length}: {len(turns)} contestants", file=sys.stderr)
    times = measure.interleave(turns, options.rounds, before=lambda: ceiling.append(measure.fresh_ceiling()))
    results = [
        {"contestant": name, "encoding": case.encoding, "kind": kind, "useful_flops": case.useful_flops(kind),
         "seconds": found}
        for (case, name, kind), found in zip(keys, times, strict=True)
    ]  # fmt: skip
    return {"length": length, "ceiling": ceiling, "results": results}, skipped


def prepare(worker: Worker, name: str, case: Case) -> dict[str, Any]:
    """{kind: seconds of one call, or why it is not measured}."""
    try:
        return worker.call("prepare", name, dataclasses.asdict(case)) or {}
    except WorkerError as error:
        return dict.fromkeys(KINDS, str(error))
