"""What test_devices runs on eight devices: attention cut over heads and queries, training over the batch."""

import itertools
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import posx
from posx.encodings.rates import layer_rates
from posx.lab.config import TrainConfig, base_config, run_config
from posx.lab.config.sections import ModelConfig
from posx.lab.layers import sequential
from posx.lab.model import make_model
from posx.lab.positions import Positions, parse_policy
from posx.lab.runs.describe import make_run_model, share
from posx.lab.runs.scores import Way, model_scores, score_rows
from posx.lab.training.layout import Layout, rows_sharding, train_program, whole_program
from posx.lab.training.step import init_state, train_steps
from posx.machine import devices
from posx.machine.devices import DATA, count_devices, mesh, replicate, shard_rows, use_every_core

T, D = 600, 8  # several tiles of the blockwise executor


def attention_cut_over_devices(name: str, executor: str, h: int) -> None:
    dims = posx.Dims(model_dim=h * D, num_heads=h, head_dim=D, num_layers=1, train_len=64)
    encoding = posx.build(name, dims)
    keys = jax.random.split(jax.random.key(0), 5)
    params = jax.tree.map(lambda x: x + jax.random.normal(keys[4], x.shape), encoding.init(keys[0], dims))
    q, k, v = (jax.random.normal(key, (1, T, h, D)) for key in keys[1:4])
    pos = np.arange(T, dtype=np.int32)

    def attend(params, q, k, v):
        o = posx.attend(encoding, params, q, k, v, pos, executor=executor)
        return (o * jnp.cos(jnp.arange(D))).sum(), o

    run = jax.jit(jax.value_and_grad(attend, argnums=(0, 1, 2, 3), has_aux=True))
    wanted = run(params, q, k, v)
    if h % 8 == 0:  # cut by whoever calls
        cut = NamedSharding(mesh(), PartitionSpec(None, None, DATA))
        same(run(params, *(jax.device_put(x, cut) for x in (q, k, v))), wanted, name)
    with jax.set_mesh(mesh()):
        same(run(params, q, k, v), wanted, name)


def attention_over_two_axes(name: str, b: int) -> None:
    """Heads over one axis; over the other sequences, or blocks of the queries of one."""
    dims = posx.Dims(model_dim=4 * D, num_heads=4, head_dim=D, num_layers=1, train_len=64)
    encoding = posx.build(name, dims)
    keys = jax.random.split(jax.random.key(0), 5)
    params = jax.tree.map(lambda x: x + jax.random.normal(keys[4], x.shape), encoding.init(keys[0], dims))
    q, k, v = (jax.random.normal(key, (b, T, 4, D)) for key in keys[1:4])
    x, pos = jax.random.normal(keys[4], (b, T, 4 * D)), np.arange(T, dtype=np.int32)

    def attend(params, q, k, v):
        o = posx.attend(encoding, params, q, k, v, pos, x=x, executor="blockwise")
        return (o * jnp.cos(jnp.arange(D))).sum(), o

    run = jax.jit(jax.value_and_grad(attend, argnums=(0, 1, 2, 3), has_aux=True))
    wanted = run(params, q, k, v)
    with jax.set_mesh(mesh(model=2)):
        same(run(params, q, k, v), wanted, f"{name} of {b}")


