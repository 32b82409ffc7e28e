"""The measured matrix-product ceiling, the denominator of MFU: once per machine and number of cores, and stored."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from posx.files.atomic import write_bytes
from posx.files.parse import parsed
from posx.machine.cores import usable_cores

SIZE = 2048


def machine_ceiling(folder: Path, dtype: str, **how: Any) -> float:
    """FLOP/s of all devices together; how: as for `matmul_ceiling`.

    A product on one CPU device is computed by all cores of a process, however many devices they are given out as.
    """
    devices = jax.process_count() if jax.default_backend() == "cpu" else jax.device_count()
    return devices * matmul_ceiling(folder, dtype, **how)


def matmul_ceiling(folder: Path, dtype: str, max_age: float = math.inf, keep: bool = True) -> float:
    """FLOP/s of a large matrix product with operands of `dtype`, read from `folder` or measured and stored there.

    Of this process's cores: those of a process that is bound to one are not compared with what all of them reach.

    What was stored more than `max_age` seconds ago is measured once more, as others may have been at work then; the
    best of all times is kept. Without `keep` nothing is written.
    """
    device = jax.devices()[0]
    name = f"ceiling-{device.device_kind}-{len(usable_cores())}-{dtype}".replace(" ", "_").replace("/", "_")
    path = folder / f"{name}.json"
    known = 0.0
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = float(parsed(path.read_text(encoding="utf-8"))["flops_per_second"])
        if time.time() - path.stat().st_mtime < max_age:
            return known
    measured = max(known, _measure(dtype))
    if not keep:
        return measured
    with contextlib.suppress(OSError):  # a cache that cannot be written only means measuring again
        folder.mkdir(parents=True, exist_ok=True)
        values = {"flops_per_second": measured, "size": SIZE, "dtype": dtype}
        write_bytes(path, (json.dumps(values) + "\n").encode())
    return measured


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
