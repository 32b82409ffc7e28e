"""Devices: on CPUs one for every core. Rows are cut over them, all else is whole on each; one device is the same code.

XLA cuts single matrix products over the cores of a CPU and lets them wait for each other after each. With every core a
device of its own a program runs whole on each, over its part of the rows, and they meet once a step.
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

#: The axes of meshes. Over the first rows are cut, or what else there is many of; over the second heads and hidden
#: units.
DATA, MODEL = "data", "model"

#: Least work between two meetings of devices, in floating-point operations on each: with less, one CPU device alone is
#: as fast or faster (measured on 2 and 4 cores).
LEAST_FLOPS = 2e8

#: Of the memory, for parameters, gradients and moments that every CPU device has of its own.
COPIES_SHARE = 0.25

#: XLA ends a process in which one device waits 40 s for another. On CPUs all are threads of one process, and what they
#: wait for is a process that was stopped, a laptop that slept, a machine with more to do than cores: so wait, quietly.
PATIENCE = {
    "--xla_cpu_collective_call_terminate_timeout_seconds": 10**8,
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 10**8,
}


def use_every_core(least: int = 1) -> None:
    """Makes every usable core a JAX device, before JAX starts its devices; every command of posx does so.

    least: so many devices if there are fewer cores, for what was begun on as many. What the user has set, by
    JAX_NUM_CPU_DEVICES, `jax.config` or XLA_FLAGS, stays; so does all where JAX has started. Accelerators are as they
    are.
    """
    cores = len(usable_cores())  # asked now: a sweep may let this process go to others later
    if jax_has_started() or "--xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    add_flags({name: str(seconds) for name, seconds in PATIENCE.items()})
    if jax.config.jax_num_cpu_devices < 1:  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", max(cores, least))


def worth(flops: float) -> int:
    """Over how many devices work of `flops` is worth cutting: all of an accelerator, on CPUs as LEAST_FLOPS says."""
    most = jax.device_count()
    return most if jax.default_backend() != "cpu" else max(1, min(most, int(flops / LEAST_FLOPS)))


def devices_for(rows: int, flops: float, copy: float = 0.0) -> int:
    """Over how many devices `rows` equal sequences that cost `flops` in all are cut: the most that divide them.

    copy: bytes of what is whole on every device. CPU devices share one memory, a quarter of which is for all copies.
    """
    most = min(worth(flops), rows)
    if copy and jax.default_backend() == "cpu":
        most = max(1, int(min(most, COPIES_SHARE * usable_memory() / copy)))
    return equal_parts(rows, most)


def mesh(num_devices: int | None = None, model: int = 0) -> Mesh:
    """The first `num_devices` devices, or all of them, along the axis `DATA`; `model` of them each time along `MODEL`,
    where there is to be such an axis."""
    devices = jax.devices()[:num_devices]
    shape, names = ((len(devices) // model, model), (DATA, MODEL)) if model else ((len(devices),), (DATA,))
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def mesh_of(text: str) -> tuple[int, int]:
    """What "DATAxMODEL" says. Raises ConfigError."""
    words = text.lower().split("x")
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        raise ConfigError(f"--mesh={text}: DATAxMODEL is expected, for example --mesh=4x2")
    return int(words[0]), int(words[1])


def on_devices(tree: Any, num_devices: int) -> Any:
    """Arrays of `tree`, whole on each of the first `num_devices` devices."""
    return jax.device_put(tree, NamedSharding(mesh(num_devices), PartitionSpec()))


def over_devices(rows: Any, num_devices: int, axis: int = 0) -> jax.Array:
    """`rows` cut along `axis` over the first `num_devices`, which divide it; the copy runs beside what they do."""
    return jax.device_put(rows, NamedSharding(mesh(num_devices), PartitionSpec(*[None] * axis, DATA)))


def on_each(function: Callable, num_devices: int, out_specs: Any = PartitionSpec()) -> Callable:
    """function(whole, rows) as each of the first `num_devices` calls it, with its part of the rows.

    Where there is more than one it may use collectives over `DATA`. What it returns is the same on all, or joined as
    `out_specs` say.
    """
    if num_devices == 1:
        return function
    return jax.shard_map(
        function, mesh=mesh(num_devices), in_specs=(PartitionSpec(), PartitionSpec(DATA)), out_specs=out_specs,
        check_vma=False,
    )  # fmt: skip
