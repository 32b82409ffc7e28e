"""Training tokens/s per encoding, posx beside x-transformers at its best.

Measures the whole step (forward, backward, clipping, AdamW) on batches already in memory, no dropout, causal. Shape
`small`: 4 layers, width 128, 4 heads, GELU MLP of 512, 257 byte tokens, 32 windows of L = 128. `medium`: 6 layers,
width 256, 8 heads, 8 windows of L = 512. Both 4096 tokens a step, at another --length too. `large`, for accelerators:
12 layers, width 768, 12 heads, 32 windows of L = 1024. `tiny` is for tests.
Share = tokens/s x FLOPs per token (matmuls and causal-exact attention only) / the float32 ceiling.

Contestants:

* `posx` with a device per core, and `one_device`.
* `pinned`: as many processes of posx as cores, each bound to one and with a batch of its own, at work together.
* `baseline`: posx at --baseline=COMMIT.
* x-transformers: `eager`, `flash`, `compiled` and `flash_compiled`. The fastest is the best rival of an encoding.
  Compiling is not timed. A form that fails is named with the reason.

The rival has posx's architecture: RMSNorm, no biases, embeddings tied or not as posx's default, full-width rotary. Its
T5 has posx's buckets. `sinusoidal` is its scaled one, GELU its exact form; posx has the tanh form. It runs on all cores
with torch's fused AdamW, with --dtype=bfloat16 under torch.autocast. All contestants see the same batches at the same
constant learning rate: the last table shows that they learn, and with how many parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import measure, report, workers
from benchmarks.report import cell, quartiles, ratios
from benchmarks.workers import Worker, WorkerError, checkout
from posx.lab.config import TrainConfig
from posx.lab.config.sections import ModelConfig
from posx.lab.data.corpus import stdlib_files
from posx.lab.model import make_model
from posx.lab.training.step import flops_per_token, init_state, train_steps
from posx.machine.devices import count_devices, replicate, shard_rows
from posx.machine.platforms import is_on_cpu

VOCAB = 257
LEARNING_RATE = 1e-3
#: Encodings that compile side by side on an accelerator, each in processes of its own: at `large` they fill 80 GB.
COPIES = 2
#: The libraries of a report by the words of --contestants. x-transformers' begin with PEER.
OURS, PEER = "posx", "x-transformers"
ONE_DEVICE, PINNED, BASELINE = "posx, one device", "posx, pinned processes", "posx, baseline"
FORMS = {"eager": PEER, "flash": f"{PEER}, flash", "compiled": f"{PEER}, compiled",
         "flash_compiled": f"{PEER}, flash compiled"}  # fmt: skip
LIBRARIES = {OURS: OURS, "one_device": ONE_DEVICE, "pinned": PINNED, "baseline": BASELINE} | FORMS
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a model and of one step.

    Attributes:
      layers: of the model.
      width: of the model.
      heads: of queries, keys and values.
      batch: windows of a step.
      length: tokens of a window.
      dtype: of posx's forward products.
    """

    layers: int
    width: int
    heads: int
    batch: int
    length: int
    dtype: str = "float32"

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(num_layers=self.layers, model_dim=self.width, num_heads=self.heads, dtype=self.dtype)

    def at_length(self, length: int) -> Shape:
        """Set another length of the windows, with as many tokens a step."""
        return dataclasses.replace(self, length=length, batch=max(self.tokens // length, 1))

    def __str__(self) -> str:
        return f"{self.layers} layers, width {self.width}, {self.heads} heads, {self.batch} windows of {self.length}"


SHAPES = {
    "small": Shape(4, 128, 4, 32, 128),
    "medium": Shape(6, 256, 8, 8, 512),
    "large": Shape(12, 768, 12, 32, 1024),
    "tiny": Shape(1, 32, 2, 2, 16),
}


@dataclasses.dataclass
class Contestant:
    """One model in training. `advance(n, count)` does the next steps, from number n on, and returns their losses."""

    parameters: int
    advance: Callable[[int, int], list[Any]]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    losses: list[Any] = dataclasses.field(default_factory=list)

    def run(self, steps: int) -> float:
        """Run that many further steps, and return their seconds."""
        start = time.perf_counter()
        self.losses += self.advance(len(self.losses), steps)
        return time.perf_counter() - start


def text_batches(shape: Shape, count: int = 64) -> list[np.ndarray]:
    """Cut windows int32 [batch, length + 1] from the interpreter's own source code, the same for every contestant."""
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in stdlib_files().paths[:60]), np.uint8)
    starts = np.random.default_rng(0).integers(len(text) - shape.length, size=(count, shape.batch, 1))
    return list(text[starts + np.arange(shape.length + 1)].astype(np.int32))


