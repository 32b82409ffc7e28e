"""Read a GGUF file as the config, the arrays and the tokenizer that transformers would have.

The metadata is read with the package gguf under the table of `posx.lab.runs.gguf_keys`, because transformers drops the
keys that it does not know. Arrays are dequantised when they are asked for. transformers builds the tokenizer.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from posx.encodings.frequencies import Llama3
from posx.errors import ConfigError, WorkdirError
from posx.lab.runs.families import FAMILIES, FULL, LOCAL
from posx.lab.runs.gguf_keys import ARCHITECTURES, CONFIG_KEYS, END_KEYS, FOLDER, check_keys
from posx.lab.runs.gguf_tokenizer import find_split, finish_tokenizer
from posx.lab.runs.keys import clip

#: The arrays [c] that llama.cpp divides theta_c by: at every length, or in long and in short texts.
ROPE_ARRAYS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
#: The turns of Llama 3.1's rule, and the training lengths in tokens that are tried, since no key has them.
_LOW, _HIGH, _LENGTHS = 1.0, 4.0, [2**n for n in range(8, 21)]
_GEMMA_27B = 62  # layers, by which llama.cpp knows the one Gemma 3 with another scale of logits
#: Keys that may hold a number for each layer.
_PER_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")

Values = Mapping[str, Any]


def read_gguf(path: Path) -> tuple[dict[str, Any], Callable[[str], np.ndarray], frozenset[str], str]:
    """Return the config, the arrays by name, their names, and the text of the tokenizer.json of a GGUF file.

    An array that the family does not have keeps the name that it has in the file.

    Raises:
      ConfigError: a key that posx refuses, another architecture, or a missing package.
      WorkdirError: the file is damaged.
    """
    try:
        import gguf
        import torch  # noqa: F401  transformers asks for it before it reads a tokenizer
        import transformers  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{path.name}: GGUF files need {error.name}. Install it: pip install 'posx[hf]'") from None
    try:
        reader = gguf.GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:  # the reader raises all kinds
        raise _damage_error(path, error) from None
    architecture = values.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{path.name}: general.architecture={clip(architecture)}: posx reads {', '.join(ARCHITECTURES)} from GGUF "
            f"files. {FOLDER}"
        )

    def array(name: str) -> np.ndarray:
        try:
            return np.asarray(gguf.dequantize(tensors[name].data, tensors[name].tensor_type), np.float32)
        except Exception as error:  # a type of numbers that gguf does not know, among others
            raise _damage_error(path, error) from None

    try:
        check_keys(values, architecture)
        split = find_split(values)
        config = gguf_config(architecture, values, array, frozenset(tensors))
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from None
    except (TypeError, ValueError, ArithmeticError) as error:  # a text for a number, and the like
        raise ConfigError(f"{path.name}: a key has a value of another type: {error}") from None
    places = _places(architecture, config, frozenset(tensors))
    try:
        text = finish_tokenizer(_tokenizer(path), values, split)
    except Exception as error:  # transformers raises all kinds
        raise _damage_error(path, error) from None
    return (
        config,
        lambda name: _reorder(architecture, places[name], array(places[name]), config),
        frozenset(places),
        text,
    )


def gguf_config(
    architecture: str, values: Values, array: Callable[[str], np.ndarray], names: frozenset[str]
) -> dict[str, Any]:
    """Return the config of transformers for the metadata of a file.

    Args:
      architecture: one of ARCHITECTURES.
      values: the metadata by full name, which `check_keys` has accepted.
      array: the function that returns an array of the file by its name there.
      names: the names of all arrays of the file.

    Raises:
      ConfigError: a key is missing, or its value has no form in posx.
    """
    own = {key.removeprefix(f"{architecture}."): value for key, value in values.items()}
    own = {key: _one(f"{architecture}.{key}", value) if key in _PER_LAYER else value for key, value in own.items()}
    own.setdefault("vocab_size", len(values.get("tokenizer.ggml.tokens", ())))
    named = {key: name for key, name in CONFIG_KEYS[architecture].items() if name}
    optional = ("attention.head_count_kv", "attention.key_length")
    if missing := next((key for key in named if key not in own and key not in optional), ""):
        raise ConfigError(f"{architecture}.{missing} is missing. Convert the model again with llama.cpp.")
    config: dict[str, Any] = {name: own[key] for key, name in named.items() if key in own}
    config |= {"model_type": ARCHITECTURES[architecture], "tie_word_embeddings": "output.weight" not in names}
    begin, ends = values.get("tokenizer.ggml.bos_token_id"), [values[key] for key in END_KEYS if key in values]
    config |= {} if begin is None else {"bos_token_id": begin}
    config |= {"eos_token_id": ends if ends[1:] else ends[0]} if ends else {}
    heads, m = own["attention.head_count"], own["embedding_length"]
    if "rope.freq_base" not in CONFIG_KEYS[architecture]:
        width = {"feed_forward_length": 4 * m} if architecture == "bloom" else {}
        _same(architecture, own, {"attention.head_count_kv": heads} | width)
        return config | _tie(architecture, config, array)
    config.setdefault("head_dim", m // heads)
    config.setdefault("num_key_value_heads", heads)
    _same(architecture, own, dict.fromkeys(("rope.dimension_count", "attention.value_length"), config["head_dim"]))
    factors = {name: [float(one) for one in array(name)] for name in ROPE_ARRAYS if name in names}
    if factors and architecture != "llama":
        raise ConfigError(f"the array {min(factors)} has no meaning in {architecture}. Convert the model again.")
    config["rope_parameters"] = _rope(architecture, own, config["head_dim"], factors)
    return config | _gemma(own, config) if architecture == "gemma3" else config


def _one(key: str, value: Any) -> Any:
    """Return the number that all layers share. Raises ConfigError."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ConfigError(f"{key}={clip(value)}: posx has one number for all layers. Import a model with equal layers.")
    return value[0]


