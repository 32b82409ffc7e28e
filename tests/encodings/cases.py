"""The encodings that tests run over, and the one layer they are run in."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posx
from golden import reference, reference_content, reference_rotary
from posx.conformance import DIMS
from posx.conformance.subject import LENGTH, add_axes
from posx.encodings import Encoding, encoding_name


def _accumulated_rope(encoding, params, x, project, pos, visible):
    """Give the reference the random steps that JAX draws for a position, as if they were learned."""
    if not encoding.random:
        return reference_rotary.accumulated_rope(encoding, params, x, project, pos, visible)
    shape = encoding.num_kv_heads, encoding.head_dim // 2
    rngs = [jax.random.fold_in(jax.random.key(0), int(p)) for p in pos]
    bits = np.stack([np.asarray(jax.random.bits(rng, shape, np.uint32)) for rng in rngs])
    steps = np.sqrt(3) * ((bits >> 9) + 0.5 - 2**22) / 2**22
    return reference_rotary.along(steps, encoding.base, *project(x), visible)


#: References of whole sequences, (encoding, params, x, project, pos, visible), where a pair does not say its own logit.
WHOLE = reference_content.WHOLE | reference_rotary.WHOLE | {"accumulated_rope": _accumulated_rope}

#: Every registry name with its defaults, and every variant that changes a formula.
SPECS: dict[str, Any] = {
    "nope": "nope",
    "sinusoidal": "sinusoidal",
    "sinusoidal-concatenated": {"name": "sinusoidal", "layout": "concatenated", "exponent": "c/(m/2-1)", "base": 50.0},
    "learned": "learned",
    "learned-clamp": {"name": "learned", "num_positions": 20, "beyond": "clamp"},
    "learned-interpolate": {"name": "learned", "num_positions": 20, "beyond": "interpolate"},
    "shaw": {"name": "shaw", "max_distance": 5},
    "shaw-keys": {"name": "shaw", "max_distance": 3, "values": False},
    "transformer_xl": "transformer_xl",
    "transformer_xl-clamp": {"name": "transformer_xl", "clamp_len": 6, "base": 100.0, "untie_biases": True},
    "t5": "t5",
    "t5-unscaled": {"name": "t5", "num_buckets": 8, "max_distance": 20, "scaled": False, "per_layer": True},
    "t5-bidirectional": {"name": "t5", "bidirectional": True, "num_buckets": 8, "max_distance": 12},
    "tupe": "tupe",
    "tupe-untied": {"name": "tupe", "untied": (0, 3), "num_positions": 20, "beyond": "interpolate"},
    "tupe-r": ["tupe", {"name": "t5", "num_buckets": 8, "max_distance": 20}],
    "tupe-r-bidirectional": ["tupe", {"name": "t5", "bidirectional": True, "num_buckets": 8, "max_distance": 12}],
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
    "darope": {"name": "darope", "base": 50.0, "original_len": 7},
    "selective_rope": "selective_rope",
    "selective_rope-gated": {"name": "selective_rope", "base": 50.0, "kernel": 2, "drift": True, "gated": True},
    "accumulated_rope": "accumulated_rope",
    "accumulated_rope-random": {"name": "accumulated_rope", "random": True},
    "rotated_values": {"name": "rotated_values", "base": {"name": "rope", "base": 100.0}},
    "rotated_values-accumulated": {"name": "rotated_values", "base": "accumulated_rope"},
    "self_extend": {"name": "self_extend", "window": 4, "group": 3},
    "self_extend-rerope": {"name": "self_extend", "window": 4, "group": 0, "rope": {"name": "rope", "rotary_dim": 4}},
    "dual_chunk": {"name": "dual_chunk", "chunk": 4, "window": 6},
    "dual_chunk-half": {"name": "dual_chunk", "chunk": 3, "window": 3, "rope": {"name": "rope", "rotary_dim": 4}},
    "mrope": "mrope",
    "mrope-interleaved": {"name": "mrope", "sections": (1, 1), "order": "interleaved", "base": 50.0},
    "axial": "axial",
    "axial-sinusoidal": {"name": "axial", "inner": {"name": "sinusoidal", "layout": "concatenated"}},
    "axial-learned": {"name": "axial", "inner": {"name": "learned", "num_positions": 40}},
    "axial-alibi": {"name": "axial", "inner": "alibi", "num_axes": 3},
    "key_offset": "key_offset",
    "key_offset-rope": ["key_offset", {"name": "rope", "rotary_dim": 2}],
    "canon": "canon",
    "canon-rope": [{"name": "canon", "kernel": 2}, "rope"],
    "alibi": "alibi",
    "alibi-log": {"name": "alibi", "scale": "log"},
    "cope": {"name": "cope", "num_positions": 5},
    "cope-unscaled": {"name": "cope", "num_positions": 20, "scaled": False, "per_layer": False},
    "dape": {"name": "dape", "base": {"name": "t5", "num_buckets": 8, "max_distance": 20}},
    "dape-kerple": "dape",
    "dape-rope": {"name": "dape", "base": "rope"},
    "dape-v2": {"name": "dape", "base": "alibi", "kernel": 3},
    "dape-fire": {"name": "dape", "base": "fire"},
    "inkling": {"name": "inkling", "extent": 7, "rank": 5},
    "grape_a": "grape_a",
    "grape_a-key": {"name": "grape_a", "gates": ("key",), "unit": False},
    "gape": "gape",
    "path": "path",
    "rope+alibi": ["rope", "alibi"],
    "xpos": "xpos",
    "xpos-interleaved": {
        "name": "xpos",
        "rope": {"name": "rope", "layout": "interleaved", "rotary_dim": 4, "base": 100.0},
        "scale_base": 5.0,
    },
    "fox": "fox",
    "fox-cable": {"name": "fox", "gate": "cable"},
    "fox-constant": {"name": "fox", "gate": "constant"},
    "fox-scaled": {"name": "fox", "gate_scale": 0.4},
    "kerple": "kerple",
    "kerple-power": {"name": "kerple", "form": "power", "per_layer": True},
    "bam": "bam",
    "bam-located": {"name": "bam", "learned": ("shape", "loc"), "shapes": (0.0, 1.0), "initial_scale": 0.2},
    "sandwich": "sandwich",
    "sandwich-first": {"name": "sandwich", "first": 1, "width": 8, "base": 100.0},
    "fire": "fire",
    "dynamic_bias": "dynamic_bias",
    "dynamic_bias-linear": {"name": "dynamic_bias", "log_distance": False, "depth": 1, "width": 5},
    "nape": "nape",
    "nape-exponential": {"name": "nape", "slopes": "exponential", "alibi_heads": 3},
    # Lengths that positions of the checks go beyond.
    "log_length": {"name": "log_length", "train_len": 5},
    "ssmax": "ssmax",
    "ssmax-plain": {"name": "ssmax", "plain_heads": 3},
    "llama4_temperature": {"name": "llama4_temperature", "floor_scale": 4},
    # Smaller factors than the default has, at large random parameters: logits of thousands are off by more in float32.
    "adaptive_temperature": {"name": "adaptive_temperature", "gamma_range": 1.0},
    "adaptive_temperature-plain": {"name": "adaptive_temperature", "plain_heads": 2},
    "learned_sinks": "learned_sinks",
    "learned_sinks-rope": ["rope", "learned_sinks"],
    "learned_sinks-alibi": ["alibi", "learned_sinks"],
    "learned_sinks-twice": ["learned_sinks", "learned_sinks"],
    "log_length-rope": ["rope", {"name": "log_length", "train_len": 5}],
}


@functools.cache
def _case(case: str) -> Encoding:
    return posx.build(SPECS[case], DIMS).at_length(32)


class Cases(Mapping[str, Encoding]):
    """SPECS resolved, and set for windows of 32 tokens, over which tables are interpolated.

    Each is built when a test asks for it: all of them take two seconds, which every process would pay to collect tests.
    """

    def __getitem__(self, case: str) -> Encoding:
        return _case(case)

    def __iter__(self) -> Iterator[str]:
        return iter(SPECS)

    def __len__(self) -> int:
        return len(SPECS)


CASES = Cases()

#: The hooks that each encoding defines.
ACTING = {
    "nope": (),
    "sinusoidal": ("embed",),
    "learned": ("embed",),
    "shaw": ("by_distance",),
    "transformer_xl": ("query", "by_distance"),
    "t5": ("by_distance",),
    "tupe": ("query", "key", "logit_scale"),
    "deberta": ("logit_scale", "by_distance"),
    "rope": ("query", "key"),
    "pope": ("query", "key"),
    "fope": ("query", "key"),
    "darope": ("features", "query", "key"),
    "selective_rope": ("features", "query", "key"),
    "accumulated_rope": ("features", "query", "key"),
    "rotated_values": ("query", "key", "value", "output"),
    "self_extend": ("query", "key", "score"),
    "dual_chunk": ("query", "key", "score"),
    "mrope": ("query", "key"),
    "axial": ("query", "key"),
    "key_offset": ("key",),
    "canon": ("query", "key", "value"),
    "alibi": ("by_distance",),
    "cope": ("score",),
    "dape": ("by_distance", "score"),  # its base acts by distance: the bias is read in `score`
    "inkling": ("features", "score"),
    "grape_a": ("score",),
    "gape": ("score",),
    "path": ("features", "revise", "score"),
    "kerple": ("by_distance",),
    "bam": ("by_distance",),
    "sandwich": ("by_distance",),
    "fire": ("bias",),
    "dynamic_bias": ("by_distance",),
    "nape": ("by_distance",),
    "log_length": ("logit_scale",),
    "ssmax": ("logit_scale",),
    "llama4_temperature": ("logit_scale",),
    "adaptive_temperature": ("features", "logit_scale"),
    "xpos": ("query", "key", "decay"),
    "fox": ("features", "token_bias"),
    "learned_sinks": ("sink",),
}

#: The encodings that a model of texts can have: those of one axis, or that read no position.
ON_TEXT = [name for name in posx.ENCODINGS if name not in ("mrope", "axial")]

#: These cases take every way through the executors, the cache and the model. The default tests check the formula of
#: every other encoding. The slow tests check everything else, and all variants.
WAYS = (
    "learned", "shaw", "transformer_xl", "tupe", "rope+alibi", "fox", "xpos", "cope", "selective_rope", "fire",
    "learned_sinks",
)  # fmt: skip


#: Of these, the ways that differ most: for tests that compile several programs a case.
FEW = ("learned", "shaw", "selective_rope", "fox", "cope")


def first(cases, ways=WAYS):
    """The cases, those that go by no way of their own marked slow."""
    return [pytest.param(case, marks=() if case in ways else pytest.mark.slow) for case in cases]


#: Variants of a formula that run through the code of their base case add nothing where only the plumbing is tested.
STRUCTURAL = [*(case for case in CASES if "-" not in case), "transformer_xl-clamp", "tupe-r"]
#: Variants that take another way through the executors than their base case.
APART = ("dape-v2", "dape-rope", "rotated_values-accumulated", "canon-rope", "deberta-c2p")


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
    """Embedded tokens x [b, t, m] and their q, k, v."""
    embedded = jax.vmap(encoding.embed, in_axes=(None, 0, 0))(params, x, pos)
    return embedded, *(jnp.einsum("btm,mhd->bthd", embedded, weights[n]) for n in "qkv")


def layer_outputs(encoding, params, weights, x, pos, idx, segment, *, executor="dense", mask=posx.causal()):
    """One attention layer over tokens x [b, t, m]: embedded, projected, attended; [b, t, h, d].

    pos [b, t] are the positions on the first axis.
    """
    pos = add_axes(encoding, pos)
    x, q, k, v = project(encoding, params, weights, x, pos)
    x = x if encoding.acts_on("features") else None
    return posx.attend(encoding, params, q, k, v, posx.Slots(pos, idx, segment), x=x, mask=mask, executor=executor)


layer = jax.jit(layer_outputs, static_argnames=("encoding", "executor", "mask"))


def reference_layer(encoding, params, weights, x, pos, idx, segment, mask=posx.causal()) -> np.ndarray:
    """`layer` in float64 NumPy loops; all arguments with a batch axis."""
    params, weights = ({n: np.float64(a) for n, a in tree.items()} for tree in (params, weights))
    outputs, pos = [], add_axes(encoding, pos)

    def project(x):
        return tuple(np.einsum("tm,mhd->thd", x, weights[n]) for n in "qkv")

    for x_one, p, n, s in zip(np.float64(x), pos, idx, segment, strict=True):
        seen = [[sees(mask, i, j) and s[a] == s[b] for b, j in enumerate(n)] for a, i in enumerate(n)]
        outputs.append(reference_of(encoding)(params, x_one, project, p, np.array(seen)))
    return np.stack(outputs)


def reference_of(encoding: Encoding):
    """The encoding's formula in float64 loops, as `check_encoding` takes it."""
    name = encoding_name(encoding)
    if name in WHOLE:
        return functools.partial(WHOLE[name], encoding)

    def outputs(params, x, project, pos, visible):
        q, k, v = project(reference.embed(name, encoding, params, x, pos))
        return reference.reference(name, encoding, params, q, k, v, pos.tolist(), pos.tolist(), visible)

    return outputs


def sees(mask: posx.attention.Mask, i: int, j: int) -> bool:
    if i < 0 or j < 0 or (mask.causal and j > i):
        return False
    return not mask.window or i - j < mask.window or j < mask.sinks
