"""Adapters to the other libraries: their own rotations and biases, at the settings of a case."""

import importlib.util
import os
import pathlib

os.environ.setdefault("KERAS_BACKEND", "jax")

import attn_gym.mods.alibi as gym_alibi
import attn_gym.mods.sandwich as gym_sandwich
import equinox
import jax
import jax.numpy as jnp
import keras_hub
import numpy as np
import torch
from diffusers.models import embeddings as diffusers
from litgpt import model as litgpt
from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding
from torchscale.component.xpos_relative_position import XPOS

from experiments.golden.layouts import (
    ALIBI,
    LONGEST,
    additive,
    attend,
    each,
    factors,
    given,
    heads_first,
    interleaved,
    rotary,
    rotated,
    row,
    rule,
    tensor,
    tokens_first,
)

torch.cuda.current_device = lambda: "cpu"  # Megatron asks for a GPU even where none is needed


# torchscale: xPos by its authors, of slots alone.


def torchscale_xpos(case):
    if not row(case):
        return None
    module, parts = XPOS(8, case["settings"]["scale_base"]), []
    for name in "qk":
        x = rotated(case, case[name])[0]
        parts.append(module(x, offset=len(case["k"]) - x.shape[1], downscale=name == "k")[None])
    return attend(case, *map(tokens_first, parts))


# torchtune: its package needs a torchao that does not import beside torch 2.13, so its files are loaded alone.