def step_parts(encoding: str, shape: Shape, executor: str = "auto") -> tuple[Any, TrainConfig]:
    """Make the model and the recipe that `train_steps` takes."""
    model = make_model(shape.config, encoding, VOCAB, shape.length)
    config = TrainConfig(
        length=shape.length, batch_size=shape.batch, steps=1_000_000, warmup_steps=0,
        learning_rate=LEARNING_RATE, final_learning_rate=LEARNING_RATE, executor=executor,
    )  # fmt: skip
    return model, config


def posx_contestant(encoding: str, shape: Shape, batches: Sequence[np.ndarray]) -> Contestant:
    """Make posx, sharded over the devices of this process as `posx train` does."""
    model, config = step_parts(encoding, shape)
    devices = count_devices(shape.batch, shape.tokens * flops_per_token(model, shape.length))
    state = replicate(init_state(model, config), devices)

    def advance(n: int, count: int) -> list[jax.Array]:
        """Run several steps a call, all calls of one size, as `posx train` does."""
        nonlocal state
        size, losses = config.dispatch_steps, []
        for first in range(n, n + count, size):
            block = np.stack([batches[(first + i) % len(batches)] for i in range(size)])
            steps = min(size, n + count - first)
            state, metrics = train_steps(model, config, state, shard_rows(block, devices, axis=1), steps, devices)
            losses += list(metrics["loss"])
        jax.block_until_ready(state)
        return losses[:count]

    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    flops = flops_per_token(model, shape.length)
    facts = {"resolved": str(model.encodings[0]), "flops_per_token": flops, "devices": devices}
    return Contestant(parameters, advance, facts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_rounds(parser, 9)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--length", type=measure.positive, help="another window length, as many tokens a step")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the operands of products"
    )
    parser.add_argument("--steps", type=measure.positive, default=10, help="timed steps of one contestant in one round")
    measure.add_names(parser, "--contestants", LIBRARIES)
    parser.add_argument("--baseline", metavar="COMMIT", help="an older state of posx that takes part")


class Side(NamedTuple):
    """One contestant with one encoding: its row of the report, and the processes that work at the same time."""

    row: dict[str, Any]
    processes: Sequence[Worker]
    key: tuple[str, str]  # of the contestant in its processes

    def turn(self, steps: int) -> float:
        """Return the tokens/s of all its processes together."""
        return sum(workers.call_all(self.processes, "turn", *self.key, steps))


def chosen(options: argparse.Namespace) -> list[str]:
    """Choose the contestants by their words. Raises SystemExit for a baseline that is not given."""
    words = options.contestants or [word for word in LIBRARIES if word != "baseline" or options.baseline]
    if "baseline" in words and not options.baseline:
        raise SystemExit("--contestants=baseline needs --baseline=COMMIT, for example --baseline=3891e0e")
    missing = next((name for name in ("torch", "x-transformers") if not measure.version(name)), None)
    if missing and any(word in FORMS for word in words):
        print(f"posx alone: {missing} is missing; pip install '.[peers]' brings it\n")
        words = [word for word in words if word not in FORMS]
    return words


