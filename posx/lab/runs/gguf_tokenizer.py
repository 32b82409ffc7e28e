"""Finish the tokenizer that transformers builds from a GGUF file with the keys that it drops.

transformers does not know every pre-tokenizer, and merges pieces that are whole tokens. It drops the default of
llama.cpp for the begin token, and the flag for the space before a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from posx.errors import ConfigError
from posx.lab.runs.gguf_keys import FOLDER
from posx.lab.runs.keys import clip


class Split(NamedTuple):
    """How llama.cpp reads a pre-tokenizer.

    Attributes:
      pattern: the regular expression of pieces that are cut out first, "" for the split that transformers set.
      alone: pieces are final, not split as GPT-2 does.
      whole: a piece that is a token is not merged.
      begin: the default of add_bos_token.
    """

    pattern: str = ""
    alone: bool = False
    whole: bool = False
    begin: bool = False


_WHOLE = Split(whole=True, begin=True)
_DIGITS = Split(r"\p{N}")
_LLAMA3 = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
)  # fmt: skip
_PLAIN = (
    "gpt-2", "phi-2", "mpt", "olmo", "jais", "qwen2", "deepseek-r1-qwen", "dbrx", "smaug-bpe", "gpt-4o", "llama4",
)  # fmt: skip
_OF_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")

#: {tokenizer.ggml.pre: its split}, for byte-level tokenizers.
SPLITS = (
    dict.fromkeys(_LLAMA3, _WHOLE) | dict.fromkeys(_PLAIN, Split()) | dict.fromkeys(_OF_DIGITS, _DIGITS)
    | {"bloom": Split(r" ?[^(\s|.,!?…。，、।۔،)]+", alone=True)}  # noqa: RUF001
)  # fmt: skip


def find_split(values: Mapping[str, Any]) -> Split:
    """Return the split of a file's tokenizer. Raises ConfigError for a model or a split that posx does not know."""
    model, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre", "default")
    if model not in ("gpt2", "llama"):
        raise ConfigError(f"tokenizer.ggml.model={clip(model)}: posx reads gpt2 and llama. {FOLDER}")
    known = SPLITS if model == "gpt2" else {"default": Split(begin=True)}
    if pre not in known:
        given = f"={clip(pre)}" if "tokenizer.ggml.pre" in values else " is missing"
        raise ConfigError(f"tokenizer.ggml.pre{given}: posx does not know how it splits a text. {FOLDER}")
    if model == "gpt2" and values.get("tokenizer.ggml.add_space_prefix"):
        raise ConfigError("tokenizer.ggml.add_space_prefix=True: byte-level tokenizers have no such space in posx.")
    return known[pre]


def finish_tokenizer(tokenizer: dict[str, Any], values: Mapping[str, Any], split: Split) -> str:
    """Return the text of a tokenizer.json with the keys of the file that transformers drops.

    Args:
      tokenizer: the contents of the tokenizer.json that transformers made.
      values: the metadata of the file by name.
      split: of `find_split`.
    """
    if split.whole:
        tokenizer["model"]["ignore_merges"] = True
    if split.pattern:
        bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not split.alone}
        first = {"type": "Split", "pattern": {"Regex": split.pattern}, "behavior": "Isolated", "invert": False}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [first, bytes_]}
    space = values.get("tokenizer.ggml.add_space_prefix", True)
    if (tokenizer.get("pre_tokenizer") or {}).get("type") == "Metaspace" and not space:
        tokenizer["pre_tokenizer"]["prepend_scheme"] = "never"
    begin = values.get("tokenizer.ggml.bos_token_id")
    if begin is None or not values.get("tokenizer.ggml.add_bos_token", split.begin):
        tokenizer["post_processor"] = None
    else:
        token = values["tokenizer.ggml.tokens"][begin]
        text = {"Sequence": {"id": "A", "type_id": 0}}
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": token, "type_id": 0}}, text],
            "pair": [{"SpecialToken": {"id": token, "type_id": 0}}, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [begin], "tokens": [token]}},
        }
    return json.dumps(tokenizer, ensure_ascii=False)
