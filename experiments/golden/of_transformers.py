"""Adapters to Hugging Face transformers: its own rotations and biases, at the settings of a case."""

import types

import numpy as np
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.gpt_neox import modeling_gpt_neox as neox
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt_alibi
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen
from transformers.models.t5 import modeling_t5 as t5
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding
from transformers.models.xlnet import modeling_xlnet as xlnet

from experiments.golden.layouts import (
    ALIBI,
    LONGEST,
    additive,
    by_slot,
    each,
    heads_first,
    rotary,
    rule,
    tensor,
    tokens_first,
)


def rope_parameters(case):
    """Return the settings of a case by their names in transformers, and a length that the text must have."""
    settings, scaled = rule(case)
    named = {
        "geometric": {"rope_type": "default"},
        "dynamic_ntk": {"rope_type": "dynamic"},
        "yarn": {"rope_type": "yarn", "beta_fast": scaled.get("fast"), "beta_slow": scaled.get("slow")},
        "longrope": {
            "rope_type": "longrope",
            "short_factor": scaled.get("short_factors"),
            "long_factor": scaled.get("long_factors"),
        },
    }.get(scaled["name"], {"rope_type": scaled["name"]})
    same = {name: scaled[name] for name in ("factor", "low_freq_factor", "high_freq_factor") if name in scaled}
    if "original_len" in scaled:
        same["original_max_position_embeddings"] = scaled["original_len"]
    return {"rope_theta": settings["base"]} | named | same, scaled.get("length")


def llama_rope(case, x, pos):
    parameters, length = rope_parameters(case)
    if length and case["k_pos"].max() >= length:
        return None  # the rule depends on the length of the text, and the vectors are of another length
    config = llama.LlamaConfig(hidden_size=16, num_attention_heads=2)
    config.max_position_embeddings = parameters.get("original_max_position_embeddings", 64)
    config.rope_parameters = parameters
    # A last position stands for the rest of a text of this length.
    asked = torch.from_numpy(np.append(pos, length - 1) if length else pos)[None]
    cos, sin = (part[:, : len(pos)] for part in llama.LlamaRotaryEmbedding(config)(heads_first(x), asked))
    return tokens_first(llama.apply_rotary_pos_emb(heads_first(x), heads_first(x), cos, sin)[0])


def neox_rope(case, x, pos):
    config = neox.GPTNeoXConfig(hidden_size=16, num_attention_heads=2)
    config.rope_parameters = {"rope_type": "default", "rope_theta": case["settings"]["base"]}
    config.rope_parameters["partial_rotary_factor"] = case["settings"]["rotary_dim"] / 8
    cos, sin = neox.GPTNeoXRotaryEmbedding(config)(heads_first(x), torch.from_numpy(pos)[None])
    return tokens_first(neox.apply_rotary_pos_emb(heads_first(x), heads_first(x), cos, sin)[0])


def gptj_rope(case, x, pos):
    if pos.max() >= LONGEST:
        return None  # a table of all positions
    sin, cos = gptj.create_sinusoidal_positions(LONGEST, 8)[torch.from_numpy(pos)].chunk(2, dim=-1)
    return gptj.apply_rotary_pos_emb(tensor(x)[None], sin[None], cos[None])[0].float().numpy()


def qwen_mrope(case, x, pos):
    config = qwen.Qwen2VLTextConfig(hidden_size=16, num_attention_heads=2)
    config.rope_parameters = {"rope_type": "default", "rope_theta": case["settings"]["base"]}
    config.rope_parameters["mrope_section"] = list(case["settings"]["sections"])
    cos, sin = qwen.Qwen2VLRotaryEmbedding(config)(heads_first(x), torch.from_numpy(pos.T.copy())[:, None])
    return tokens_first(qwen.apply_rotary_pos_emb(heads_first(x), heads_first(x), cos, sin)[0])


def key_bias(build):
    """Return an adapter from build(h, j) -> [h, 1, j]: ALiBi by the key's index, equal after a causal softmax."""

    def bias(case):
        # Only causal attention: keys after the query would be favoured.
        if not case["mask"]["causal"] or case["k_pos"].max() >= LONGEST:
            return None
        rows = build(case["settings"]["num_heads"], int(case["k_pos"].max() + 1))
        return rows.float().numpy()[..., case["k_pos"]]

    return additive(bias)


def t5_bias(case):
    settings = case["settings"]
    config = t5.T5Config(d_model=16, d_kv=8, num_heads=2, is_decoder=not settings["bidirectional"])
    config.relative_attention_num_buckets = settings["num_buckets"]
    config.relative_attention_max_distance = settings["max_distance"]
    module = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    module.relative_attention_bias.weight.copy_(torch.from_numpy(case["arrays"]["table"]))
    # T5 has no 1/sqrt(d), which `attend` has.
    return by_slot(case, lambda i, j: module.compute_bias(i, j, past_seen_tokens=j - i)[0])


def xglm_sinusoidal(case):
    if case["q_pos"].max() >= LONGEST:
        return None  # a table of all positions
    module = XGLMSinusoidalPositionalEmbedding(LONGEST, 16)
    # XGLM counts from 2, as fairseq does.
    return case["x"] + module(torch.from_numpy(case["q_pos"])[None] - module.offset)[0].numpy()


