"""Cores and devices. Batches are cut over all devices, all else is whole on each; one device is the same code."""

from __future__ import annotations

import os
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from posx.errors import ConfigError


def num_cpus() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_batch(batch_size: int, accumulation: int) -> None:
    """Raises ConfigError unless every device gets the same number of windows of each part of a batch."""
    devices, rows = jax.device_count(), batch_size // accumulation
    if rows % devices:
        parts = f" in {accumulation} parts" if accumulation > 1 else ""
        raise ConfigError(
            f"train.batch_size={batch_size}{parts} cannot be shared equally by {devices} devices; the nearest: "
            f"{accumulation * devices * max(1, round(rows / devices))}"
        )


def on_all_devices(tree: Any) -> Any:
    """Arrays of `tree`, whole on every device."""
    return jax.device_put(tree, _sharding())


def over_devices(rows: Any, axis: int = 0) -> jax.Array:
    """`rows` cut along `axis`, whose size the number of devices divides; the copy runs beside what devices do."""
    return jax.device_put(rows, _sharding(*[None] * axis, "batch"))


def _sharding(*axes: str | None) -> NamedSharding:
    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(*axes))
