"""A trained model as one file that travels: safetensors, with its settings and its tokenizer in the header."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from posx.config.stored import from_stored
from posx.data import Tokenizer, load_tokenizer
from posx.errors import PosxError, WorkdirError, other_names
from posx.files.atomic import disk_errors, write_bytes
from posx.files.parse import parsed
from posx.model import Model
from posx.runs.describe import model_of, notice_of_code
from posx.runs.folder import RunFolder
from posx.runs.load import load_model
from posx.training.checkpoints import flatten
from posx.training.digests import sha256_of

FORMAT = "posx 1"

#: Among the digests of arrays, that of all else.
HEADER = ""


def export(folder: RunFolder, target: Path) -> int:
    """Writes the newest good parameters of a run to `target`, named as in its checkpoints; returns their step.

    The header holds `config` and `tokenizer`, the run's own files, and the digest of every array. Raises WorkdirError,
    OutOfMemoryError.
    """
    from safetensors.numpy import save

    _, params, tokenizer, step = load_model(folder)
    arrays = flatten(params)
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save(Path(place, "tokenizer.json"))
        words = Path(place, "tokenizer.json").read_bytes().decode()
    header = {"format": FORMAT, "step": str(step), "config": folder.config_file.read_text("utf-8"), "tokenizer": words}
    digests = {name: sha256_of(array) for name, array in arrays.items()}
    header["digests"] = json.dumps(digests | {HEADER: _digest(header)})
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(target, save(arrays, header))
    return step


def _digest(header: Mapping[str, str]) -> str:
    words = json.dumps([header[name] for name in ("step", "config", "tokenizer")])
    return hashlib.sha256(words.encode()).hexdigest()


def load_file(path: Path) -> tuple[Model, dict[str, Any], Tokenizer, int]:
    """What `load_model` gives of a run, from the file that `export` wrote. Raises WorkdirError where it is damaged, or
    of something else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                newer = header.get("format", "").startswith("posx ")
                by_whom = "a newer posx has written it" if newer else "`posx export` has not written it"
                raise WorkdirError(f"{path} is not of the format {FORMAT!r}: {by_whom}")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        digests = dict(parsed(header["digests"]))
        if digests.get(HEADER) != _digest(header):
            raise WorkdirError(f"{path} is damaged: its settings or its tokenizer are not what their digest says")
        run, step = from_stored(parsed(header["config"])), int(header["step"])
        with tempfile.TemporaryDirectory() as place:
            words = Path(place, "tokenizer.json")
            words.write_bytes(header["tokenizer"].encode())
            tokenizer = load_tokenizer(words)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, PosxError) as error:
        if isinstance(error, WorkdirError):
            raise
        raise WorkdirError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    notice_of_code(run, path.name)
    model = model_of(run, tokenizer.vocab_size)
    abstract = model.abstract()
    wanted = flatten(abstract)
    if other := other_names(arrays, wanted):
        raise WorkdirError(f"{path} holds other arrays than its settings ask for: {other}. Export the run again.")
    for name, leaf in wanted.items():
        array = arrays[name]
        if (array.shape, array.dtype) != (leaf.shape, leaf.dtype) or sha256_of(array) != digests.get(name):
            raise WorkdirError(f"{path} is damaged: {name} is of another shape, or not what its digest says")
    params = jax.tree.unflatten(jax.tree.structure(abstract), [jnp.asarray(arrays[name]) for name in wanted])
    return model, params, tokenizer, step
