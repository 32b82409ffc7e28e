"""One file that travels with a trained run: safetensors, with the run's settings and its tokenizer in the header."""

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
from typing import Any

import jax
import numpy as np

from posx.errors import PosxError, WorkdirError, other_names
from posx.lab.files.atomic import disk_errors, write_bytes
from posx.lab.files.lines import parse_json
from posx.lab.runs.folder import RunFolder

FORMAT, SUFFIX = "posx 1", ".safetensors"

#: The name, among the digests of arrays, of the digest of everything else.
HEADER = ""


def export(folder: RunFolder, params: dict[str, Any], step: int, target: Path) -> None:
    """Write parameters of a run to `target`, named as in checkpoints. Raises WorkdirError, OutOfMemoryError.

    The header holds the texts of the run's `config.json` and `tokenizer.json`, and the digest of every array.
    """
    from safetensors.numpy import save

    from posx.lab.training.checkpoints import array_sha256, flatten

    arrays = flatten(params)
    config, tokenizer = (file.read_bytes().decode() for file in (folder.config_file, folder.tokenizer_file))
    header = {"format": FORMAT, "step": str(step), "config": config, "tokenizer": tokenizer}
    digests = {name: array_sha256(array) for name, array in arrays.items()}
    header["digests"] = json.dumps(digests | {HEADER: _digest(header)})
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(target, save(arrays, header))


def _digest(header: Mapping[str, str]) -> str:
    words = json.dumps([header[name] for name in ("step", "config", "tokenizer")])
    return hashlib.sha256(words.encode()).hexdigest()


def unpack(path: Path) -> Path:
    """Return `path`, or if it is a file that `export` wrote, a temporary run folder with its contents.

    The folder lasts as long as this process. Raises WorkdirError if the file is damaged or not of posx.
    """
    return unpack_export(path).path if path.suffix == SUFFIX and os.path.isfile(path) else path


def unpack_export(path: Path) -> RunFolder:
    """Return a temporary run folder with the contents of the file `path`, as `unpack` does."""
    header = export_header(path)
    place = Path(tempfile.mkdtemp(prefix="posx-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    folder = RunFolder(place / path.stem)
    with disk_errors(folder.path):
        folder.path.mkdir()
        folder.config_file.write_text(header["config"], "utf-8")
        folder.tokenizer_file.write_bytes(header["tokenizer"].encode())
        folder.weights_file.write_text(str(path), "utf-8")
    return folder


@contextlib.contextmanager
def report_damage(path: Path) -> Iterator[None]:
    """Make a WorkdirError of whatever is wrong with the file `path`."""
    from safetensors import SafetensorError

    try:
        yield
    except WorkdirError:
        raise
    except SafetensorError as error:
        raise WorkdirError(f"{path} is damaged, or no safetensors file: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, PosxError) as error:
        raise WorkdirError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None


def export_header(path: Path) -> dict[str, str]:
    """Return the header of the file that `export` wrote. Raises WorkdirError if it is of something else or damaged."""
    from safetensors import safe_open

    with report_damage(path):
        with safe_open(path, "numpy") as file:
            header = file.metadata() or {}
        if header.get("format") != FORMAT:
            newer = header.get("format", "").startswith("posx ")
            by_whom = "a newer posx has written it" if newer else "`posx export` has not written it"
            raise WorkdirError(f"{path} is not of the format {FORMAT!r}: {by_whom}")
        if dict(parse_json(header["digests"])).get(HEADER) != _digest(header):
            raise WorkdirError(
                f"{path} is damaged: its settings or its tokenizer do not match their digest. Export the run again."
            )
    return header


def is_export(path: Path) -> bool:
    """Tell whether a file says that `export` wrote it."""
    from safetensors import safe_open

    try:
        with safe_open(path, "numpy") as file:
            return (file.metadata() or {}).get("format", "").startswith("posx ")
    except Exception:  # not a file of posx, or too damaged to show it
        return False


def check_export(path: Path) -> None:
    """Raise WorkdirError if a file that `export` wrote was cut, edited or changed by the disk."""
    for _ in _checked_arrays(path, export_header(path)):
        pass


def _checked_arrays(path: Path, header: Mapping[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) of an exported file with this header. Raises WorkdirError for damage."""
    from safetensors import safe_open

    from posx.lab.training.checkpoints import array_sha256

    digests = {name: digest for name, digest in dict(parse_json(header["digests"])).items() if name != HEADER}
    with report_damage(path), safe_open(path, "numpy") as file:
        if other := other_names(file.keys(), digests):
            raise WorkdirError(f"{path} is damaged: its arrays do not match its header: {other}. Export the run again.")
        for name, digest in digests.items():
            if array_sha256(array := file.get_tensor(name)) != digest:
                raise WorkdirError(f"{path} is damaged: {name} does not match its digest. Export the run again.")
            yield name, array


def read_export(path: Path, abstract: Any) -> tuple[int, Any]:
    """Return the step and the parameters, of the shapes, types and shardings of `abstract`, of an exported file.

    Raises WorkdirError if the file is damaged or holds other arrays.
    """
    from posx.lab.training.checkpoints import flatten

    header = export_header(path)
    arrays, wanted = dict(_checked_arrays(path, header)), flatten(abstract)
    if other := other_names(arrays, wanted):
        raise WorkdirError(f"{path} holds other arrays than its settings need: {other}. Export the run again.")
    for name, leaf in wanted.items():
        if (arrays[name].shape, arrays[name].dtype) != (leaf.shape, leaf.dtype):
            raise WorkdirError(f"{path} is damaged: {name} has another shape or type. Export the run again.")
    leaves = [jax.device_put(arrays[name], leaf.sharding) for name, leaf in wanted.items()]
    return int(header["step"]), jax.tree.unflatten(jax.tree.structure(abstract), leaves)