def training_in_parts(name: str, **settings) -> None:
    """A step with weights and moments in parts is that with all of them whole, and lays them out as it found them."""
    model = make_model(ModelConfig(num_layers=2, model_dim=32, num_heads=4, **settings), name, 40, 16)
    policy = "randomised(longest=40)"
    config = TrainConfig(length=16, batch_size=16, steps=20, warmup_steps=2, accumulation=2, positions=policy)
    batches = np.random.default_rng(0).integers(0, 40, (3, 16, 17), np.int32)
    rates = layer_rates(model.encodings, model.dims, 0.0)
    states, metrics = {}, {}
    for layout in (Layout(1), Layout(4, 2), Layout(2, 4)):
        state = layout.init(model, config)
        tokens = layout.batches(batches.shape[1], lambda rows: batches[:, rows])
        for _ in range(2):
            before = jax.tree.map(lambda leaf: leaf.sharding, state)
            state, metrics[layout] = layout.steps(model, config, state, tokens, 3, rates)
            after = jax.tree.map(lambda leaf: leaf.sharding, state)
            assert jax.tree.all(jax.tree.map(lambda a, b: a == b, before, after))
        states[layout] = jax.device_get(state)
        if layout.model:
            up = state["params"]["layers"]["layer_00"]["mlp"]["up"]
            assert up.addressable_shards[0].data.size * 8 == up.size
    whole, *parts = states
    for layout in parts:
        for found, wanted in zip(jax.tree.leaves(metrics[layout]), jax.tree.leaves(metrics[whole]), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
        for found, wanted in zip(jax.tree.leaves(states[layout]), jax.tree.leaves(states[whole]), strict=True):
            # Adam divides by the size of a gradient, so one that is all but 0 may round to another update: up to 3e-5
            # for one weight of an array, while the norm of an array's gap was at most 1e-5 of the array's.
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4, err_msg=f"{name} {layout}")
            gap, size = np.linalg.norm(np.subtract(found, wanted, dtype=float)), np.linalg.norm(wanted)
            assert gap <= 3e-5 * size, (name, layout, gap, size)


def what_a_device_has() -> None:
    """Bytes sent in a step, and memory, are on paper what they are in XLA's programs."""
    for heads, remat in ((1, "layer"), (2, "none"), (8, "layer")):
        config = base_config("rope")
        config.model.update(num_layers=4, model_dim=256, num_heads=8, remat=remat)
        config.train.update(length=64, batch_size=32, dispatch_steps=1)
        run, layout = run_config(config), Layout(8 // heads, heads)
        model = make_run_model(run, 256)
        state = layout.abstract(model, run.train)
        tokens = jax.ShapeDtypeStruct((1, 32, 65), jnp.int32, sharding=rows_sharding(layout.mesh))
        with jax.set_mesh(layout.mesh):
            step = train_program(layout, model, run.train, run.rates).lower(state, tokens, 1).compile()
        found, told = step.memory_analysis(), share(run, model, layout.data, layout.model)
        memory = found.temp_size_in_bytes + found.argument_size_in_bytes
        sent = sum(bytes_sent(line) for line in step.as_text().splitlines())
        np.testing.assert_allclose(told.moved_weights + told.moved_activations, sent, rtol=0.07)
        if remat == "none":  # XLA's CPU backend merges what is computed again with what was
            np.testing.assert_allclose(told.state + told.gathered + told.activations, memory, rtol=0.2)


def a_long_window_over_devices() -> None:
    """Each device holds its part of a window, but for the keys and values of one layer."""
    model, taken = make_model(ModelConfig(num_layers=2, model_dim=64, num_heads=4), "t5", 40, 16).at_length(4096), {}
    for layout in (Layout(1, 1), Layout(8, 1)):
        params, tokens = layout.place(model.abstract()), jax.ShapeDtypeStruct((1, 4097), jnp.int32)
        with jax.set_mesh(layout.mesh):
            found = whole_program(layout, score_rows, model, Way(), 1).lower(params, tokens).compile().memory_analysis()
        taken[layout.data] = found.temp_size_in_bytes
    keys_and_values = 2 * 4 * 4096 * 64
    assert taken[8] - keys_and_values < 0.4 * (taken[1] - keys_and_values), taken


KINDS = {"f32": 4, "s32": 4, "u32": 4, "pred": 1}


def bytes_sent(line: str) -> float:
    """By one device, around a ring, for a collective operation of a compiled program."""
    found = re.search(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(", line)
    if not found:
        return 0.0
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", found[1])
    size = sum(KINDS[kind] * math.prod(int(n) for n in shape.split(",") if n) for kind, shape in arrays)
    groups = re.search(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])", line)
    count = 8 if groups is None else int(groups[2]) if groups[2] else len(groups[1].split(","))
    return size * (2 if found[2] == "all-reduce" else 1) * (count - 1) / count


def same(found, wanted, name: str) -> None:
    assert found[0][1].shape == wanted[0][1].shape and len(found[0][1].sharding.device_set) == 8
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5 * np.abs(b).max() + 2e-4, err_msg=name)


def training_cut_over_the_batch() -> None:
    """A step on eight devices is that on one, dropout, offsets and parts of a batch too.

    It leaves the state as it found it.
    """
    model = make_model(ModelConfig(num_layers=1, model_dim=16, num_heads=2, dropout=0.1), "sinusoidal+t5", 29, 16)
    policy = "offset(longest=40)"
    config = TrainConfig(length=16, batch_size=16, steps=20, warmup_steps=2, accumulation=2, positions=policy)
    batches = np.random.default_rng(0).integers(0, 29, (3, 16, 17), np.int32)
    states, metrics = {}, {}
    for n in (1, 8):
        states[n] = replicate(init_state(model, config), n)
        tokens = shard_rows(batches, n, axis=1)
        assert {shard.data.shape for shard in tokens.addressable_shards} == {(3, 16 // n, 17)}
        for _ in range(2):
            states[n], metrics[n] = train_steps(model, config, states[n], tokens, 3, n)
            assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(states[n]))
        assert metrics[n]["loss"].sharding.num_devices == n
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *metrics.values())
    one, eight = map(jax.device_get, states.values())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), one, eight)
    assert train_steps._cache_size() == 2, "the state came back laid out in another way"


