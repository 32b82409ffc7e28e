"""Models of transformers from hand-written configs, and what posx makes of the same files.

A config is written as it is given: the library reads it, and makes random weights of the shapes that it reads.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from posx.lab.data import train_bpe
from posx.lab.runs.describe import make_run_model
from posx.lab.runs.exchange import read_params, read_run
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.foreign import read_model
from posx.lab.runs.load import Apply
from posx.machine.guard import start_devices

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 32, "vocab_size": 270,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
GPT = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 270}
#: {model type: a small config of it}.
BASES = {
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 8},
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 16},
    "gemma3_text": GROUPED | {"head_dim": 16, "num_hidden_layers": 2, "sliding_window": 8, "sliding_window_pattern": 2},
    "gpt_neox": SIZES,
    "gpt2": GPT | {"n_positions": 32},
    "bloom": {"n_embed": 32, "n_layer": 1, "num_attention_heads": 4, "vocab_size": 270, "seq_length": 32},
    "mpt": {"d_model": 32, "n_layers": 1, "n_heads": 4, "vocab_size": 270, "max_seq_len": 32},
}
TOKENS = np.random.default_rng(0).integers(0, 270, (2, 24)).astype(np.int32)


class Model(NamedTuple):
    """A folder that transformers has written, with its logits [b, t, v]; None if it raises."""

    folder: Path
    logits: np.ndarray | None


def write(folder, name, config, arrays=lambda arrays: arrays, seed=0) -> Model:
    """Write a model with this config into `folder`, and compute its logits.

    arrays: a function of {name: array} of the saved model, which returns the arrays that the files hold.
    """
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    text = json.dumps({"model_type": name, **config})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(text)
    torch.manual_seed(seed)
    transformers.utils.logging.disable_progress_bar()
    try:
        made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    except Exception:  # transformers raises all kinds
        return Model(folder, None)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file(arrays(load_file(weights)), weights, {"format": "pt"})
    (folder / "config.json").write_text(text)
    train_bpe(["some words and other words " * 9], 262).save(folder / "tokenizer.json")
    return Model(folder, theirs(folder))


def theirs(folder, tokens=TOKENS) -> np.ndarray | None:
    """Return the logits of transformers, None if it raises."""
    import torch
    import transformers

    with contextlib.suppress(Exception), torch.no_grad():  # transformers raises all kinds
        made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return made.eval()(torch.from_numpy(tokens.astype(np.int64)), return_dict=True).logits.numpy()
    return None


def imported(folder):
    """Return (settings, parameters) of posx for a folder of transformers."""
    start_devices()
    source = read_model(folder)
    run = read_run(source, folder.name, RunFolder(folder / "run"))
    return run, read_params(source, run, folder.name)


def ours(folder, tokens=TOKENS) -> np.ndarray:
    """Return the logits of posx for a folder of transformers."""
    run, params = imported(folder)
    apply = Apply(make_run_model(run, run.model.vocab_size))
    return np.asarray(jax.jit(lambda params: apply(params, tokens))(params))
