"""Measure how a training step divides into products, attention, layers and dispatch.

The steps run under jax.profiler, with a device per core as in `posx train`. Each operation of XLA's CPU backend leaves
an event with its name in the compiled program. Its own time is its duration less the events inside it. The program's
text says which operation is a product, of which sizes, and in which `jax.named_scope` of posx it was made. On a GPU
products are calls of cuBLAS or fusions around a product, and attention may be a call of cuDNN. Graphs of kernels are
switched off there, since their events have no names.

Cells are per step and device, the median of the devices. GFLOP/s are of one device; its ceiling is that of one core.
"Dispatch" is the time of a step outside of all operations: starting them, loops, allocation. "Average over devices" is
that of gradients, where a device also waits for the slower one. Profiling itself slows a step by a few per cent.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import measure, report, workers
from benchmarks.train import SHAPES, Shape, step_parts, text_batches
from posx.lab.training.step import flops_per_token, init_state, train_steps
from posx.machine.devices import count_devices, replicate, shard_rows
from posx.machine.platforms import is_on_cpu

#: The names of posx's scopes in the table. Outside of them are the layers but for attention.
SCOPES = {"attention": "attention", "optimizer": "optimizer", "cross_entropy": "cross-entropy", "": "layers"}
#: The groups of operations that are no products, by parts of their names. XLA names a fusion after some of its steps.
KINDS = {
    "exponential": "exponentials", "tanh": "GELU", "reduce-window": "sums and maxima", "reduce_": "sums and maxima",
    "transpose": "copies", "copy": "copies", "slice": "copies", "concatenate": "copies", "convert": "casts",
}  # fmt: skip


class Operation(NamedTuple):
    """One operation of the compiled program: its group in the table, and its floating-point operations if a product."""

    group: str
    flops: float = 0.0


class Share(NamedTuple):
    """The part of one group: milliseconds and events a step and device, and floating-point operations a second."""

    group: str
    milliseconds: float
    events: float
    flops_per_second: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="medium")
    parser.add_argument("--length", type=measure.positive, help="another window length, as many tokens a step")
    parser.add_argument("--steps", type=measure.positive, default=8, help="profiled steps")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of operands of products")


def run(options: argparse.Namespace, save: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    shape, cores = dataclasses.replace(SHAPES[options.shape], dtype=options.dtype), measure.core_list()
    shape = shape.at_length(options.length) if options.length else shape
    made = workers.Worker("benchmarks.profiling:profile", devices=len(cores))
    with contextlib.closing(made):
        results = [made.call("", dataclasses.asdict(shape), name, options.steps) for name in options.encodings]
    with contextlib.closing(workers.Worker("benchmarks.measure:fresh_ceiling", cpus=cores[:1], devices=1)) as one:
        ceiling = one.call("")
    return {"shape": dataclasses.asdict(shape), "steps": options.steps, "ceiling": ceiling, "results": results}


def profile(sizes: dict[str, Any], encoding: str, steps: int) -> dict[str, Any]:
    """Return the milliseconds of a step, and its `Share`s, the largest first."""
    shape = Shape(**sizes)
    model, config = step_parts(encoding, shape)
    devices = count_devices(shape.batch, shape.tokens * flops_per_token(model, shape.length))
    state = replicate(init_state(model, config), devices)
    block = shard_rows(np.stack(text_batches(shape, steps)), devices, axis=1)
    no_graphs = {} if is_on_cpu() else {"xla_gpu_enable_command_buffer": ""}
    compiled = train_steps.lower(model, config, state, block, steps, devices).compile(no_graphs)
    operations, shares = parsed(compiled.as_text()), collections.defaultdict(list)
    state, _ = jax.block_until_ready(compiled(state, block, steps))
    started = time.perf_counter()
    state, _ = jax.block_until_ready(compiled(state, block, steps))
    by_clock = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compiled(state, block, steps))
        found = [own_times(events) for events in device_events(Path(folder), operations)]
    for own, events, wall in found:
        per: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
        for name, seconds in own.items():
            operation = operations[name]
            for n, value in enumerate((seconds, events[name], operation.flops * events[name])):
                per[operation.group][n] += value / steps
        per["dispatch"][0] += (wall - sum(own.values())) / steps
        for group, values in per.items():
            shares[group].append(values)
    rows = []
    for group, values in shares.items():
        seconds, events, flops = (statistics.median(column) for column in zip(*values, strict=True))
        rows.append(Share(group, 1e3 * seconds, events, flops / seconds if seconds else 0.0))
    return {
        "encoding": encoding, "devices": devices, "flops_per_token": flops_per_token(model, shape.length),
        "milliseconds": 1e3 * statistics.median(wall for *_, wall in found) / steps,
        "unprofiled_milliseconds": 1e3 * by_clock / steps,
        "shares": sorted(rows, key=lambda row: -row.milliseconds),
    }  # fmt: skip


def parsed(program: str) -> dict[str, Operation]:
    """Return the operations of a compiled program's text by name."""
    computations: dict[str, dict[str, str]] = {}
    lines: dict[str, str] = {}
    inside = computations.setdefault("", {})
    for line in program.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            inside = computations.setdefault(head[1], {})
        elif found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", line):
            inside[found[1]] = lines[found[1]] = found[2]
    return {name: _operation(name, line, lines, computations) for name, line in lines.items()}