def gpt_oss_sinks(case):
    groups = case["q"].shape[1] // case["k"].shape[1]
    module = types.SimpleNamespace(sinks=tensor(case["arrays"]["z"]), num_key_value_groups=groups, training=False)
    hidden = torch.zeros(case["visible"].shape).masked_fill(~torch.from_numpy(case["visible"]), -1e30)[None, None]
    parts = (heads_first(case[name]) for name in "qkv")
    return gpt_oss.eager_attention_forward(module, *parts, hidden, 8**-0.5)[0][0].numpy()


def llama4_scale(case):
    """Run the whole layer: it has no function for the scale, and takes positions from the slots alone."""
    if len(case["q"]) < len(case["k"]) or case["k_pos"].max() > 100:
        return None
    settings, (t, groups) = case["settings"], case["k"].shape[:2]
    config = llama4.Llama4TextConfig(
        hidden_size=48, num_attention_heads=2, num_key_value_heads=groups, head_dim=8, num_hidden_layers=1,
        no_rope_layers=[0], attn_temperature_tuning=True, floor_scale=settings["floor_scale"],
        attn_scale=settings["attn_scale"], attn_implementation="eager",
    )  # fmt: skip
    module = llama4.Llama4TextAttention(config, 0).eval()
    hidden = np.concatenate([case[name].reshape(t, -1) for name in "qkv"] + [np.zeros((t, 16 * (2 - groups)))], axis=1)
    start = 0
    for linear, width in ((module.q_proj, 16), (module.k_proj, 8 * groups), (module.v_proj, 8 * groups)):
        linear.weight.copy_(torch.eye(48)[start : start + width])
        start += width
    module.o_proj.weight.copy_(torch.eye(48)[:, :16])
    mask = torch.zeros(t, t).masked_fill(~torch.from_numpy(case["visible"]), -1e30)[None, None]
    outputs = module(torch.from_numpy(hidden).float()[None], None, mask)[0]
    return outputs[0, :, :16].reshape(t, 2, 8).numpy()


def xlnet_relative(case):
    if case["k_pos"].max() >= LONGEST:
        return None
    # XLNet reads distances from slots: a gap is filled with hidden tokens.
    spread = case["name"] == "far"
    at = case["k_pos"] if spread else np.arange(len(case["k"]))
    keys, queries = at.max() + 1, len(case["q"])
    config = xlnet.XLNetConfig(d_model=16, n_head=2, n_layer=1, d_inner=4, vocab_size=8)
    module = xlnet.XLNetRelativeAttention(config).eval()
    for name, array in (("r_w_bias", "u"), ("r_r_bias", "v")):
        getattr(module, name).copy_(torch.from_numpy(case["arrays"][array]))
    wave = xlnet.XLNetModel(config).relative_positional_encoding(queries, keys, bsz=1)
    rows = torch.einsum("ibh,hnd->ibnd", wave, torch.from_numpy(case["arrays"]["w_r"]).float())
    k, v = (np.zeros((keys, 2, 8)) for _ in "kv")
    for whole, name in ((k, "k"), (v, "v")):
        whole[at] = np.repeat(case[name], 2 // case[name].shape[1], axis=1)
    hidden = torch.ones(queries, keys)
    hidden[:, at] = 1 - torch.from_numpy(case["visible"]).float()
    q, k, v = (torch.from_numpy(x).float()[:, None] for x in (case["q"], k, v))
    return module.rel_attn_core(q, k, v, rows, attn_mask=hidden[:, :, None, None])[:, 0].numpy()


def bloom(heads, length):
    return bloom_alibi(torch.ones(1, length), heads, torch.float32)


def falcon(heads, length):
    return falcon_alibi(torch.ones(1, length, dtype=torch.int64), heads, torch.float32)


RULES = (
    "rope", "rope_base", "rope_linear", "rope_dynamic_ntk", "rope_yarn", "rope_llama3", "rope_longrope_short",
    "rope_longrope_long",
)  # fmt: skip
#: (package, implementation, {family: adapter}).
PEERS = [
    ("transformers", "Llama, six rope_types", each(RULES, rotary(llama_rope))),
    ("transformers", "GPT-NeoX, partial rotation", {"rope_partial": rotary(neox_rope)}),
    ("transformers", "GPT-J, interleaved", {"rope_interleaved": rotary(gptj_rope)}),
    ("transformers", "Qwen2-VL, M-RoPE", {"mrope": rotary(qwen_mrope)}),
    ("transformers", "BLOOM, build_alibi_tensor", each(ALIBI, key_bias(bloom))),
    ("transformers", "MPT, build_mpt_alibi_tensor", each(ALIBI, key_bias(mpt_alibi))),
    # Falcon adds before it divides by sqrt(d). Here the bias is added after that, as papers have it.
    ("transformers", "Falcon, build_alibi_tensor", each(ALIBI, key_bias(falcon))),
    ("transformers", "T5, compute_bias", {"t5": additive(t5_bias), "t5_bidirectional": additive(t5_bias)}),
    ("transformers", "XLNet, rel_attn_core", {"transformer_xl": xlnet_relative}),
    ("transformers", "XGLM, sinusoidal", {"sinusoidal_concatenated": xglm_sinusoidal}),
    ("transformers", "gpt-oss, sinks", {"learned_sinks": gpt_oss_sinks}),
    ("transformers", "Llama 4, attention temperature", {"llama4_temperature": llama4_scale}),
]
