"""The layout of training on devices: of the rows of a batch, and of the state.

Rows are sharded, and by default each device has a copy of the state. With a mesh `DATA` x `MODEL`, parameters and both
moments are sharded too, by the table `RULES`. The mesh may span many processes. XLA then gathers the weights of a layer
for their use and brings their gradients back (FSDP, arXiv 2304.11277; over `MODEL` as Megatron-LM, arXiv 1909.08053).
The step is the same function in both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from posx.encodings.rates import Rates
from posx.errors import ConfigError
from posx.lab.config import TrainConfig
from posx.lab.model import Model
from posx.lab.training.step import Batch, Metrics, State, init_state, train_steps
from posx.machine.devices import DATA, MODEL, mesh, parse_mesh, replicate

#: The rows `rows` of the batches of some steps, arrays [n, rows, ...].
Batches = Callable[[slice], Any]

#: The axis of the mesh over which each dimension of a parameter is sharded, by the end of its name. All other
#: parameters are whole. An axis that does not divide the size does not shard it.
RULES: dict[tuple[str, ...], tuple[str, str]] = {
    ("embedding",): (MODEL, DATA),
    ("unembedding",): (DATA, MODEL),
    ("attention", "query"): (DATA, MODEL),
    ("attention", "key"): (DATA, MODEL),
    ("attention", "value"): (DATA, MODEL),
    ("attention", "out"): (MODEL, DATA),
    ("mlp", "up"): (DATA, MODEL),
    ("mlp", "gate"): (DATA, MODEL),
    ("mlp", "down"): (MODEL, DATA),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """The devices of training. DATA divides the rows of every part of a batch.

    Attributes:
      data: devices along the axis DATA.
      model: devices along the axis MODEL. Each of the `data` x `model` devices then holds a part of the state. 0 gives
        each of `data` devices a copy of the whole state.
    """

    data: int = 1
    model: int = 0

    def __str__(self) -> str:
        return f"{self.data}x{self.model}" if self.model else str(self.data)

    @property
    def num_devices(self) -> int:
        return self.data * max(self.model, 1)

    @property
    def mesh(self) -> Mesh:
        return mesh(self.num_devices, self.model)

    @property
    def whole(self) -> NamedSharding:
        """The sharding of an array that each device has a copy of."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def is_global(self) -> bool:
        """Whether parameters lie on the mesh of all processes, so that programs are compiled over that mesh."""
        return self.model > 0 or jax.process_count() > 1

    def init(self, model: Model, config: TrainConfig) -> State:
        """Make the state at step 0."""
        if not self.model:
            return self.put(init_state(model, config))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract(model, config))
        return jax.jit(lambda: init_state(model, config), out_shardings=shardings)()

    def put(self, state: State) -> State:
        """Copy a state that was restored or made on one device to the devices of training. Parts stay in place."""
        if self.model:
            return state
        if not self.is_global:
            return replicate(state, self.num_devices)
        whole = self.whole
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, whole, np.asarray(x).__getitem__), state)

    def abstract(self, model: Model, config: TrainConfig) -> State:
        """Return shapes and types of the state, with the shardings of its parts."""
        return self.place(jax.eval_shape(lambda: init_state(model, config)))

    def place(self, abstract: Any) -> Any:
        """Return shapes and types of parameters, or of a state, with the shardings of their parts."""

        def one(path: tuple[Any, ...], leaf: Any) -> Any:
            sharding = NamedSharding(self.mesh, spec(path, leaf.shape, {DATA: self.data, MODEL: self.model}))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(one, abstract) if self.model else abstract

    def batches(self, size: int, make: Batches) -> Batch:
        """Shard batches of `size` rows. Each process makes the rows of its own devices."""
        made = functools.cache(lambda start, stop: make(slice(start, stop)))  # devices along MODEL share rows
        sharding = rows_sharding(self.mesh)

        def rows(index: Any) -> Any:
            return made(*index[1].indices(size)[:2])

        first = next(iter(sharding.addressable_devices_indices_map((1, size)).values()))
        assert first is not None
        leaves, form = jax.tree.flatten(rows(first))

        def shard(n: int, leaf: np.ndarray) -> jax.Array:
            shape = (leaf.shape[0], size, *leaf.shape[2:])
            return jax.make_array_from_callback(shape, sharding, lambda index: jax.tree.leaves(rows(index))[n])

        return jax.tree.unflatten(form, [shard(n, leaf) for n, leaf in enumerate(leaves)])

    def steps(
        self, model: Model, config: TrainConfig, state: State, batches: Batch, count: int, rates: Rates
    ) -> tuple[State, Metrics]:
        """Run `train_steps` on these devices."""
        if not self.model:
            return train_steps(model, config, state, batches, count, self.num_devices, rates)
        with jax.set_mesh(self.mesh):
            return train_program(self, model, config, rates)(state, batches, count)


