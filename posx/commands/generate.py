"""`posx generate`: text from a trained run."""

from __future__ import annotations

from typing import Any

import numpy as np

from posx.commands import work_folder
from posx.data.store import cache_folder
from posx.errors import ConfigError
from posx.generate import Sampling, generate
from posx.machine.compile_cache import use_compile_cache
from posx.runs.folder import RunFolder
from posx.runs.text import settings


def main(values: dict[str, Any], _: None) -> None:
    sampling = Sampling(values["temperature"], values["top_k"])
    folder = RunFolder(work_folder(values))
    if values["num_tokens"] < 1:
        raise ConfigError(f"--num_tokens={values['num_tokens']} must be at least 1")
    if not 0 <= values["seed"] < 2**32:
        raise ConfigError(f"--seed={values['seed']} must be at least 0 and below 2**32")
    if values["dry_run"]:
        print(f"would sample {values['num_tokens']} tokens from {folder.path} with {sampling}")
        return
    from posx.runs.load import load_model  # Flax and Orbax: once the settings are known to be right

    use_compile_cache(cache_folder(settings(folder, folder.read_config().data)))
    model, params, tokenizer, _step = load_model(folder)
    prompt = np.concatenate([[tokenizer.eos], tokenizer.encode(values["prompt"])])
    made: list[int] = []
    shown = ""
    print(values["prompt"], end="", flush=True)
    steps = generate(model, params, [prompt], values["num_tokens"], sampling=sampling, seed=values["seed"])
    for new in steps:
        made.append(int(new[0]))
        text = tokenizer.decode(made)
        if not text.endswith("\ufffd"):  # a character whose last bytes are still to come
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(tokenizer.decode(made)[len(shown) :])
