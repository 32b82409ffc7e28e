"""Seconds to compile one training step per encoding and executor, cold and from the persistent cache.

Every measurement is a new process. Two in a turn share a new cache folder: the first finds it empty (cold), the second
full (warm). "compile" is lowering and compiling the step. "first step" lasts from the start of the process to the end
of step one, imports included. "hits" counts the cache entries that the warm process's step found: without hits, warm
means nothing. JAX's thresholds for what to cache are at 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import measure, report, workers
from benchmarks.calls import LIBRARY
from benchmarks.report import cell, quartiles, ratios
from benchmarks.train import SHAPES, VOCAB, Shape, step_parts
from posx.attention import EXECUTORS
from posx.lab.training.step import init_state, train_steps

HIT = "/jax/compilation_cache/cache_hits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_rounds(parser, 3)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    measure.add_names(parser, "--executors", EXECUTORS)
    parser.set_defaults(executors=[name for name in LIBRARY if name != "kernel"])  # CPUs interpret it


def first_step(encoding: str, executor: str, shape: dict[str, Any], cache: str, started: float) -> dict[str, float]:
    """Measure the first training step of this process, started at that time of day: seconds, and cache hits."""
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
    """Return {"cold", "warm"}, or {"failed": ...} if the executor cannot serve the encoding."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            result = workers.fresh(first_step, encoding, executor, dataclasses.asdict(shape), cache, time.time())
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


def summarise(stored: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per pair that every turn served: spreads of seconds, the ratio per turn, the fewest hits."""
    rows = []
    for result in stored["results"]:
        turns = result["turns"]
        if any("failed" in turn for turn in turns):
            continue
        cold, warm = ([turn[which]["lower"] + turn[which]["compile"] for turn in turns] for which in ("cold", "warm"))
        rows.append({
            "encoding": result["encoding"], "executor": result["executor"], "cold": quartiles(cold),
            "warm": quartiles(warm), "ratio": ratios(cold, warm),
            **{f"first_{which}": quartiles(turn[which]["first_step"] for turn in turns) for which in ("cold", "warm")},
            "hits": min(turn["warm"]["hits"] for turn in turns),
        })  # fmt: skip
    return rows


def table(stored: dict[str, Any]) -> str:
    """Format one row per encoding and executor."""
    spreads = {"cold": "compile, cold (s)", "warm": "compile, warm (s)", "ratio": "cold / warm",
               "first_cold": "first step, cold (s)", "first_warm": "first step, warm (s)"}  # fmt: skip
    body = [
        [row["encoding"], row["executor"], *(cell(row[name], ".2f") for name in spreads), str(row["hits"])]
        for row in summarise(stored)
    ]
    lines = [
        f"one training step: {Shape(**stored['shape'])}, float32; {report.place(stored)}; "
        f"{len(stored['results'][0]['turns'])} pairs of fresh processes each: median [quartiles]",
        "", *report.rows(["encoding", "executor", *spreads.values(), "hits"], body),
    ]  # fmt: skip
    for result in stored["results"]:
        for failed in [turn["failed"] for turn in result["turns"] if "failed" in turn][:1]:
            lines += ["", f"{failed['status']}: {result['encoding']}, {result['executor']}: {failed['why']}"]
    return "\n".join(lines)
