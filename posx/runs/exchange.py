"""Models in Hugging Face's format: a folder with config.json, safetensors and tokenizer.json becomes a run, and back.

The families have one shape, Llama's: pre-norm RMSNorm, RoPE, SwiGLU. Every other model is refused. GGUF files are read.
posx multiplies embeddings by sqrt(m), so they are divided by it here. If they are tied, the last norm makes up for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from posx.config import ModelConfig, RunConfig, base_config, run_config
from posx.data.tokenizers import BpeTokenizer
from posx.encodings import Rope, spec_text
from posx.encodings.frequencies import DynamicNtk
from posx.encodings.hugging_face import parameters_of, ropes_of
from posx.errors import ConfigError, DataError, OutOfMemoryError, WorkdirError, other_names
from posx.fields import typed
from posx.files.atomic import disk_errors, write_json
from posx.machine.cores import own_memory
from posx.model import layer_name
from posx.progress import say, size
from posx.runs.checks import check_disk
from posx.runs.describe import count, model_of
from posx.runs.folder import RunFolder
from posx.runs.foreign import ForeignModel
from posx.runs.load import load_model

#: The name of a projection in posx and in the files.
_PROJECTIONS = {"query": "q", "key": "k", "value": "v", "out": "o"}


class Family(NamedTuple):
    """A model type of transformers.

    needed: {key of its config: the value that posx has}, which is also the default of transformers. window: the default
    of `sliding_window`, if the family has one.
    """

    needed: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None


FAMILIES = {
    "llama": Family({"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}),
    "mistral": Family({"hidden_act": "silu"}, window=4096),
    "qwen2": Family({"hidden_act": "silu", "use_sliding_window": False}, qkv_bias=True),
    "qwen3": Family({"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False}, qk_norm=True),
}
#: The sizes that a config must have.
SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip


def import_model(source: ForeignModel, whose: str, folder: RunFolder) -> RunConfig:
    """Write a run with the weights of a model into an empty folder; return its settings.

    whose: the name of the model in messages and labels.

    Raises:
      ConfigError: the model does not have the shape that posx has.
      DataError: the tokenizer has more ids than the model has rows.
      OutOfMemoryError: the weights do not fit into the memory or on the disk.
      WorkdirError: the folder holds something, or an array is damaged or missing.
    """
    from posx.training.checkpoints import Checkpoints, flatten

    if folder.path.exists() and any(folder.path.iterdir()):
        raise WorkdirError(f"--to={folder.path} holds something. Name a new folder.")
    run = run_of(source, whose, folder)
    model = model_of(run, 1)
    needed, have = 8 * count(model), own_memory()  # the arrays as read, and as posx has them
    if needed > have:
        raise OutOfMemoryError(
            f"{whose} has {count(model):,} parameters, so importing it takes {size(needed)} of memory, but this "
            f"process may use {size(have)}."
        )
    check_disk(folder.path.parent, needed)
    arrays, abstract = params_of(source, run.model), model.abstract()
    wanted = {name: leaf.shape for name, leaf in flatten(abstract).items()}
    if wrong := other_names(arrays, wanted) or next((n for n, shape in wanted.items() if arrays[n].shape != shape), ""):
        raise WorkdirError(f"{whose} has other arrays than its config says: {wrong}.")
    params = jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in wanted])
    with folder.held():
        folder.tokenizer_file.write_text(source.tokenizer, "utf-8")
        Checkpoints(folder.checkpoints).save(run.train.steps, {"params": params})
        folder.write_config(run, num_params=count(model))
    return run


def run_of(source: ForeignModel, whose: str, folder: RunFolder) -> RunConfig:
    """Return the settings of a model as a run. Raises ConfigError for the first thing that does not fit."""
    config, name = source.config, source.config.get("model_type")
    if name not in FAMILIES:
        raise ConfigError(f"{whose}: model_type={name!r} is unknown to posx. It reads {', '.join(FAMILIES)}.")
    family = FAMILIES[name]
    for key, value in family.needed.items():
        if config.get(key, value) != value:
            raise ConfigError(f"{whose}: {key}={config[key]!r}, but posx has {value!r}.")
    sizes = {key: _size(config.get(key), key) for key in SIZES}
    heads = sizes["num_attention_heads"]
    if len(ropes := ropes_of(config)) > 1:
        raise ConfigError(f"{whose}: layer types with several RoPEs ({', '.join(ropes)}) are not supported.")
    (rope,) = ropes.values()
    if rope.rotary_dim is not None:
        raise ConfigError(f"{whose}: partial_rotary_factor has no effect in transformers' {name}, so posx refuses it.")
    tokenizer, rows, length = BpeTokenizer(source.tokenizer), sizes["vocab_size"], sizes["max_position_embeddings"]
    if tokenizer.vocab_size > rows:
        raise DataError(f"{whose}: the tokenizer has {tokenizer.vocab_size:,} ids, but the model {rows:,} rows.")
    settings = base_config(spec_text(rope))
    settings.model.update({
        "num_layers": sizes["num_hidden_layers"], "model_dim": sizes["hidden_size"], "num_heads": heads,
        "num_kv_heads": _size(config.get("num_key_value_heads") or heads, "num_key_value_heads"),
        "head_dim": _size(config.get("head_dim") or sizes["hidden_size"] // heads, "head_dim"),
        "vocab_size": rows, "mlp": "swiglu", "mlp_dim": sizes["intermediate_size"],
        "tied": bool(config.get("tie_word_embeddings", False)),
        "norm_eps": typed(config.get("rms_norm_eps", 1e-6), float, "rms_norm_eps"),
        "qk_norm": family.qk_norm, "qkv_bias": family.qkv_bias, "mask_policy": _masks(config, family, whose),
    })  # fmt: skip
    settings.data.tokenizer = str(folder.tokenizer_file)
    settings.train.update({  # to train on, from a checkpoint at the end of a first step
        "length": length, "batch_size": 1, "steps": 1, "warmup_steps": 0, "learning_rate": 2e-5,
        "final_learning_rate": 2e-6,
    })  # fmt: skip
    settings.eval.lengths = tuple(sorted({max(length // 4, 1), max(length // 2, 1), length}))
    settings.eval.num_targets = max(length, 16384)
    return dataclasses.replace(run_config(settings), text=f"imported {source.digest}")


def _size(value: Any, key: str) -> int:
    found = typed(value, int, key)
    if found < 1:
        raise ConfigError(f"{key}={value}: a size must be at least 1.")
    return found


def _masks(config: Mapping[str, Any], family: Family, whose: str) -> tuple[str, ...]:
    """Return the mask of each layer: the last `sliding_window` tokens, if the family has a window."""
    if other := {*(config.get("layer_types") or ())} - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"{whose}: layer_types has {sorted(other)[0]!r}, which posx does not know.")
    size = config.get("sliding_window", family.window) if family.window else None
    local = "causal" if size is None else f"window(size={_size(size, 'sliding_window')})"
    types = config.get("layer_types") or ["sliding_attention" if family.window else "full_attention"]
    if size is None and "sliding_attention" in types and not family.window:
        raise ConfigError(f"{whose}: layer_types has 'sliding_attention', but this family has no window in posx.")
    return tuple(local if kind == "sliding_attention" else "causal" for kind in types)


def names_of(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the name of each array in posx, as `flatten` spells it, and its name in the files."""
    yield "embedding", "model.embed_tokens.weight"
    for n in range(model.num_layers):
        own, at = f"layers.{layer_name(n)}", f"model.layers.{n}"
        for name, letter in _PROJECTIONS.items():
            yield f"{own}.attention.{name}", f"{at}.self_attn.{letter}_proj.weight"
            if model.qkv_bias and name != "out":
                yield f"{own}.attention.{name}_bias", f"{at}.self_attn.{letter}_proj.bias"
            if model.qk_norm and name in ("query", "key"):
                yield f"{own}.attention.{name}_norm", f"{at}.self_attn.{letter}_norm.weight"
        yield f"{own}.attention_norm", f"{at}.input_layernorm.weight"
        yield f"{own}.mlp_norm", f"{at}.post_attention_layernorm.weight"
        for name in ("up", "gate", "down"):
            yield f"{own}.mlp.{name}", f"{at}.mlp.{name}_proj.weight"
    yield "final_norm", "model.norm.weight"
    if not model.tied:
        yield "unembedding", "lm_head.weight"