def _operation(name: str, line: str, lines: dict[str, str], computations: dict[str, dict[str, str]]) -> Operation:
    called = re.search(r"calls=%?([\w.\-]+)", line)
    body = computations.get(called[1], {}) if called else {name: line}
    scope = next((word for word in SCOPES if word and word in _made_in(line, lines)), "")
    if "__cudnn$fmha" in line:
        return Operation(f"attention: cuDNN, {'backward' if 'Backward' in line else 'forward'}")
    for inner in body.values():
        is_call = "__cublas$" in inner
        if product := re.search(r" custom-call\(%?([\w.\-]+)," if is_call else r" dot\(%?([\w.\-]+),", inner):
            out, left = _sizes(inner), _sizes((body | lines if called else lines)[product[1]])
            axes = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', inner) if is_call else None
            contracting = re.findall(r"\d+", axes[1]) if axes else _axes("lhs_contracting_dims", inner)
            contracted = math.prod(left[int(n)] for n in contracting)
            label = f"products {_by(out)} over {contracted}"
            kind = "attention" if scope == "attention" else "weights"
            return Operation(f"{kind}: {label}", 2.0 * math.prod(out) * contracted)
    if re.search(r" (all-reduce|all-gather|reduce-scatter|collective-permute)[\w\-]*\(", line):
        return Operation("average over devices")
    if re.search(r" (while|call|conditional)\(", line):
        return Operation("dispatch")
    kind = next((word for part, word in KINDS.items() if part in name), "other element-wise work")
    return Operation(f"{SCOPES[scope]}: {kind}" if scope in ("", "attention") else SCOPES[scope])


def _made_in(line: str, lines: dict[str, str], depth: int = 4) -> str:
    """Return the path of scopes that an operation was made in. One that XLA made itself has that of its operand."""
    if named := re.search(r'op_name="([^"]*)"', line):
        return named[1]
    operand = re.search(r"\(%?([\w.\-]+)", line)
    return _made_in(lines[operand[1]], lines, depth - 1) if operand and depth and operand[1] in lines else ""


def _sizes(line: str) -> list[int]:
    found = re.match(r"\(?\w+\[([\d,]*)\]", line)
    return [int(n) for n in found[1].split(",") if n] if found else []


def _axes(name: str, line: str) -> list[str]:
    found = re.search(rf"{name}=\{{([\d,]*)\}}", line)
    return found[1].split(",") if found and found[1] else []


def _by(sizes: list[int]) -> str:
    return " x ".join(map(str, sizes))


class Event(NamedTuple):
    """One event of a device, in seconds. An operation of a GPU may be several kernels and settings of memory."""

    start: float
    end: float
    operation: str
    kernel: str


def device_events(folder: Path, operations: dict[str, Operation]) -> list[list[Event]]:
    """Return the events of the profiled program by device."""
    (path,) = folder.rglob("*.xplane.pb")
    devices: dict[str, list[Event]] = collections.defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                facts = dict(event.stats)
                if facts.get("hlo_op") in operations:
                    start = event.start_ns / 1e9
                    devices[str(facts.get("device_ordinal"))].append(
                        Event(start, start + event.duration_ns / 1e9, str(facts["hlo_op"]), event.name)
                    )
    return list(devices.values())


def own_times(events: list[Event]) -> tuple[dict[str, float], dict[str, int], float]:
    """Return own seconds and the number of runs by operation, and the seconds from the first start to the last end."""
    own: dict[str, float] = collections.defaultdict(float)
    kernels, runs, open_events = collections.Counter((x.operation, x.kernel) for x in events), {}, []
    for (operation, _), count in kernels.items():
        runs[operation] = max(runs.get(operation, 0), count)
    for start, end, name, _ in sorted(events, key=lambda event: (event.start, -event.end)):
        while open_events and open_events[-1][0] <= start:
            open_events.pop()
        if open_events:
            own[open_events[-1][1]] -= end - start
        own[name] += end - start
        open_events.append((end, name))
    return own, runs, max(event.end for event in events) - min(event.start for event in events)


def table(stored: dict[str, Any]) -> str:
    """Format one table per encoding, and how much of the ceiling a step reaches."""
    shape, ceiling = Shape(**stored["shape"]), stored["ceiling"]
    core = f"float32 matmul ceiling of a core {ceiling / 1e9:.0f} GFLOP/s"
    lines = [f"{shape}, {shape.dtype}; {report.place(stored)}; {core}"]
    for result in stored["results"]:
        step, tokens = result["milliseconds"], shape.tokens / result["devices"]
        useful = tokens * result["flops_per_token"] / step * 1e3
        lines += ["", f"{result['encoding']}: {step:.0f} ms a step on each of {result['devices']} devices, "
                      f"{useful / ceiling:.2f} of the ceiling; {result['unprofiled_milliseconds']:.0f} ms by the "
                      "host's clock without the profiler", ""]  # fmt: skip
        head = ["group", "ms a step", "share", "events a step", "GFLOP/s"]
        lines += report.rows(head, (
            [row.group, f"{row.milliseconds:.1f}", f"{row.milliseconds / step:.1%}", f"{row.events:.0f}",
             f"{row.flops_per_second / 1e9:.0f}" if row.flops_per_second else "-"]
            for row in map(Share._make, result["shares"]) if row.milliseconds >= 0.002 * step
        ))  # fmt: skip
    return "\n".join(lines)
