"""The families of models that posx imports, as tables: their settings, their positions, the names of their arrays.

A new family is one entry of FAMILIES, if the settings of `ModelConfig` have its architecture.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from posx.config import ModelConfig
from posx.encodings import Alibi, Encoding, Learned
from posx.encodings.hugging_face import ropes_of
from posx.errors import ConfigError

#: The contents of a `config.json`.
Config = Mapping[str, Any]
#: {an array in posx, without its layer: its name in the files, without ".weight" and ".bias"}; {n} is the layer.
Names = Mapping[str, str]

FULL, LOCAL = "full_attention", "sliding_attention"
#: {an activation of transformers: the `mlp` of posx}, for MLPs without a gate.
GELUS = {"gelu": "gelu_exact"} | dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu")
_PROJECTIONS = ("query", "key", "value")


def _names(layer: str, places: Names, **ends: str) -> Names:
    """Return the names of a family: `places` are in each layer, `ends` are not."""
    return ends | {name: f"{layer}.{{n}}.{place}" for name, place in places.items()}


def _llama(**places: str) -> Names:
    """Return the names of Llama, with other or more places in a layer."""
    found = {f"attention.{name}": f"self_attn.{name[0]}_proj" for name in (*_PROJECTIONS, "out")}
    found |= {f"attention.{name}_norm": f"self_attn.{name[0]}_norm" for name in ("query", "key")}
    found |= {f"mlp.{name}": f"mlp.{name}_proj" for name in ("up", "gate", "down")}
    found |= {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    ends = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "unembedding": "lm_head"}
    return _names("model.layers", found | places, **ends)


def _fused(qkv: str, out: str, up: str, down: str, first_norm: str, second_norm: str) -> Names:
    """Return the places in a layer that holds queries, keys and values in one array."""
    return {f"attention.{name}": qkv for name in _PROJECTIONS} | {
        "attention.out": out, "mlp.up": up, "mlp.down": down, "attention_norm": first_norm, "mlp_norm": second_norm,
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Family:
    """A model type of transformers.

    settings: those of `ModelConfig` that all its models share. needed: {key of the config: the value that posx has},
    which is the default too. keys: {Llama's key: the family's own}. defaults: of Llama's keys. positions: the encoding
    of each layer type, {"": encoding} if all have one. window: the default of `sliding_window`, None if the family has
    none. activation: the key of an activation out of GELUS, "" if the settings have it. fused: how queries, keys and
    values share an array: in "blocks", or by "heads". inputs_first: matrices are [inputs, outputs]. scaled: the model
    itself multiplies embeddings by sqrt(m). offset: added to the scales of norms.
    """

    names: Names
    settings: Config
    needed: Config
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Config = dataclasses.field(default_factory=dict)
    positions: Callable[[Config], Mapping[str, Encoding]] = ropes_of
    window: int | None = None
    activation: str = ""
    fused: str = ""
    inputs_first: bool = False
    scaled: bool = False
    offset: float = 0.0

    def read(self, config: Config) -> dict[str, Any]:
        """Return a config under Llama's keys too."""
        own = {key: config[name] for key, name in self.keys.items() if config.get(name) is not None}
        return {**self.defaults, **config, **own}

    def model(self, config: Config) -> dict[str, Any]:
        """Return the settings that a config of the family decides, but for sizes. Raises ConfigError."""
        if not self.activation:
            return dict(self.settings)
        name = config.get(self.activation)
        if name not in GELUS:
            raise ConfigError(f"{self.activation}={name!r}, but posx has {', '.join(GELUS)}")
        return {**self.settings, "mlp": GELUS[name]}

    def layers(self, config: Config) -> tuple[list[Encoding], list[int | None]]:
        """Return the encoding of each layer and its window, of a config under Llama's keys. Raises ConfigError."""
        size = config.get("sliding_window", self.window) if self.window else None
        kinds = config.get("layer_types") or [FULL if self.window is None else LOCAL] * config["num_hidden_layers"]
        if len(kinds) != config["num_hidden_layers"]:
            raise ConfigError(
                f"layer_types has {len(kinds)} entries, but there are {config['num_hidden_layers']} layers."
            )
        if other := [kind for kind in kinds if kind not in (FULL, LOCAL)]:
            raise ConfigError(f"layer_types has {other[0]!r}, which posx does not know.")
        if LOCAL in kinds and not self.window:
            raise ConfigError(f"layer_types has {LOCAL!r}, but this family has no window in posx.")
        positions = self.positions(config)
        if missing := {*kinds} - positions.keys() if "" not in positions else ():
            raise ConfigError(f"layer type {min(missing)!r} has no rope_parameters.")
        encodings = [positions[kind if kind in positions else ""] for kind in kinds]
        return encodings, [size if kind == LOCAL else None for kind in kinds]

    def place(self, name: str) -> str | None:
        """Return the name in the files of an array of posx, "layers.layer_03.mlp.up"; None if they have none."""
        within = name.split(".")
        layer = int(within[1].removeprefix("layer_")) if within[0] == "layers" else None
        name = ".".join(within[2:] if layer is not None else within)
        bare = name.removesuffix("_bias")
        place = self.names.get(bare)
        return None if place is None else f"{place.format(n=layer)}.{'bias' if bare != name else 'weight'}"

    def ours(self, name: str, array: np.ndarray, config: Config, num_heads: int) -> np.ndarray:
        """Return an array of posx out of the array of the files that holds it."""
        role = name.rpartition(".")[2].removesuffix("_bias")
        array = self._turned(role, array)
        if self.fused and role in _PROJECTIONS:
            n, rest = _PROJECTIONS.index(role), array.shape[:-1]
            shape = (3, 1, -1) if self.fused == "blocks" else (num_heads, 3, -1)
            blocks = np.moveaxis(array.reshape(*rest, *shape), -3 if self.fused == "blocks" else -2, 0)
            array = blocks[n].reshape(*rest, -1)
        factor, offset = self._scale(name, config)
        return array if (factor, offset) == (1, 0) else (array + np.float32(offset)) / np.float32(factor)

    def theirs(self, name: str, array: np.ndarray, config: Config) -> np.ndarray:
        """Return the array of the files of an array of posx. Raises ConfigError for a fused one."""
        if self.fused:
            raise ConfigError("models with queries, keys and values in one array are not exported.")
        factor, offset = self._scale(name, config)
        array = array if (factor, offset) == (1, 0) else array * np.float32(factor) - np.float32(offset)
        return self._turned(name.rpartition(".")[2], array)

    def _turned(self, role: str, array: np.ndarray) -> np.ndarray:
        """Return a matrix of the other format: inputs come first in posx, outputs in most files."""
        turns = role == "unembedding" or not (self.inputs_first or role in ("embedding", "table"))
        return np.ascontiguousarray(array.T) if turns and array.ndim == 2 else array

    def _scale(self, name: str, config: Config) -> tuple[float, float]:
        """Return (factor, offset): the array of the files is that of posx times the factor, minus the offset.

        posx multiplies embeddings by sqrt(m). If they are tied, the last norm makes up for the division.
        """
        root = 1.0 if self.scaled else math.sqrt(config["hidden_size"])
        offset = self.offset if name.endswith("_norm") else 0.0
        if name == "embedding":
            return root, offset
        if name.startswith("final_norm") and config.get("tie_word_embeddings"):
            return 1 / root, offset
        if name.endswith("query_norm") and config.get("query_pre_attn_scalar"):
            return math.sqrt(config["query_pre_attn_scalar"] / config["head_dim"]), offset
        return 1.0, offset


