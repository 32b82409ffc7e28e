"""Adapters to x-transformers and rotary-embedding-torch: interleaved, with factors for the linear and NTK rules."""

import numpy as np
import torch
from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb
from x_transformers import x_transformers

from experiments.golden.layouts import (
    ALIBI,
    additive,
    attend,
    by_slot,
    each,
    factors,
    rotary,
    rotated,
    row,
    tensor,
    tokens_first,
)


def x_rope(case, x, pos):
    linear, ntk = factors(case)
    module = x_transformers.RotaryEmbedding(
        case["settings"]["rotary_dim"],
        base=case["settings"]["base"],
        interpolation_factor=linear,
        base_rescale_factor=ntk,
    )
    angles, scale = module(tensor(pos))
    return tokens_first(x_transformers.apply_rotary_pos_emb(rotated(case, x), angles, scale))


def x_xpos(case):
    module = x_transformers.RotaryEmbedding(8, use_xpos=True, scale_base=case["settings"]["scale_base"])
    # Queries read the last rows of the angles of all keys, as the library's attention does.
    angles, scale = module(tensor(case["k_pos"]))
    q, k = (rotated(case, case[name]) for name in "qk")
    q = x_transformers.apply_rotary_pos_emb(q, angles, scale)
    return attend(case, tokens_first(q), tokens_first(x_transformers.apply_rotary_pos_emb(k, angles, scale**-1)))


def x_alibi(case):
    module = x_transformers.AlibiPositionalBias(case["settings"]["num_heads"])
    return module.forward_custom_pos(tensor(case["q_pos"]), tensor(case["k_pos"]))


def x_alibi_by_slot(case):
    module = x_transformers.AlibiPositionalBias(case["settings"]["num_heads"])
    return by_slot(case, module)


def x_t5(case):
    settings = case["settings"]
    # The scale is the library's sqrt(d), here 1.
    module = x_transformers.RelativePositionBias(
        1.0, not settings["bidirectional"], settings["num_buckets"], settings["max_distance"], heads=2
    )
    module.relative_attention_bias.weight.copy_(tensor(case["arrays"]["table"]))
    return by_slot(case, module)


def x_fox(case):
    module = x_transformers.DataDependentAlibi(16, 2)
    module.to_forget_gates[0].weight.copy_(tensor(case["arrays"]["w"].T))
    module.to_forget_gates[0].bias.copy_(tensor(case["arrays"]["b"]))
    return module(tensor(case["x"])[None])[0, :, -len(case["q"]) :]


def x_cope(case):
    module = x_transformers.CoPE(8, 2, case["settings"]["num_positions"])
    module.pos_emb.copy_(tensor(case["arrays"]["table"]))
    k = np.repeat(case["k"], 2 // case["k"].shape[1], axis=1)
    q, k = (tensor(x).transpose(0, 1)[None] for x in (case["q"], k))
    logits = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~torch.from_numpy(case["visible"]), -1e30)
    # The library does not divide q . e by sqrt(d), as in the paper's listing.
    return module(q, logits)[0] / 8**0.5


def lucid(case):
    linear, ntk = factors(case)
    xpos = case["settings"]["name"] == "xpos"
    settings = case["settings"]["rope"] if xpos else case["settings"]
    return RotaryEmbedding(
        settings["rotary_dim"], theta=settings["base"], interpolate_factor=linear, theta_rescale_factor=ntk,
        use_xpos=xpos, xpos_scale_base=case["settings"].get("scale_base", 512),
    )  # fmt: skip


def lucid_positions(case, x, pos):
    # `forward` takes positions that are divided by the factor already.
    angles = lucid(case)(tensor(pos) / factors(case)[0])
    return tokens_first(apply_rotary_emb(angles, rotated(case, x)))


def lucid_offset(case, x, pos):
    if pos.tolist() != list(range(pos[0], pos[0] + len(pos))):
        return None
    return tokens_first(lucid(case).rotate_queries_or_keys(rotated(case, x), offset=int(pos[0])))


def lucid_cached(case):
    if not row(case):
        return None
    q, k = lucid(case).rotate_queries_with_cached_keys(*(rotated(case, case[name]) for name in "qk"))
    return attend(case, tokens_first(q), tokens_first(k))


def lucid_whole(case):
    if not row(case) or len(case["q"]) < len(case["k"]):
        return None
    q, k = (rotated(case, case[name]) for name in "qk")
    q, k = lucid(case).rotate_queries_and_keys(q, k)
    return attend(case, tokens_first(q), tokens_first(k))


FAMILIES = ("rope_interleaved", "rope_base", "rope_linear", "rope_ntk", "rope_partial")
#: (package, implementation, {family: adapter}).
PEERS = [
    ("x-transformers", "RotaryEmbedding", each(FAMILIES, rotary(x_rope))),
    ("x-transformers", "RotaryEmbedding, use_xpos", {"xpos": x_xpos}),
    ("x-transformers", "AlibiPositionalBias, forward_custom_pos", each(ALIBI, additive(x_alibi))),
    ("x-transformers", "AlibiPositionalBias, forward", each(ALIBI, additive(x_alibi_by_slot))),
    ("x-transformers", "RelativePositionBias", each(("t5", "t5_bidirectional"), additive(x_t5))),
    ("x-transformers", "DataDependentAlibi", {"fox": additive(x_fox)}),
    ("x-transformers", "CoPE", {"cope": additive(x_cope)}),
    ("rotary-embedding-torch", "forward, apply_rotary_emb", each(FAMILIES, rotary(lucid_positions))),
    ("rotary-embedding-torch", "rotate_queries_or_keys", each(FAMILIES, rotary(lucid_offset))),
    ("rotary-embedding-torch", "rotate_queries_with_cached_keys", each((*FAMILIES, "xpos"), lucid_cached)),
    ("rotary-embedding-torch", "rotate_queries_and_keys, xPos", {"xpos": lucid_whole}),
]
