"""The keys of GGUF metadata as a table: read, neutral at one value, irrelevant, or refused.

The meanings are those of llama.cpp, the format's own program, and of transformers 5.23. A key is read if llama.cpp
computes with it and posx can express it. It is irrelevant if neither program uses it for the logits of the family. A
key that is in no table is refused, so that a new key never changes a model in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from posx.errors import ConfigError
from posx.lab.runs.keys import clip

Kind = Literal["read", "neutral", "irrelevant", "refused"]

#: How to fix a file that has less than the config of its model.
FOLDER = "Import the model's folder with config.json and safetensors instead."

#: {general.architecture: the model type of transformers}.
ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text", "gpt2": "gpt2", "bloom": "bloom",
}  # fmt: skip

_SIZES = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
}  # fmt: skip
_ROPE = _SIZES | {
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim", "attention.value_length": "", "rope.dimension_count": "", "rope.freq_base": "",
    "rope.scale_linear": "", "rope.scaling.type": "", "rope.scaling.factor": "",
    "rope.scaling.original_context_length": "", "rope.scaling.attn_factor": "",
}  # fmt: skip
_GPT = {"attention.layer_norm_epsilon": "layer_norm_epsilon", "attention.head_count_kv": ""}

#: {architecture: {key without the architecture: the key of transformers' config; "" for a key read by a rule}}.
CONFIG_KEYS: dict[str, dict[str, str]] = {
    "llama": _ROPE, "qwen2": _ROPE, "qwen3": _ROPE,
    "gemma3": _ROPE | {
        "attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": "", "rope.freq_base_swa": "",
    },
    "gpt2": _SIZES | _GPT | {
        "context_length": "n_positions", "block_count": "n_layer", "embedding_length": "n_embd",
        "feed_forward_length": "n_inner", "attention.head_count": "n_head",
    },
    "bloom": _SIZES | _GPT | {
        "context_length": "seq_length", "block_count": "n_layer", "attention.head_count": "n_head",
        "feed_forward_length": "",
    },
}  # fmt: skip

#: The tokens that end a generation in llama.cpp: of the text, of a turn, and of a message.
END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))

#: Keys of every architecture that are read: the tokenizer's, and those of the file.
READ = (
    *END_KEYS,
    "general.architecture", "general.alignment", "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type", "tokenizer.ggml.scores", "tokenizer.ggml.merges", "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.padding_token_id", "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_space_prefix",
)  # fmt: skip

#: {key: the values at which it changes nothing}. Any other value is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "general.type": ("model",),
    "split.count": (0, 1), "split.no": (0,),
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
    "{arch}.attention.causal": (True,), "{arch}.pooling_type": (0,),
    "{arch}.attention.clamp_kqv": (0,), "{arch}.attention.max_alibi_bias": (0,), "{arch}.attention.scale": (0,),
    "{arch}.attention.output_scale": (0, 1), "{arch}.attention.sliding_window": (0,),
    "{arch}.attn_logit_softcapping": (0,), "{arch}.final_logit_softcapping": (0,),
    "{arch}.embedding_scale": (1,), "{arch}.residual_scale": (1,), "{arch}.logit_scale": (1,),
    "{arch}.use_parallel_residual": (False,),
    "{arch}.expert_count": (0,), "{arch}.expert_used_count": (0,), "{arch}.expert_shared_count": (0,),
    "{arch}.leading_dense_block_count": (0,), "{arch}.nextn_predict_layers": (0,),
    "{arch}.rope.scaling.yarn_log_multiplier": (0,), "{arch}.rope.scaling.yarn_ext_factor": (-1,),
    "{arch}.rope.scaling.yarn_attn_factor": (1,), "{arch}.rope.scaling.yarn_beta_fast": (32,),
    "{arch}.rope.scaling.yarn_beta_slow": (1,),
}  # fmt: skip
_OWN_NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {"bloom": {"{arch}.attention.max_alibi_bias": (8,)}}

#: Patterns of keys that do not reach the logits: descriptions, and tokens that are only marked.
IRRELEVANT = (
    "GGUF.*", "general.*", "quantize.imatrix.*", "split.tensors.count",
    "tokenizer.chat_template", "tokenizer.chat_template.*", "tokenizer.chat_templates", "tokenizer.huggingface.json",
    "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_sep_token", "tokenizer.ggml.seperator_token_id",
    "tokenizer.ggml.cls_token_id", "tokenizer.ggml.mask_token_id", "tokenizer.ggml.fim_*_token_id",
    "tokenizer.ggml.prefix_token_id", "tokenizer.ggml.suffix_token_id", "tokenizer.ggml.middle_token_id",
    "{arch}.tensor_data_layout", "{arch}.rope.scaling.finetuned",
    "{arch}.attention.layer_norm_epsilon", "{arch}.attention.layer_norm_rms_epsilon",
)  # fmt: skip


def key_kind(key: str, architecture: str) -> Kind:
    """Return how a key of a file of one architecture is treated.

    Args:
      key: the full name, as "llama.rope.freq_base".
      architecture: one of ARCHITECTURES.
    """
    head, _, rest = key.partition(".")
    if key in READ or (head == architecture and rest in CONFIG_KEYS[architecture]):
        return "read"
    name = f"{{arch}}.{rest}" if head == architecture else key
    if name in NEUTRAL:
        return "neutral"
    return "irrelevant" if any(fnmatchcase(name, pattern) for pattern in IRRELEVANT) else "refused"


def check_keys(values: Mapping[str, Any], architecture: str) -> None:
    """Raise ConfigError for the first key of a file that posx refuses, or whose value it refuses."""
    for key, value in values.items():
        kind = key_kind(key, architecture)
        if kind == "refused":
            raise ConfigError(f"{key}={clip(value)}: posx does not read this key, which may change the model. {FOLDER}")
        if kind == "neutral" and value not in (fits := neutral_values(key, architecture)):
            joined = key.startswith("split.")
            raise ConfigError(
                f"{key}={clip(value)}: posx imports only files with {' or '.join(map(str, fits))} here. "
                + ("Join the parts with llama.cpp's `llama-gguf-split --merge`." if joined else FOLDER)
            )


def neutral_values(key: str, architecture: str) -> tuple[Any, ...]:
    """Return the values of a neutral key that change nothing in files of one architecture."""
    head, _, rest = key.partition(".")
    name = f"{{arch}}.{rest}" if head == architecture else key
    return _OWN_NEUTRAL.get(architecture, {}).get(name) or NEUTRAL[name]
