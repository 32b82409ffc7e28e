"""Attention cut over the devices of a mesh: over sequences where they divide them, else heads, else blocks of queries.

`with jax.set_mesh(posx.machine.devices.mesh()):` around a jitted call says that it is to be cut. Inside of
`jax.shard_map`, where each device has a part already, nothing is cut again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from posx.machine.cores import usable_cores
from posx.machine.devices import AXIS

_CUT, _WHOLE = PartitionSpec(AXIS), PartitionSpec()


def num_devices() -> int:
    """Devices to cut over: those of the mesh around, 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[AXIS] if AXIS in mesh.auto_axes else 1


def is_one_core() -> bool:
    """Whether what is traced here is computed by one core of a CPU: a device's part of the work, or all there is."""
    return jax.default_backend() == "cpu" and (
        AXIS in jax.sharding.get_abstract_mesh().axis_names or len(usable_cores()) == 1
    )


def cuts_sequences(num_sequences: int) -> bool:
    return num_devices() > 1 and num_sequences % num_devices() == 0


def cuts_heads(num_sequences: int, num_key_heads: int) -> bool:
    """Whether each device has heads of its own. XLA cuts what is computed of them, by `spread`; loops see to it."""
    return num_devices() > 1 and not cuts_sequences(num_sequences) and num_key_heads % num_devices() == 0


def over_sequences(function: Callable[..., jax.Array], whole: Any, *rows: Any) -> jax.Array:
    """function(whole, *rows), the first axis of its result cut over devices, which divide the number of sequences.

    rows: trees of arrays [b, ...], or [1, ...] for what all sequences share, which stays whole. Key heads in front will
    do as well.
    """
    b = max(x.shape[0] for x in jax.tree.leaves(rows))
    specs = jax.tree.map(lambda x: _CUT if x.shape[0] == b else _WHOLE, rows)
    return jax.shard_map(function, in_specs=(_WHOLE, *specs), out_specs=_CUT, check_vma=False)(whole, *rows)


def over_blocks(function: Callable[..., jax.Array], whole: Any, blocks: Any) -> jax.Array:
    """function(whole, numbers, blocks), blocks being a tree of arrays [n, ...]; its result [n, ...].

    A device gets blocks from both ends, as late queries see more keys than early ones: twice as many blocks as devices,
    or a multiple of that.
    """
    count = jax.tree.leaves(blocks)[0].shape[0]
    cut = jax.tree.map(_dealt, (jnp.arange(count), blocks))
    found = jax.shard_map(function, in_specs=(_WHOLE, _CUT, _CUT), out_specs=_CUT, check_vma=False)(whole, *cut)
    return _collected(found)


def spread(x: jax.Array, axis: int = 0) -> jax.Array:
    """x, of which each device is to hold a part along `axis`, where devices divide its size."""
    devices = num_devices()
    if devices == 1 or x.shape[axis] % devices:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[None] * axis, AXIS))


def _dealt(x: jax.Array) -> jax.Array:
    """x [n, ...] dealt out to devices, first to last and back again, those of a device side by side. No gather, as the
    gradient of one is a scatter."""
    devices, rest = num_devices(), x.shape[1:]
    there, back = jnp.split(x.reshape(-1, 2, devices, *rest), 2, axis=1)
    rounds = jnp.concatenate([there, jnp.flip(back, axis=2)], axis=1)
    return rounds.reshape(-1, devices, *rest).swapaxes(0, 1).reshape(x.shape)


def _collected(x: jax.Array) -> jax.Array:
    """What `_dealt` gave, in order again."""
    devices, rest = num_devices(), x.shape[1:]
    rounds = x.reshape(devices, -1, *rest).swapaxes(0, 1).reshape(-1, 2, devices, *rest)
    there, back = jnp.split(rounds, 2, axis=1)
    return jnp.concatenate([there, jnp.flip(back, axis=2)], axis=1).reshape(x.shape)