def start(words: list[str], shape: Shape, baseline: str | None, stack: contextlib.ExitStack) -> dict[str, list[Worker]]:
    """Start the processes of every contestant. The forms of x-transformers share one."""
    make = functools.partial(Worker, "benchmarks.train_worker:Training", dataclasses.asdict(shape))
    cores = measure.core_list()
    kinds: dict[str, Callable[[], list[Worker]]] = {
        OURS: lambda: [make(devices=len(cores))],
        "one_device": lambda: [make(devices=1)],
        "pinned": lambda: [make(cpus=[core], devices=1) for core in cores],
        "baseline": lambda: [make(code=stack.enter_context(checkout(str(baseline))), devices=len(cores))],
    }
    found: dict[str, list[Worker]] = {}
    for word in words:
        kind = "peer" if word in FORMS else word
        if kind not in found:
            found[kind] = kinds.get(kind, lambda: [make()])()
            for worker in found[kind]:
                stack.callback(worker.close)
        found[word] = found[kind]
    return found


def sides(
    words: list[str], encodings: Sequence[str], copies: Sequence[dict[str, list[Worker]]]
) -> tuple[list[Side], list[dict[str, str]]]:
    """Return every contestant that has run its first steps, encoding by encoding, and the failures.

    On an accelerator contestants of other processes compile side by side.
    """
    pairs = list(itertools.product(zip(encodings, itertools.cycle(copies)), words))

    def ready(word: str, encoding: str, processes: list[Worker]) -> Side | dict[str, str] | None:
        key, who = (word if word in FORMS else OURS, encoding), {"library": LIBRARIES[word], "encoding": encoding}
        try:
            facts = workers.call_all(processes, "add", *key)[0]
        except WorkerError as error:
            return who | {"why": str(error)}
        if facts:
            print(f"{LIBRARIES[word]} {encoding} is ready", file=sys.stderr)
        return Side({**who, "processes": len(processes), **facts}, processes, key) if facts else None

    calls = [(word, encoding, processes[word]) for (encoding, processes), word in pairs]
    found = workers.side_by_side(ready, calls, lambda _, __, processes: processes)
    return [one for one in found if isinstance(one, Side)], [one for one in found if isinstance(one, dict)]


