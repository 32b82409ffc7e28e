"""Programs lowered for accelerators on this CPU, and the law that holds for their text.

Run as a script, this file prints which custom calls the gradient of every encoding makes that the fused executor
serves: JSON of {name: {case: calls}}. It must find `cudnn_get_version` in a module `jax_cuda12_plugin._versions`, as
JAX asks for the version of cuDNN before it lowers its call.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import posx
from posx.attention import causal, refusal
from posx.contract import abstract_params
from posx.machine.platforms import traced_for

ACCELERATORS = ("cuda", "tpu")
#: By name: length, width of a head, and type of the operands. Every encoding has the first two, NoPE all.
SIZES = {
    "even": (16, 8, "bfloat16"),
    "odd": (13, 6, "float16"),
    "too wide": (16, 136, "bfloat16"),
    "too precise": (16, 8, "float32"),
}
EVERY = ("even", "odd")


def lowered(function: Callable, platform: str, *shapes: Any) -> str:
    """Return the StableHLO text of a function of arrays of these shapes, exported for a platform."""
    with traced_for(platform):
        return jax.export.export(jax.jit(function), platforms=[platform])(*shapes).mlir_module()


def custom_calls(text: str) -> set[str]:
    return set(re.findall(r"custom_call @([\w$.]+)", text))


def faults(text: str) -> list[str]:
    """List what must not be in a program for an accelerator."""
    found = ["float64"] if re.search(r"\b(f64|complex<f64)\b", text) else []
    found += sorted(custom_calls(text))
    return found + [word for word in ("optimization_barrier", "reduce_precision") if f"stablehlo.{word}" in text]


def shape_of(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def kernel_calls(name: str, length: int, width: int, dtype: str) -> list[str]:
    """Return the custom calls of attention with gradients on cuda, by the executor that posx chooses there."""
    dims = posx.Dims(2 * width, 2, width, 1, 64, 1)
    encoding, pos = posx.build(name, dims), np.arange(length, dtype=np.int32)
    q, k = (shape_of(1, length, heads, width, dtype=dtype) for heads in (2, 1))
    x = [shape_of(1, length, dims.model_dim)] if encoding.acts_on("features") else []

    def gradients(params, q, k, v, x=None):
        def loss(*arrays):
            return jnp.sum(posx.attend(encoding, *arrays, pos, x=x).astype(jnp.float32))

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(params, q, k, v)

    with traced_for("cuda"):
        traced = jax.jit(gradients).trace(abstract_params(encoding, dims), q, k, k, *x)
        return sorted(custom_calls(traced.lower(lowering_platforms=("cuda",)).as_text()))


def main() -> None:
    found = {}
    for name in posx.ENCODINGS:
        encoding = posx.build(name, dims := posx.Dims(16, 2, 8, 1, 64, 1))
        if not refusal(encoding, abstract_params(encoding, dims), causal(), in_order=True, segments=False):
            cases = SIZES if name == "nope" else EVERY
            found[name] = {case: kernel_calls(name, *SIZES[case]) for case in cases}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
