"""The machine's measured matrix-product ceiling, the denominator of MFU; measured once per machine and stored."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from posx.model import Model

SIZE = 2048


def flops_per_token(model: Model, length: int) -> float:
    """Floating-point operations per token of one training step: 6 per matmul weight and 6 m L per layer for attention.

    Causal-exact (half of the square), no recomputation, nothing for the encoding itself: what an encoding costs shows
    as a lower MFU. Source: PaLM (arXiv 2204.02311) appendix B, halved for causality.
    """
    config, dims = model.config, model.dims
    projections = dims.model_dim * dims.head_dim * (2 * dims.num_heads + 2 * config.kv_heads)
    mlp = (2 if config.mlp == "gelu" else 3) * dims.model_dim * config.hidden_dim
    weights = config.num_layers * (projections + mlp) + dims.model_dim * model.vocab_size
    return 6.0 * weights + 6.0 * config.num_layers * dims.num_heads * dims.head_dim * length


def matmul_ceiling(folder: Path, dtype: str) -> float:
    """FLOP/s of a large matrix product with operands of `dtype`, read from `folder` or measured and stored there."""
    device = jax.devices()[0]
    name = f"ceiling-{device.device_kind}-{num_cpus()}-{dtype}".replace(" ", "_").replace("/", "_")
    path = folder / f"{name}.json"
    try:
        return float(json.loads(path.read_text())["flops_per_second"])
    except (OSError, ValueError, KeyError):
        pass
    measured = _measure(dtype)
    with contextlib.suppress(OSError):  # a cache that cannot be written only means measuring again
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"flops_per_second": measured, "size": SIZE, "dtype": dtype}) + "\n")
        temporary.replace(path)
    return measured


def num_cpus() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _measure(dtype: str) -> float:
    """The best of several products: a ceiling is what the machine can do, not what it did while others ran."""
    a = jnp.ones((SIZE, SIZE), dtype)
    product = jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32))
    product(a).block_until_ready()
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        product(a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2.0 * SIZE**3 / best
