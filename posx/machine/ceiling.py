"""The measured speed of matrix products, the denominator of MFU, stored once per machine and number of cores."""

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
from posx.files.lines import parsed
from posx.machine.cores import usable_cores

SIZE = 2048


def machine_ceiling(folder: Path, dtype: str, **how: Any) -> float:
    """Return the FLOP/s of all devices together; how: as for `matmul_ceiling`.

    On CPUs a product on one device is computed by all cores of the process, however many devices they are split into.
    """
    devices = jax.process_count() if jax.default_backend() == "cpu" else jax.device_count()
    return devices * matmul_ceiling(folder, dtype, **how)


def matmul_ceiling(folder: Path, dtype: str, max_age: float = math.inf, keep: bool = True) -> float:
    """Return the FLOP/s of a large matrix product on this process's cores, as stored in `folder` or measured now.

    Args:
      folder: where the speed is stored.
      dtype: of the operands.
      max_age: seconds after which it is measured again, as others may have been at work. The best of all times counts.
      keep: whether a measurement is stored.
    """
    device = jax.devices()[0]
    name = f"ceiling-{device.device_kind}-{len(usable_cores())}-{dtype}".replace(" ", "_").replace("/", "_")
    path, known = folder / f"{name}.json", 0.0
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = float(parsed(path.read_text(encoding="utf-8"))["flops_per_second"])
        if time.time() - path.stat().st_mtime < max_age:
            return known
    measured = max(known, _measure(dtype))
    with contextlib.suppress(OSError):  # a cache that cannot be written only means measuring again
        if keep:
            folder.mkdir(parents=True, exist_ok=True)
            values = {"flops_per_second": measured, "size": SIZE, "dtype": dtype}
            write_bytes(path, (json.dumps(values) + "\n").encode())
    return measured


def _measure(dtype: str) -> float:
    """Return the best of several products: a ceiling shows the machine, not the others that use it meanwhile."""
    a = jnp.ones((SIZE, SIZE), dtype)
    product = jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32))
    product(a).block_until_ready()
    best = math.inf
    for _ in range(8):
        start = time.perf_counter()
        product(a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2.0 * SIZE**3 / best
