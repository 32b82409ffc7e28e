"""The families of models that posx imports, as tables: their keys, their positions, the names of their arrays.

A new family is one entry of FAMILIES, if the settings of `ModelConfig` have its architecture.
"""

from __future__ import annotations

from collections.abc import Mapping

from posx.encodings import Encoding
from posx.encodings.alibi import Alibi
from posx.encodings.hugging_face import layer_ropes
from posx.encodings.learned import Learned
from posx.errors import ConfigError
from posx.lab.config import ModelConfig
from posx.lab.runs.family import FULL, LOCAL, PROJECTIONS, Family, Names
from posx.lab.runs.keys import Config, Keys


def _names(layer: str, places: Names, **ends: str) -> Names:
    """Return the names of a family: `places` are in each layer, `ends` are not."""
    return ends | {name: f"{layer}.{{n}}.{place}" for name, place in places.items()}


def _llama(**places: str) -> Names:
    """Return the names of Llama, with other or more places in a layer."""
    names = {f"attention.{name}": f"self_attn.{name[0]}_proj" for name in (*PROJECTIONS, "out")}
    names |= {f"attention.{name}_norm": f"self_attn.{name[0]}_norm" for name in ("query", "key")}
    names |= {f"mlp.{name}": f"mlp.{name}_proj" for name in ("up", "gate", "down")}
    names |= {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    ends = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "unembedding": "lm_head"}
    return _names("model.layers", names | places, **ends)


def _fused_places(qkv: str, out: str, up: str, down: str, first_norm: str, second_norm: str) -> Names:
    """Return the places in a layer that holds queries, keys and values in one array."""
    return {f"attention.{name}": qkv for name in PROJECTIONS} | {
        "attention.out": out, "mlp.up": up, "mlp.down": down, "attention_norm": first_norm, "mlp_norm": second_norm,
    }  # fmt: skip


def _same(keys: str) -> dict[str, str]:
    return {key: key for key in keys.split()}


def _gemma_ropes(config: Config) -> Mapping[str, Encoding]:
    """Return the RoPEs of full and local layers. Keys of older configs are those of full layers, but for one."""
    given = config.get("rope_parameters") or {}
    if flat := sorted(given.keys() - {FULL, LOCAL}):
        raise ConfigError(
            f"rope_parameters.{flat[0]}={given[flat[0]]!r}: transformers reads the keys of Gemma 3's RoPE only within "
            f"{FULL!r} and {LOCAL!r}. Move it there in config.json, or remove it."
        )
    nested = {kind: dict(given.get(kind) or {"rope_type": "default"}) for kind in (FULL, LOCAL)}
    nested[FULL] |= config.get("rope_scaling") or {}
    for kind, key, default in ((FULL, "rope_theta", 1e6), (LOCAL, "rope_local_base_freq", 1e4)):
        nested[kind].setdefault("rope_theta", default if config.get(key) is None else config[key])
    return {**layer_ropes({**config, "rope_parameters": nested, "rope_scaling": None, "rope_theta": None})}


_LLAMA = {
    "mlp": "swiglu", "norm": "rms", "biases": "none", "qk_norm": False, "parallel": False, "post_norm": False,
    "embedding_norm": False,
}  # fmt: skip
_GPT = _LLAMA | {"mlp": "gelu", "norm": "layer", "biases": "all"}
_ENDS = _same("vocab_size tie_word_embeddings bos_token_id eos_token_id")
_SIZES = _same("hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings")
_ROPE = _same("rope_parameters rope_scaling original_max_position_embeddings")
_ROPES = _ROPE | _same("rope_theta partial_rotary_factor")
_READ = _ENDS | _SIZES | _same("num_key_value_heads head_dim rms_norm_eps")
_EPS = {"layer_norm_epsilon": "rms_norm_eps"}
_HEADS = _same("num_hidden_layers num_attention_heads")
_SILU = {"hidden_act": "silu"}
_ATTENTION = {
    "alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "softmax_scale": None, "qk_ln": False, "qk_gn": False,
    "prefix_lm": False, "attn_type": "multihead_attention", "rope": False, "sliding_window_size": -1,
    "attn_uses_sequence_id": False,
}  # fmt: skip
_H = "transformer.h"
_GPT_ENDS = {"final_norm": "transformer.ln_f", "unembedding": "lm_head"}
#: Keys of every config, within MPT's.
_MPT_INNER = tuple(
    f"attn_config.{key}" for key in ("model_type", "tie_word_embeddings", "bos_token_id", "eos_token_id")
)
_QWEN = ("sliding_window", "max_window_layers")

