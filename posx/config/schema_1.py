"""`config.json` of schema 1: what its runs were resolved to is there as text alone, as Python prints encodings.

The rules here are those of then, whatever today's are.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from posx.encodings import ENCODINGS
from posx.errors import ConfigError


def migrated(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same file in schema 2. Raises ConfigError for what cannot be read."""
    try:
        encoding, model, resolved = dict(values["encoding"]), values["model"], values["resolved"]
        words = [encoding["name"], *model["layer_policy"]]
        names = {cls.__name__: name for name, cls in ENCODINGS.items()}
        names |= {word.rpartition(":")[2]: word for word in words if ":" in word}
        layers = [_layer(text, names) for text in resolved["encodings"]]
        m, h = model["model_dim"], model["num_heads"]
        hidden = 4 * m if model["mlp"] == "gelu" else 8 * m // 3
        sizes = {"num_kv_heads": model["num_kv_heads"] or h, "mlp_dim": model["mlp_dim"] or hidden}
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise ConfigError(f"what this run was resolved to cannot be read: {type(error).__name__}: {error}") from None
    if encoding.get("head_dim") == "auto":  # T5's, in its first days
        encoding["head_dim"] = 0
    return {**values, "schema_version": 2, "encoding": encoding, "resolved": {"layers": layers, "model": sizes}}


def digest(values: Mapping[str, Any]) -> str:
    """What DONE called the run: a hash of what was asked for."""
    asked = {name: dict(values[name]) for name in ("encoding", "model", "data", "train", "eval")}
    asked["data"].pop("cache_dir")
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]


def _layer(text: str, names: Mapping[str, str]) -> Any:
    spec = _spec(ast.parse(text, mode="eval").body, names)
    if isinstance(spec, dict) and spec["name"] == "t5" and spec["scaled"]:
        spec["head_dim"] = 0  # its first days wrote the width there, though nothing reads it
    return spec


def _spec(node: ast.expr, names: Mapping[str, str]) -> Any:
    """The spec that the text of an encoding's value stands for; plain values as they are."""
    if isinstance(node, ast.Tuple):
        return [_spec(item, names) for item in node.elts]
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    fields = {word.arg: _spec(word.value, names) for word in node.keywords if word.arg}
    name = ast.unparse(node.func)
    return fields["parts"] if name == "Chain" else {"name": names[name], **fields}
