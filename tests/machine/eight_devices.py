"""What test_parallel runs on eight devices: attention cut over heads, training cut over the batch."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import posx
import posx.cli
from posx.config import TrainConfig
from posx.config.model import ModelConfig
from posx.machine.devices import on_all_devices, over_devices
from posx.model import make_model
from posx.training.step import init_state, train_steps

T, H, D = 600, 8, 8  # several tiles of the blockwise executor


def attention_cut_over_heads(name: str, executor: str) -> None:
    dims = posx.Dims(model_dim=H * D, num_heads=H, head_dim=D, num_layers=1, train_len=64)
    encoding = posx.build(name, dims)
    keys = jax.random.split(jax.random.key(0), 5)
    params = jax.tree.map(lambda x: x + jax.random.normal(keys[4], x.shape), encoding.init(keys[0], dims))
    q, k, v = (jax.random.normal(key, (1, T, H, D)) for key in keys[1:4])
    pos = np.arange(T, dtype=np.int32)

    def attend(params, q, k, v):
        o = posx.attend(encoding, params, q, k, v, q_pos=pos, k_pos=pos, executor=executor)
        return (o * jnp.cos(jnp.arange(D))).sum(), o

    run = jax.jit(jax.value_and_grad(attend, argnums=(0, 1, 2, 3), has_aux=True))
    wanted = run(params, q, k, v)
    mesh = jax.make_mesh((8,), ("heads",), axis_types=(AxisType.Auto,))
    cut = NamedSharding(mesh, PartitionSpec(None, None, "heads"))
    found = run(params, *(jax.device_put(x, cut) for x in (q, k, v)))
    assert found[1][1].shape == q.shape and len(found[0][1].sharding.device_set) == 8
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4, err_msg=name), found, wanted)


def training_cut_over_the_batch() -> None:
    model = make_model(ModelConfig(num_layers=1, model_dim=16, num_heads=2, dropout=0.1), "t5", 29, 16)
    config = TrainConfig(length=16, batch_size=16, steps=20, warmup_steps=2, accumulation=2)
    state = on_all_devices(init_state(model, config))
    tokens = over_devices(np.zeros((3, 16, 17), np.int32), axis=1)
    assert {shard.data.shape for shard in tokens.addressable_shards} == {(3, 2, 17)}
    assert "all-reduce" in train_steps.lower(model, config, state, tokens, 3).compile().as_text()
    for _ in range(2):
        state, _ = train_steps(model, config, state, tokens, 3)
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    assert train_steps._cache_size() == 1, "the state came back laid out in another way"


def batch_that_cannot_be_shared(config: str, workdir: str) -> None:
    """Says one line on standard error."""
    code = posx.cli.main(["train", f"--config={config}", f"--workdir={workdir}", "--config.train.batch_size=12"])
    assert code == 2


if __name__ == "__main__":
    assert jax.device_count() == 8
    for name in ("nope", "rope", "alibi", "t5"):
        for executor in ("dense", "blockwise"):
            attention_cut_over_heads(name, executor)
    training_cut_over_the_batch()
    batch_that_cannot_be_shared(*sys.argv[1:])
