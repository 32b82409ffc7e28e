"""Writes posx/lab/runs/declared.json: the keys that the config classes of transformers declare, with their defaults.

    python -m tests.lab.runs.declared           # needs the `peers` extra, which pins the version

`posx.lab.runs.keys` reads the file. A test marked `peers` writes it anew and compares. Keys within `attn_config` have
both names, "attn_config.alibi". Keys that a class takes from `PreTrainedConfig` are in the entry "".
"""

import dataclasses
import json
import pathlib

import posx
from posx.lab.runs.families import FAMILIES
from posx.lab.runs.keys import flat

PLACE = pathlib.Path(posx.__file__).parent / "lab" / "runs" / "declared.json"


def declared() -> dict:
    """Return the contents of the file for the installed version."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    shared = fields(transformers.PreTrainedConfig)
    shared |= dict.fromkeys(transformers.GenerationConfig._get_default_generation_params())
    keys = {"": dict.fromkeys(sorted(shared))}
    for name in FAMILIES:
        cls = CONFIG_MAPPING[name]
        own = {key: value for key, value in fields(cls).items() if key not in fields(transformers.PreTrainedConfig)}
        for key, nested in cls.sub_configs.items():
            inner = {name: value for name, value in fields(nested).items() if name not in shared}
            own = {**own, key: inner}
        keys[name] = dict(sorted(flat(own)))
    return {"transformers": transformers.__version__, "keys": keys}


def fields(cls) -> dict:
    return {field.name: field.default for field in dataclasses.fields(cls)}


def text() -> str:
    return json.dumps(declared(), indent=1) + "\n"


if __name__ == "__main__":
    PLACE.write_text(text(), encoding="utf-8")
