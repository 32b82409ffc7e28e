"""Read models of Hugging Face's format: a folder with config.json, safetensors and tokenizer.json, or a GGUF file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from posx.errors import ConfigError, WorkdirError
from posx.lab.data import load_tokenizer
from posx.lab.data.tokenizers import BpeTokenizer, with_model
from posx.lab.files.checksums import file_checksum, read_object
from posx.lab.files.lines import parse_json
from posx.lab.runs.exported import report_damage
from posx.lab.runs.gguf import read_gguf
from posx.notices import say

#: The types of numbers in safetensors files that posx reads.
_TYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
#: Keys of tokenizer_config.json that name tokens.
_TOKENS = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "bos_token", "eos_token")
_SAVE = "Save one with a fast tokenizer's save_pretrained."


class ForeignModel(NamedTuple):
    """A model that was read from its files.

    Attributes:
      config: its config.json, or what a GGUF file holds of it.
      arrays: returns the array of a name.
      names: of the arrays.
      tokenizer: the text of a tokenizer.json with the ids of the model, see `with_model`.
      digest: of its files.
    """

    config: Mapping[str, Any]
    arrays: Callable[[str], np.ndarray]
    names: frozenset[str]
    tokenizer: str
    digest: str


def read_model(path: Path) -> ForeignModel:
    """Read a folder of Hugging Face, or a GGUF file. Arrays are read when they are asked for.

    Raises WorkdirError for a missing or damaged file, ConfigError for a GGUF file that posx refuses, or without the
    extra `hf`.
    """
    if path.suffix == ".gguf" and path.is_file():
        config, arrays, names, text = read_gguf(path)
        text = _with_ids(_drop_tokens(text, config["vocab_size"]), config, {}, {})
        return ForeignModel(config, arrays, names, text, _digest([path]))
    if not path.is_dir():
        raise WorkdirError(
            f"--from={path}: there is no such folder. Name one with a config.json, or a .gguf file. "
            "posx downloads no models."
        )
    config = read_object(path / "config.json")
    if not (path / "tokenizer.json").exists():
        raise WorkdirError(f"{path} holds no tokenizer.json. {_SAVE}")
    tokenizer = load_tokenizer(path / "tokenizer.json")
    if not isinstance(tokenizer, BpeTokenizer):
        raise WorkdirError(f"{path / 'tokenizer.json'} is of posx's bytes, not of Hugging Face.")
    places = _places(path)
    digest = _digest([path / "config.json", path / "tokenizer.json", *sorted(set(places.values()))])
    generation, named, legacy, added = (
        read_object(path / f"{name}.json") if (path / f"{name}.json").exists() else {}
        for name in ("generation_config", "tokenizer_config", "special_tokens_map", "added_tokens")
    )
    if "added_tokens_decoder" not in named:  # else transformers does not read the older files
        named = {**named, **legacy, "added_tokens_decoder": list(added)}
    if lost := sorted({*_texts([named.get(key) for key in _TOKENS])} - tokenizer.vocab.keys()):
        say(f"notice: the token {lost[0]!r} is not in tokenizer.json, so posx does not know it. {_SAVE}")
    text = _with_ids(_drop_tokens(tokenizer.text, config.get("vocab_size")), config, generation, named)
    return ForeignModel(config, lambda name: _array(places[name], name), frozenset(places), text, digest)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of tokens in a value of tokenizer_config.json: one, a list, or under names or ids."""
    value = value.get("content", list(value.values())) if isinstance(value, Mapping) else value
    if isinstance(value, list):
        yield from (text for one in value for text in _texts(one))
    elif isinstance(value, str):
        yield value


def _drop_tokens(tokenizer: str, rows: Any) -> str:
    """Return a tokenizer.json without special tokens past the model's rows, which no text has: Gemma 3's of images."""
    values = parse_json(tokenizer)
    added = values.get("added_tokens") or []
    kept = [token for token in added if not (token["special"] and isinstance(rows, int) and token["id"] >= rows)]
    return tokenizer if kept == added else json.dumps(values | {"added_tokens": kept}, ensure_ascii=False)


