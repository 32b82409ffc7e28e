"""Seconds to compile one training step per encoding and executor, cold and from the persistent cache.

Every measurement is a fresh process, two in a turn that share a new cache folder: the first finds it empty (cold), the
second full (warm). "compile" is lowering and compiling the step, "first step" all from the start of the process to the
end of step one, imports included, and "hits" what the warm process's step found in the cache: without hits, warm means
nothing. JAX's thresholds for what to cache are at 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import fresh, measure
from benchmarks.calls import LIBRARY
from benchmarks.measure import cell, quartiles
from benchmarks.train import step_parts
from benchmarks.train_parts import SHAPES, VOCAB, Shape
from posx.attention import EXECUTORS
from posx.plots import look
from posx.training.step import init_state, train_steps

HIT = "/jax/compilation_cache/cache_hits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_rounds(parser, 3)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--executors", type=executors, default=list(LIBRARY), help="names with commas; default: posx's")


def executors(text: str) -> list[str]:
    for name in (chosen := text.split(",")):
        if name not in EXECUTORS:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; known: {', '.join(EXECUTORS)}")
    return chosen


def first_step(encoding: str, executor: str, shape: dict[str, Any], cache: str, started: float) -> dict[str, float]:
    """What this process, started at that time of day, takes for its first training step; seconds, and cache hits."""
    hits: list[str] = []
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event == HIT else None)
    sizes = Shape(**shape)
    model, config = step_parts(encoding, sizes, executor)
    state = init_state(model, config)
    tokens = np.random.default_rng(0).integers(VOCAB, size=(config.dispatch_steps, sizes.batch, sizes.length + 1))
    tokens = tokens.astype(np.int32)
    hits.clear()
    before = time.perf_counter()
    lowered = train_steps.lower(model, config, state, tokens, 1)
    between = time.perf_counter()
    compiled = lowered.compile()
    after, found = time.perf_counter(), len(hits)
    jax.block_until_ready(compiled(state, tokens, 1))
    return {
        "lower": between - before, "compile": after - between, "first_step": time.time() - started, "hits": found,
    }  # fmt: skip


def turn(encoding: str, executor: str, shape: Shape) -> dict[str, dict[str, float]]:
    """{"cold", "warm"}, or {"failed": ...} where the executor cannot serve the encoding."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            result = fresh.call(first_step, encoding, executor, dataclasses.asdict(shape), cache, time.time())
            if result["status"] != "ok":
                return {"failed": result}
            found[name] = result["value"]
    return found


def run(options: argparse.Namespace, save: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    shape = SHAPES[options.shape]
    pairs = [(encoding, executor) for encoding in options.encodings for executor in options.executors]

    def one(encoding: str, executor: str) -> dict[str, Any]:
        print(encoding, executor, file=sys.stderr)
        return turn(encoding, executor, shape)

    rounds = measure.interleave([functools.partial(one, *pair) for pair in pairs], options.rounds)
    results = [
        {"encoding": encoding, "executor": executor, "turns": turns}
        for (encoding, executor), turns in zip(pairs, rounds, strict=True)
    ]
    return {"shape": dataclasses.asdict(shape), "results": results}


def summarise(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per pair that every turn served: spreads of seconds, the ratio formed per turn, the fewest hits."""
    rows = []
    for result in report["results"]:
        turns = result["turns"]
        if any("failed" in turn for turn in turns):
            continue

        def times(which: str, *parts: str, turns: list[dict[str, Any]] = turns) -> list[float]:
            return [sum(turn[which][part] for part in parts) for turn in turns]

        cold, warm = times("cold", "lower", "compile"), times("warm", "lower", "compile")
        rows.append({
            "encoding": result["encoding"], "executor": result["executor"], "cold": quartiles(cold),
            "warm": quartiles(warm), "ratio": measure.ratios(cold, warm),
            "first_cold": quartiles(times("cold", "first_step")), "first_warm": quartiles(times("warm", "first_step")),
            "hits": min(turn["warm"]["hits"] for turn in turns),
        })  # fmt: skip
    return rows


def table(report: dict[str, Any]) -> str:
    """Markdown, one row per encoding and executor."""
    body = [
        [
            row["encoding"], row["executor"],
            *(cell(row[name], ".2f") for name in ("cold", "warm", "ratio", "first_cold", "first_warm")),
            str(row["hits"]),
        ]
        for row in summarise(report)
    ]  # fmt: skip
    head = [
        "encoding", "executor", "compile, cold (s)", "compile, warm (s)", "cold / warm", "first step, cold (s)",
        "first step, warm (s)", "hits",
    ]  # fmt: skip
    lines = [
        f"one training step: {Shape(**report['shape'])}, float32; {measure.place(report)}; "
        f"{len(report['results'][0]['turns'])} pairs of fresh processes each: median [quartiles]",
        "",
        *measure.rows(head, body),
    ]
    for result in report["results"]:
        for failed in [turn["failed"] for turn in result["turns"] if "failed" in turn][:1]:
            lines += ["", f"{failed['status']}: {result['encoding']}, {result['executor']}: {failed['why']}"]
    return "\n".join(lines)


def draw(report: dict[str, Any], path: Path) -> None:
    """Cold bars per encoding and executor, the warm time as a tick within."""
    rows = summarise(report)[::-1]
    with look.style():
        made = look.figure(7.5, 1.2 + 0.28 * len(rows))
        ax = made.add_subplot()
        made.subplots_adjust(top=0.99, left=0.24)
        for place, row in enumerate(rows):
            middle, low, high = row["cold"]
            spread = [[middle - low], [high - middle]]
            color = look.look(row["encoding"]).color
            ax.barh(place, middle, 0.7, color=color, xerr=spread, ecolor="#555555", capsize=2, alpha=0.8)
            ax.plot([row["warm"][0]] * 2, [place - 0.35, place + 0.35], color="white", linewidth=2.5)
        ax.set_yticks(range(len(rows)), [f"{look.look(row['encoding']).name}, {row['executor']}" for row in rows])
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.05, y=0.02)
        ax.set_xlabel("seconds to compile one training step (median; whiskers: quartiles)")
        lines = [f"{Shape(**report['shape'])} tokens, {report['cores']} cores", "white line: from the persistent cache"]
        look.headings(made, "Compile time", lines)
        look.save(made, path.parent, path.stem)
