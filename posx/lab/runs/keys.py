"""The keys of the configs of transformers: each is read, irrelevant by name, or refused by name.

`declared.json` holds the keys that the config classes of one version of transformers declare, with their defaults.
`python -m tests.lab.runs.declared` writes it again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posx.errors import ConfigError, nearest

#: The contents of a `config.json`.
Config = Mapping[str, Any]

_FILE = json.loads((Path(__file__).parent / "declared.json").read_text(encoding="utf-8"))
#: The version of transformers whose behaviour every import repeats.
VERSION: str = _FILE["transformers"]
#: {model type: {key: its default}} of that version. "attn_config.alibi" is a key within a key.
DECLARED: Mapping[str, Config] = _FILE["keys"]
#: The keys whose values are configs of their own, in MPT.
NESTED = ("attn_config", "ffn_config")

#: {topic: its keys, which change no logits}, in every family.
IRRELEVANT = {
    "dropout, which acts in training": """
        attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout emb_pdrop embd_pdrop hidden_dropout
        hidden_dropout_prob resid_pdrop summary_first_dropout""",
    "initialisation and training": """
        embedding_fraction gradient_checkpointing init_config init_device initializer_range init_std loss_type
        neftune_noise_alpha output_past pretraining_tp use_bfloat16""",
    "the numbers and kernels of a computation": """
        _attn_implementation _attn_implementation_autoset _experts_implementation _flash_attn_2_enabled attn_impl
        attn_implementation attention_softmax_in_fp32 bias_dropout_fusion chunk_size_feed_forward dtype
        experts_implementation fc_type masked_softmax_fusion reorder_and_upcast_attn skip_bias_add skip_bias_add_qkv
        torch_dtype torchscript""",
    "outputs other than logits, and other heads": """
        _num_labels _output_attentions finetuning_task id2label label2id num_labels output_attentions
        output_hidden_states problem_type return_dict summary_activation summary_proj_to_labels summary_type
        summary_use_proj task_specific_params tf_legacy_loss tie_last_hidden_states""",
    "caches and generation": """
        assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens cache_implementation
        diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty
        epsilon_cutoff eta_cutoff exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id is_decoder
        length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_assistant_tokens
        num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_scores prefix
        remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens target_lookbehind temperature
        top_k top_p typical_p use_cache""",
    "tokens that no model computes with": """
        cls_token_id decoder_start_token_id mask_token_id model_max_length max_sequence_length n_ctx n_special
        pad_token_id predict_special_tokens sep_token_id tokenizer_class tokenizer_name unk_token_id""",
    "the file itself": """
        _commit_hash _name_or_path architectures auto_map is_llama_config name_or_path transformers.js_config
        transformers_version unsloth_fixed unsloth_version verbose""",
}  # fmt: skip
_IRRELEVANT = frozenset(key for keys in IRRELEVANT.values() for key in keys.split())

#: {feature: keys that ask for it and may change the model}. None, false and empty values ask for nothing.
REASONS = {
    "quantised weights. Save the model dequantised first": "quantization_config compression_config",
    "other files than model.safetensors and config.json": "transformers_weights configuration_files",
    "layers that differ, or other modules": """
        fusion_config kv_sharing_modes num_mtp_layers per_layer_config pruned_heads""",
    "another mask": "attention_chunk_size",
    "an encoder, or a part of a larger model": """
        add_cross_attention cross_attention_hidden_size is_encoder_decoder text_config tie_encoder_decoder
        vision_config""",
    "RoPE in another form": "rope_interleaved rope_ratio use_mrope",
    "another architecture": """
        attention_multiplier embedding_multiplier logits_scaling moe_intermediate_size num_experts num_experts_per_tok
        num_local_experts qk_layernorm residual_multiplier use_qk_norm""",
}  # fmt: skip
#: {key: the feature that it asks for}, in every family that does not read the key.
REFUSED = {key: why for why, keys in REASONS.items() for key in keys.split()}
#: Keys with one value in every family. A decoder of transformers whose config says otherwise sees later tokens.
NEEDED = {"is_causal": True}


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of a family's configs.

    Attributes:
      name: the model type.
      reads: {key: Llama's key of the same meaning}. Two keys with one meaning must agree.
      needed: {key: the value that posx has}, which is read too.
      repeats: {key: Llama's key}. transformers does not read the key, so it must agree with the one that is read.
      irrelevant: keys that change no logits, beside those of every family.
      defaults: {Llama's key: its value} of keys that transformers does not declare.
    """

    name: str
    reads: Mapping[str, str]
    needed: Config
    repeats: Mapping[str, str] = dataclasses.field(default_factory=dict)
    irrelevant: tuple[str, ...] = ()
    defaults: Config = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def kinds(self) -> dict[str, str]:
        """Return {key: "read", "irrelevant" or "refused"}, without the keys of other families."""
        kinds = dict.fromkeys((*_IRRELEVANT, *self.irrelevant), "irrelevant") | dict.fromkeys(REFUSED, "refused")
        return kinds | dict.fromkeys(("model_type", *NEEDED, *self.needed, *self.repeats, *self.reads), "read")

    def kind(self, key: str) -> str:
        """Return "read", "irrelevant" or "refused", "" for a key of another family or of none."""
        inner = key.partition(".")[2] if key.startswith(NESTED) else ""
        return self.kinds.get(key) or ("irrelevant" if inner in _IRRELEVANT else "refused" if inner in REFUSED else "")

    def check(self, config: Config, foreign: Mapping[str, str]) -> None:
        """Raise ConfigError for the first key of a config that posx does not read and that may change the model.

        foreign: {a key that some families read: their names}.
        """
        needed = {**NEEDED, **self.needed}
        for key, value in flat(config):
            kind = self.kind(key)
            wanted = needed.get(key, value)
            null = value is None and wanted in (False, None)  # transformers reads null as false
            if kind == "read" and value != wanted and not null:
                raise ConfigError(f"{key}={clip(value)}, but posx has {wanted!r}. It does not import such models.")
            asks = value not in (None, False, {}, [])
            if kind in ("read", "irrelevant") or (not asks and (kind or key in foreign)):
                continue
            if kind == "refused":
                why = f"it asks for {REFUSED[key.rpartition('.')[2]]}. "
            elif key in foreign:
                why = f"it is a key of {foreign[key]}, not of {self.name}. "
            else:
                why = f"posx does not know this key of {self.name}. {nearest(key, self.kinds)}"
            raise ConfigError(f"{key}={clip(value)}: {why}Remove it from config.json if the model does not need it.")

    def read(self, config: Config) -> dict[str, Any]:
        """Return what a config says under Llama's keys, with the defaults of transformers. Raises ConfigError."""
        given, values = dict(flat(config)), dict(self.defaults)
        values |= {self.reads[key]: value for key, value in DECLARED[self.name].items() if key in self.reads}
        said: dict[str, str] = {}
        for key, meaning in self.reads.items():
            if key not in given or (meaning in said and given[key] is None):
                continue
            if given[said.get(meaning, key)] not in (None, given[key]):
                raise ConfigError(_disagree(said[meaning], given[said[meaning]], key, given[key]))
            said[meaning], values[meaning] = key, given[key]
        for key, meaning in self.repeats.items():
            if given.get(key) not in (None, values.get(meaning)):
                own = next(own for own, other in self.reads.items() if other == meaning)
                raise ConfigError(_disagree(own, values.get(meaning), key, given[key]))
        return values


def flat(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a config. A key within one of NESTED has both names, "attn_config.alibi"."""
    for key, value in config.items():
        if key in NESTED and (value is None or isinstance(value, Mapping)):
            yield from ((f"{key}.{name}", inner) for name, inner in (value or {}).items())
        else:
            yield key, value


def clip(value: Any) -> str:
    """Return a value for a message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _disagree(one: str, value: Any, other: str, another: Any) -> str:
    return (
        f"{other}={clip(another)} does not agree with {one}={clip(value)}. Transformers {VERSION} reads only one "
        "of them. Remove the wrong one from config.json."
    )
