"""Imports repeat transformers: each key alone and fifty random configurations, compared by their logits."""

import json
import random
import shutil

import jax
import numpy as np
import pytest

from posx.errors import ConfigError, PosxError
from posx.lab.runs.families import FAMILIES
from posx.lab.runs.family import FULL, LOCAL
from tests.lab.runs import declared, oracle

pytestmark = pytest.mark.peers

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 1e3}
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
#: Keys that act, one change at a time: {family: changes of its small config}. Every one is imported.
READ = {
    "llama": [
        {"rms_norm_eps": 0.3},
        {"num_key_value_heads": None},
        {"head_dim": 6},
        {"tie_word_embeddings": True},
        {"rope_theta": 50.0},
        {"rope_parameters": YARN, "rope_theta": 7.0},
        {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_parameters": {"rope_theta": 5.0}},
        {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 3.0}},
        {"rope_parameters": YARN, "original_max_position_embeddings": 64},
        {"rope_parameters": YARN | {"truncate": None, "original_max_position_embeddings": 40}},
        {"rope_parameters": LLAMA3, "original_max_position_embeddings": 8},
        {"rope_parameters": DYNAMIC, "max_position_embeddings": 8},
        {"rope_parameters": {"rope_type": "proportional"}, "partial_rotary_factor": 0.5},
    ],
    "mistral": [{"sliding_window": None}, {"sliding_window": 3, "num_key_value_heads": 4}],
    "qwen2": [{"head_dim": 6}, {"layer_types": [FULL], "sliding_window": 4, "max_window_layers": 0}],
    "qwen3": [{"head_dim": 8, "rope_theta": 100.0}],
    "gemma3_text": [
        {"query_pre_attn_scalar": 3},
        {"sliding_window": 3},
        {"sliding_window_pattern": 1},
        {"layer_types": [FULL, LOCAL]},
        {"rope_theta": 30.0},
        {"rope_local_base_freq": 30.0},
        {"rope_scaling": LINEAR},
        {"rope_parameters": {FULL: LINEAR, LOCAL: None}, "rope_local_base_freq": 9.0},
        {"rope_parameters": {FULL: YARN}, "rope_scaling": {"factor": 2.0}, "rope_theta": 9.0},
        {"tie_word_embeddings": False},
    ],
    "gpt_neox": [
        {"rotary_pct": 0.75, "rotary_emb_base": 50},
        {"rotary_pct": 0.75, "partial_rotary_factor": 0.75, "rope_theta": 10000},
        {"rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.5}, "rotary_pct": 1.0},
        {"rope_scaling": LINEAR, "rotary_pct": 1.0},
        {"use_parallel_residual": False},
        {"layer_norm_eps": 0.3},
        {"hidden_act": "gelu_new"},
        {"tie_word_embeddings": True},
    ],
    "gpt2": [
        {"n_inner": 24},
        {"layer_norm_epsilon": 0.3},
        {"activation_function": "gelu"},
        {"tie_word_embeddings": False},
        {"n_embd": 32, "hidden_size": 32, "num_attention_heads": 4},
    ],
    "bloom": [{"layer_norm_epsilon": 0.3}, {"tie_word_embeddings": False}],
    "mpt": [{"layer_norm_epsilon": 0.3}, {"attn_config": {"attn_pdrop": 0, "attn_impl": "triton", "clip_qkv": None}}],
}
#: Changes that posx may refuse, but may not read in another way than transformers.
REFUSED = {
    "llama": [
        {"use_parallel_residual": True}, {"sliding_window": 4}, {"layer_types": [LOCAL], "sliding_window": 4},
        {"rope_parameters": {FULL: LINEAR}}, {"partial_rotary_factor": 0.5}, {"is_causal": False},
        {"rope_parameters": {"rope_type": "default", "factor": 4.0}}, {"attention_bias": True}, {"mlp_bias": True},
        {"hidden_act": "gelu"}, {"query_pre_attn_scalar": 3}, {"residual_multiplier": 0.5}, {"rotary_emb_base": 9.0},
        {"per_layer_config": {"0": {"intermediate_size": 24}}},
    ],
    "mistral": [{"layer_types": [FULL]}, {"use_sliding_window": False, "max_window_layers": 3}],
    "qwen2": [{"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, {"attention_bias": True}],
    "qwen3": [{"query_pre_attn_scalar": 4}, {"layer_types": [LOCAL]}],
    "gemma3_text": [
        {"partial_rotary_factor": 0.5}, {"rope_parameters": LINEAR}, {"original_max_position_embeddings": 4},
        {"rope_parameters": {FULL: YARN | {"truncate": False}}}, {"hidden_act": "silu"},
        {"final_logit_softcapping": 2.0},
        {"attn_logit_softcapping": 2.0}, {"use_bidirectional_attention": True},
        {"rope_scaling": {"type": "linear", "factor": 3.0}},
    ],
    "gpt_neox": [
        {"rope_theta": 50.0}, {"partial_rotary_factor": 1.0}, {"head_dim": 4}, {"rms_norm_eps": 0.3},
        {"num_key_value_heads": 2}, {"attention_bias": False},
    ],
    "gpt2": [
        {"intermediate_size": 24}, {"rms_norm_eps": 0.3}, {"hidden_size": 64}, {"num_key_value_heads": 2},
        {"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}, {"add_cross_attention": True},
    ],
    "bloom": [
        {"intermediate_size": 48}, {"apply_residual_connection_post_layernorm": True}, {"head_dim": 4}, {"n_inner": 48},
        {"n_head": 2}, {"rope_theta": 5.0}, {"alibi": False}, {"slow_but_exact": True, "pretraining_tp": 2},
    ],
    "mpt": [
        {"attn_config": {"clip_qkv": 0.1}}, {"attn_config": {"softmax_scale": 0.1}}, {"attn_config": {"alibi": False}},
        {"attn_config": {"alibi_bias_max": 4}}, {"expansion_ratio": 2}, {"logit_scale": 2.0}, {"no_bias": False},
        {"intermediate_size": 48}, {"attn_config": {"qk_ln": True}}, {"attn_config": {"kv_n_heads": 2}},
    ],
}  # fmt: skip
#: Values that irrelevant keys have in real configs, or none: keys that are not here are set to 1.
VALUES = {
    "architectures": ["Other"], "attn_implementation": "eager", "_attn_implementation": "eager", "auto_map": {},
    "dtype": "float32", "torch_dtype": "bfloat16", "init_device": "meta", "id2label": {"0": "no"},
    "label2id": {"no": 0}, "problem_type": "regression", "use_cache": True, "output_attentions": True,
    "output_hidden_states": True, "return_dict": True, "is_decoder": True, "gradient_checkpointing": True,
    "transformers_version": "4.1", "summary_type": "first", "summary_activation": "tanh", "summary_use_proj": False,
    "summary_proj_to_labels": False, "learned_pos_emb": False, "reorder_and_upcast_attn": False,
    "embedding_fraction": 0.5, "pretraining_tp": 2, "layer_types": None, "_experts_implementation": "eager",
    "experts_implementation": "eager", "task_specific_params": {"a": 1}, "bad_words_ids": [[1]],
    "tokenizer_class": "Other", "torchscript": True, "init_config": {"emb_init_std": 1},
    "attn_config.attn_impl": "torch", "sliding_window": 4, "attn_config.model_type": "",
    "attn_config.tie_word_embeddings": True, "loss_type": "ForCausalLM", "_num_labels": 3,
    "cache_implementation": "hybrid", "num_labels": 1, "initializer_range": 0.5,
    "_attn_implementation_autoset": True,
}  # fmt: skip


def names_in(change):
    """Yield the keys of a change, and those within them."""
    for key, value in change.items():
        yield key
        yield from names_in(value) if isinstance(value, dict) else ()


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_that_are_read_act_as_in_transformers(tmp_path, name):
    """Each change of a small config gives the logits of transformers."""
    base = oracle.write(tmp_path / "base", name, oracle.BASES[name])
    close(oracle.ours(base.folder), base.logits)
    for number, change in enumerate(READ[name]):
        model = oracle.write(tmp_path / str(number), name, oracle.BASES[name] | change)
        assert model.logits is not None, change
        np.testing.assert_allclose(oracle.ours(model.folder), model.logits, atol=2e-4, rtol=2e-4, err_msg=str(change))


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_of_no_effect_change_nothing(tmp_path, name):
    """All irrelevant keys at once: the logits of transformers stay, and so do the settings and arrays of posx."""
    keys = FAMILIES[name].keys
    given: dict = {}
    for key in (key for key, kind in keys.kinds.items() if kind == "irrelevant"):
        outer, _, inner = key.partition(".") if key.startswith("attn_config") else (key, "", "")
        value = VALUES.get(key, 1)
        given |= {outer: {**given.get(outer, {}), inner: value}} if inner else {key: value}
    from safetensors.torch import load_file

    base = oracle.write(tmp_path / "base", name, oracle.BASES[name])
    held = load_file(base.folder / "model.safetensors")
    model = oracle.write(tmp_path / "given", name, given | oracle.BASES[name], lambda _: held)
    np.testing.assert_allclose(model.logits, base.logits, atol=1e-5, rtol=1e-5)  # another kernel of attention
    (one, params), (other, same) = oracle.imported(base.folder), oracle.imported(model.folder)
    assert one.model == other.model and one.layers == other.layers
    jax.tree.map(np.testing.assert_array_equal, params, same)


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_that_are_not_read_are_never_acted_upon(tmp_path, name):
    """Each is refused by its name, or transformers ignores it too."""
    for number, change in enumerate(REFUSED[name]):
        model = oracle.write(tmp_path / str(number), name, oracle.BASES[name] | change)
        if model.logits is None:
            continue
        try:
            oracle.imported(model.folder)
        except PosxError as error:
            assert any(key in str(error) for key in names_in(change)), (change, str(error))
        else:
            close(oracle.ours(model.folder), model.logits)


def test_files_are_those_that_transformers_reads(tmp_path):
    """Shards of another model beside `model.safetensors`, and other safetensors, are not read."""
    model, other = (oracle.write(tmp_path / str(n), "llama", oracle.BASES["llama"], seed=n) for n in range(2))
    shards, folder = "model-00001-of-00001.safetensors", model.folder
    for name in (shards, "consolidated.safetensors", "adapter_model.safetensors"):
        shutil.copy(other.folder / "model.safetensors", folder / name)
    index = {"metadata": {}, "weight_map": {"model.norm.weight": shards}}  # all arrays of the file are read
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    close(oracle.theirs(folder), model.logits)
    close(oracle.ours(folder), model.logits)
    (folder / "model.safetensors").unlink()
    close(oracle.theirs(folder), other.logits)
    close(oracle.ours(folder), other.logits)


def test_declared_keys_are_those_of_the_library():
    """`python -m tests.lab.runs.declared` writes them."""
    assert declared.PLACE.read_text(encoding="utf-8") == declared.text()


def draw(rng):
    """Return (family, config, a function of the arrays of its files) at random."""
    name = rng.choice(list(oracle.BASES))
    config, reads = dict(oracle.BASES[name]), FAMILIES[name].keys.reads
    heads, width = rng.choice([2, 4]), rng.choice([8, 16])
    written = {meaning: key for key, meaning in reads.items() if key in config}
    config |= {written["num_attention_heads"]: heads, written["hidden_size"]: heads * width}
    config[written["num_hidden_layers"]] = 2 if name == "gemma3_text" else rng.choice([1, 1, 2])
    eps = next(key for key, meaning in reads.items() if meaning == "rms_norm_eps")
    config |= rng.choice([{}, {eps: 1e-6}, {eps: 1e-3}])
    config |= rng.choice([{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
    if "num_key_value_heads" in config:
        config["num_key_value_heads"] = rng.choice([1, heads])
    if act := {"gpt_neox": "hidden_act", "gpt2": "activation_function"}.get(name):
        config |= rng.choice([{}, {act: "gelu"}, {act: "gelu_new"}, {act: "gelu_fast"}])
    if name == "gpt_neox":
        share = rng.choice([0.25, 0.5, 1.0])
        config |= rng.choice([{"rotary_pct": share}, {"rotary_pct": share, "partial_rotary_factor": share}])
        config |= rng.choice([{}, {"use_parallel_residual": False}])
        config |= rng.choice([{}, {"rotary_emb_base": 300.0}, {"rotary_emb_base": 300, "rope_theta": 300.0}])
        width = int(width * share)
    if name == "gemma3_text":
        config |= draw_gemma(rng, config["head_dim"])
    elif "rope_parameters" in reads:
        config |= draw_rope(rng, config.get("head_dim") or width, "rope_theta" in reads)
    return name, config, rng.choice([dict, another_head])


def draw_rule(rng, width):
    """Return a dictionary of RoPE's parameters for `width` rotated channels."""
    longer = {"short_factor": [1.0 + n for n in range(width // 2)], "long_factor": [2.0 + n for n in range(width // 2)]}
    rule = rng.choice([{}, LINEAR, DYNAMIC, LLAMA3, YARN, {"rope_type": "longrope", **longer}])
    return {key: value for key, value in rule.items() if key != "rope_theta"}


def draw_rope(rng, width, outer):
    """Return keys of RoPE at one of their places. outer: whether the family reads rope_theta at the top."""
    rule, found = draw_rule(rng, width), {"max_position_embeddings": rng.choice([8, 32])}
    if rule.get("rope_type") in ("yarn", "llama3", "longrope"):
        found |= rng.choice([{}, *({"original_max_position_embeddings": n} for n in (16, 64))])
    if rule and rng.random() < 0.3:
        rule["type"] = rule.pop("rope_type")
    rule |= rng.choice([{}, {"rope_theta": 20.0}, {"rope_theta": 5e4}])
    found |= {"rope_theta": 700.0} if outer and rng.random() < 0.5 else {}
    place, other = rng.sample(["rope_scaling", "rope_parameters"], 2)
    return {**found, other: None, place: rule or None}


def draw_gemma(rng, width):
    """Return Gemma's keys of RoPE, some at their old places, and of layers."""
    found = dict(rng.choice([{}, {"layer_types": [LOCAL, FULL]}, {"layer_types": [FULL, FULL]}]))
    found |= {key: rng.choice([20.0, 3e4]) for key in ("rope_theta", "rope_local_base_freq") if rng.random() < 0.5}
    full = draw_rule(rng, width) | rng.choice([{}, {"rope_theta": 90.0}])
    if rng.random() < 0.5:
        found["rope_parameters"] = {FULL: full or None} | rng.choice([{}, {LOCAL: {"rope_theta": 8.0}}, {LOCAL: None}])
    elif rng.random() < 0.5:
        found["rope_scaling"] = LINEAR
    return found | {"query_pre_attn_scalar": rng.choice([4, 16, 256]), "sliding_window": rng.choice([3, 30])}


def another_head(arrays):
    """Return arrays with a matrix of outputs of its own, whether the config says so or not."""
    import torch

    embedding = next(
        array
        for name, array in arrays.items()
        if name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight"))
    )
    head = "embed_out.weight" if any(name.startswith("gpt_neox") for name in arrays) else "lm_head.weight"
    return arrays | {head: torch.randn_like(embedding)}


@pytest.mark.parametrize("seed", range(50))
def test_random_configurations_have_the_logits_of_transformers(tmp_path, seed):
    name, config, arrays = draw(random.Random(seed))
    model = oracle.write(tmp_path / "hf", name, config, arrays, seed)
    assert model.logits is not None, config
    try:
        close(oracle.ours(model.folder), model.logits)
    except ConfigError as error:
        raise AssertionError(f"{name} {json.dumps(config)}") from error
