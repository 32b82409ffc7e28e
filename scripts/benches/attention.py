"""Seconds of one attention call, forward and with gradients, per encoding and length, posx beside JAX, Flax and torch.

Gradients are those of q, k, v and of every learned parameter. 8 heads of 64 unless told otherwise, batch 1, causal,
scale 1/sqrt(d); encodings are resolved for --train_len tokens, tables that end repeat their last row. Contestants:
posx's executors, and for encodings that fade `posx-every-tile`, blockwise that skips nothing; `jax.nn`
(dot_product_attention, XLA, causal flag) and `flax.nnx` (the same code beneath, but with a mask array), with a dense
bias; torch's SDPA with a dense float mask or, for ALiBi, also with one row as mask (`torch-sdpa-column`);
`torch-eager`. Encodings that act on the embeddings alone are NoPE here and left out.

Useful FLOP/s count two products forward and four more backward over the visible pairs. "faster than dense XLA" is the
time of `jax.nn`, where it serves the encoding, else of posx's dense executor, over that of the row. First of all, every
contestant's output and gradients at --check_length are held against posx's dense executor in float64.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

from benches import measure
from benches.attention_report import draw, summarise, table
from benches.calls import TOLERANCE, Call, Case, contestants, errors, in_attention, is_quadratic, oracle, separate
from posx.config.model import DTYPES

__all__ = ["add_arguments", "draw", "run", "summarise", "table"]
KINDS = ("forward", "gradient")
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


def run(options: argparse.Namespace, save: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    start, encodings = first_case(options), in_attention(options.encodings)
    checked = [dataclasses.replace(start, encoding=name, length=options.check_length) for name in encodings]
    checks = [row for case in checked for row in check(case, options.contestants)]
    wrong = [row for row in checks if not row["error"] <= TOLERANCE[options.dtype]]
    report: dict[str, Any] = {
        "case": dataclasses.asdict(start), "check_length": options.check_length, "checks": checks,
        "problems": [f"wrong: {row['contestant']} with {row['encoding']}, {row['answer']} is off by "
                     f"{row['error']:.1e} of its largest entry" for row in wrong],
        "left_out": [name for name in options.encodings if name not in encodings], "skipped": [], "groups": [],
    }  # fmt: skip
    for length in options.lengths:
        cases = [dataclasses.replace(start, encoding=name, length=length) for name in encodings]
        group, skipped = one_length(cases, options)
        report["groups"].append(group)
        report["skipped"] += skipped
        save(report)
    return report


def check(case: Case, chosen: list[str]) -> list[dict[str, Any]]:
    """The worst answer of every contestant that serves the encoding; what raises is left for `one_length` to tell."""
    truth, rows = oracle(case), []
    for name in chosen:
        answers = attempt(name, case, lambda call: call.answers())
        if isinstance(answers, dict):
            answer, error = max(errors(answers, truth).items(), key=lambda item: item[1])
            rows.append({"contestant": name, "encoding": case.encoding, "answer": answer, "error": error})
    return rows


def attempt(name: str, case: Case, use: Callable[[Call], Any]) -> Any:
    """What `use` makes of the call; the reason as text where that fails; None where the call does not apply."""
    try:
        call = contestants()[name](case)
        return use(call) if call else None
    except (ValueError, TypeError, NotImplementedError, RuntimeError, MemoryError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def warm(call: Call) -> Call:
    """The call after a first run of both kinds, which compiles them."""
    call.forward()
    call.gradient()
    return call


def one_length(cases: list[Case], options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Every contestant with every encoding, interleaved: this length's numbers, and who did not take part."""
    length, calls, skipped = cases[0].length, {}, []
    for case in cases:
        for name in options.contestants:
            too_long = length > options.dense_limit and is_quadratic(name, case.encoding)
            call = "longer than --dense_limit" if too_long else attempt(name, case, warm)
            if isinstance(call, Call):
                calls[case, name] = call
            elif call:
                skipped.append({"contestant": name, "encoding": case.encoding, "length": length, "why": call})
    keys = [(case, name, kind) for case, name in calls for kind in KINDS]
    turns = []
    for case, name, kind in keys:
        once = getattr(calls[case, name], kind)
        repeats = min(max(round(options.turn_seconds / seconds(once, 1)), 1), MOST_CALLS)
        turns.append(functools.partial(seconds, once, repeats))
    ceiling: list[float] = []
    print(f"length {length}: {len(turns)} contestants", file=sys.stderr)
    times = measure.interleave(turns, options.rounds, before=lambda: ceiling.append(measure.fresh_ceiling()))
    results = [
        {"contestant": name, "encoding": case.encoding, "kind": kind, "useful_flops": case.useful_flops(kind),
         "seconds": found}
        for (case, name, kind), found in zip(keys, times, strict=True)
    ]  # fmt: skip
    return {"length": length, "ceiling": ceiling, "results": results}, skipped


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Seconds per call, after some that are not timed."""
    for _ in range(1 + repeats // 4):
        call()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
