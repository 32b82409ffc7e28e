"""Devices, on CPUs one for every core, and their speed. Rows are sharded over them, and all else is replicated.

XLA splits single matrix products over the cores of a CPU, which then wait for each other after each product. If every
core is a device, each runs the whole program on its share of the rows, and they synchronise once a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from posx.errors import ConfigError
from posx.machine.cores import equal_parts, usable_cores, usable_memory
from posx.machine.guard import add_flags, jax_has_started
from posx.machine.platforms import is_on_cpu

#: The axes of meshes. Rows and other large axes are sharded over the first, heads and hidden units over the second.
DATA, MODEL = "data", "model"

#: Least floating-point operations of a device between two synchronisations. With less work one CPU device alone is as
#: fast or faster (measured on 2 and 4 cores).
LEAST_FLOPS = 2e8

#: The fraction of the memory for the parameters, gradients and moments that every CPU device has of its own.
COPIES_SHARE = 0.25

#: XLA ends a process in which one device waits 40 s for another. CPU devices are threads of one process. They wait long
#: if it was stopped, if the laptop slept, or if the machine is overloaded. These timeouts in seconds let them wait.
PATIENCE = {
    "--xla_cpu_collective_call_terminate_timeout_seconds": 10**8,
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 10**8,
}


def use_every_core(least: int = 1) -> None:
    """Make every usable core a JAX device, if JAX has not made its devices yet. Every command of posx does so.

    least: the number of devices to make if there are fewer cores, for a run that began on this number. A number that
    the user has set by JAX_NUM_CPU_DEVICES, `jax.config` or XLA_FLAGS stays. Accelerators are not changed.
    """
    cores = len(usable_cores())  # asked now: a sweep may let this process go to others later
    if jax_has_started() or "--xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    add_flags(PATIENCE)
    if jax.config.jax_num_cpu_devices < 1:  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", max(cores, least))


def worthwhile_devices(flops: float) -> int:
    """Return over how many devices work of `flops` is worth sharding: all accelerators, or CPUs by LEAST_FLOPS."""
    most = jax.device_count()
    return max(1, min(most, int(flops / LEAST_FLOPS))) if is_on_cpu() else most


def count_devices(rows: int, flops: float, copy: float = 0.0) -> int:
    """Return over how many devices `rows` equal sequences of `flops` in all are sharded: the most that divide them.

    copy: bytes that are replicated on every device. CPU devices share one memory, a quarter of which is for all copies.
    """
    most = min(worthwhile_devices(flops), rows)
    if copy and is_on_cpu():
        most = max(1, int(min(most, COPIES_SHARE * usable_memory() / copy)))
    return equal_parts(rows, most)


def mesh(num_devices: int | None = None, model: int = 0) -> Mesh:
    """Return a mesh of the first `num_devices` devices, or of all, along the axis `DATA`.

    If `model` is given, the mesh has a second axis `MODEL` of `model` devices.
    """
    devices = jax.devices()[:num_devices]
    shape, names = ((len(devices) // model, model), (DATA, MODEL)) if model else ((len(devices),), (DATA,))
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def parse_mesh(text: str) -> tuple[int, int]:
    """Return the sizes of the axes in "DATAxMODEL". Raises ConfigError."""
    words = text.lower().split("x")
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        raise ConfigError(f"--mesh={text}: DATAxMODEL is expected, for example --mesh=4x2")
    return int(words[0]), int(words[1])


def replicate(tree: Any, num_devices: int) -> Any:
    """Return the arrays of `tree`, replicated on the first `num_devices` devices."""
    return jax.device_put(tree, NamedSharding(mesh(num_devices), PartitionSpec()))


def shard_rows(rows: Any, num_devices: int, axis: int = 0) -> jax.Array:
    """Return `rows` sharded along `axis` over the first `num_devices`, which divide it. The copy is asynchronous."""
    return jax.device_put(rows, NamedSharding(mesh(num_devices), PartitionSpec(*[None] * axis, DATA)))


def map_devices(function: Callable, num_devices: int, out_specs: Any = PartitionSpec()) -> Callable:
    """Return function(whole, rows) as called on each of the first `num_devices`, with its shard of the rows.

    On several devices the function may use collectives over `DATA`. Its result is the same on all devices, or joined as
    `out_specs` say.
    """
    if num_devices == 1:
        return function
    return jax.shard_map(
        function, mesh=mesh(num_devices), in_specs=(PartitionSpec(), PartitionSpec(DATA)), out_specs=out_specs,
        check_vma=False,
    )  # fmt: skip
