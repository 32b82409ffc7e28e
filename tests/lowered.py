"""Programs lowered for accelerators on this CPU, and the law that holds for their text.

Run as a script, this file prints the custom calls of a training step with every encoding that the fused executor
serves, and the types of their operands: JSON of {name: {case: {call: types}}}. It must find `cudnn_get_version` in a
module `jax_cuda12_plugin._versions`, as JAX asks for the version of cuDNN before it lowers its call.
"""

import json
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax

import posx
from posx.attention import causal, refusal
from posx.contract import abstract_params
from posx.lab.config import TrainConfig
from posx.lab.config.sections import ModelConfig
from posx.lab.model import make_model
from posx.lab.training.step import init_state, train_step
from posx.machine.platforms import trace_platform

ACCELERATORS = ("cuda", "tpu")
#: By name: length, width of a head, and type of the operands. cuDNN serves SERVED. Every encoding has EVERY case, but
#: some have more.
SIZES = {
    "even": (16, 8, "bfloat16"),
    "odd": (13, 6, "bfloat16"),
    "in slabs": (8191, 6, "bfloat16"),
    "too wide": (16, 136, "bfloat16"),
    "too precise": (16, 8, "float32"),
}
EVERY, SERVED = ("even", "odd"), ("even", "odd", "in slabs")
MORE = {"alibi": SERVED, "nope": (*EVERY, "too wide", "too precise")}


def lowered(function: Callable, platform: str, *shapes: Any) -> str:
    """Return the StableHLO text of a function of arrays of these shapes, lowered for a platform.

    Barriers that are made for accelerators are left out, so that any other one is seen.
    """
    with trace_platform(platform), mock.patch("posx.attention.accelerators.accelerator_barrier", lambda tree: tree):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


def custom_calls(text: str) -> set[str]:
    return set(re.findall(r"custom_call @([\w$.]+)", text))


def faults(text: str) -> list[str]:
    """List what must not be in a program for an accelerator."""
    found = ["float64"] if re.search(r"\b(f64|complex<f64)\b", text) else []
    found += sorted(custom_calls(text))
    return found + [word for word in ("optimization_barrier", "reduce_precision") if f"stablehlo.{word}" in text]


def shape_of(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def kernel_calls(encoding: str, length: int, width: int, dtype: str) -> dict[str, list[str]]:
    """Return the vendor's calls in a training step on cuda: the types of q, k, v, and of the gradient of o and o."""
    model = make_model(ModelConfig(1, 2 * width, 2, 1, width, dtype=dtype), encoding, 7, 64)
    config = TrainConfig(length=length, batch_size=1, steps=9, executor="fused")
    state, found = jax.eval_shape(lambda: init_state(model, config)), {}
    with trace_platform("cuda"):
        traced = train_step.trace(model, config, state, shape_of(1, length + 1, dtype="int32"))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for name, operands in re.findall(r"custom_call @([\w$.]+)\(.*\} : \((.*?)\) ->", text):
        types = re.findall(r"tensor<(?:\d+x)*(\w+)>", operands)
        # The backward call also gets float32 statistics of rows, and the bias if there is one.
        found[name] = [types[n] for n in ((0, 1, 2, 4, -1) if name.endswith("Backward") else (0, 1, 2))]
    return found


def main() -> None:
    found = {}
    for name in posx.ENCODINGS:
        encoding = posx.build(name, dims := posx.Dims(16, 2, 8, 1, 64, 1))
        if encoding.axes <= 1 and not refusal(
            encoding, abstract_params(encoding, dims), causal(), in_order=True, segments=False, native=True
        ):
            found[name] = {case: kernel_calls(name, *SIZES[case]) for case in MORE.get(name, EVERY)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
