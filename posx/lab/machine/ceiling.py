"""The speed of matrix products that the machine can reach, measured and kept."""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from posx.errors import PosxError
from posx.lab.files import checksums
from posx.lab.files.rows import number
from posx.machine.cores import cpu_name, usable_cores
from posx.machine.platforms import is_on_cpu

#: The rows and columns of the matrix products whose speed is measured, and their number in one call. An accelerator
#: needs larger products, and several, or it shows how fast calls begin.
SIZE, PRODUCTS = 2048, 1
ACCELERATOR_SIZE, ACCELERATOR_PRODUCTS = 8192, 16
#: Seconds after which a stored speed is measured again, as others may have been at work. The best of all times counts.
MAX_AGE = 3600.0


def machine_ceiling(folder: Path, dtype: str, keep: bool = True) -> float:
    """Return the FLOP/s of large matrix products on all devices together: the denominator of MFU.

    It is stored once per kind of device and number of cores. On CPUs a product on one device is computed by all cores
    of the process, however many devices they are split into.

    Args:
      folder: where the speed is stored.
      dtype: of the operands.
      keep: whether a measurement is stored. A process that only estimates does not: the machine may be busy now.
    """
    units = jax.process_count() if is_on_cpu() else jax.device_count()
    path = _path(folder, dtype, len(usable_cores()))
    known = _read(path)
    with contextlib.suppress(OSError):
        if known and time.time() - path.stat().st_mtime < MAX_AGE:
            return units * known
    measured = max(known, _measure(dtype))
    with contextlib.suppress(OSError, PosxError):  # a cache that cannot be written only means measuring again
        if keep:
            folder.mkdir(parents=True, exist_ok=True)
            checksums.write_checked(path, {"flops_per_second": measured})
    return units * measured


def stored_ceiling(folder: Path, dtype: str, cores: int) -> float:
    """Return the stored FLOP/s of products on so many cores of this CPU, 0 if none is stored."""
    return _read(_path(folder, dtype, cores))


def _path(folder: Path, dtype: str, cores: int) -> Path:
    device = cpu_name() if is_on_cpu() else jax.devices()[0].device_kind  # JAX calls every CPU "cpu"
    return folder / f"ceiling-{device}-{cores}-{dtype}.json".replace(" ", "_").replace("/", "_")


def _read(path: Path) -> float:
    return number(checksums.read_verified(path).get("flops_per_second")) or 0.0


@functools.cache
def _measure(dtype: str) -> float:
    """Return the speed of the fastest of several products, since others may use the machine meanwhile."""
    size, count = (SIZE, PRODUCTS) if is_on_cpu() else (ACCELERATOR_SIZE, ACCELERATOR_PRODUCTS)
    a = jnp.ones((size, size), dtype)

    @jax.jit
    def products(a: jax.Array) -> jax.Array:
        def product(b: jax.Array) -> jax.Array:
            return jnp.dot(a, b, preferred_element_type=jnp.float32)

        if count == 1:
            return product(a)
        # Each product reads the one before, divided so that numbers stay finite.
        return jax.lax.fori_loop(0, count, lambda _, b: (product(b) / size).astype(dtype), a)

    products(a).block_until_ready()
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        products(a).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return count * 2.0 * size**3 / min(seconds)
