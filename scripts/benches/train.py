"""Training tokens/s per encoding, posx beside x-transformers.

Measures the whole step (forward, backward, clipping, AdamW) on batches already in memory, no dropout, causal. Shape
`small`: 4 layers, width 128, 4 heads, GELU MLP of 512, 257 byte tokens, 32 windows of L = 128. `medium`: 6 layers,
width 256, 8 heads, 8 windows of L = 512. Both 4096 tokens a step, at another --length too. `tiny` is for tests.
Share = tokens/s x FLOPs per token (matmuls and causal-exact attention only) / the float32 ceiling.

The rival has posx's architecture: RMSNorm, no biases, embeddings tied or not as posx's default, full-width rotary, T5
with posx's buckets; `sinusoidal` is its scaled one, GELU its exact form where posx has the tanh form. Its attention
is at its default (flash off) or, with --flash, flash wherever it allows it. It runs eagerly on all cores with torch's
fused AdamW, in float32 and, with --autocast, once more under torch.autocast to bfloat16; --dtype is posx's alone. Both
see the same batches at the same constant learning rate: the second table shows that both learn, and with how many
parameters. Posx and x-transformers with the same encoding stand side by side.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benches import measure
from benches.train_parts import LEARNING_RATE, OURS, SHAPES, VOCAB, Contestant, Shape, text_batches
from benches.train_peer import peer_contestant, peers_installed
from benches.train_report import draw, summarise, table
from posx.config import TrainConfig
from posx.config.model import DTYPES
from posx.model import make_model
from posx.training.step import flops_per_token, init_state, train_steps

__all__ = ["add_arguments", "draw", "run", "summarise", "table"]


def step_parts(encoding: str, shape: Shape, executor: str = "auto") -> tuple[Any, TrainConfig]:
    """The model and the recipe that `train_steps` takes."""
    model = make_model(shape.config, {"name": encoding}, VOCAB, shape.length)
    config = TrainConfig(
        length=shape.length, batch_size=shape.batch, steps=1_000_000, warmup_steps=0,
        learning_rate=LEARNING_RATE, final_learning_rate=LEARNING_RATE, executor=executor,
    )  # fmt: skip
    return model, config


def posx_contestant(encoding: str, shape: Shape, batches: Sequence[np.ndarray]) -> Contestant:
    model, config = step_parts(encoding, shape)
    state = init_state(model, config)

    def advance(n: int, count: int) -> list[jax.Array]:
        """As `posx train` does it: several steps a call, all calls of one size."""
        nonlocal state
        size = config.dispatch_steps
        losses = []
        for first in range(n, n + count, size):
            block = np.stack([batches[(first + i) % len(batches)] for i in range(size)])
            state, metrics = train_steps(model, config, state, block, min(size, n + count - first))
            losses += list(metrics["loss"])
        return losses[:count]

    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    facts = {"resolved": str(model.encodings[0]), "flops_per_token": flops_per_token(model, shape.length)}
    return Contestant(OURS, encoding, parameters, advance, lambda: jax.block_until_ready(state), facts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_rounds(parser, 9)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--length", type=measure.positive, help="another window length, as many tokens a step")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the operands of posx's forward products")
    parser.add_argument("--steps", type=measure.positive, default=10, help="timed steps of one contestant in one round")
    parser.add_argument("--posx_only", action="store_true", help="without x-transformers")
    parser.add_argument("--flash", action="store_true", help="x-transformers with flash attention where it allows it")
    parser.add_argument("--autocast", action="store_true", help="x-transformers in bfloat16 as well")


def contestants(options: argparse.Namespace, shape: Shape) -> list[Contestant]:
    """Posx, then its rivals, encoding by encoding; each has run its first steps."""
    batches, peers = text_batches(shape), not options.posx_only and peers_installed()
    found: list[Contestant] = []
    for encoding in options.encodings:
        found.append(posx_contestant(encoding, shape, batches))
        for autocast in (False, True)[: 1 + options.autocast] if peers else ():
            if rival := peer_contestant(encoding, shape, batches, options.flash, autocast):
                found.append(rival)
    for contestant in found:  # compiles, and lets allocators settle
        contestant.facts["first_step_seconds"] = contestant.run(1)
        contestant.run(2)
        print(f"{contestant.library} {contestant.encoding} is ready", file=sys.stderr)
    return found


def run(options: argparse.Namespace, save: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    shape, steps = dataclasses.replace(SHAPES[options.shape], dtype=options.dtype), options.steps
    shape = shape.at_length(options.length) if options.length else shape
    taking_part = contestants(options, shape)

    def turn(contestant: Contestant) -> float:
        contestant.run(1)
        return steps * shape.tokens / contestant.run(steps)

    ceiling: list[float] = []
    rates = measure.interleave(
        [functools.partial(turn, contestant) for contestant in taking_part],
        options.rounds,
        before=lambda: ceiling.append(measure.fresh_ceiling()),
    )
    results = [
        {"library": one.library, "encoding": one.encoding, "parameters": one.parameters, **one.facts,
         "tokens_per_second": rate, "losses": [float(loss) for loss in one.losses]}
        for one, rate in zip(taking_part, rates, strict=True)
    ]  # fmt: skip
    sizes = {"shape": dataclasses.asdict(shape), "steps": steps, "ceiling": ceiling}
    return {**sizes, "peak_rss": measure.peak_rss(), "results": results}
