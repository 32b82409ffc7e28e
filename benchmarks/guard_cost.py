"""The cost of posx's guards in attention and the training step: none, `barrier`, `barrier` and the flag.

    python -m benchmarks.guard_cost attention --lengths=1024,4096 --encodings=nope,rope,t5 --rounds=9
    python -m benchmarks.guard_cost train --shapes=small,medium --encodings=nope,rope,t5 --rounds=9

All variants take turns in one process, on a quiet machine. The flag is a compiler option here: with individual products
left in the fusion and nothing else, XLA makes the same program as under --xla_cpu_experimental_ynn_fusion_type=-reduce.
Shown are medians in ms and the median over rounds of the ratio to the variant without guards.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os

# Reductions stay in the fusion unless a variant takes them out; before posx is imported, which would set the flag.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_experimental_ynn_fusion_type=+reduce".strip()

import jax
import jax.numpy as jnp
import numpy as np

import posx
from benchmarks import measure
from benchmarks.calls import Case, seconds
from benchmarks.report import cell, quartiles, ratios
from benchmarks.train import SHAPES, step_parts, text_batches
from posx.lab.layers import sequential
from posx.lab.training.step import init_state, train_steps
from posx.machine.guard import barrier

FUSION = "xla_cpu_experimental_ynn_fusion_type"
INDIVIDUAL_DOT = "4"  # its number in XLA's enumeration: compiler options take no names
#: Whether barriers enclose the products, and options of the compiler.
VARIANTS = {"none": (False, None), "apart": (True, None), "apart, flag": (True, {FUSION: INDIVIDUAL_DOT})}


def guarded(is_apart: bool) -> None:
    """Trace programs with the barriers, or without them, from now on."""
    for name in ("attention.attend", "attention.tiles", "layers"):  # posx.attention.attend itself is the function
        importlib.import_module(f"posx.{name}").barrier = barrier if is_apart else lambda tree: tree
    jax.clear_caches()


def attention(encoding: str, length: int, is_gradient: bool):
    case, pos = Case(encoding, length), sequential(length)
    *qkv, o_grad = (jnp.asarray(x) for x in case.arrays().values())

    def forward(params, q, k, v):
        return posx.attend(case.value, params, q, k, v, pos, executor="blockwise")

    def gradient(params, q, k, v, o_grad):
        return jax.vjp(forward, params, q, k, v)[1](o_grad)

    call, operands = (gradient, (case.params, *qkv, o_grad)) if is_gradient else (forward, (case.params, *qkv))

    def make(options):
        program = jax.jit(call).lower(*operands).compile(options)
        return lambda: jax.block_until_ready(program(*operands))

    return make


def training(encoding: str, shape: str, steps: int = 4):
    model, config = step_parts(encoding, SHAPES[shape])
    block = np.stack(text_batches(SHAPES[shape], steps))

    def make(options):
        state = init_state(model, config)
        program = train_steps.lower(model, config, state, block, steps).compile(options)

        def turn():
            nonlocal state
            state, _ = program(state, block, steps)
            jax.block_until_ready(state)

        return turn

    return make


def compare(title: str, make, rounds: int) -> None:
    turns = []
    for is_apart, options in VARIANTS.values():
        guarded(is_apart)
        turns.append(functools.partial(seconds, make(options), 1))
    times = measure.interleave(turns, rounds)
    for name, found in zip(VARIANTS, times, strict=True):
        ratio = cell(ratios(found, times[0]), ".3f")
        print(f"{title:40} {name:12} {1e3 * quartiles(found)[0]:10.1f} ms   {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("attention", "train"))
    parser.add_argument("--encodings", default="nope,rope,t5")
    parser.add_argument("--lengths", type=measure.lengths, default=[1024, 4096])
    parser.add_argument("--shapes", default="small,medium")
    measure.add_rounds(parser, 9)
    options = parser.parse_args()
    print(measure.busy(measure.environment()), end="")
    for encoding in options.encodings.split(","):
        if options.what == "train":
            makers = {f"{shape} {encoding}": training(encoding, shape) for shape in options.shapes.split(",")}
        else:
            makers = {
                f"{encoding} L={length} {kind}": attention(encoding, length, kind == "gradient")
                for length in options.lengths
                for kind in ("forward", "gradient")
            }
        for title, make in makers.items():
            compare(f"{options.what} {title}", make, options.rounds)


if __name__ == "__main__":
    main()
