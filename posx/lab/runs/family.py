"""A family of models that posx imports: its settings, its positions, the names of its arrays."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from posx.encodings import Encoding
from posx.encodings.hugging_face import layer_ropes
from posx.errors import ConfigError
from posx.lab.runs.keys import Config, Keys

#: {an array in posx, without its layer: its name in the files, without ".weight" and ".bias"}; {n} is the layer.
Names = Mapping[str, str]

FULL, LOCAL = "full_attention", "sliding_attention"
#: {an activation of transformers: the `mlp` of posx}, for MLPs without a gate.
GELUS = {"gelu": "gelu_exact"} | dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu")
PROJECTIONS = ("query", "key", "value")
#: The name of the matrix of outputs that transformers knows in every family, beside the family's own.
HEAD = "lm_head.weight"


def one_rope(config: Config) -> dict[str, Encoding]:
    """Return the RoPE that all layers of a model have, as {"": rope}. Raises ConfigError if layer types differ."""
    ropes = layer_ropes(config)
    if other := next((kind for kind in ropes if kind), ""):
        raise ConfigError(f"rope_parameters has the layer type {other!r}, but all layers of the family have one RoPE.")
    return {**ropes}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model type of transformers.

    Attributes:
      names: the names of its arrays.
      settings: those of `ModelConfig` that all its models share.
      keys: all keys of its configs.
      positions: the encoding of each layer type, {"": encoding} if all layers have one.
      window: layers have a window, if no layer types are named.
      pattern: every layer of this number has no window; 0 for none.
      activation: the config names one of GELUS.
      partial: RoPE may rotate a share of the channels.
      fused: how queries, keys and values share an array: in "blocks" or by "heads"; "" if they do not.
      inputs_first: matrices are [inputs, outputs].
      scaled: the model itself multiplies embeddings by sqrt(m).
      offset: added to the scales of norms.
      buffers: arrays of a layer that no model needs.
    """

    names: Names
    settings: Config
    keys: Keys
    positions: Callable[[Config], Mapping[str, Encoding]] = one_rope
    window: bool = False
    pattern: int = 0
    activation: bool = False
    partial: bool = False
    fused: str = ""
    inputs_first: bool = False
    scaled: bool = False
    offset: float = 0.0
    buffers: tuple[str, ...] = ()

    def model(self, config: Config) -> dict[str, Any]:
        """Return the settings that a config under Llama's keys decides, but for sizes. Raises ConfigError."""
        if not self.activation:
            return dict(self.settings)
        name = config.get("hidden_act")
        if name not in GELUS:
            key = next(own for own, meaning in self.keys.reads.items() if meaning == "hidden_act")
            raise ConfigError(f"{key}={name!r}, but posx has {', '.join(GELUS)}.")
        return {**self.settings, "mlp": GELUS[name]}

    def layers(self, config: Config) -> tuple[list[Encoding], list[int | None]]:
        """Return the encoding of each layer and its window, of a config under Llama's keys. Raises ConfigError."""
        kinds, positions = self._kinds(config), self.positions(config)
        encodings = [positions[kind if kind in positions else ""] for kind in kinds]
        if not self.partial and any(getattr(rope, "rotary_dim", None) for rope in encodings):
            raise ConfigError(
                f"partial_rotary_factor has no effect in transformers' {self.keys.name}. Remove it from config.json."
            )
        return encodings, [config.get("sliding_window") if kind == LOCAL else None for kind in kinds]

    def _kinds(self, config: Config) -> list[str]:
        """Return FULL or LOCAL for each layer. Raises ConfigError."""
        num_layers, every = config["num_hidden_layers"], config.get("sliding_window_pattern") or self.pattern
        usual = [LOCAL if self.window and (not every or (n + 1) % every) else FULL for n in range(num_layers)]
        kinds = config.get("layer_types") or usual
        if len(kinds) != num_layers:
            raise ConfigError(f"layer_types has {len(kinds)} entries, but there are {num_layers} layers.")
        if other := [kind for kind in kinds if kind not in (FULL, LOCAL)]:
            raise ConfigError(f"layer_types has {other[0]!r}, which posx does not know.")
        if LOCAL in kinds and not self.window:
            raise ConfigError(f"layer_types has {LOCAL!r}, but this family has no window in posx.")
        return kinds

    def head(self, names: Collection[str]) -> str:
        """Return the name of the matrix of outputs among the names of the files, "" if they have none."""
        return next((name for name in (str(self.place("unembedding")), HEAD) if name in names), "")

    def harmless(self, name: str) -> bool:
        """Decide whether an array of the files is computed anew by every model: frequencies of RoPE, and masks."""
        layer = "|".join(re.escape(end) for end in self.buffers)
        return bool(re.fullmatch(rf"(.*\.)?(rotary_emb\.inv_freq|\d+\.({layer or 'rotary_emb.inv_freq'}))", name))

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
        array = self._transpose(role, array)
        if self.fused and role in PROJECTIONS:
            n, rest = PROJECTIONS.index(role), array.shape[:-1]
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
        return self._transpose(name.rpartition(".")[2], array)

    def _transpose(self, role: str, array: np.ndarray) -> np.ndarray:
        """Return a matrix in the other format: posx has [inputs, outputs], most files have [outputs, inputs]."""
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