def _turned(name: str, array: np.ndarray) -> np.ndarray:
    """Return a matrix of the other format: inputs come first here, outputs there."""
    return np.ascontiguousarray(array.T) if name.endswith(("_proj.weight", "lm_head.weight")) else array


def _factor(name: str, model: ModelConfig) -> float:
    """Return an array in the files over that of posx."""
    root = math.sqrt(model.model_dim)
    return root if name == "embedding" else 1 / root if name == "final_norm" and model.tied else 1.0


def params_of(source: ForeignModel, model: ModelConfig) -> dict[str, np.ndarray]:
    """Return the arrays of a model by their names in posx, float32. Raises WorkdirError, ConfigError."""
    places = dict(names_of(model))
    for place in places.values():
        if place not in source.names:
            raise WorkdirError(f"the array {place} is missing in the model's files.")
    spare = {"lm_head.weight"} if model.tied else set()
    buffers = {name for name in source.names if name.endswith("rotary_emb.inv_freq")}  # of old files
    if extra := sorted(source.names - {*places.values()} - spare - buffers):
        raise ConfigError(f"the model has the array {extra[0]}, for which posx has no place.")
    read = {name: _turned(place, source.arrays(place)) for name, place in places.items()}
    return {name: array if (by := _factor(name, model)) == 1 else array / by for name, array in read.items()}