def _same(architecture: str, own: Values, expected: Mapping[str, Any]) -> None:
    for key, value in expected.items():
        if own.get(key, value) != value:
            raise ConfigError(
                f"{architecture}.{key}={clip(own[key])}: the model's other sizes need {value} here. "
                "Import a model whose heads and layers have these sizes."
            )


def _tie(architecture: str, config: Values, array: Callable[[str], np.ndarray]) -> dict[str, Any]:
    """Return the tie of BLOOM, whose files hold the embedding twice: transformers drops the second."""
    if architecture != "bloom" or config["tie_word_embeddings"]:
        return {}
    if not np.array_equal(array("output.weight"), array("token_embd.weight")):
        raise ConfigError(
            "output.weight differs from token_embd.weight: llama.cpp uses it, transformers drops it. "
            "Import a file with both in one type, such as F16."
        )
    return {"tie_word_embeddings": True}


def _gemma(own: Values, config: Values) -> dict[str, Any]:
    """Return the settings of Gemma 3 that llama.cpp has as constants. Raises ConfigError."""
    layers, width = config["num_hidden_layers"], config["head_dim"]
    kinds = [FULL if (n + 1) % 6 == 0 else LOCAL for n in range(layers)]
    pattern = own.get("attention.sliding_window_pattern", 6)
    if pattern not in (6, [kind == LOCAL for kind in kinds]):
        raise ConfigError(
            f"gemma3.attention.sliding_window_pattern={clip(pattern)}: transformers reads 6 only. {FOLDER}"
        )
    if layers != _GEMMA_27B and width != 256:
        raise ConfigError(
            f"gemma3.attention.key_length={width}: llama.cpp divides logits by its root, transformers by that of 256. "
            + FOLDER
        )
    if not own["attention.sliding_window"]:
        raise ConfigError("gemma3.attention.sliding_window=0: llama.cpp then caps logits. posx has no such model.")
    local = {"rope_type": "default", "rope_theta": own.get("rope.freq_base_swa", 1e4)}
    return {
        "layer_types": kinds,
        "rope_parameters": {FULL: config["rope_parameters"], LOCAL: local},
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if layers == _GEMMA_27B
        else 256,
    }