_ALL = (
    Family(
        _llama(),
        _LLAMA,
        Keys("llama", _READ | _ROPES, _SILU | {"attention_bias": False, "mlp_bias": False, "activation": "swiglu"}),
    ),
    Family(_llama(), _LLAMA, Keys("mistral", _READ | _ROPES | _same("sliding_window"), _SILU), window=True),
    Family(
        _llama(),
        _LLAMA | {"biases": "qkv"},
        Keys("qwen2", _READ | _ROPES | _same("layer_types"), _SILU | {"use_sliding_window": False}, irrelevant=_QWEN),
    ),
    Family(
        _llama(),
        _LLAMA | {"qk_norm": True},
        Keys(
            "qwen3",
            _READ | _ROPES | _same("layer_types"),
            _SILU | {"use_sliding_window": False, "attention_bias": False},
            irrelevant=_QWEN,
        ),
    ),
    Family(
        _llama(
            attention_post_norm="post_attention_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            mlp_post_norm="post_feedforward_layernorm",
        ),
        _LLAMA | {"mlp": "geglu", "qk_norm": True, "post_norm": True},
        Keys(
            "gemma3_text",
            _READ
            | _same("rope_parameters rope_scaling rope_theta rope_local_base_freq query_pre_attn_scalar")
            | _same("sliding_window sliding_window_pattern layer_types"),
            {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": False}
            | {"final_logit_softcapping": None, "attn_logit_softcapping": None},
            irrelevant=("_sliding_window_pattern",),
        ),
        positions=_gemma_ropes,
        window=True,
        pattern=6,
        scaled=True,
        offset=1.0,
    ),
    Family(
        _names(
            "gpt_neox.layers",
            _fused_places(
                "attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
                "input_layernorm", "post_attention_layernorm",
            ),
            embedding="gpt_neox.embed_in", final_norm="gpt_neox.final_layer_norm", unembedding="embed_out",
        ),
        _GPT,
        Keys(
            "gpt_neox",
            _ENDS | _SIZES | _ROPE | _same("hidden_act use_parallel_residual") | {
                "layer_norm_eps": "rms_norm_eps", "rotary_emb_base": "rope_theta",
                "rotary_pct": "partial_rotary_factor",
            },
            {"attention_bias": True},
            repeats=_same("rope_theta partial_rotary_factor"),
            defaults={"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        ),
        partial=True,
        activation=True,
        fused="heads",
        buffers=("attention.bias", "attention.masked_bias"),
    ),
    Family(
        _names(
            _H,
            _fused_places("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2"),
            embedding="transformer.wte", **{"shared.encoding_0.table": "transformer.wpe"}, **_GPT_ENDS,
        ),
        _GPT,
        Keys(
            "gpt2",
            _ENDS | _EPS | _HEADS | _same("hidden_size max_position_embeddings") | {
                "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
                "n_positions": "max_position_embeddings", "n_inner": "intermediate_size",
                "activation_function": "hidden_act",
            },
            {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        ),
        activation=True,
        positions=lambda config: {"": Learned(num_positions=config["max_position_embeddings"])},
        fused="blocks",
        inputs_first=True,
        buffers=("attn.bias", "attn.masked_bias"),
    ),
    Family(
        _names(
            _H,
            _fused_places(
                "self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
                "input_layernorm", "post_attention_layernorm",
            ),
            embedding="transformer.word_embeddings", embedding_norm="transformer.word_embeddings_layernorm",
            **_GPT_ENDS,
        ),
        _GPT | {"embedding_norm": True},
        Keys(
            "bloom",
            _ENDS | _EPS | _HEADS | _same("hidden_size") | {
                "n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
                "seq_length": "max_position_embeddings",
            },
            {"apply_residual_connection_post_layernorm": False, "slow_but_exact": False},  # the latter drops biases
            irrelevant=("offset_alibi",),
            defaults={"max_position_embeddings": 2048},
        ),
        positions=lambda config: {"": Alibi()},
        fused="heads",
    ),
    Family(
        _names(
            "transformer.blocks",
            _fused_places("attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj", "norm_1", "norm_2"),
            embedding="transformer.wte", final_norm="transformer.norm_f", unembedding="lm_head",
        ),
        _GPT | {"mlp": "gelu_exact", "biases": "none"},
        Keys(
            "mpt",
            _ENDS | _EPS | _HEADS | _same("hidden_size") | {
                "d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
                "max_seq_len": "max_position_embeddings",
            },
            {"no_bias": True, "logit_scale": None, "expansion_ratio": 4, "norm_type": "low_precision_layernorm"}
            | {"ffn_config.ffn_type": "mptmlp", "ffn_config.ffn_act_fn": None}
            | {f"attn_config.{key}": value for key, value in _ATTENTION.items()},
            irrelevant=("learned_pos_emb", "ffn_config.fc_type", *_MPT_INNER),
        ),
        positions=lambda config: {"": Alibi()},
        fused="blocks",
    ),
)  # fmt: skip
FAMILIES = {family.keys.name: family for family in _ALL}
#: {a key that some families read: their names}.
FOREIGN = {
    key: ", ".join(name for name, family in FAMILIES.items() if family.keys.kinds.get(key) == "read")
    for family in _ALL
    for key, kind in family.keys.kinds.items()
    if kind == "read"
}


#: The families with Llama's names, which are written too.
LLAMAS = {name: family for name, family in FAMILIES.items() if family.names == _llama()}


def find_family(model: ModelConfig) -> str:
    """Return the one of LLAMAS that a model's settings belong to, "" for none."""
    local = bool(model.masks[0].window)
    fits = (name for name, family in LLAMAS.items() if local == family.window and not family_differences(model, name))
    return next(fits, "")


def family_differences(model: ModelConfig, name: str = "llama") -> str:
    """Return the settings of a model that differ from those of a family, in words."""
    given = {key: getattr(model, key) for key, value in FAMILIES[name].settings.items() if getattr(model, key) != value}
    return " and ".join(f"model.{key}={value}" for key, value in given.items())
