"""Attention sharded over the devices of a mesh: by sequences if devices divide them, else heads, else query blocks.

Call a jitted function under `with jax.set_mesh(posx.machine.devices.mesh()):` to shard it. If the mesh has an axis
`MODEL`, every call shards heads over that axis, and sequences or query blocks over the other axis. Inside
`jax.shard_map` each device already has its shard, so nothing is sharded again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from posx.machine.cores import usable_cores
from posx.machine.devices import DATA, MODEL


def _size(axis: str) -> int:
    """Return the devices along an axis of the current mesh if nothing is sharded over it yet, else 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.auto_axes else 1


def is_one_core() -> bool:
    """Return whether one core computes a function traced for CPUs: a device's shard, or all of it on one core."""
    return DATA in jax.sharding.get_abstract_mesh().axis_names or len(usable_cores()) == 1


def shards_sequences(num_sequences: int) -> bool:
    """Return whether sequences are sharded over the devices."""
    return _size(DATA) > 1 and num_sequences % _size(DATA) == 0


def head_axis(num_sequences: int, num_key_heads: int) -> str | None:
    """Return the mesh axis over which heads are sharded, None if each device has all heads.

    After `shard` XLA shards the arrays that are computed from the heads. Loops shard themselves.
    """
    if _size(MODEL) > 1:
        return MODEL if num_key_heads % _size(MODEL) == 0 else None
    devices = _size(DATA)
    return DATA if devices > 1 and num_sequences % devices and num_key_heads % devices == 0 else None


def block_devices(num_sequences: int, num_key_heads: int) -> int:
    """Return the number of devices over which blocks of queries are sharded."""
    if (devices := _size(DATA)) == 1 or num_sequences % devices == 0:
        return 1
    return 1 if head_axis(num_sequences, num_key_heads) == DATA else devices


def map_sequences(function: Callable[..., jax.Array], whole: Any, *rows: Any, axis: str = DATA) -> jax.Array:
    """Call function(whole, *rows) on each device's shard; the first axis of its result is sharded as the rows are.

    Args:
      function: the function of one shard.
      whole: a tree of arrays that every device gets whole.
      rows: trees of arrays [b, ...], with b a multiple of the devices. Arrays [1, ...], which all sequences share, stay
        whole. The first axis may be key heads as well.
      axis: the axis of the mesh.
    """
    b = max(x.shape[0] for x in jax.tree.leaves(rows))
    specs = jax.tree.map(lambda x: PartitionSpec(axis if x.shape[0] == b else None), rows)
    return _map_shards(axis, function, (PartitionSpec(), *specs))(whole, *rows)


def map_blocks(function: Callable[..., jax.Array], tables: Any, blocks: Any, whole: Any) -> jax.Array:
    """Call function(tables, blocks, whole) on each device's blocks, a tree of arrays [n, ...]; its result is [n, ...].

    The number of blocks must be a multiple of twice the number of devices. The blocks form two runs for each device.
    Device i works on the i-th run and the i-th run from the end, because late queries see more keys than early ones.
    """
    devices = _size(DATA)

    def each(shared: Any, blocks: Any) -> jax.Array:
        blocks = jax.tree.map(lambda x: _exchange_runs(x, devices), blocks)
        return _exchange_runs(function(shared[0], blocks, shared[1]), devices, back=True)

    return _map_shards(DATA, each, (PartitionSpec(), PartitionSpec(DATA)))((tables, whole), blocks)


def _map_shards(axis: str, function: Callable, in_specs: Any) -> Callable:
    """Map `function` over the shards along `axis`. XLA keeps the sharding over all other axes."""
    return jax.shard_map(function, in_specs=in_specs, out_specs=PartitionSpec(axis), axis_names={axis}, check_vma=False)


def shard(x: jax.Array, axis: int = 0, over: str | None = DATA) -> jax.Array:
    """Shard `axis` of x over the mesh axis `over`, if its devices divide the size."""
    if over is None or _size(over) == 1 or x.shape[axis] % _size(over):
        return x
    spec = PartitionSpec(*(over if n == axis else PartitionSpec.UNCONSTRAINED for n in range(x.ndim)))
    return jax.lax.with_sharding_constraint(x, spec)


def _exchange_runs(x: jax.Array, devices: int, back: bool = False) -> jax.Array:
    """Exchange runs 2i and 2i + 1, device i's shard x [n, ...], for the runs i and 2 * devices - 1 - i; or back.

    Devices send runs to each other, because XLA would gather all of x on each device. Every device receives one even
    run and one odd run.
    """
    is_even = jax.lax.axis_index(DATA) % 2 == 0

    def order_runs(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.where(is_even, first, second), jnp.where(is_even, second, first)

    def send_part(part: jax.Array, odd: int) -> jax.Array:
        runs = [2 * device + odd for device in range(devices)]
        pairs = [(device, min(n, 2 * devices - 1 - n)) for device, n in enumerate(runs)]
        return jax.lax.ppermute(part, DATA, [pair[::-1] for pair in pairs] if back else pairs)

    first, second = jnp.split(x, 2)
    if back:
        even, odd = order_runs(first, second)
        return jnp.concatenate([send_part(even, 0), send_part(odd, 1)])
    return jnp.concatenate(order_runs(send_part(first, 0), send_part(second, 1)))