def _rope(architecture: str, own: Values, width: int, factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the `rope_parameters` of a file: its base and the rule for its frequencies. Raises ConfigError."""
    if architecture == "gemma3" and "rope.freq_base" not in own:  # 10000 in llama.cpp, a million in transformers
        raise ConfigError("gemma3.rope.freq_base is missing. Convert the model again with llama.cpp.")
    base = float(own.get("rope.freq_base", 1e4))
    kind, length = own.get("rope.scaling.type", "linear"), own["context_length"]
    factor = float(own.get("rope.scaling.factor", own.get("rope.scale_linear", 0)) or 1)
    original, growth = own.get("rope.scaling.original_context_length", length), own.get("rope.scaling.attn_factor")
    kind, factor = ("linear", 1.0) if kind == "none" else (kind, factor)
    if kind not in ("linear", "yarn", "longrope"):
        raise ConfigError(
            f"{architecture}.rope.scaling.type={clip(kind)}: posx reads none, linear, yarn and longrope from GGUF "
            f"files. {FOLDER}"
        )
    if kind != "longrope" and growth not in (None, 1):
        raise ConfigError(
            f"{architecture}.rope.scaling.attn_factor={clip(growth)}: posx reads it with longrope only. {FOLDER}"
        )
    wanted = {"longrope": {*ROPE_ARRAYS[1:]}, "yarn": set()}.get(kind, {*factors} & {ROPE_ARRAYS[0]})
    if {*factors} != wanted or any(len(array) != width // 2 for array in factors.values()):
        raise ConfigError(
            f"rope.scaling.type={kind} does not go with the arrays {sorted(factors) or 'of the file'}: "
            f"expected {sorted(wanted) or 'none'} of {width // 2} numbers. Convert the model again with llama.cpp."
        )
    if kind == "longrope":
        rule = _longrope(architecture, factors, factor, length, (original, growth))
    elif kind == "yarn" and factor != 1:
        rule = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    else:
        rule = _divided_rule([factor * one for one in factors.get(ROPE_ARRAYS[0], [1.0])], base, width, length)
    return rule | {"rope_theta": base}


def _longrope(
    architecture: str, factors: Mapping[str, list[float]], factor: float, length: int, given: tuple[int, float | None]
) -> dict[str, Any]:
    """Return LongRoPE's parameters. Raises ConfigError if llama.cpp and transformers differ."""
    original, growth = given
    if factor != 1:
        raise ConfigError(
            f"{architecture}.rope.scaling.factor={factor:g}: llama.cpp divides longrope's angles by it, transformers "
            f"does not. {FOLDER}"
        )
    if growth is None and length > original:
        raise ConfigError(
            f"{architecture}.rope.scaling.attn_factor is missing: longrope is 1 without it in llama.cpp, and "
            "sqrt(1 + ln f / ln L) in transformers. Convert the model again with llama.cpp."
        )
    return {
        "rope_type": "longrope", "original_max_position_embeddings": original, "factor": max(length / original, 1.0),
        "attention_factor": 1.0 if growth is None else float(growth), "long_factor": factors[ROPE_ARRAYS[1]],
        "short_factor": factors[ROPE_ARRAYS[2]],
    }  # fmt: skip


def _divided_rule(factors: list[float], base: float, width: int, length: int) -> dict[str, Any]:
    """Return the rule that divides theta_c by `factors`: one number, Llama 3.1's rule, or a number for each plane."""
    if max(factors) == min(factors) >= 1:
        return {"rope_type": "default"} if factors[0] == 1 else {"rope_type": "linear", "factor": factors[0]}
    factor, theta = max(factors), base ** (-np.arange(0, width, 2) / width)
    for original in _LENGTHS if factor > 1 else ():
        rule = Llama3(factor, original, _LOW, _HIGH)
        if np.allclose(rule.frequencies(base, width) * factors, theta, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    factors = factors * (width // 2) if len(factors) == 1 else factors
    return {
        "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0,
        "original_max_position_embeddings": length,
    }  # fmt: skip


def _places(architecture: str, config: Values, names: frozenset[str]) -> dict[str, str]:
    """Return {the name of an array in transformers: its name in the file}; arrays without a place keep their own."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    family = FAMILIES[config["model_type"]]
    layers = config["num_hidden_layers" if "num_hidden_layers" in config else "n_layer"]
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    known, places = get_tensor_name_map(number, layers), {}
    for place in {place.format(n=n) for place in family.names.values() for n in range(layers)}:
        role = known.get_name(place) or known.get_name(place.partition(".")[2])  # as models without a head have it
        for suffix in (".weight", ".bias"):
            if (name := f"{role}{suffix}") in names:
                places[place + suffix] = name
    if config["tie_word_embeddings"]:
        names -= {"output.weight"}
    return places | {name: name for name in names - {*places.values(), *ROPE_ARRAYS}}


def _reorder(architecture: str, name: str, array: np.ndarray, config: Values) -> np.ndarray:
    """Return an array of the file in the order that transformers has."""
    role = name.split(".")[-2]
    if architecture == "llama" and role in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if role == "attn_q" else "num_key_value_heads"]
        pairs = array.reshape(heads, -1, 2, *array.shape[1:])  # llama.cpp rotates neighbours
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
    if architecture == "gemma3" and role.endswith("norm"):
        return array - 1
    if architecture == "gpt2" and array.ndim == 2 and role in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
        return array.T
    if architecture == "bloom" and role == "attn_qkv":
        blocks = array.reshape(3, config["n_head"], -1, *array.shape[1:])
        return np.ascontiguousarray(blocks.swapaxes(0, 1)).reshape(array.shape)
    return array


def _tokenizer(path: Path) -> dict[str, Any]:
    """Return the contents of the tokenizer.json that transformers makes of a file."""
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:  # files beside a GGUF file would take its place
        (Path(folder) / path.name).symlink_to(path.resolve())
        made = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=path.name)
    return json.loads(made.backend_tokenizer.to_str())


def _damage_error(path: Path, error: Exception) -> WorkdirError:
    return WorkdirError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}")
