"""The encodings that tests run over, and the one layer they are run in."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import posx
from posx.encodings import Encoding, encoding_name
from posx.testing import DIMS
from posx.testing.subject import LENGTH
from tests.encodings import reference, reference_rotary

#: Every registry name with its defaults, and every variant that changes a formula.
SPECS: dict[str, Any] = {
    "nope": "nope",
    "sinusoidal": "sinusoidal",
    "sinusoidal-concatenated": {"name": "sinusoidal", "layout": "concatenated", "exponent": "c/(m/2-1)", "base": 50.0},
    "learned": "learned",
    "learned-clamp": {"name": "learned", "num_positions": 20, "beyond": "clamp"},
    "learned-interpolate": {"name": "learned", "num_positions": 20, "beyond": "interpolate", "stretched_to": 32},
    "shaw": {"name": "shaw", "max_distance": 5},
    "shaw-keys": {"name": "shaw", "max_distance": 3, "values": False},
    "transformer_xl": "transformer_xl",
    "transformer_xl-clamp": {"name": "transformer_xl", "clamp_len": 6, "base": 100.0, "untie_biases": True},
    "t5": "t5",
    "t5-unscaled": {"name": "t5", "num_buckets": 8, "max_distance": 20, "scaled": False, "per_layer": True},
    "t5-bidirectional": {"name": "t5", "bidirectional": True, "num_buckets": 8, "max_distance": 12},
    "tupe": "tupe",
    "tupe-untied": {"name": "tupe", "untied": (0, 3), "num_positions": 20, "beyond": "interpolate", "stretched_to": 32},
    "tupe-r": ["tupe", {"name": "t5", "num_buckets": 8, "max_distance": 20}],
    "deberta": {"name": "deberta", "max_distance": 7},
    "deberta-release": {"name": "deberta", "max_distance": 7, "release_index": True},
    "deberta-log": {"name": "deberta", "log_buckets": 6, "max_distance": 24},
    "deberta-c2p": {"name": "deberta", "max_distance": 32, "terms": ("c2p",)},
    "deberta-p2c": {"name": "deberta", "max_distance": 5, "terms": ("p2c",)},
    "rope": "rope",
    "rope-interleaved": {"name": "rope", "layout": "interleaved", "rotary_dim": 4, "base": 100.0},
    "pope": "pope",
    "fope": {"name": "fope", "base": 50.0},
    "fope-learned": {"name": "fope", "base": 50.0, "dropped": "plain", "learned": True},
    "selective_rope": "selective_rope",
    "selective_rope-gated": {"name": "selective_rope", "base": 50.0, "kernel": 2, "drift": True, "gated": True},
    "key_offset": "key_offset",
    "key_offset-rope": ["key_offset", {"name": "rope", "rotary_dim": 2}],
    "alibi": "alibi",
    "rope+alibi": ["rope", "alibi"],
}
CASES: dict[str, Encoding] = {case: posx.build(spec, DIMS) for case, spec in SPECS.items()}

#: Variants of a formula that run through the code of their base case add nothing where only the plumbing is tested.
STRUCTURAL = [*(case for case in CASES if "-" not in case), "transformer_xl-clamp", "tupe-r"]


def params_of(encoding: Encoding, dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Large random arrays in the shapes of `init`, so that each one changes the outputs well above rounding."""
    shapes = jax.eval_shape(lambda: encoding.init(jax.random.key(0), DIMS))
    rng = np.random.default_rng(seed)
    return {name: (0.5 * rng.standard_normal(a.shape)).astype(dtype) for name, a in shapes.items()}


def tokens(batch_size: int, length: int = LENGTH, dtype=np.float32, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch_size, length, DIMS.model_dim)).astype(dtype)


def projections(dtype=np.float32, seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    heads = {"q": DIMS.num_heads, "k": DIMS.num_kv_heads, "v": DIMS.num_kv_heads}
    shape = DIMS.model_dim, DIMS.head_dim
    return {n: (0.3 * rng.standard_normal((shape[0], h, shape[1]))).astype(dtype) for n, h in heads.items()}


def project(encoding, params, weights, x, pos):
    """q, k, v of embedded tokens x [b, t, m]."""
    embedded = jax.vmap(encoding.embed, in_axes=(None, 0, 0))(params, x, pos)
    return tuple(jnp.einsum("btm,mhd->bthd", embedded, weights[n]) for n in "qkv")


def layer_outputs(encoding, params, weights, x, pos, idx, segment, *, executor="dense", mask=posx.causal()):
    """One attention layer over tokens x [b, t, m]: embedded, projected, attended; [b, t, h, d]."""
    q, k, v = project(encoding, params, weights, x, pos)
    where = {"q_pos": pos, "k_pos": pos, "q_idx": idx, "k_idx": idx, "q_segment": segment, "k_segment": segment}
    kept = x if encoding.acts_on("features") else None
    return posx.attend(encoding, params, q, k, v, mask=mask, executor=executor, x=kept, **where)


layer = jax.jit(layer_outputs, static_argnames=("encoding", "executor", "mask"))


def reference_layer(encoding, params, weights, x, pos, idx, segment, mask=posx.causal()) -> np.ndarray:
    """`layer` in float64 NumPy loops; all arguments with a batch axis."""
    name = encoding_name(encoding)
    params, weights = ({n: np.float64(a) for n, a in tree.items()} for tree in (params, weights))
    outputs = []
    for x_one, p, n, s in zip(np.float64(x), pos, idx, segment, strict=True):
        embedded = reference.embed(name, encoding, params, x_one, p)
        q, k, v = (np.einsum("tm,mhd->thd", embedded, weights[c]) for c in "qkv")
        seen = np.array([[sees(mask, i, j) and s[a] == s[b] for b, j in enumerate(n)] for a, i in enumerate(n)])
        if name in reference_rotary.OUTPUTS:
            outputs.append(reference_rotary.OUTPUTS[name](encoding, params, x_one, lambda x: (q, k, v), p, seen))  # noqa: B023
            continue
        outputs.append(reference.reference(name, encoding, params, q, k, v, p.tolist(), p.tolist(), seen))
    return np.stack(outputs)


def sees(mask: posx.attention.Mask, i: int, j: int) -> bool:
    if i < 0 or j < 0 or (mask.causal and j > i):
        return False
    return not mask.window or i - j < mask.window or j < mask.sinks