class _Gemma(Family):
    """Gemma 3, whose older configs have a key for the RoPE of local layers, and every sixth layer is full."""

    def read(self, config: Config) -> dict[str, Any]:
        found = super().read(config)
        every, num_layers = found.get("sliding_window_pattern") or 6, found.get("num_hidden_layers")
        kinds = [LOCAL if (n + 1) % every else FULL for n in range(num_layers if isinstance(num_layers, int) else 0)]
        found["layer_types"] = found.get("layer_types") or kinds
        given = found.get("rope_parameters") or {}
        if not any(isinstance(value, Mapping) for value in given.values()):
            whole = (
                {"rope_theta": found.pop("rope_theta", None) or 1e6} | given | (found.pop("rope_scaling", None) or {})
            )
            given = {FULL: whole, LOCAL: {"rope_theta": found.get("rope_local_base_freq", 1e4)}}
        return found | {"rope_parameters": given, "rope_scaling": None}


_LLAMA = {
    "mlp": "swiglu", "norm": "rms", "biases": "none", "qk_norm": False, "parallel": False, "post_norm": False,
    "embedding_norm": False,
}  # fmt: skip
_GPT = _LLAMA | {"mlp": "gelu", "norm": "layer", "biases": "all"}
_EPS = {"rms_norm_eps": "layer_norm_epsilon"}
_GPT_DEFAULTS = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
_SILU = {"hidden_act": "silu"}
_ATTENTION = {
    "alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "softmax_scale": None, "qk_ln": False, "prefix_lm": False,
    "attn_type": "multihead_attention", "rope": False, "sliding_window_size": -1,
}  # fmt: skip
_H = "transformer.h"
_GPT_ENDS = {"final_norm": "transformer.ln_f", "unembedding": "lm_head"}