def run(options: argparse.Namespace, save: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    shape, steps = dataclasses.replace(SHAPES[options.shape], dtype=options.dtype), options.steps
    shape, words = shape.at_length(options.length) if options.length else shape, chosen(options)
    ceiling: list[float] = []
    sizes = {"shape": dataclasses.asdict(shape), "steps": steps, "ceiling": ceiling}
    stored: dict[str, Any] = {**sizes, "baseline": options.baseline, "failed": [], "results": []}

    def open_round() -> None:
        if len(ceiling) < options.rounds:
            ceiling.append(measure.fresh_ceiling())

    with contextlib.ExitStack() as stack:
        number = 1 if is_on_cpu() else min(COPIES, len(options.encodings))
        copies = [start(words, shape, options.baseline, stack) for _ in range(number)]
        for few in measure.in_parts(options.encodings, number):
            taking_part, failed = sides(words, few, copies)
            before = stored | {"failed": [*stored["failed"], *failed]}
            stored = before
            turns = [functools.partial(side.turn, steps) for side in taking_part]
            for rates in measure.interleaved(turns, options.rounds, open_round):
                results = [
                    {**side.row, "tokens_per_second": rate, "losses": side.processes[0].call("losses", *side.key)}
                    for side, rate in zip(taking_part, rates, strict=True) if rate
                ]  # fmt: skip
                save(stored := before | {"results": [*before["results"], *results]})
    return stored


def summarise(stored: dict[str, Any]) -> list[Row]:
    """Return one row per encoding from a report's stored numbers.

    `others` holds the other contestants by library, `best` the library of the fastest rival or None.
    """
    results = {(row["library"], row["encoding"]): row for row in stored["results"]}
    rates = {key: row["tokens_per_second"] for key, row in results.items()}
    ceiling = statistics.median(stored["ceiling"])
    rows = []
    for encoding in [name for library, name in results if library == OURS]:
        ours, rate = results[OURS, encoding], quartiles(rates[OURS, encoding])
        others = {
            name: {**row, "rate": quartiles(rates[name, encoding]),
                   "ratio": ratios(rates[OURS, encoding], rates[name, encoding])}
            for (name, of), row in results.items() if of == encoding and name != OURS
        }  # fmt: skip
        rivals = [name for name in others if name.startswith(PEER)]
        rows.append({
            "encoding": encoding, "ours": ours, "rate": rate, "others": others,
            "best": max(rivals, key=lambda name: others[name]["rate"][0], default=None),
            "share": rate[0] * ours["flops_per_token"] / ceiling,
            "step_time_to_nope": ratios(rates.get((OURS, "nope")), rates[OURS, encoding]),
        })  # fmt: skip
    return rows


def table(stored: dict[str, Any]) -> str:
    """Format posx and its best rival, posx in other arrangements, all forms of the rival, and the check of fairness."""
    shape, rows = Shape(**stored["shape"]), summarise(stored)
    ceiling = cell(quartiles(flops / 1e9 for flops in stored["ceiling"]), ",.0f")
    baseline = f"; baseline {stored['baseline']}" if stored.get("baseline") else ""
    lines = [
        f"{shape}, {shape.tokens} tokens a step, {shape.dtype}; {report.place(stored)}; float32 matmul ceiling "
        f"{ceiling} GFLOP/s; {len(stored['ceiling'])} rounds of {stored['steps']} steps: median [quartiles]{baseline}"
    ]
    forms = _columns(rows, {name: ("rate",) for name in FORMS.values()})
    arrangements = _columns(rows, dict.fromkeys((ONE_DEVICE, PINNED, BASELINE), ("rate", "ratio")))
    tables = [_speed(rows), arrangements, forms, _fairness(rows, stored["steps"])]
    for head, *body in tables:
        if len(head) > 1:
            lines += ["", *report.rows(head, body)]
    lines += [f"failed: {row['library']}, {row['encoding']}: {row['why']}" for row in stored.get("failed", ())]
    return "\n".join(lines)


def _of(row: Row, library: str | None, key: str) -> str:
    """Format a rate, or the ratio of posx's rate to it."""
    return cell(row["others"].get(library, {}).get(key), ",.0f" if key == "rate" else ".2f")


def _speed(rows: list[Row]) -> list[list[str]]:
    head = ["encoding", f"{OURS} tokens/s", "share of float32 ceiling", "step time / NoPE's", "best rival",
            "its tokens/s", f"{OURS} / best rival"]  # fmt: skip
    return [head, *(
        [
            row["encoding"], cell(row["rate"], ",.0f"), f"{row['share']:.2f}", cell(row["step_time_to_nope"], ".2f"),
            (row["best"] or "-").removeprefix(f"{PEER}, "), _of(row, row["best"], "rate"),
            _of(row, row["best"], "ratio"),
        ]
        for row in rows
    )]  # fmt: skip


def _columns(rows: list[Row], keys: dict[str, Sequence[str]]) -> list[list[str]]:
    """Make columns of the rates and ratios of the contestants that took part."""
    lines = [["encoding"], *([row["encoding"]] for row in rows)]
    for name in [name for name in keys if any(name in row["others"] for row in rows)]:
        lines[0] += [{"rate": f"{name} tokens/s", "ratio": f"{OURS} / it"}[key] for key in keys[name]]
        for row, line in zip(rows, lines[1:], strict=True):
            line += [_of(row, name, key) for key in keys[name]]
    return lines


def _fairness(rows: list[Row], steps: int) -> list[list[str]]:
    """Compare parameters and losses of posx and of the best rival."""
    names = (OURS, "best rival")
    columns = (*(f"parameters: {name}" for name in names), *(f"loss, first to last {steps}: {name}" for name in names))
    lines = [["encoding", *columns]]
    for row in rows:
        both = [row["ours"], row["others"].get(row["best"])]
        counts = [f"{side['parameters']:,}" if side else "-" for side in both]
        losses = [f"{s['losses'][0]:.2f} to {np.mean(s['losses'][-steps:]):.2f}" if s else "-" for s in both]
        lines.append([row["encoding"], *counts, *losses])
    return lines
