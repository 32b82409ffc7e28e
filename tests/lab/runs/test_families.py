"""Families of transformers: what is read out of their configs, and which models are refused."""

import pathlib

import numpy as np
import pytest

from docs import keys as page_of_keys
from posx.encodings import spec_text
from posx.errors import ConfigError
from posx.lab.runs.families import FAMILIES, FOREIGN
from posx.lab.runs.family import FULL, LOCAL
from posx.lab.runs.keys import DECLARED

GEMMA = {"hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4, "max_position_embeddings": 128}


def read(name, **config):
    """Return a config under Llama's keys, as an import does."""
    FAMILIES[name].keys.check(config, FOREIGN)
    return FAMILIES[name].keys.read(config)


@pytest.mark.parametrize(
    ("name", "config", "problem"),
    [
        ("mpt", {"attn_config": {"clip_qkv": 6}}, "attn_config.clip_qkv=6, but posx has None"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi=False"),
        ("mpt", {"attn_config": {"kv_n_heads": 2}}, "attn_config.kv_n_heads=2: posx does not know this key of mpt"),
        ("mpt", {"attn_config": "alibi"}, "attn_config='alibi'"),
        ("mpt", {"no_bias": False}, "no_bias=False"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm=True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=True"),
        ("gpt_neox", {"attention_bias": False}, "attention_bias=False"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type='rmsnorm'"),
        ("mpt", {"attn_config": {"rope": True}}, "attn_config.rope=True"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("llama", {"is_causal": None}, "is_causal=None, but posx has True"),
        (
            "llama",
            {"quantization_config": {"bits": 4}},
            "quantization_config={'bits': 4}: it asks for quantised weights",
        ),
        ("llama", {"per_layer_config": {"1": {}}}, "per_layer_config"),
        ("llama", {"rms_norm_epsilon": 1e-3}, "does not know this key of llama. Did you mean 'rms_norm_eps'"),
        ("llama", {"query_pre_attn_scalar": 4}, "query_pre_attn_scalar=4: it is a key of gemma3_text, not of llama"),
        ("llama", {"logits_scaling": 2.0}, "logits_scaling=2.0: it asks for another architecture"),
        ("gpt2", {"n_embd": 32, "hidden_size": 64}, "n_embd=32 does not agree with hidden_size=64"),
        ("gpt_neox", {"rope_theta": 500.0}, "rope_theta=500.0 does not agree with rotary_emb_base=10000.0"),
        ("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25 does not agree"),
    ],
)
def test_keys_that_posx_lacks_are_refused_by_name(name, config, problem):
    with pytest.raises(ConfigError) as caught:
        read(name, **config)
    assert problem in str(caught.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_declared_key_has_one_kind(name):
    """The keys that transformers declares, and those of all its configs. posx needs their defaults."""
    keys = FAMILIES[name].keys
    declared = {**DECLARED[""], **DECLARED[name]}
    assert [key for key in declared if not keys.kind(key)] == []
    assert {key: value for key, value in DECLARED[name].items() if key in keys.needed} == {
        key: value for key, value in keys.needed.items() if key in DECLARED[name]
    }
    assert not {*keys.irrelevant, *keys.needed, *keys.repeats} & keys.reads.keys()
    read(name, **{key: value for key, value in declared.items() if value is not None})


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_of_other_families_are_refused(name):
    """They ask for nothing if they are null or false. A key that no family has is refused as null too."""
    keys = FAMILIES[name].keys
    others = {key for key in FOREIGN if "." not in key} - keys.kinds.keys()
    assert len(others) > 10
    for key in (*others, *(key for key, kind in keys.kinds.items() if kind == "refused")):
        with pytest.raises(ConfigError, match=f"^{key}=7: it "):
            read(name, **{key: 7})
        assert read(name, **{key: None}) == read(name)
    with pytest.raises(ConfigError, match="does not know this key"):
        read(name, colour=None)


def test_absent_keys_have_the_defaults_of_transformers():
    """As `LlamaConfig` and the others declare them, not values that fit."""
    qwen, mistral, llama = read("qwen3"), read("mistral"), read("llama")
    assert (qwen["head_dim"], qwen["num_key_value_heads"], qwen["intermediate_size"]) == (128, 32, 22016)
    assert (mistral["num_key_value_heads"], mistral["sliding_window"]) == (8, 4096)
    assert (llama["num_key_value_heads"], llama["max_position_embeddings"]) == (None, 2048)
    assert read("mistral", num_key_value_heads=None)["num_key_value_heads"] is None
    tied = {name for name in FAMILIES if read(name)["tie_word_embeddings"]}
    assert tied == {"gemma3_text", "gpt2", "bloom", "mpt"}


def test_gemma_reads_older_and_newer_keys_of_rope():
    """Local layers have a base of their own, and the scaling is that of full layers alone."""
    family = FAMILIES["gemma3_text"]
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = read("gemma3_text", **GEMMA, rope_local_base_freq=1e3, rope_theta=1e5, rope_scaling=scaling)
    encodings, windows = family.layers(config)
    assert windows == [4096] * 5 + [None, 4096]
    assert [spec_text(rope) for rope in encodings[4:6]] == [
        "rope(base=1000)",
        "rope(base=100000, frequencies=linear(factor=8))",
    ]
    nested = {FULL: {"rope_theta": 1e5, **scaling}, LOCAL: {"rope_theta": 1e3}}
    newer = read("gemma3_text", **GEMMA, rope_parameters=nested)
    assert family.layers(newer) == (encodings, windows)
    alone = read("gemma3_text", **GEMMA, rope_parameters={LOCAL: {"rope_theta": 1e3}}, rope_theta=1e5)
    assert [spec_text(rope) for rope in family.layers(alone)[0][4:6]] == ["rope(base=1000)", "rope(base=100000)"]
    with pytest.raises(ConfigError, match=r"rope_parameters\.rope_theta=10"):
        family.layers(read("gemma3_text", **GEMMA, rope_parameters={"rope_theta": 10.0}))


def test_ropes_of_layer_types_need_a_family_that_has_them():
    nested = {FULL: {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(ConfigError, match="layer type 'full_attention'"):
        FAMILIES["llama"].layers(read("llama", **GEMMA, rope_parameters=nested))


def test_activations_are_those_that_posx_has():
    gpt2, neox = FAMILIES["gpt2"], FAMILIES["gpt_neox"]
    assert gpt2.model(read("gpt2"))["mlp"] == "gelu" and neox.model(read("gpt_neox"))["mlp"] == "gelu_exact"
    assert gpt2.model(read("gpt2", activation_function="gelu"))["mlp"] == "gelu_exact"
    with pytest.raises(ConfigError, match="hidden_act='relu'"):
        neox.model(read("gpt_neox", hidden_act="relu"))
    with pytest.raises(ConfigError, match="activation_function='relu'"):
        gpt2.model(read("gpt2", activation_function="relu"))


def test_layer_types_are_one_for_each_layer():
    for name, kinds in (("qwen2", [FULL] * 2), ("gemma3_text", [FULL] * 5), ("qwen3", [FULL, LOCAL] * 4)):
        with pytest.raises(ConfigError, match="entries, but there are 7 layers"):
            FAMILIES[name].layers(read(name, **GEMMA, layer_types=kinds))
    with pytest.raises(ConfigError, match="'sliding_attention', but this family has no window"):
        FAMILIES["qwen2"].layers(read("qwen2", **GEMMA, layer_types=[LOCAL] * 7))


def test_pythia_rotates_a_quarter_of_its_channels():
    config = read("gpt_neox", **GEMMA, rotary_emb_base=5000, rope_theta=5000, partial_rotary_factor=0.25)
    (rope, *_), _ = FAMILIES["gpt_neox"].layers(config)
    assert (rope.base, rope.rotary_dim) == (5000.0, 4)
    for parameters in ({"rope_theta": 100.0, "partial_rotary_factor": 0.5}, {"rope_theta": 100.0}):
        (rope, *_), _ = FAMILIES["gpt_neox"].layers(read("gpt_neox", **GEMMA, rope_parameters=parameters))
        assert (rope.base, rope.rotary_dim) == (100.0, 16 * parameters.get("partial_rotary_factor", 0.25))


@pytest.mark.parametrize("name", FAMILIES)
def test_arrays_return_to_their_files(name):
    """Reading undoes writing; a family with fused arrays is not written."""
    family, rng = FAMILIES[name], np.random.default_rng(0)
    config = family.keys.read({"hidden_size": 64, "head_dim": 16, "tie_word_embeddings": True})
    for array in ("embedding", "final_norm", "layers.layer_01.attention.query_norm", "layers.layer_00.mlp.up"):
        theirs = rng.standard_normal((6, 4) if array in ("embedding", "layers.layer_00.mlp.up") else 4)
        if family.fused:
            with pytest.raises(ConfigError, match="not exported"):
                family.theirs(array, theirs, config)
            continue
        ours = family.ours(array, theirs.astype(np.float32), config, 4)
        np.testing.assert_allclose(family.theirs(array, ours, config), theirs, rtol=1e-5, atol=1e-6)


#: Configs that are published with models, but for sizes: keys of older and newer versions of transformers.
PUBLISHED = [
    {"model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None,  # SmolLM2
     "rope_theta": 100000, "pretraining_tp": 1, "torch_dtype": "bfloat16", "transformers.js_config": {"dtype": "q4"}},
    {"model_type": "mistral", "sliding_window": None, "head_dim": None, "attention_bias": False},
    {"model_type": "qwen2", "use_mrope": False, "use_sliding_window": False, "sliding_window": 32768,  # Qwen2.5
     "max_window_layers": 24, "rope_theta": 1000000.0},
    {"model_type": "qwen3", "head_dim": 128, "attention_bias": False, "sliding_window": None, "rope_scaling": None},
    {"model_type": "gemma3_text", "cache_implementation": "hybrid", "eos_token_id": [1, 106], "rope_scaling": None,
     "sliding_window_pattern": 6, "rope_local_base_freq": 10000, "final_logit_softcapping": None},
    {"model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True,  # Pythia
     "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "rope_scaling": None},
    {"model_type": "gpt2", "n_ctx": 1024, "summary_type": "cls_index", "task_specific_params": {}, "_num_labels": 1},
    {"model_type": "bloom", "n_embed": 1024, "n_inner": None, "offset_alibi": 100, "skip_bias_add_qkv": False,
     "masked_softmax_fusion": True, "unk_token_id": 0, "attention_softmax_in_fp32": True, "seq_length": 2048},
    {"model_type": "mpt", "init_config": {"init_std": 0.02}, "tokenizer_name": "EleutherAI/gpt-neox-20b", "verbose": 0,
     "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"}, "logit_scale": None,
     "attn_config": {"alibi": True, "attn_impl": "torch", "clip_qkv": None, "model_type": ""}},
]  # fmt: skip


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda config: config["model_type"])
def test_published_configs_are_read(config):
    found = read(config["model_type"], **config)
    family = FAMILIES[config["model_type"]]
    encodings, windows = family.layers(found)
    assert len(encodings) == len(windows) == found["num_hidden_layers"]


def test_the_page_lists_the_keys_of_each_family():
    """`python -m docs.keys` prints its tables."""
    page = pathlib.Path(page_of_keys.__file__).parent / "guides" / "keys.md"
    assert page_of_keys.tables() in page.read_text(encoding="utf-8")