def export_model(folder: RunFolder, target: Path) -> int:
    """Write the newest good parameters of a run as a folder that transformers reads; return their step.

    A tokenizer of bytes has no form there and is left out. Raises ConfigError if the model does not have Llama's shape,
    WorkdirError if the target holds something.
    """
    from safetensors.numpy import save_file

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WorkdirError(f"--to={target} holds something. Name a new folder, or a file that ends with .safetensors.")
    config = config_of(folder.read_config())
    model, params, tokenizer, step = load_model(folder)
    config |= {"vocab_size": model.vocab_size, "eos_token_id": tokenizer.eos, "bos_token_id": tokenizer.eos}
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays_of(params, model.config)}
    with disk_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        write_json(target / "config.json", config)
        save_file(arrays, target / "model.safetensors", {"format": "pt"})
        if isinstance(tokenizer, BpeTokenizer):
            tokenizer.save(target / "tokenizer.json")
        else:
            say("notice: no tokenizer is written, because posx's bytes have no form there")
    return step


def config_of(run: RunConfig) -> dict[str, Any]:
    """Return the config of transformers for a run, without its vocabulary. Raises ConfigError for another shape."""
    model, rope = run.model, run.layers[0]
    for problem, wrong in {
        "the MLP is not SwiGLU": model.mlp != "swiglu",
        "layers have different encodings": len(set(run.layers)) > 1,
        f"{rope} is not rope": not isinstance(rope, Rope),
        "the masks are neither causal nor one window without sinks": len({*model.masks}) > 1 or model.masks[0].sinks,
        "some channels are not rotated": isinstance(rope, Rope) and rope.rotary_dim != run.dims.head_dim,
        "dynamic_ntk has an original_len of its own": (
            isinstance(rope, Rope)
            and isinstance(rope.frequencies, DynamicNtk)
            and rope.frequencies.original_len != run.train.length
        ),
        "windows go with neither qk_norm nor qkv_bias": model.masks[0].window and (model.qk_norm or model.qkv_bias),
        "qk_norm and qkv_bias go together in no family": model.qk_norm and model.qkv_bias,
    }.items():
        if wrong:
            raise ConfigError(f"this model does not have Llama's shape: {problem}. Export it to a .safetensors file.")
    assert isinstance(rope, Rope)  # or it was refused
    window = model.masks[0].window or None
    family = next(n for n, x in FAMILIES.items() if (x.qk_norm, x.qkv_bias) == (model.qk_norm, model.qkv_bias))
    family = "mistral" if window else family
    return ({"sliding_window": window} if window else {}) | {
        "model_type": family, "architectures": [f"{family.capitalize()}ForCausalLM"], "hidden_act": "silu",
        "hidden_size": model.model_dim, "intermediate_size": model.hidden_dim, "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads, "num_key_value_heads": model.kv_heads, "head_dim": run.dims.head_dim,
        "max_position_embeddings": run.train.length, "rms_norm_eps": model.norm_eps, "dtype": "float32",
        "tie_word_embeddings": model.tied, "rope_parameters": parameters_of(rope, run.dims.head_dim),
    }  # fmt: skip


def arrays_of(params: dict[str, Any], model: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of a model by their names in the files."""
    from posx.training.checkpoints import flatten

    arrays = flatten(params)
    for name, place in names_of(model):
        by = _factor(name, model)
        yield place, _turned(place, np.asarray(arrays[name])) * np.float32(by)