FAMILIES = {
    "llama": Family(_llama(), _LLAMA, _SILU | {"attention_bias": False, "mlp_bias": False}),
    "mistral": Family(_llama(), _LLAMA, _SILU, window=4096),
    "qwen2": Family(_llama(), _LLAMA | {"biases": "qkv"}, _SILU | {"use_sliding_window": False}),
    "qwen3": Family(
        _llama(), _LLAMA | {"qk_norm": True}, _SILU | {"use_sliding_window": False, "attention_bias": False}
    ),
    "gemma3_text": _Gemma(
        _llama(
            attention_post_norm="post_attention_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            mlp_post_norm="post_feedforward_layernorm",
        ),
        _LLAMA | {"mlp": "geglu", "qk_norm": True, "post_norm": True},
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": False}
        | {"final_logit_softcapping": None, "attn_logit_softcapping": None},
        defaults={"tie_word_embeddings": True, "query_pre_attn_scalar": 256, "head_dim": 256, "num_key_value_heads": 4},
        window=4096,
        scaled=True,
        offset=1.0,
    ),
    "gpt_neox": Family(
        _names(
            "gpt_neox.layers",
            _fused(
                "attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
                "input_layernorm", "post_attention_layernorm",
            ),
            embedding="gpt_neox.embed_in", final_norm="gpt_neox.final_layer_norm", unembedding="embed_out",
        ),
        _GPT,
        {"attention_bias": True},
        keys={
            "rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct",
        },
        defaults={
            "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "use_parallel_residual": True, "hidden_act": "gelu",
        },
        activation="hidden_act",
        fused="heads",
    ),
    "gpt2": Family(
        _names(
            _H,
            _fused("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2"),
            embedding="transformer.wte", **{"shared.encoding_0.table": "transformer.wpe"}, **_GPT_ENDS,
        ),
        _GPT,
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        keys=_EPS | {
            "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions", "intermediate_size": "n_inner",
        },
        defaults=_GPT_DEFAULTS | {"activation_function": "gelu_new"},
        activation="activation_function",
        positions=lambda config: {"": Learned(num_positions=config["max_position_embeddings"])},
        fused="blocks",
        inputs_first=True,
    ),
    "bloom": Family(
        _names(
            _H,
            _fused(
                "self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
                "input_layernorm", "post_attention_layernorm",
            ),
            embedding="transformer.word_embeddings", embedding_norm="transformer.word_embeddings_layernorm",
            **_GPT_ENDS,
        ),
        _GPT | {"embedding_norm": True},
        {"apply_residual_connection_post_layernorm": False},
        keys=_EPS | {
            "hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "max_position_embeddings": "seq_length",
        },
        defaults=_GPT_DEFAULTS | {"max_position_embeddings": 2048},
        positions=lambda config: {"": Alibi()},
        fused="heads",
    ),
    "mpt": Family(
        _names(
            "transformer.blocks",
            _fused("attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj", "norm_1", "norm_2"),
            embedding="transformer.wte", final_norm="transformer.norm_f", unembedding="lm_head",
        ),
        _GPT | {"mlp": "gelu_exact", "biases": "none"},
        {"no_bias": True, "logit_scale": None, "expansion_ratio": 4, "norm_type": "low_precision_layernorm"}
        | {"attn_config": _ATTENTION, "ffn_config": {"ffn_type": "mptmlp", "ffn_act_fn": None}},
        keys=_EPS | {
            "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        },
        defaults=_GPT_DEFAULTS,
        positions=lambda config: {"": Alibi()},
        fused="blocks",
    ),
}  # fmt: skip


#: The families with Llama's names, which are written too.
LLAMAS = {name: family for name, family in FAMILIES.items() if family.names == _llama()}


def family_of(model: ModelConfig) -> str:
    """Return the one of LLAMAS that a model's settings belong to, "" for none."""
    local = bool(model.masks[0].window)
    fits = (name for name, family in LLAMAS.items() if local == bool(family.window) and not differences(model, name))
    return next(fits, "")


def differences(model: ModelConfig, name: str = "llama") -> str:
    """Return the settings of a model that differ from those of a family, in words."""
    given = {key: getattr(model, key) for key, value in FAMILIES[name].settings.items() if getattr(model, key) != value}
    return " and ".join(f"model.{key}={value}" for key, value in given.items())


def mismatch(needed: Config, config: Config, within: str = "") -> str:
    """Return the first key of a config that has another value than posx, in words; "" if there is none."""
    for key, value in needed.items():
        found = config.get(key, value)
        found = value if found is None and value in (False, None) else found  # transformers reads null as false
        if isinstance(value, Mapping) and isinstance(found, Mapping):
            if problem := mismatch(value, found, f"{within}{key}."):
                return problem
        elif found != value:
            return f"{within}{key}={found!r}, but posx has {value!r}"
    return ""
