"""Models in Hugging Face's format: a folder with config.json, safetensors and tokenizer.json becomes a run, and back.

The families have one shape, Llama's: pre-norm RMSNorm, RoPE, SwiGLU. Every other model is refused. GGUF files are read.
posx multiplies embeddings by sqrt(m), so they are divided by it here. If they are tied, the last norm makes up for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from posx.config import ModelConfig, RunConfig, base_config, run_config
from posx.contract.sizes import named
from posx.data import load_tokenizer
from posx.data.tokenizers import BpeTokenizer
from posx.encodings import Rope, spec_text
from posx.encodings.frequencies import DynamicNtk
from posx.encodings.hugging_face import parameters_of, ropes_of
from posx.errors import ConfigError, DataError, OutOfMemoryError, WorkdirError, other_names
from posx.fields import typed
from posx.files.atomic import disk_errors, write_json
from posx.files.lines import parsed
from posx.machine.cores import own_memory
from posx.progress import say, size
from posx.runs.checks import check_disk
from posx.runs.describe import count, model_of
from posx.runs.folder import RunFolder
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
#: The sizes that a config must have, and optional numbers with the defaults of transformers.
SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip


class ForeignModel(NamedTuple):
    """A model that was read: its config, its arrays by name, the text of its tokenizer, and the digest of its files."""

    config: Mapping[str, Any]
    arrays: Callable[[str], np.ndarray]
    names: frozenset[str]
    tokenizer: str
    digest: str


def read(path: Path) -> ForeignModel:
    """Read a folder of Hugging Face, or a GGUF file. Arrays are read when they are asked for.

    Raises WorkdirError for a missing or damaged file, ConfigError for a GGUF file without the extra `hf`.
    """
    if not path.is_dir() and not (path.suffix == ".gguf" and path.is_file()):
        raise WorkdirError(
            f"--from={path}: there is no such folder. Name one with a config.json, or a .gguf file. "
            "posx downloads no models."
        )
    if path.is_file():
        return _read_gguf(path)
    config = _parsed_file(path / "config.json")
    if not (path / "tokenizer.json").exists():
        raise WorkdirError(f"{path} holds no tokenizer.json. Save one with a fast tokenizer's save_pretrained.")
    tokenizer = load_tokenizer(path / "tokenizer.json")
    if not isinstance(tokenizer, BpeTokenizer):
        raise WorkdirError(f"{path / 'tokenizer.json'} is of posx's bytes, not of Hugging Face.")
    places = _places(path)
    digest = _digest([path / "config.json", path / "tokenizer.json", *sorted(set(places.values()))])
    return ForeignModel(config, lambda name: _array(places[name], name), frozenset(places), tokenizer.text, digest)


def import_model(source: ForeignModel, whose: str, folder: RunFolder) -> RunConfig:
    """Write a run with the weights of a model into an empty folder; return its settings.

    whose: the name of the model in messages and labels.

    Raises:
      ConfigError: the model does not have the shape that posx has.
      DataError: the tokenizer has more ids than the model has rows.
      OutOfMemoryError: the weights do not fit into the memory or on the disk.
      WorkdirError: the folder holds something, or an array is damaged or missing.
    """
    from posx.training.checkpoints import Checkpoints

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
    params = params_of(source, run)
    wanted, given = named(model.abstract()), named(params)
    if wrong := other_names(given, wanted) or next((n for n, shape in wanted.items() if given[n] != shape), ""):
        raise WorkdirError(f"{whose} has other arrays than its config says: {wrong}.")
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


def params_of(source: ForeignModel, run: RunConfig) -> dict[str, Any]:
    """Return the parameters of a model in the names and shapes of posx, float32. Raises WorkdirError."""
    used: set[str] = set()

    def read(name: str) -> np.ndarray:
        if name not in source.names:
            raise WorkdirError(f"the array {name} is missing in the model's files.")
        used.add(name)
        return source.arrays(name)

    model, root = run.model, math.sqrt(run.model.model_dim)
    embedding = read("model.embed_tokens.weight")
    params: dict[str, Any] = {"embedding": embedding / root, "layers": {}, "shared": {}}
    for n in range(model.num_layers):
        at = f"model.layers.{n}"
        attention: dict[str, Any] = {}
        for own, letter in _PROJECTIONS.items():
            attention[own] = np.ascontiguousarray(read(f"{at}.self_attn.{letter}_proj.weight").T)
            if model.qkv_bias and own != "out":
                attention[f"{own}_bias"] = read(f"{at}.self_attn.{letter}_proj.bias")
            if model.qk_norm and own in ("query", "key"):
                attention[f"{own}_norm"] = read(f"{at}.self_attn.{letter}_norm.weight")
        params["layers"][f"layer_{n:02d}"] = {
            "attention_norm": read(f"{at}.input_layernorm.weight"), "attention": attention,
            "mlp_norm": read(f"{at}.post_attention_layernorm.weight"),
            "mlp": {x: np.ascontiguousarray(read(f"{at}.mlp.{x}_proj.weight").T) for x in ("up", "gate", "down")},
        }  # fmt: skip
    norm = read("model.norm.weight")
    params["final_norm"] = norm * root if model.tied else norm
    if not model.tied:
        params["unembedding"] = np.ascontiguousarray(read("lm_head.weight").T)
    spare = {"lm_head.weight"} if model.tied else set()
    buffers = {name for name in source.names if name.endswith("rotary_emb.inv_freq")}  # of old files
    if extra := sorted(source.names - used - spare - buffers):
        raise ConfigError(f"the model has the array {extra[0]}, for which posx has no place.")
    return params


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
    """Yield the arrays of a model by the names of transformers: `params_of` the other way round."""
    root = math.sqrt(model.model_dim)
    yield "model.embed_tokens.weight", np.asarray(params["embedding"]) * root
    for n, layer in enumerate(params["layers"][name] for name in sorted(params["layers"])):
        at, attention = f"model.layers.{n}", layer["attention"]
        for own, letter in _PROJECTIONS.items():
            yield f"{at}.self_attn.{letter}_proj.weight", np.asarray(attention[own]).T
            for end, part in (("bias", "proj.bias"), ("norm", "norm.weight")):
                if f"{own}_{end}" in attention:
                    yield f"{at}.self_attn.{letter}_{part}", np.asarray(attention[f"{own}_{end}"])
        yield f"{at}.input_layernorm.weight", np.asarray(layer["attention_norm"])
        yield f"{at}.post_attention_layernorm.weight", np.asarray(layer["mlp_norm"])
        for name, weights in layer["mlp"].items():
            yield f"{at}.mlp.{name}_proj.weight", np.asarray(weights).T
    yield "model.norm.weight", np.asarray(params["final_norm"]) / (root if model.tied else 1)
    if not model.tied:
        yield "lm_head.weight", np.asarray(params["unembedding"]).T


def _read_gguf(path: Path) -> ForeignModel:
    """Read a GGUF file through transformers, which dequantises it."""
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(f"{path.name}: GGUF files need {error.name}. Install it: pip install 'posx[hf]'") from None
    logging.disable_progress_bar()
    try:
        made = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # transformers raises all kinds
        raise WorkdirError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    arrays = made.state_dict()
    digest, text = _digest([path]), tokenizer.backend_tokenizer.to_str()
    return ForeignModel(made.config.to_dict(), lambda name: arrays[name].numpy(), frozenset(arrays), text, digest)


def _places(path: Path) -> dict[str, Path]:
    """Return {array: its file} of a folder. Raises WorkdirError."""
    from safetensors import SafetensorError, safe_open

    index = path / "model.safetensors.index.json"
    if index.exists():
        names = _parsed_file(index).get("weight_map")
        if not isinstance(names, Mapping):
            raise WorkdirError(f"{index} has no weight_map.")
        places = {str(name): path / str(file) for name, file in names.items()}
        if gone := sorted(str(file) for file in {*places.values()} if not file.is_file()):
            raise WorkdirError(f"{gone[0]} is missing, which {index.name} names.")
        return places
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise WorkdirError(f"{path} holds no .safetensors file.")
    found: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, "flax") as opened:
                found |= dict.fromkeys(opened.keys(), file)
        except (SafetensorError, OSError) as error:
            raise WorkdirError(f"{file} is damaged, or no safetensors file: {error}") from None
    return found


def _array(file: Path, name: str) -> np.ndarray:
    """Return an array of a safetensors file as float32."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "flax") as opened:  # it knows bfloat16
            return np.asarray(opened.get_tensor(name)).astype(np.float32)
    except (SafetensorError, OSError) as error:
        raise WorkdirError(f"{file} is damaged, or has no array {name}: {error}") from None


def _digest(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for file in files:
        with open(file, "rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()[:8]


def _parsed_file(path: Path) -> Any:
    try:
        found = parsed(path.read_text("utf-8"))
        if not isinstance(found, Mapping):
            raise ValueError("it holds no object")
        return found
    except FileNotFoundError:
        raise WorkdirError(f"{path.parent} holds no {path.name}.") from None
    except (OSError, ValueError) as error:
        raise WorkdirError(f"{path} cannot be read: {error}") from None
