"""posx as a library under the test vectors: python -m golden.run FOLDER tests.golden.posx_attention:attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import posx
from golden.families import MODEL_DIM

#: Slots of queries and of keys in all cases, so that few programs are compiled. Slots beyond a case are empty.
SLOTS = 21


@functools.cache
def encoding_of(spec, num_heads, head_dim, num_kv_heads):
    dims = posx.Dims(MODEL_DIM, num_heads, head_dim, num_layers=1, train_len=16, num_kv_heads=num_kv_heads)
    return posx.build(spec, dims)


def attention(case, dtype=jnp.float32):
    """Return the outputs and gradients of a case."""
    arrays = {name: jnp.asarray(array, jnp.float32) for name, array in case["arrays"].items()}
    if "q" not in case:
        encoding = encoding_of(case["spec"], 1, MODEL_DIM, 1)
        return {"outputs": encoding.embed(arrays, jnp.asarray(case["x"], dtype), jnp.asarray(case["q_pos"], jnp.int32))}
    num_queries, num_heads, head_dim = case["q"].shape
    encoding = encoding_of(case["spec"], num_heads, head_dim, case["k"].shape[1])
    vectors = {part: fill(case[part], 0, dtype) for part in "qkv"}
    g = fill(case.get("g", 0 * case["q"]), 0, dtype)
    q_slots, k_slots = (slots(case, side) for side in "qk")
    x = None
    if "x" in case:  # features of all tokens: each query stands in the slot of its own key
        x, q_slots = fill(case["x"], 0, dtype), k_slots
        before = len(case["k"]) - num_queries
        vectors["q"], g = (jnp.roll(each, before, axis=1) for each in (vectors["q"], g))
    o, dq, dk = attend(encoding, posx.attention.Mask(**case["mask"]), arrays, vectors, q_slots, k_slots, x, g)
    o = jnp.roll(o, -before, axis=1) if x is not None else o
    gradients = {"grad_q": dq[0, :num_queries], "grad_k": dk[0, : len(case["k"])]} if "g" in case else {}
    return {"outputs": o[0, :num_queries]} | gradients


def fill(array, empty, dtype):
    """Return an array [t, ...] as [1, SLOTS, ...]."""
    widths = [(0, SLOTS - len(array)), *((0, 0) for _ in array.shape[1:])]
    return jnp.asarray(np.pad(array, widths, constant_values=empty)[None], dtype)


def slots(case, side):
    empty = {"pos": 0, "idx": -1, "segment": 0}
    return posx.Slots(**{name: fill(case[f"{side}_{name}"], each, jnp.int32) for name, each in empty.items()})


@functools.partial(jax.jit, static_argnums=(0, 1))
def attend(encoding, mask, arrays, vectors, q_slots, k_slots, x, g):
    """Return outputs, and the gradients of sum(outputs * g) by q and k."""

    def outputs(q, k):
        return posx.attend(
            encoding, arrays, q, k, vectors["v"], q_slots, k_slots, mask=mask, x=x, executor="dense"
        )  # fmt: skip

    o, backward = jax.vjp(outputs, vectors["q"], vectors["k"])
    return o, *backward(g)
