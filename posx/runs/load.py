"""A trained run as a function of parameters and tokens."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from posx.data import Tokenizer
from posx.errors import WorkdirError
from posx.layers import sequential, token_ids
from posx.machine.guard import start_devices
from posx.model import Model
from posx.progress import say
from posx.runs.describe import model_of, notice_of_code
from posx.runs.folder import RunFolder, run_in
from posx.runs.text import saved_tokenizer
from posx.training.checkpoints import Checkpoints
from posx.training.layout import Layout


@dataclasses.dataclass(frozen=True)
class Apply:
    """A trained model's forward pass as a function of parameters and tokens."""

    model: Model

    def __call__(self, params: dict[str, Any], tokens: jax.Array, pos: Any = None) -> jax.Array:
        """Return logits [b, t, v], float32, of the tokens after tokens [b, t]. Positions are 0 .. t - 1 unless given.

        Raises UndefinedLength if an encoding is not defined for t tokens.
        """
        tokens = token_ids(tokens, "[b, t]", vocab_size=self.model.vocab_size)
        length = tokens.shape[1]
        return self.model.at_length(length)(params, tokens, sequential(length) if pos is None else pos)


def load(workdir: str | Path) -> tuple[Apply, dict[str, Any], Tokenizer]:
    """Return (apply, params, tokenizer) of a trained run or of an exported file.

    `apply(params, tokens [b, t])` returns logits [b, t, v].

    Raises WorkdirError if the folder holds no run, or no checkpoint that verifies, or if the file is damaged.
    """
    path = Path(workdir).expanduser().resolve()
    if os.path.isfile(path):
        from posx.runs.export import load_file

        model, params, tokenizer, _ = load_file(path)
    else:
        model, params, tokenizer, _ = load_model(run_in(path))
    return Apply(model), params, tokenizer


def load_model(folder: RunFolder, layout: Layout = Layout()) -> tuple[Model, dict[str, Any], Tokenizer, int]:
    """Return the model of a run, its newest good parameters, its tokenizer, and their step."""
    start_devices()  # else it would be the checkpoints that cannot be read
    if folder.exported.exists():
        from posx.runs.export import load_file

        model, params, tokenizer, step = load_file(folder.exported)
        places = layout.placed(model.abstract())
        params = jax.tree.map(lambda array, place: jax.device_put(array, place.sharding), params, places)
        return model, params, tokenizer, step
    run = folder.read_config()
    notice_of_code(run, folder.path.name)
    tokenizer = saved_tokenizer(folder)
    model = model_of(run, tokenizer.vocab_size)
    restored = Checkpoints(folder.checkpoints).restore({"params": layout.placed(model.abstract())}, notice=say)
    if restored is None and (last := folder.ended_with_nan()) is not None:
        raise WorkdirError(f"{folder.path} has no checkpoint: its training ended with NaN at step {last}")
    if restored is None:
        raise WorkdirError(f"{folder.path} holds no checkpoint yet: run `posx train` with this --workdir first")
    step, state = restored
    return model, jax.tree.map(jnp.asarray, state["params"]), tokenizer, step
