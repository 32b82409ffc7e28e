"""Attention cut over the devices of a mesh: over sequences where they divide them, else heads, else blocks of queries.

`with jax.set_mesh(posx.machine.devices.mesh()):` around a jitted call says that it is to be cut. Of a mesh with an axis
`MODEL` heads are cut over that, in every call, and sequences or blocks of queries over the other. Inside of
`jax.shard_map`, where each device has a part already, nothing is cut again.
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
    """Devices along an axis of the mesh around over which nothing was cut yet, 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.auto_axes else 1


def is_one_core() -> bool:
    """Whether what is traced here is computed by one core of a CPU: a device's part of the work, or all there is."""
    return jax.default_backend() == "cpu" and (
        DATA in jax.sharding.get_abstract_mesh().axis_names or len(usable_cores()) == 1
    )


def cuts_sequences(num_sequences: int) -> bool:
    return _size(DATA) > 1 and num_sequences % _size(DATA) == 0


def head_axis(num_sequences: int, num_key_heads: int) -> str | None:
    """The axis along which each device has heads of its own. XLA cuts what is computed of them, by `spread`; loops see
    to it. None where heads are whole."""
    if _size(MODEL) > 1:
        return MODEL if num_key_heads % _size(MODEL) == 0 else None
    devices = _size(DATA)
    return DATA if devices > 1 and num_sequences % devices and num_key_heads % devices == 0 else None


def block_devices(num_sequences: int, num_key_heads: int) -> int:
    """Over how many devices blocks of queries are cut."""
    taken = cuts_sequences(num_sequences) or head_axis(num_sequences, num_key_heads) == DATA
    return 1 if taken else _size(DATA)


def over_sequences(function: Callable[..., jax.Array], whole: Any, *rows: Any, axis: str = DATA) -> jax.Array:
    """function(whole, *rows), the first axis of its result cut over devices, which divide the number of sequences.

    rows: trees of arrays [b, ...], or [1, ...] for what all sequences share, which stays whole. Key heads in front will
    do as well.
    """
    b = max(x.shape[0] for x in jax.tree.leaves(rows))
    specs = jax.tree.map(lambda x: PartitionSpec(axis if x.shape[0] == b else None), rows)
    return _over(axis, function, (PartitionSpec(), *specs))(whole, *rows)


def over_blocks(function: Callable[..., jax.Array], whole: Any, blocks: Any) -> jax.Array:
    """function(whole, numbers, blocks), blocks being a tree of arrays [n, ...]; its result [n, ...].

    Of 2n stretches of blocks device i works on the i-th and the i-th from the end, as late queries see more keys than
    early ones: there are twice as many blocks as devices, or a multiple of that.
    """
    numbers = jnp.arange(jax.tree.leaves(blocks)[0].shape[0])
    devices = _size(DATA)

    def each(whole: Any, *parts: Any) -> jax.Array:
        return _exchanged(function(whole, *jax.tree.map(lambda x: _exchanged(x, devices), parts)), devices, back=True)

    one = PartitionSpec(DATA)
    return _over(DATA, each, (PartitionSpec(), one, one))(whole, numbers, blocks)


def _over(axis: str, function: Callable, in_specs: Any) -> Callable:
    """`function` as each device along `axis` calls it with its part; what other axes cut, XLA goes on to cut."""
    return jax.shard_map(function, in_specs=in_specs, out_specs=PartitionSpec(axis), axis_names={axis}, check_vma=False)


def spread(x: jax.Array, axis: int = 0, over: str | None = DATA) -> jax.Array:
    """x, of which each device along `over` is to hold a part along `axis`, where devices divide its size."""
    if over is None or _size(over) == 1 or x.shape[axis] % _size(over):
        return x
    spec = PartitionSpec(*(over if n == axis else PartitionSpec.UNCONSTRAINED for n in range(x.ndim)))
    return jax.lax.with_sharding_constraint(x, spec)


def _exchanged(x: jax.Array, devices: int, back: bool = False) -> jax.Array:
    """Of a device's part x [n, ...], stretches 2i and 2i + 1: what it works on, i and 2 * devices - 1 - i. Or back.

    Sent from device to device: XLA would make the whole of x on each. An even stretch goes to each, and an odd one.
    """
    is_even = jax.lax.axis_index(DATA) % 2 == 0

    def ordered(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.where(is_even, first, second), jnp.where(is_even, second, first)

    def sent(part: jax.Array, odd: int) -> jax.Array:
        stretches = [2 * device + odd for device in range(devices)]
        pairs = [(device, min(n, 2 * devices - 1 - n)) for device, n in enumerate(stretches)]
        return jax.lax.ppermute(part, DATA, [pair[::-1] for pair in pairs] if back else pairs)

    first, second = jnp.split(x, 2)
    if back:
        even, odd = ordered(first, second)
        return jnp.concatenate([sent(even, 0), sent(odd, 1)])
    return jnp.concatenate(ordered(sent(first, 0), sent(second, 1)))
