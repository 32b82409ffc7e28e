"""The manifests of checkpoints: `STEP.json` beside the folder STEP, with the digests of its arrays and of its files.

A manifest is written last, so a step without one does not exist. It carries a checksum of itself and the hash of its
run. The files' digests need no JAX. Reading and hashing took 1.5 s a GB on one core (measured on a small VM).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posx.errors import Damaged, WorkdirError
from posx.lab.files.atomic import write_bytes
from posx.lab.files.checksums import checksum_problem, file_checksum, read_object, with_checksum

#: The version of a checkpoint. One of another version is an error.
FORMAT_VERSION = 3


def steps(folder: Path) -> list[int]:
    """Return the steps with a manifest, in increasing order."""
    return sorted(int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit())


def manifest_path(folder: Path, step: int) -> Path:
    """Return the place of a manifest."""
    return folder / f"{step}.json"


def write_manifest(folder: Path, step: int, run: str, arrays: Mapping[str, Any]) -> None:
    """Write the manifest of a step whose files are complete.

    Args:
      folder: of the checkpoints of one run.
      step: the number of the step, and the name of its folder.
      run: the hash of the run.
      arrays: {name: its shape, dtype and digest}.

    Raises:
      OSError: a file cannot be read or written.
    """
    facts = {"format_version": FORMAT_VERSION, "step": step, "run": run, "arrays": arrays}
    facts |= {"files": {name: file_checksum(path) for name, path in _files(folder, step).items()}}
    write_bytes(manifest_path(folder, step), json.dumps(with_checksum(facts)).encode())


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """Return a manifest that matches its checksum.

    Args:
      folder: of the checkpoints of one run.
      step: the number of the step.

    Returns:
      {"run", "step", "arrays", "files"}.

    Raises:
      Damaged: the manifest was cut, edited or changed by the disk.
      WorkdirError: it is of another version.
    """
    try:
        manifest = read_object(manifest_path(folder, step))
    except Damaged as error:
        raise Damaged(f"manifest: {str(error).removeprefix(f'{manifest_path(folder, step)} ')}") from None
    if (version := manifest.get("format_version", FORMAT_VERSION)) != FORMAT_VERSION:
        raise WorkdirError(
            f"checkpoint {step} in {folder} has format {version!r}, which this posx does not read. Use another "
            "--workdir."
        )
    if problem := checksum_problem(manifest):
        raise Damaged(f"manifest: {problem}")
    if not all(isinstance(manifest.get(name), dict) for name in ("arrays", "files")):
        raise Damaged("manifest: it names no arrays or no files")
    if manifest.get("step") != step:
        raise Damaged(f"manifest: it is of step {manifest.get('step')}")
    return manifest


def manifest_run(folder: Path, step: int) -> str:
    """Return the hash of the run that a step is of, "" if its manifest is damaged. Raises WorkdirError."""
    try:
        return str(read_manifest(folder, step).get("run", ""))
    except Damaged:
        return ""


def manifest_problem(folder: Path, step: int) -> str:
    """Return the first difference of a step's files from its manifest, "" if there is none.

    Args:
      folder: of the checkpoints of one run.
      step: the number of the step.

    Raises:
      WorkdirError: the manifest is of another version.
    """
    try:
        wanted, files = read_manifest(folder, step)["files"], _files(folder, step)
        for name in sorted(wanted.keys() | files.keys()):
            if name not in files:
                return f"{name} is missing"
            if name not in wanted:
                return f"{name} is not in the manifest"
            if file_checksum(files[name]) != wanted[name]:
                return f"{name} does not match its digest"
    except Damaged as error:
        return str(error)
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    return ""


def weights_digest(folder: Path, step: int) -> str:
    """Return a digest of the parameters of a step, whatever their run. Raises Damaged, WorkdirError."""
    params = {
        name: facts for name, facts in read_manifest(folder, step)["arrays"].items() if name.startswith("params.")
    }
    return hashlib.sha256(json.dumps(params, sort_keys=True).encode()).hexdigest()[:16]


def _files(folder: Path, step: int) -> dict[str, Path]:
    """Return {name below the folder of a step: file}."""
    place = folder / str(step)
    return {path.relative_to(place).as_posix(): path for path in sorted(place.rglob("*")) if path.is_file()}