@functools.cache
def train_program(
    layout: Layout, model: Model, config: TrainConfig, rates: Rates
) -> Callable[..., tuple[State, Metrics]]:
    """Compile `train_steps` so that the state keeps its shardings."""
    state = jax.tree.map(lambda leaf: leaf.sharding, layout.abstract(model, config))

    def steps(state: State, batches: Batch, count: Any) -> tuple[State, Metrics]:
        return train_steps(model, config, state, batches, count, 1, rates)

    return jax.jit(steps, donate_argnums=0, out_shardings=(state, layout.whole))


@functools.cache
def whole_program(layout: Layout, function: Callable[..., Any], *static: Any) -> Callable[..., Any]:
    """Compile `function`, which takes the `static` values first, so that each device has a copy of its results."""
    return jax.jit(functools.partial(function, *static), out_shardings=layout.whole if layout.is_global else None)


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of batches [n, b, t + 1]."""
    return NamedSharding(mesh, PartitionSpec(None, DATA))


def agreement(layout: Layout) -> Callable[[bool], bool]:
    """Return a function that reports in all processes, at the same call, whether one of them has raised its flag.

    With several processes it reports the flags of the previous call. Their result has arrived by then, so no process
    waits.
    """
    if jax.process_count() == 1:
        return bool
    every, raised = NamedSharding(layout.mesh, PartitionSpec(layout.mesh.axis_names)), whole_program(layout, jnp.any)
    before: list[Any] = [False]

    def agree(flag: bool) -> bool:
        flags = jax.make_array_from_callback((layout.num_devices,), every, lambda _: np.array([flag]))
        before.append(raised(flags))
        return bool(before.pop(0))

    return agree


def spec(path: tuple[Any, ...], shape: tuple[int, ...], sizes: dict[str, int]) -> PartitionSpec:
    """Return how an array of the state is sharded, by the last names of its path. sizes: those of the mesh's axes."""
    names = tuple(key.key for key in path if hasattr(key, "key"))
    for end, axes in RULES.items():
        if names[-len(end) :] == end and len(shape) == len(axes):
            return PartitionSpec(*(axis if n % sizes[axis] == 0 else None for axis, n in zip(axes, shape, strict=True)))
    return PartitionSpec()


def asked_layout(text: str, rows: int, key_heads: int) -> Layout:
    """Return the layout of `--mesh=DATAxMODEL`.

    Args:
      text: the mesh. "" stands for copies on all devices of several processes, or for one device.
      rows: of a part of a batch, which DATA must divide.
      key_heads: which MODEL must divide.

    Raises:
      ConfigError: the mesh does not fit.
    """
    devices, several = jax.device_count(), jax.process_count() > 1
    if not text and not several:
        return Layout()
    if not text:
        if rows % devices:
            raise ConfigError(
                f"{devices} devices must divide the {rows} rows of a part of a batch. Use one of {_divisors(rows)}."
            )
        return Layout(devices)
    data, model = parse_mesh(text)
    if data * model > devices or (data * model < devices and several):
        raise ConfigError(f"--mesh={data}x{model} needs {data * model} devices, but there are {devices}.")
    check_mesh(data, model, rows, key_heads)
    return Layout(data, model)


def check_mesh(data: int, model: int, rows: int, key_heads: int) -> None:
    """Raise ConfigError unless DATA divides the rows of a part of a batch, and MODEL the key heads."""
    divided = (("DATA", data, "rows of a part of a batch", rows), ("MODEL", model, "key heads", key_heads))
    for name, size, what, count in divided:
        if count % size:
            raise ConfigError(
                f"--mesh={data}x{model}: {name} must divide the {count} {what}. Use one of {_divisors(count)}."
            )


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]
