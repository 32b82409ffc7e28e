"""Models in Hugging Face's format: a folder with config.json, safetensors and tokenizer.json becomes a run, and back.

`posx.lab.runs.families` holds the architectures; every other model is refused. Models with Llama's shape are written.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from posx.attention.masks import causal
from posx.attention.masks import window as window_of
from posx.encodings import spec_text
from posx.encodings.frequencies import DynamicNtk
from posx.encodings.hugging_face import rope_parameters
from posx.encodings.rope import Rope
from posx.errors import ConfigError, DataError, OutOfMemoryError, WorkdirError
from posx.lab.config import RunConfig, base_config, run_config
from posx.lab.config.mask_texts import mask_text
from posx.lab.config.run import IMPORTED
from posx.lab.config.sections import shortest_cycle
from posx.lab.data.tokenizers import BpeTokenizer
from posx.lab.files.atomic import disk_errors, write_json
from posx.lab.files.lines import parse_json
from posx.lab.progress import size
from posx.lab.runs.checks import check_disk
from posx.lab.runs.describe import count, make_run_model
from posx.lab.runs.families import FAMILIES, FOREIGN, family_differences, find_family
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.foreign import ForeignModel
from posx.lab.runs.load import load_model
from posx.machine.cores import own_memory
from posx.notices import say
from posx.parsing import to_type

#: The sizes that a config must have.
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
#: The pieces that a text is split into by the tokenizer of Qwen 2 and 3, before pairs of bytes are merged.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def import_model(source: ForeignModel, whose: str, folder: RunFolder) -> RunConfig:
    """Write a run with the weights of a model into an empty folder; return its settings.

    Args:
      source: the model.
      whose: its name in messages and labels.
      folder: of the run.

    Raises:
      ConfigError: the model does not have the shape that posx has.
      DataError: the tokenizer has more ids than the model has rows.
      OutOfMemoryError: the weights do not fit into the memory or on the disk.
      WorkdirError: the folder holds something, or an array is damaged or missing.
    """
    from posx.lab.training.checkpoints import Checkpoints

    if folder.path.exists() and any(folder.path.iterdir()):
        raise WorkdirError(f"--to={folder.path} holds something. Name a new folder.")
    run = read_run(source, whose, folder)
    model = make_run_model(run, 1)
    needed, have = 8 * count(model), own_memory()  # the arrays as read, and as posx has them
    if needed > have:
        raise OutOfMemoryError(
            f"{whose} has {count(model):,} parameters, so importing it takes {size(needed)} of memory, but this "
            f"process may use {size(have)}."
        )
    check_disk(folder.path, 4 * count(model), "name a folder on another disk with --to")  # float32, without moments
    params = read_params(source, run, whose)
    with folder.hold():
        folder.tokenizer_file.write_text(source.tokenizer, "utf-8")
        Checkpoints(folder.checkpoints, run=run.hash).save(run.train.steps, {"params": params})
        folder.write_config(run, num_params=count(model))
    return run


def read_run(source: ForeignModel, whose: str, folder: RunFolder) -> RunConfig:
    """Return the settings of a model as a run. Raises ConfigError for the first thing that does not fit."""
    name = source.config.get("model_type")
    if name not in FAMILIES:
        raise ConfigError(f"{whose}: model_type={name!r} is unknown to posx. It reads {', '.join(FAMILIES)}.")
    family = FAMILIES[name]
    try:
        family.keys.check(source.config, FOREIGN)
        config = family.keys.read(source.config)
        sizes = {key: _size(config.get(key), key) for key in SIZES}
        chosen, (encodings, windows) = family.model(config), family.layers(config)
    except ConfigError as error:
        raise ConfigError(f"{whose}: {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:  # a text for a number, and the like
        raise ConfigError(f"{whose}: its config.json has a value of another type: {error}") from None
    m, h = sizes["hidden_size"], sizes["num_attention_heads"]
    tokenizer, rows, length = BpeTokenizer(source.tokenizer), sizes["vocab_size"], sizes["max_position_embeddings"]
    if tokenizer.vocab_size > rows:
        raise DataError(f"{whose}: the tokenizer has {tokenizer.vocab_size:,} ids, but the model {rows:,} rows.")
    # A rule that is put on the model later acts on its layers without a window.
    layers = list(zip(encodings, windows, strict=True))
    main, mains = next(((one, [None]) for one, window in layers if window is None), (encodings[-1], windows))
    settings = base_config(spec_text(main))
    settings.model.update(chosen)
    settings.model.update({
        "num_layers": sizes["num_hidden_layers"], "model_dim": m, "num_heads": h,
        "num_kv_heads": _size(config.get("num_key_value_heads") or h, "num_key_value_heads"),
        "head_dim": _size(config.get("head_dim") or m // h, "head_dim"),
        "vocab_size": rows, "mlp_dim": _size(config.get("intermediate_size") or 4 * m, "intermediate_size"),
        "tied": _is_tied(source, to_type(config["tie_word_embeddings"] or False, bool, "tie_word_embeddings")),
        "norm_eps": to_type(config.get("rms_norm_eps", 1e-6), float, "rms_norm_eps"),
        "parallel": to_type(config.get("use_parallel_residual") or False, bool, "use_parallel_residual"),
        "layer_policy": shortest_cycle(
            tuple("encoding" if one == main and window in mains else spec_text(one) for one, window in layers)
        ),
        "mask_policy": shortest_cycle(tuple(_mask(window) for window in windows)),
    })  # fmt: skip
    settings.data.tokenizer = str(folder.tokenizer_file)
    settings.train.update({  # to train on, from a checkpoint at the end of a first step
        "length": length, "batch_size": 1, "steps": 1, "warmup_steps": 0, "learning_rate": 2e-5,
        "final_learning_rate": 2e-6,
    })  # fmt: skip
    settings.eval.lengths = tuple(sorted({max(length // n, 2) for n in (4, 2, 1)}))
    settings.eval.num_targets = max(length, 16384)
    return dataclasses.replace(run_config(settings), text=f"{IMPORTED} {source.digest}")


def _size(value: Any, key: str) -> int:
    size = to_type(value, int, key)
    if size < 1:
        raise ConfigError(f"{key}={value}: a size must be at least 1.")
    return size


def _mask(window: int | None) -> str:
    return mask_text(causal() if window is None else window_of(_size(window, "sliding_window")))


def _is_tied(source: ForeignModel, flag: bool) -> bool:
    """Decide whether a model has one matrix for inputs and outputs, as transformers does if the files hold two."""
    family = FAMILIES[source.config["model_type"]]
    place, head = str(family.place("embedding")), family.head(source.names)
    embedding = next((name for name in (place, place.partition(".")[2]) if name in source.names), "")
    if not (flag and head and embedding) or np.array_equal(source.arrays(head), source.arrays(embedding)):
        return flag
    say(f"notice: tie_word_embeddings=True, but the files hold another {head}. It is read, as transformers does.")
    return False


def read_params(source: ForeignModel, run: RunConfig, whose: str) -> dict[str, Any]:
    """Return the parameters of a model, float32, for the run that `read_run` returned.

    Raises:
      ConfigError: the files hold an array that posx has no place for.
      WorkdirError: an array is missing, or of another shape than the config says.
    """
    from posx.lab.training.checkpoints import flatten

    abstract = make_run_model(run, 1).abstract()
    wanted = {name: leaf.shape for name, leaf in flatten(abstract).items()}
    arrays = _arrays(source, wanted, run)
    if wrong := next((name for name, shape in wanted.items() if arrays[name].shape != shape), ""):
        raise WorkdirError(f"{whose} has other arrays than its config says: {wrong}.")
    return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in wanted])


def _arrays(source: ForeignModel, wanted: Iterable[str], run: RunConfig) -> dict[str, np.ndarray]:
    """Return the arrays of a model by their `wanted` names in posx. Raises WorkdirError, ConfigError."""
    tied, num_heads = run.model.tied, run.model.num_heads
    family = FAMILIES[source.config["model_type"]]
    config, head = family.keys.read(source.config) | {"tie_word_embeddings": tied}, family.head(source.names)
    places = {name: head if name == "unembedding" and head else family.place(name) or name for name in wanted}
    base = places["embedding"].partition(".")[0] + "."
    if places["embedding"] not in source.names:  # files of the model without its head leave the first word out
        places = {name: place.removeprefix(base) for name, place in places.items()}
    for place in places.values():
        if place not in source.names:
            raise WorkdirError(f"the array {place} is missing in the model's files.")
    spare = {head} if tied else set()
    if extra := sorted(name for name in source.names - {*places.values()} - spare if not family.harmless(name)):
        raise ConfigError(
            f"the model has the array {extra[0]}, for which posx has no place. If no model needs it, save the files "
            "without it."
        )
    try:
        return {name: family.ours(name, source.arrays(place), config, num_heads) for name, place in places.items()}
    except ValueError as error:  # a fused array that does not split
        raise WorkdirError(f"the model has other arrays than its config says: {error}") from None


def export_model(folder: RunFolder, target: Path) -> int:
    """Write the newest good parameters of a run as a folder that transformers reads; return their step.

    A tokenizer of bytes has no form there and is left out. Raises ConfigError if the model does not have Llama's shape.
    """
    from safetensors.numpy import save_file

    config = transformers_config(folder.read_config())
    model, params, tokenizer, step = load_model(folder)
    of_model = tokenizer.model_ids if isinstance(tokenizer, BpeTokenizer) else {}
    special = {"eos_token_id": tokenizer.eos, "bos_token_id": tokenizer.begin}
    config |= {"vocab_size": model.vocab_size} | of_model.get("config", special)
    arrays = dict(named_arrays(params, config))
    with disk_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        write_json(target / "config.json", config)
        if "generation_config" in of_model:
            write_json(target / "generation_config.json", of_model["generation_config"])
        save_file(arrays, target / "model.safetensors", {"format": "pt"})
        if isinstance(tokenizer, BpeTokenizer):
            (target / "tokenizer.json").write_text(tokenizer.plain, "utf-8")
            _say_split(tokenizer, config["model_type"])
        else:
            say(f"notice: no tokenizer is written, because the {tokenizer.name} tokenizer has no form there")
    return step


def _say_split(tokenizer: BpeTokenizer, family: str) -> None:
    """Say so if AutoTokenizer would split texts in another way. For Qwen it does not read the split of the file."""
    split = json.dumps(parse_json(tokenizer.plain).get("pre_tokenizer"))
    if family.startswith("qwen") and json.dumps(QWEN_SPLIT) not in split:
        say(
            f"notice: AutoTokenizer splits texts as Qwen does if model_type={family}, so it gives other tokens. Load "
            "this tokenizer by transformers.PreTrainedTokenizerFast.from_pretrained(FOLDER)."
        )


def transformers_config(run: RunConfig) -> dict[str, Any]:
    """Return the config of transformers for a run, without its vocabulary. Raises ConfigError for another shape."""
    model, rope, mask = run.model, run.layers[0], run.model.masks[0]
    family, rule = find_family(model), getattr(rope, "frequencies", None)
    for problem, wrong in {
        "it predicts masked tokens from both sides": not mask.causal,
        "the masks are neither causal nor one window without sinks": len({*model.masks}) > 1 or mask.sinks,
        f"{family_differences(model) or 'windows'} go with no family": not family,
        "layers have different encodings": len(set(run.layers)) > 1,
        f"{rope} is not rope": not isinstance(rope, Rope),
        "some channels are not rotated": getattr(rope, "rotary_dim", None) != run.dims.head_dim,
        "dynamic_ntk has an original_len of its own": (
            isinstance(rule, DynamicNtk) and rule.original_len != run.train.length
        ),
        f"train.positions={run.train.positions} draws positions": run.train.token_positions.policy.most,
    }.items():
        if wrong:
            raise ConfigError(f"this model does not have Llama's shape: {problem}. Export it to a .safetensors file.")
    assert isinstance(rope, Rope)  # or it was refused
    return ({"sliding_window": mask.window} if mask.window else {}) | {
        "model_type": family, "architectures": [f"{family.capitalize()}ForCausalLM"], "hidden_act": "silu",
        "hidden_size": model.model_dim, "intermediate_size": model.hidden_dim, "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads, "num_key_value_heads": model.kv_heads, "head_dim": run.dims.head_dim,
        "max_position_embeddings": run.train.length, "rms_norm_eps": model.norm_eps, "dtype": "float32",
        "tie_word_embeddings": model.tied, "rope_parameters": rope_parameters(rope, run.dims.head_dim),
    }  # fmt: skip


def named_arrays(params: dict[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of a model by their names in the files, under the config that `transformers_config` returned."""
    from posx.lab.training.checkpoints import flatten

    family = FAMILIES[config["model_type"]]
    for name, array in flatten(params).items():
        yield str(family.place(name)), np.ascontiguousarray(family.theirs(name, np.asarray(array), config))