def _with_ids(text: str, config: Mapping[str, Any], generation: Mapping[str, Any], named: Mapping[str, Any]) -> str:
    """Return a tokenizer.json with the begin and end tokens of a model.

    The begin token is that of tokenizer_config.json, which may say that there is none, else that of config.json. A
    generation ends at each end token of the three.

    Args:
      text: the tokenizer.json.
      config: the config.json.
      generation: the generation_config.json, empty without one.
      named: the tokenizer_config.json, which names tokens by their text, and older files; empty without one.

    Raises:
      ConfigError: a value is no token id.
    """
    written = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    begins, ends = (_ids(config, f"{name}_token_id", config) for name in ("bos", "eos"))
    ends += _ids(generation, "eos_token_id", config) + _named_id(named, "eos_token", text)
    if "bos_token" in named:
        begins = _named_id(named, "bos_token", text)
    ids = {"begin": next(iter(begins), None), "ends": list(dict.fromkeys(ends)), "config": written}
    return with_model(text, ids | ({"generation_config": generation} if generation else {}))


def _named_id(values: Mapping[str, Any], name: str, text: str) -> list[int]:
    """Return the id of a token that is named by its text, [] for null and for a token that is not in the file."""
    token = values.get(name)
    token = token.get("content") if isinstance(token, Mapping) else token
    number = None if token is None else BpeTokenizer(text).vocab.get(str(token))
    return [] if number is None else [number]


def _ids(values: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> list[int]:
    """Return the ids under a name, one or a list of them, that the model has rows for."""
    value = values.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if wrong := [one for one in ids if isinstance(one, bool) or not isinstance(one, int)]:
        raise ConfigError(f"{name}={wrong[0]!r} is no token id. Write a whole number, a list of them, or null.")
    rows = config.get("vocab_size")
    if beyond := [one for one in ids if one < 0 or (isinstance(rows, int) and one >= rows)]:
        say(f"notice: {name}={beyond[0]} has no row in the model, which has {rows}. posx does not use it.")
    return [one for one in ids if one not in beyond]


def _places(path: Path) -> dict[str, Path]:
    """Return {array: its file} of a folder, from the files that transformers reads. Raises WorkdirError.

    `model.safetensors` goes before an index. The index only names files: all their arrays are read.
    """
    from safetensors import safe_open

    if (path / "adapter_config.json").exists():
        raise WorkdirError(f"{path} holds an adapter, adapter_config.json. Merge it into the model and save that.")
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    files = [whole] if whole.is_file() else []
    if index.is_file():
        named = read_object(index).get("weight_map")
        if not isinstance(named, Mapping):
            raise WorkdirError(f"{index} has no weight_map.")
        shards = sorted({path / str(file) for file in named.values()})
        if files and shards != files:
            say(f"notice: {whole.name} is read, as transformers does, not the files that {index.name} names.")
        files = files or shards
    if gone := [file.name for file in files if not file.is_file()]:
        raise WorkdirError(f"{path / gone[0]} is missing, which {index.name} names.")
    if not files:
        raise WorkdirError(f"{path} holds no {whole.name} and no {index.name}.")
    places: dict[str, Path] = {}
    for file in files:
        with report_damage(file), safe_open(file, "flax") as opened:
            names = set(opened.keys())
        if both := sorted(names & places.keys()):
            raise WorkdirError(f"{file} and {places[both[0]].name} both hold the array {both[0]}. Remove one of them.")
        places |= dict.fromkeys(names, file)
    return places


def _array(file: Path, name: str) -> np.ndarray:
    """Return an array of a safetensors file as float32."""
    from safetensors import safe_open

    with report_damage(file), safe_open(file, "flax") as opened:  # it knows bfloat16
        if (kind := opened.get_slice(name).get_dtype()) not in _TYPES:  # numbers of 8 bits are quantised
            raise ValueError(f"the array {name} has the type {kind}. Save the model in float32, float16 or bfloat16.")
        return np.asarray(opened.get_tensor(name)).astype(np.float32)


def _digest(files: Iterable[Path]) -> str:
    return hashlib.sha256("".join(map(file_checksum, files)).encode()).hexdigest()[:8]