def torchtune(path, name, base, **settings):
    folder = pathlib.Path(importlib.util.find_spec("torchtune").submodule_search_locations[0])
    found = importlib.util.spec_from_file_location(name, folder / path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return getattr(module, name)(8, LONGEST, base, **settings)


def tune(path, name, layout):
    """Return an adapter to a class of torchtune, which holds a table of all positions."""

    def rotate(case, x, pos):
        if pos.max() >= LONGEST:
            return None
        settings, scaled = rule(case)
        named = {"scale_factor": "factor", "old_context_len": "original_len"} if name == "Llama3ScaledRoPE" else {}
        module = torchtune(path, name, settings["base"], **{new: scaled[old] for new, old in named.items()})
        x = interleaved(x, 8) if layout == "interleaved" and settings["layout"] == "half_split" else x
        return module(tensor(x)[None], input_pos=tensor(pos)[None])[0].float().numpy()

    return rotary(rotate)


# litgpt


def litgpt_rope(case, x, pos):
    if pos.max() >= LONGEST:
        return None  # a table of all positions
    settings, scaled = rule(case)
    extra = {"factor": scaled.get("factor"), "original_max_seq_len": scaled.get("original_len")}
    extra |= {name: scaled[name] for name in ("low_freq_factor", "high_freq_factor") if name in scaled}
    if scaled["name"] == "yarn":
        extra |= {"beta_fast": scaled["fast"], "beta_slow": scaled["slow"], "mscale": 1.0}
    extra = {name: each for name, each in extra.items() if each} if scaled["name"] != "geometric" else None
    width, base = settings["rotary_dim"], settings["base"]
    cos, sin = (
        table[tensor(pos)][None] for table in litgpt.build_rope_cache(LONGEST, width, base=base, extra_config=extra)
    )
    turn = litgpt.apply_rope_interleave if settings["layout"] == "interleaved" else litgpt.apply_rope
    x = heads_first(x)
    return tokens_first(torch.cat([turn(x[..., :width], cos, sin), x[..., width:]], dim=-1))


# megatron-core


def megatron_rope(case, x, pos):
    if pos.max() >= LONGEST:
        return None  # a table of all positions
    settings, scaled = rule(case)
    linear = scaled["factor"] if scaled["name"] == "linear" else None
    turned = settings["layout"] == "interleaved"
    plain = {"rotary_base": settings["base"], "use_cpu_initialization": True}
    mscale = 1.0
    if scaled["name"] == "yarn":
        module = yarn_rotary_pos_embedding.YarnRotaryEmbedding(
            8, scaling_factor=scaled["factor"], original_max_position_embeddings=scaled["original_len"],
            beta_fast=scaled["fast"], beta_slow=scaled["slow"], **plain,
        )  # fmt: skip
        angles, mscale = module(LONGEST)
    else:
        module = rotary_pos_embedding.RotaryEmbedding(8, settings["rotary_dim"] / 8, turned, linear, **plain)
        if scaled["name"] == "llama3":  # the constructor has no original length
            own = [scaled[name] for name in ("factor", "low_freq_factor", "high_freq_factor", "original_len")]
            module.inv_freq = module._apply_scaling(module.inv_freq, *own)
        angles = module(LONGEST)
    return (
        rope_utils._apply_rotary_pos_emb_bshd(tensor(x)[:, None], angles[tensor(pos)], turned, mscale=mscale)[:, 0]
        .float()
        .numpy()
    )


def megatron_mrope(case, x, pos):
    module = rotary_pos_embedding.MultimodalRotaryEmbedding(8, 1.0, rotary_base=case["settings"]["base"])
    angles = module(tensor(pos.T)[:, None], list(case["settings"]["sections"]))
    return rope_utils._apply_rotary_pos_emb_bshd(tensor(x)[:, None], angles)[:, 0].float().numpy()


# diffusers


def diffusers_rope(case, x, pos):
    linear, ntk = factors(case)
    turned = case["settings"]["layout"] == "interleaved"
    # Its factor multiplies the base as it is given.
    angles = diffusers.get_1d_rotary_pos_embed(
        8, pos, case["settings"]["base"], True, linear, ntk ** (8 / 6), repeat_interleave_real=turned
    )
    x = heads_first(x)
    return tokens_first(diffusers.apply_rotary_emb(x, angles, use_real_unbind_dim=-1 if turned else -2))


# Equinox: of slots alone, so that each token is rotated in a text of its own.


def equinox_rope(case, x, pos):
    if pos.max() >= LONGEST:
        return None
    module = equinox.nn.RotaryPositionalEmbedding(8, case["settings"]["base"], jnp.dtype(given.dtype))
    turn = jax.jit(lambda each, p: module(jnp.zeros((LONGEST, 8), given.dtype).at[p].set(each))[p])
    tokens = zip(jnp.asarray(x, given.dtype), pos, strict=True)
    return np.array([[turn(each, p) for each in token] for token, p in tokens], np.float32)


# KerasHub


def keras_rope(case, x, pos):
    settings, scaled = rule(case)
    extra = {"scaling_factor": scaled.get("factor", 1.0)}
    if scaled["name"] == "ntk":
        extra["rope_type"] = "dynamic"
    if scaled["name"] == "yarn":
        extra |= {"rope_type": "yarn", "beta_fast": scaled["fast"], "beta_slow": scaled["slow"]}
        extra["original_max_position_embeddings"] = scaled["original_len"]
    layer = keras_hub.layers.RotaryEmbedding(max_wavelength=settings["base"], dtype=given.dtype, **extra)
    return np.asarray(layer(jnp.asarray(x[None], given.dtype), positions=pos), np.float32)[0]


def keras_sinusoidal(case):
    layer = keras_hub.layers.SinePositionEncoding()
    x, pos = case["x"].astype(np.float32)[None], case["q_pos"].astype(np.float32)
    return case["x"] + np.asarray(layer(x, positions=pos))[0]


def keras_alibi(case):
    if not case["mask"]["causal"] or case["k_pos"].max() >= LONGEST:
        return None  # the key's index alone, and no positions
    scores = np.zeros((1, case["settings"]["num_heads"], 1, case["k_pos"].max() + 1), np.float32)
    return np.asarray(keras_hub.layers.AlibiBias()(scores))[0][..., case["k_pos"]]


# attention-gym


def score_mod(modify, case, shape):
    """Call a score_mod on zeros for all heads and pairs."""
    heads, i, j = (torch.arange(shape[0])[:, None, None], tensor(case["q_pos"])[:, None], tensor(case["k_pos"])[None])
    return modify(torch.zeros(()), None, heads, i, j)


def gym_alibi_bias(case):
    if not case["mask"]["causal"]:
        return None  # keys after the query would be favoured
    heads = case["settings"]["num_heads"]
    return score_mod(gym_alibi.generate_alibi_bias(heads), case, (heads,))


def gym_sandwich_bias(case):
    modify = gym_sandwich.generate_sandwich_bias(2, LONGEST, case["settings"]["width"])
    return score_mod(modify, case, (2,))


RULED = ("rope", "rope_interleaved", "rope_base", "rope_partial", "rope_linear", "rope_llama3", "rope_yarn")
DIFFUSERS = ("rope", "rope_interleaved", "rope_base", "rope_linear", "rope_ntk")
KERAS = ("rope", "rope_base", "rope_linear", "rope_ntk", "rope_yarn")
TUNE = {
    "RotaryPositionalEmbeddings": ("modules/position_embeddings.py", "interleaved", ("rope_interleaved", "rope_base")),
    "Llama3ScaledRoPE": ("models/llama3_1/_position_embeddings.py", "interleaved", ("rope_llama3",)),
    "Qwen2RotaryPositionalEmbeddings": (
        "models/qwen2/_positional_embeddings.py", "half_split", ("rope", "rope_base"),
    ),
    "Phi3RotaryPositionalEmbeddings": ("models/phi3/_position_embeddings.py", "half_split", ("rope", "rope_base")),
}  # fmt: skip
#: (package, implementation, {family: adapter}).
PEERS = [
    ("torchscale", "XPOS", {"xpos": torchscale_xpos}),
    *(("torchtune", name, each(families, tune(path, name, layout))) for name, (path, layout, families) in TUNE.items()),
    ("litgpt", "build_rope_cache", each(RULED, rotary(litgpt_rope))),
    ("megatron-core", "RotaryEmbedding, YarnRotaryEmbedding", each(RULED, rotary(megatron_rope))),
    ("megatron-core", "MultimodalRotaryEmbedding", {"mrope": rotary(megatron_mrope)}),
    ("diffusers", "get_1d_rotary_pos_embed", each(DIFFUSERS, rotary(diffusers_rope))),
    ("equinox", "RotaryPositionalEmbedding", each(("rope", "rope_base"), rotary(equinox_rope))),
    ("keras-hub", "RotaryEmbedding", each(KERAS, rotary(keras_rope))),
    ("keras-hub", "SinePositionEncoding", {"sinusoidal": keras_sinusoidal}),
    ("keras-hub", "AlibiBias", each(ALIBI, additive(keras_alibi))),
    ("attn-gym", "generate_alibi_bias", each(ALIBI, additive(gym_alibi_bias))),
    ("attn-gym", "generate_sandwich_bias", {"sandwich": additive(gym_sandwich_bias)}),
]
