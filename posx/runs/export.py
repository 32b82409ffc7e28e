"""A trained model as one file that travels: safetensors, with its settings and its tokenizer in the header."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from posx.config import RunConfig
from posx.data import Tokenizer, load_tokenizer
from posx.errors import PosxError, WorkdirError, other_names
from posx.files.atomic import disk_errors, write_bytes
from posx.files.lines import parsed
from posx.runs.folder import RunFolder

if TYPE_CHECKING:
    from posx.model import Model

FORMAT, SUFFIX = "posx 1", ".safetensors"

#: Among the digests of arrays, that of all else.
HEADER = ""


def export(folder: RunFolder, target: Path) -> int:
    """Write the newest good parameters of a run to `target`, named as in its checkpoints. Return their step.

    The header holds `config` and `tokenizer`, the run's own files, and the digest of every array. Raises WorkdirError,
    OutOfMemoryError.
    """
    from safetensors.numpy import save

    from posx.runs.load import load_model
    from posx.training.checkpoints import flatten, sha256_of

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


def unpacked(path: Path) -> Path:
    """Return `path`, or if it is a file that `export` wrote, a temporary run folder with its contents.

    The folder lasts as long as this process. Raises WorkdirError if the file is damaged or not of posx.
    """
    if path.suffix != SUFFIX or not os.path.isfile(path):
        return path
    with _reading(path):
        header = _header(path)
    place = Path(tempfile.mkdtemp(prefix="posx-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    folder = RunFolder(place / path.stem)
    with disk_errors(folder.path):
        folder.path.mkdir()
        folder.config_file.write_text(header["config"], "utf-8")
        folder.tokenizer_file.write_bytes(header["tokenizer"].encode())
        folder.exported.symlink_to(path)
    return folder.path


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Make a WorkdirError of whatever is wrong with the file `path`."""
    from safetensors import SafetensorError

    try:
        yield
    except WorkdirError:
        raise
    except SafetensorError as error:
        raise WorkdirError(f"{path} is damaged, or no safetensors file: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, PosxError) as error:
        raise WorkdirError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None


def _header(path: Path) -> dict[str, str]:
    """Return the header of the file that `export` wrote. Raises WorkdirError if it is of something else or damaged."""
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        header = file.metadata() or {}
    if header.get("format") != FORMAT:
        newer = header.get("format", "").startswith("posx ")
        by_whom = "a newer posx has written it" if newer else "`posx export` has not written it"
        raise WorkdirError(f"{path} is not of the format {FORMAT!r}: {by_whom}")
    if dict(parsed(header["digests"])).get(HEADER) != _digest(header):
        raise WorkdirError(f"{path} is damaged: its settings or its tokenizer are not what their digest says")
    return header


def load_file(path: Path) -> tuple[Model, dict[str, Any], Tokenizer, int]:
    """Return what `load_model` returns of a run, from the file that `export` wrote.

    Raises WorkdirError if the file is damaged or not of posx.
    """
    from safetensors import safe_open

    from posx.runs.describe import model_of, notice_of_code
    from posx.training.checkpoints import flatten, sha256_of

    with _reading(path):
        header = _header(path)
        with safe_open(path, "numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        digests = dict(parsed(header["digests"]))
        run, step = RunConfig.from_json(parsed(header["config"])), int(header["step"])
        with tempfile.TemporaryDirectory() as place:
            words = Path(place, "tokenizer.json")
            words.write_bytes(header["tokenizer"].encode())
            tokenizer = load_tokenizer(words)
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