def evaluation_cut_over_windows_or_queries() -> None:
    devices.LEAST_FLOPS = 1
    model = make_model(ModelConfig(num_layers=1, model_dim=16, num_heads=2), "alibi", 29, 16)
    params = model.init(jax.random.key(0))
    drawn = Positions(parse_policy("randomised(longest=2000)"))
    for n, (b, length) in enumerate(((20, 16), (8, 300), (1, 1200), (3, 301))):
        positions = (drawn, Positions())[n % 2]
        log_probs = model_scores(model, params, positions=positions)
        tokens = np.random.default_rng(0).integers(0, 29, (b, length + 1), np.int32)
        pos = sequential(length) if positions.measure(length) is None else positions.measure(length)
        wanted = model.log_probs(params, tokens, pos, None, "dense")
        np.testing.assert_allclose(log_probs(tokens), wanted, rtol=1e-4, atol=1e-4, err_msg=f"{b} of {length}")


if __name__ == "__main__":
    use_every_core()
    assert jax.device_count() == 8, "what the user has set stays"
    assert [count_devices(rows, 1e15) for rows in (64, 12, 7, 1, 11)] == [8, 6, 7, 1, 1]
    assert count_devices(64, 1e3) == 1, "there is too little to share"
    assert count_devices(64, 1e15, copy=1e18) == 1, "memory does not hold two copies"
    if sys.argv[1] == "training":
        training_cut_over_the_batch()
        evaluation_cut_over_windows_or_queries()
    elif sys.argv[1] == "parts":
        for b, name in itertools.product((4, 1), ("alibi", "shaw", "fox")):
            attention_over_two_axes(name, b)
        # A decay; features by head and scores; whole rows; a history; a bias of both positions; a logit scale and a
        # sink by head.
        for n, name in enumerate(("xpos", "inkling", "path", "key_offset", "fire", "ssmax", "alibi+learned_sinks")):
            attention_over_two_axes(name, (1, 4)[n % 2])
        training_in_parts("rope+shaw", dropout=0.1)
        training_in_parts("tupe(num_positions=40)", remat="layer", mlp="swiglu", mlp_dim=64, tied=True)
        what_a_device_has()
        a_long_window_over_devices()
    else:
        for name in ("nope", "alibi", "t5", "shaw", "deberta"):
            attention_cut_over_devices(name, "blockwise", 8)
        for name in ("t5", "shaw"):  # heads that eight do not divide: blocks of queries
            attention_cut_over_devices(name, "blockwise", 3)
        attention_cut_over_devices("t5", "dense", 8)
