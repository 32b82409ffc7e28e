"""What test_devices runs on eight devices: attention cut over heads and queries, training over the batch."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import posx
from posx.config import TrainConfig
from posx.config.model import ModelConfig
from posx.machine import devices
from posx.machine.devices import AXIS, devices_for, mesh, on_devices, over_devices, use_every_core
from posx.model import make_model
from posx.positions import sequential
from posx.runs.evaluate import model_log_probs
from posx.training.step import init_state, train_steps

T, D = 600, 8  # several tiles of the blockwise executor


def attention_cut_over_devices(name: str, executor: str, h: int) -> None:
    dims = posx.Dims(model_dim=h * D, num_heads=h, head_dim=D, num_layers=1, train_len=64)
    encoding = posx.build(name, dims)
    keys = jax.random.split(jax.random.key(0), 5)
    params = jax.tree.map(lambda x: x + jax.random.normal(keys[4], x.shape), encoding.init(keys[0], dims))
    q, k, v = (jax.random.normal(key, (1, T, h, D)) for key in keys[1:4])
    pos = np.arange(T, dtype=np.int32)

    def attend(params, q, k, v):
        o = posx.attend(encoding, params, q, k, v, q_pos=pos, k_pos=pos, executor=executor)
        return (o * jnp.cos(jnp.arange(D))).sum(), o

    run = jax.jit(jax.value_and_grad(attend, argnums=(0, 1, 2, 3), has_aux=True))
    wanted = run(params, q, k, v)
    if h % 8 == 0:  # cut by whoever calls
        cut = NamedSharding(mesh(), PartitionSpec(None, None, AXIS))
        same(run(params, *(jax.device_put(x, cut) for x in (q, k, v))), wanted, name)
    with jax.set_mesh(mesh()):
        same(run(params, q, k, v), wanted, name)


def same(found, wanted, name: str) -> None:
    assert found[0][1].shape == wanted[0][1].shape and len(found[0][1].sharding.device_set) == 8
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5 * np.abs(b).max() + 2e-4, err_msg=name)


def training_cut_over_the_batch() -> None:
    """A step on eight devices is that on one, dropout and parts of a batch too, and leaves the state as it found it."""
    model = make_model(ModelConfig(num_layers=1, model_dim=16, num_heads=2, dropout=0.1), "t5", 29, 16)
    config = TrainConfig(length=16, batch_size=16, steps=20, warmup_steps=2, accumulation=2)
    batches = np.random.default_rng(0).integers(0, 29, (3, 16, 17), np.int32)
    states, metrics = {}, {}
    for n in (1, 8):
        states[n] = on_devices(init_state(model, config), n)
        tokens = over_devices(batches, n, axis=1)
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
    log_probs = model_log_probs(model, params)
    for b, length in ((20, 16), (8, 300), (1, 1200), (3, 301)):
        tokens = np.random.default_rng(0).integers(0, 29, (b, length + 1), np.int32)
        wanted = model.log_probs(params, tokens, sequential(length), None, "dense")
        np.testing.assert_allclose(log_probs(tokens), wanted, rtol=1e-4, atol=1e-4, err_msg=f"{b} of {length}")


if __name__ == "__main__":
    use_every_core()
    assert jax.device_count() == 8, "what the user has set stays"
    assert [devices_for(rows, 1e15) for rows in (64, 12, 7, 1, 11)] == [8, 6, 7, 1, 1]
    assert devices_for(64, 1e3) == 1, "there is too little to share"
    assert devices_for(64, 1e15, copy=1e18) == 1, "memory does not hold two copies"
    for name in ("nope", "alibi", "t5", "shaw", "deberta"):
        attention_cut_over_devices(name, "blockwise", 8)
    for name in ("t5", "shaw"):  # heads that eight do not divide: blocks of queries
        attention_cut_over_devices(name, "blockwise", 3)
    attention_cut_over_devices("t5", "dense", 8)
    training_cut_over_the_batch()
    evaluation_cut_over_windows_or_queries()
