"""Families of transformers: what is read out of their configs, and which models are refused."""

import numpy as np
import pytest

from posx.encodings import spec_text
from posx.errors import ConfigError
from posx.runs.families import FAMILIES, FULL, LOCAL, mismatch

GEMMA = {"hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4, "max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("name", "config", "problem"),
    [
        ("mpt", {"attn_config": {"clip_qkv": 6}}, "attn_config.clip_qkv=6, but posx has None"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi=False"),
        ("mpt", {"no_bias": False}, "no_bias=False"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm=True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=True"),
        ("gpt_neox", {"attention_bias": False}, "attention_bias=False"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type='rmsnorm'"),
        ("mpt", {"attn_config": {"rope": True}}, "attn_config.rope=True"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ],
)
def test_other_architectures_are_named(name, config, problem):
    assert problem in mismatch(FAMILIES[name].needed, config)
    assert mismatch(FAMILIES[name].needed, {}) == ""
    assert mismatch(FAMILIES[name].needed, {"attention_bias": None} if name != "gpt_neox" else {}) == ""


def test_older_gemma_configs_have_two_ropes():
    """Local layers have a base of their own, and the scaling is that of full layers alone."""
    family = FAMILIES["gemma3_text"]
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = family.read(GEMMA | {"rope_local_base_freq": 1e3, "rope_theta": 1e5, "rope_scaling": scaling})
    encodings, windows = family.layers(config)
    assert windows == [4096] * 5 + [None, 4096]
    assert [spec_text(rope) for rope in encodings[4:6]] == [
        "rope(base=1000)",
        "rope(base=100000, frequencies=linear(factor=8))",
    ]
    newer = family.read(GEMMA | {"rope_parameters": {FULL: {"rope_theta": 1e5, **scaling}, LOCAL: {"rope_theta": 1e3}}})
    assert family.layers(newer) == (encodings, windows)
    with pytest.raises(ConfigError, match="'full_attention' has no rope_parameters"):
        family.layers(newer | {"rope_parameters": {LOCAL: {"rope_theta": 1e3}}})


def test_activations_are_those_that_posx_has():
    gpt2, neox = FAMILIES["gpt2"], FAMILIES["gpt_neox"]
    assert gpt2.model(gpt2.read({}))["mlp"] == "gelu" and neox.model(neox.read({}))["mlp"] == "gelu_exact"
    assert gpt2.model({"activation_function": "gelu"})["mlp"] == "gelu_exact"
    with pytest.raises(ConfigError, match="hidden_act='relu'"):
        neox.model({"hidden_act": "relu"})


def test_layer_types_are_one_for_each_layer():
    for name, kinds in (("llama", [FULL] * 2), ("gemma3_text", [FULL] * 5), ("llama", [FULL, LOCAL] * 4)):
        with pytest.raises(ConfigError, match="entries, but there are 7 layers"):
            FAMILIES[name].layers(FAMILIES[name].read(GEMMA | {"layer_types": kinds}))


def test_pythia_rotates_a_quarter_of_its_channels():
    config = FAMILIES["gpt_neox"].read(GEMMA | {"rotary_emb_base": 5000})
    (rope, *_), _ = FAMILIES["gpt_neox"].layers(config)
    assert (rope.base, rope.rotary_dim) == (5000.0, 4)


@pytest.mark.parametrize("name", FAMILIES)
def test_arrays_return_to_their_files(name):
    """Reading undoes writing; a family with fused arrays is not written."""
    family, rng = FAMILIES[name], np.random.default_rng(0)
    config = family.read({"hidden_size": 64, "head_dim": 16, "tie_word_embeddings": True})
    for array in ("embedding", "final_norm", "layers.layer_01.attention.query_norm", "layers.layer_00.mlp.up"):
        theirs = rng.standard_normal((6, 4) if array in ("embedding", "layers.layer_00.mlp.up") else 4)
        if family.fused:
            with pytest.raises(ConfigError, match="not exported"):
                family.theirs(array, theirs, config)
            continue
        ours = family.ours(array, theirs.astype(np.float32), config, 4)
        np.testing.assert_allclose(family.theirs(array, ours, config), theirs, rtol=1e-5, atol=1e-6)
