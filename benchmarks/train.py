"""Training tokens/s per encoding, posx beside x-transformers at its best.

Measures the whole step (forward, backward, clipping, AdamW) on batches already in memory, no dropout, causal. Shape
`small`: 4 layers, width 128, 4 heads, GELU MLP of 512, 257 byte tokens, 32 windows of L = 128. `medium`: 6 layers,
width 256, 8 heads, 8 windows of L = 512. Both 4096 tokens a step, at another --length too. `tiny` is for tests.
Share = tokens/s x FLOPs per token (matmuls and causal-exact attention only) / the float32 ceiling.

Contestants: `posx` with a device per core, `one_device`; `pinned`, as many processes of posx as cores, each bound to
one and with a batch of its own, at work together; `baseline`, posx at --baseline=COMMIT; x-transformers `eager`,
`flash`, `compiled` and `flash_compiled`, the fastest of which is the best rival of an encoding. Compiling is not timed;
a form that fails is named with the reason.

The rival has posx's architecture: RMSNorm, no biases, embeddings tied or not as posx's default, full-width rotary, T5
with posx's buckets; `sinusoidal` is its scaled one, GELU its exact form where posx has the tanh form. It runs on all
cores with torch's fused AdamW, with --dtype=bfloat16 under torch.autocast. All see the same batches at the same
constant learning rate: the last table shows that they learn, and with how many parameters.

What positions cost at long windows, above no positions and over NoPE's step at an older commit:

    python -m benchmarks train --length=2048 --contestants=posx,baseline --baseline=3891e0e
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import measure, workers
from benchmarks.checkout import checkout
from benchmarks.train_parts import FORMS, LEARNING_RATE, LIBRARIES, OURS, SHAPES, VOCAB, Contestant, Shape
from benchmarks.train_parts import text_batches as text_batches  # an older checkout's is asked for by the same name
from benchmarks.train_report import draw, summarise, table
from benchmarks.workers import Worker, WorkerError
from posx.config import TrainConfig
from posx.config.model import DTYPES
from posx.machine.devices import devices_for, on_devices, over_devices
from posx.model import make_model
from posx.training.step import flops_per_token, init_state, train_steps

__all__ = ["add_arguments", "draw", "run", "summarise", "table"]


def step_parts(encoding: str, shape: Shape, executor: str = "auto") -> tuple[Any, TrainConfig]:
    """The model and the recipe that `train_steps` takes."""
    model = make_model(shape.config, encoding, VOCAB, shape.length)
    config = TrainConfig(
        length=shape.length, batch_size=shape.batch, steps=1_000_000, warmup_steps=0,
        learning_rate=LEARNING_RATE, final_learning_rate=LEARNING_RATE, executor=executor,
    )  # fmt: skip
    return model, config


def posx_contestant(encoding: str, shape: Shape, batches: Sequence[np.ndarray]) -> Contestant:
    """posx, cut over the devices of this process as a run of it is."""
    model, config = step_parts(encoding, shape)
    devices = devices_for(shape.batch, shape.tokens * flops_per_token(model, shape.length))
    state = on_devices(init_state(model, config), devices)

    def advance(n: int, count: int) -> list[jax.Array]:
        """As `posx train` does it: several steps a call, all calls of one size."""
        nonlocal state
        size = config.dispatch_steps
        losses = []
        for first in range(n, n + count, size):
            block = np.stack([batches[(first + i) % len(batches)] for i in range(size)])
            steps = min(size, n + count - first)
            state, metrics = train_steps(model, config, state, over_devices(block, devices, axis=1), steps, devices)
            losses += list(metrics["loss"])
        return losses[:count]

    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    facts = {
        "resolved": str(model.encodings[0]), "flops_per_token": flops_per_token(model, shape.length),
        "devices": devices,
    }  # fmt: skip
    return Contestant(OURS, encoding, parameters, advance, lambda: jax.block_until_ready(state), facts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_rounds(parser, 9)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--length", type=measure.positive, help="another window length, as many tokens a step")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the operands of forward products")
    parser.add_argument("--steps", type=measure.positive, default=10, help="timed steps of one contestant in one round")
    parser.add_argument("--contestants", type=_contestants, help=f"words with commas, of: {', '.join(LIBRARIES)}")
    parser.add_argument("--baseline", metavar="COMMIT", help="an older state of posx that takes part")


def _contestants(text: str) -> list[str]:
    for word in (chosen := text.split(",")):
        if word not in LIBRARIES:
            raise argparse.ArgumentTypeError(f"{word!r} is unknown; known: {', '.join(LIBRARIES)}")
    return chosen


@dataclasses.dataclass(frozen=True)
class Side:
    """One contestant with one encoding: processes that work at the same time, and what they call it."""

    library: str
    form: str
    encoding: str
    processes: Sequence[Worker]
    facts: dict[str, Any]

    def turn(self, steps: int) -> float:
        """Tokens/s of all its processes together."""
        return sum(workers.call_all(self.processes, "turn", self.form, self.encoding, steps))

    def losses(self) -> list[float]:
        return self.processes[0].call("losses", self.form, self.encoding)


def chosen(options: argparse.Namespace) -> list[str]:
    """The words of those that take part. Raises SystemExit for a baseline that is not given."""
    words = options.contestants or [word for word in LIBRARIES if word != "baseline" or options.baseline]
    if "baseline" in words and not options.baseline:
        raise SystemExit("--contestants=baseline needs --baseline=COMMIT, for example --baseline=3891e0e")
    missing = next((name for name in ("torch", "x-transformers") if not measure.version(name)), None)
    if missing and any(word in FORMS for word in words):
        print(f"posx alone: {missing} is missing; pip install '.[peers]' brings it\n")
        words = [word for word in words if word not in FORMS]
    return words


def start(words: list[str], shape: Shape, baseline: str | None, stack: contextlib.ExitStack) -> dict[str, list[Worker]]:
    """The processes of every contestant; the forms of x-transformers share one."""
    make, cores = functools.partial(Worker, "train_worker:Training", dataclasses.asdict(shape)), measure.core_list()
    kinds: dict[str, Callable[[], list[Worker]]] = {
        OURS: lambda: [make(devices=len(cores))],
        "one_device": lambda: [make(devices=1)],
        "pinned": lambda: [make(cpus=[core], devices=1) for core in cores],
        "baseline": lambda: [make(code=stack.enter_context(checkout(str(baseline))))],
    }
    found: dict[str, list[Worker]] = {}
    for word in words:
        kind = "peer" if word in FORMS else word
        if kind not in found:
            found[kind] = kinds.get(kind, lambda: [make()])()
            stack.enter_context(workers.closing(found[kind]))
        found[word] = found[kind]
    return found


def sides(
    words: list[str], encodings: Sequence[str], processes: dict[str, list[Worker]]
) -> tuple[list[Side], list[dict[str, str]]]:
    """Every contestant that has run its first steps, encoding by encoding; and who failed, with the reason."""
    found, failed = [], []
    for encoding, word in itertools.product(encodings, words):
        form, library = word if word in FORMS else OURS, LIBRARIES[word]
        try:
            facts = workers.call_all(processes[word], "add", form, encoding)[0]
        except WorkerError as error:
            failed.append({"library": library, "encoding": encoding, "why": str(error)})
            continue
        if facts:
            found.append(Side(library, form, encoding, processes[word], facts))
            print(f"{library} {encoding} is ready", file=sys.stderr)
    return found, failed


def run(options: argparse.Namespace, save: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    shape, steps = dataclasses.replace(SHAPES[options.shape], dtype=options.dtype), options.steps
    shape, words = shape.at_length(options.length) if options.length else shape, chosen(options)
    ceiling: list[float] = []
    with contextlib.ExitStack() as stack:
        taking_part, failed = sides(words, options.encodings, start(words, shape, options.baseline, stack))
        rates = measure.interleave(
            [functools.partial(side.turn, steps) for side in taking_part],
            options.rounds,
            before=lambda: ceiling.append(measure.fresh_ceiling()),
        )
        results = [
            {"library": side.library, "encoding": side.encoding, "processes": len(side.processes), **side.facts,
             "tokens_per_second": rate, "losses": side.losses()}
            for side, rate in zip(taking_part, rates, strict=True)
        ]  # fmt: skip
    sizes = {"shape": dataclasses.asdict(shape), "steps": steps, "ceiling": ceiling}
    return {**sizes, "baseline": options.baseline, "failed": failed, "results": results}
