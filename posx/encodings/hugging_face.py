"""RoPE as Hugging Face's configs write it: `rope_parameters`, or `rope_scaling` and `rope_theta` in older ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from posx.encodings import frequencies
from posx.encodings.frequencies import FrequencyRule
from posx.encodings.rope import Rope
from posx.errors import ConfigError, nearest
from posx.notices import say

_ORIGINAL = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"

#: {rope_type: the rule, {its field: the key}}.
_TYPES: dict[str, tuple[type[FrequencyRule], dict[str, str]]] = {
    "default": (frequencies.Geometric, {}),
    "linear": (frequencies.Linear, {"factor": "factor"}),
    "dynamic": (frequencies.DynamicNtk, {"factor": "factor"}),
    "yarn": (
        frequencies.Yarn,
        {"factor": "factor", "original_len": _ORIGINAL, "fast": "beta_fast", "slow": "beta_slow"}
        | {name: name for name in ("attention_factor", "truncate", "mscale", "mscale_all_dim")},
    ),
    "longrope": (
        frequencies.Longrope,
        {"factor": "factor", "original_len": _ORIGINAL, "attention_factor": "attention_factor"}
        | {"short_factors": "short_factor", "long_factors": "long_factor"},
    ),
    "llama3": (
        frequencies.Llama3,
        {"original_len": _ORIGINAL} | {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")},
    ),
    "proportional": (frequencies.Proportional, {"share": _SHARE, "factor": "factor"}),
}


#: The keys of M-RoPE. It is RoPE for the tokens of a text, whose numbers are equal on all axes.
_SECTIONS = ("mrope_section", "mrope_interleaved")

#: Fields that a dictionary may leave out, if they have their defaults.
_OPTIONAL = ("truncate", "mscale", "mscale_all_dim")


def layer_ropes(config: Mapping[str, Any]) -> dict[str, Rope]:
    """Return the RoPE of each layer type of a model's config; {"": rope} if all layers have one.

    A dictionary's own rope_theta and partial_rotary_factor go before those of the config, as in transformers. The
    original_max_position_embeddings of the config goes before the dictionary's, and is not read beside layer types.

    Args:
      config: the contents of a `config.json` of Hugging Face's transformers.

    Raises:
      ConfigError: a rule or a key that posx does not know, or that is missing.
    """
    head_dim = config.get("head_dim") or _require_key(config, "hidden_size") // _require_key(
        config, "num_attention_heads"
    )
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})  # transformers' own order
    outer = {key: config[key] for key in ("rope_theta", _SHARE) if config.get(key) is not None}
    nested = {kind: inner for kind, inner in given.items() if isinstance(inner, Mapping)}
    if beside := sorted(given.keys() - nested.keys() if nested else ()):
        raise ConfigError(f"{beside[0]}={given[beside[0]]!r} is beside layer types. Move it into them, or remove it.")
    if any("truncate" in inner for inner in nested.values()):
        raise ConfigError("truncate: transformers does not read it within a layer type. Remove it from config.json.")
    original = {} if nested or config.get(_ORIGINAL) is None else {_ORIGINAL: config[_ORIGINAL]}
    sizes = head_dim, _require_key(config, "max_position_embeddings")
    return {kind: read_rope({**outer, **inner, **original}, *sizes) for kind, inner in (nested or {"": given}).items()}


def read_rope(parameters: Mapping[str, Any], head_dim: int, max_positions: int) -> Rope:
    """Return the RoPE of one dictionary of `rope_parameters`; `resolve` sets what it leaves open.

    Args:
      parameters: keys such as rope_type, rope_theta, factor.
      head_dim: the channels of a head.
      max_positions: the model's max_position_embeddings in tokens.

    Raises:
      ConfigError: a rule or a key that posx does not know, or that is missing.
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    if "truncate" in parameters:
        given["truncate"] = bool(parameters["truncate"])  # transformers reads null as false
    if "type" in given:  # of older configs
        given.setdefault("rope_type", given.pop("type"))
    kind = given.pop("rope_type", "default")
    if kind not in _TYPES:
        raise ConfigError(
            f"rope_type={kind!r} is unknown. {nearest(str(kind), list(_TYPES))}posx reads {_known_types()}."
        )
    rule, keys = _TYPES[kind]
    base, share = given.pop("rope_theta", 10000.0), given.get(_SHARE, 1.0)
    if _SHARE not in keys.values():
        given.pop(_SHARE, None)
    if _ORIGINAL in keys.values():
        given.setdefault(_ORIGINAL, max_positions)
        factor = max_positions / given[_ORIGINAL]
        given.setdefault("factor", max(factor, 1.0) if kind == "longrope" else factor)
    else:
        given.pop(_ORIGINAL, None)
    if sections := [name for name in _SECTIONS if given.pop(name, None)]:
        say(
            f"{sections[0]} is read as rope, which is exact for texts: their tokens have equal positions on all axes. "
            "For images build mrope(sections=...)."
        )
    if extra := sorted(given.keys() - set(keys.values())):
        raise ConfigError(f"rope_type={kind!r} has the key {extra[0]!r}, which posx does not know.")
    if kind != "proportional":
        for field in {"factor", "low_freq_factor", "high_freq_factor"} & keys.keys():
            _require_key(given, keys[field])
    fields = {field: given[key] for field, key in keys.items() if key in given}
    fields = {field: tuple(value) if isinstance(value, list) else value for field, value in fields.items()}
    if rule is frequencies.DynamicNtk:
        fields["original_len"] = max_positions
    rotary_dim = None if share == 1 or rule is frequencies.Proportional else int(head_dim * share)
    return Rope(base=float(base), rotary_dim=rotary_dim, frequencies=rule(**fields))


def rope_parameters(rope: Rope, head_dim: int) -> dict[str, Any]:
    """Return the dictionary that `read_rope` reads as this RoPE, without its open fields.

    It has no `original_len` of `dynamic_ntk`: there it is the config's own max_position_embeddings.

    Raises:
      ConfigError: Hugging Face has no such rule, layout or form of it.
    """
    rule = rope.frequencies
    kind = next((kind for kind, (cls, _) in _TYPES.items() if cls is type(rule)), "")
    if not kind:
        raise ConfigError(f"{rule}: Hugging Face has no such rule. It has {_known_types()}.")
    if rope.layout != "half_split" or getattr(rule, "ramp", "index") != "index":
        raise ConfigError(f"{rope}: Hugging Face has neither interleaved planes nor YaRN's ramp over turns.")
    keys, values = _TYPES[kind][1], {"rope_type": kind, "rope_theta": rope.base}
    if rope.rotary_dim not in (None, head_dim):
        if _SHARE in keys.values():
            raise ConfigError(f"{rope}: Hugging Face has this rule for all channels only.")
        share = rope.rotary_dim / head_dim
        values[_SHARE] = share if int(head_dim * share) == rope.rotary_dim else math.nextafter(share, 1)
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if field.name in keys and value is not None and not (field.name in _OPTIONAL and value == field.default):
            values[keys[field.name]] = list(value) if isinstance(value, tuple) else value
    return values


def _require_key(mapping: Mapping[str, Any], key: str) -> Any:
    if mapping.get(key) is None:
        raise ConfigError(f"the config has no {key!r}, which RoPE needs here.")
    return mapping[key]


def _known_types() -> str:
    return ", ".join(_TYPES)
