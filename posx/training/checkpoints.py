"""Checkpoints through Orbax, behind one adapter.

Orbax writes the arrays. What it does not promise is kept beside it: a manifest `<step>.json`, written last and synced,
names every array with shape, type and digest. A step without a manifest does not exist; one that does not match its
manifest is passed over for the next older one, loudly. Old steps lose their manifest first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from posx import interrupts
from posx.errors import OutOfMemoryError, WorkdirError
from posx.files.atomic import clear, disk_full, write_bytes
from posx.files.parse import parsed

FORMAT_VERSION = 1

Tree = Any


class Checkpoints:
    """The checkpoints of one run in `folder`; the newest `keep` are kept. The caller holds the run's lock."""

    def __init__(self, folder: Path, keep: int = 1):
        self.folder = folder.absolute()
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps with a manifest, oldest first."""
        return sorted(int(path.stem) for path in self.folder.glob("*.json") if path.stem.isdigit())

    def save(self, step: int, state: Tree) -> None:
        """Writes `state` as `step`, then removes all but the newest `keep`. Raises OutOfMemoryError, WorkdirError."""
        arrays = _flatten(state)
        target = self.folder / str(step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{step}.json").unlink(missing_ok=True)  # a damaged one that was passed over
            self._sweep()
            with interrupts.deferred(), _one_error_is_enough(), ocp.PyTreeCheckpointer() as checkpointer:
                checkpointer.save(target, arrays)
            manifest = {
                "format_version": FORMAT_VERSION,
                "step": step,
                "arrays": {k: _facts(v) for k, v in arrays.items()},
            }
            write_bytes(self.folder / f"{step}.json", json.dumps(manifest).encode())
        except OSError as error:
            self._sweep()
            kind = OutOfMemoryError if disk_full(error) else WorkdirError
            raise kind(f"checkpoint {target} could not be written: {error.strerror or error}") from None
        except ValueError as error:
            self._sweep()
            if any(words in str(error) for words in ("NO_SPACE", "No space", "RESOURCE_EXHAUSTED", "File too large")):
                raise OutOfMemoryError(f"the disk is full, checkpoint {target} could not be written") from None
            raise WorkdirError(f"checkpoint {target} could not be written: {_first_line(error)}") from None
        for later in (other for other in self.steps() if other > step):  # damaged, or training would not be here
            (self.folder / f"{later}.json").unlink()
        for old in self.steps()[: -self.keep]:
            (self.folder / f"{old}.json").unlink()
        self._sweep()

    def restore(self, abstract: Tree, notice=lambda text: None) -> tuple[int, Tree] | None:
        """The newest step that verifies, as (step, state); None if none was ever saved.

        `abstract` gives the tree, shapes and types wanted; it may be a part of what was saved. Raises WorkdirError if
        no step verifies, or if the newest holds other shapes or types: nothing is cast or cut to fit. `notice` gets a
        line for each damaged step that was passed over.
        """
        wanted = _flatten(abstract)
        damaged: list[str] = []
        for step in reversed(self.steps()):
            try:
                arrays = self._read(step, wanted)
            except _Damaged as error:
                damaged.append(f"checkpoint {step} in {self.folder} is damaged ({error}) and was passed over")
                notice(damaged[-1])
                continue
            return step, jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in wanted])
        if damaged:
            raise WorkdirError(
                "; ".join(damaged) + "; no good checkpoint is left: use another --workdir to start again"
            )
        return None

    def _read(self, step: int, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
        try:
            manifest = parsed((self.folder / f"{step}.json").read_text())
            version = manifest["format_version"]
            saved = {
                name: {key: facts[key] for key in ("shape", "dtype", "sha256")}
                for name, facts in manifest["arrays"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _Damaged(f"manifest: {_first_line(error)}") from None
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise WorkdirError(
                f"checkpoint {step} in {self.folder} has format {version!r}, not one that this posx reads"
            )
        problems = [f"{name} is missing" for name in wanted if name not in saved]
        for name in wanted.keys() & saved.keys():
            have, want = (
                (saved[name]["shape"], saved[name]["dtype"]),
                (list(wanted[name].shape), str(wanted[name].dtype)),
            )
            if have != want:
                problems.append(f"{name} is {have[1]}{have[0]}, not {want[1]}{want[0]}")
        try:
            with _one_error_is_enough(), ocp.PyTreeCheckpointer() as checkpointer:
                arrays = checkpointer.restore(
                    self.folder / str(step), restore_args={k: ocp.RestoreArgs(restore_type=np.ndarray) for k in saved}
                )
        except Exception as error:  # Orbax reports damage with whatever its storage layers raise.
            raise _Damaged(_first_line(error)) from None
        # Only a manifest that is true to all its arrays proves another model; otherwise it is itself damaged.
        for name in saved if problems else wanted:
            if name not in arrays or _facts(np.asarray(arrays[name])) != saved[name]:
                raise _Damaged(f"{name} does not match its digest")
        if problems:
            raise WorkdirError(
                f"checkpoint {step} in {self.folder} is of another model: {'; '.join(sorted(problems)[:4])}"
            )
        return {name: np.asarray(arrays[name]) for name in wanted}

    def _sweep(self) -> None:
        """Removes what has no manifest: half-written steps, half-deleted ones, Orbax's temporary folders."""
        clear(self.folder)
        good = {str(step) for step in self.steps()}
        for path in self.folder.iterdir() if self.folder.exists() else ():
            if path.is_dir() and path.name not in good and path.name.split(".")[0].isdigit():
                shutil.rmtree(path, ignore_errors=True)


class _Damaged(Exception):
    pass


_GONE = "Event loop is closed"


@contextlib.contextmanager
def _one_error_is_enough() -> Iterator[None]:
    """Where a save or a restore fails, what is still under way of it finds its event loop gone, and each would print
    that: now and later, so that what is set here stays then."""
    shown, raised = sys.unraisablehook, sys.excepthook

    def unraisable(found: Any) -> None:
        if str(found.exc_value) != _GONE:
            shown(found)

    def uncaught(kind: Any, error: Any, place: Any) -> None:  # TensorStore's threads end here
        if str(error) != _GONE:
            raised(kind, error, place)

    sys.unraisablehook, sys.excepthook = unraisable, uncaught
    yield
    sys.unraisablehook, sys.excepthook = shown, raised


def _flatten(tree: Tree) -> dict[str, Any]:
    """{"params.layers.layer_00...": leaf}: plain names, the same whatever containers Optax uses."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {k: v if isinstance(v, jax.ShapeDtypeStruct) else np.asarray(v) for k, v in named.items()}


def _facts(array: np.ndarray) -> dict[str, Any]:
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": digest}


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
