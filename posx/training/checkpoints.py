"""Checkpoints through Orbax, behind one adapter.

Orbax writes the arrays. What it does not promise is kept beside it: a manifest `<step>.json`, written last and synced,
names every array with shape, type and digest. A step without a manifest does not exist; one that does not match its
manifest is passed over for the next older one, loudly. Old steps lose their manifest first.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from posx import interrupts
from posx.errors import OutOfMemoryError, PosxError, WorkdirError
from posx.files.atomic import clear, disk_full, write_bytes
from posx.files.parse import parsed
from posx.machine import processes
from posx.training.digests import facts_of, in_parts, is_same

#: 2: arrays in parts have a sum and no sha256.
FORMAT_VERSION = 2

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
        """Writes `state` as `step`, then removes all but the newest `keep`. Raises OutOfMemoryError, WorkdirError.

        Arrays that lie in parts over devices are written so, each part by the process that holds it: all processes
        call this, with a folder that all see.
        """
        arrays = flatten(state)
        processes.first(lambda: self._tried(step, lambda: self._make_room(step)))
        self._tried(step, lambda: self._write(step, arrays))
        facts = facts_of(arrays)
        version = 1 if all("sha256" in one for one in facts.values()) else FORMAT_VERSION
        manifest = {"format_version": version, "step": step, "arrays": facts}
        processes.first(lambda: self._tried(step, lambda: self._finish(step, manifest)))

    def _write(self, step: int, arrays: dict[str, Any]) -> None:
        with interrupts.deferred(), _one_error_is_enough(), ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(self.folder / str(step), arrays)

    def _tried(self, step: int, part: Callable[[], object]) -> None:
        """Calls a part of a save; what it raises says what was to be written."""
        target = self.folder / str(step)
        try:
            part()
        except (OSError, ValueError) as error:
            if processes.is_first():
                self._sweep()
            if isinstance(error, OSError):
                kind = OutOfMemoryError if disk_full(error) else WorkdirError
                raise kind(f"checkpoint {target} could not be written: {error.strerror or error}") from None
            if any(words in str(error) for words in ("NO_SPACE", "No space", "RESOURCE_EXHAUSTED", "File too large")):
                raise OutOfMemoryError(f"the disk is full, checkpoint {target} could not be written") from None
            raise WorkdirError(f"checkpoint {target} could not be written: {_first_line(error)}") from None

    def _make_room(self, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{step}.json").unlink(missing_ok=True)  # a damaged one that was passed over
        self._sweep()

    def _finish(self, step: int, manifest: dict[str, Any]) -> None:
        """The step exists from here on; others go."""
        write_bytes(self.folder / f"{step}.json", json.dumps(manifest).encode())
        for later in (other for other in self.steps() if other > step):  # damaged, or training would not be here
            (self.folder / f"{later}.json").unlink()
        for old in self.steps()[: -self.keep]:
            (self.folder / f"{old}.json").unlink()
        self._sweep()

    def restore(self, abstract: Tree, notice=lambda text: None) -> tuple[int, Tree] | None:
        """The newest step that verifies, as (step, state); None if none was ever saved.

        `abstract` gives the tree, shapes and types wanted; it may be a part of what was saved. Raises WorkdirError if
        no step verifies, or if the newest holds other shapes or types: nothing is cast or cut to fit. `notice` gets a
        line for each damaged step that was passed over. Arrays are NumPy's, or lie as the shardings in `abstract` say,
        however they lay when they were saved; then all processes call this.
        """
        wanted = flatten(abstract)
        damaged: list[str] = []
        for step in reversed(processes.told(self.steps)):
            try:
                arrays, sums = processes.together(functools.partial(self._read, step, wanted))
                _check_sums(arrays, sums)
            except _Damaged as error:
                damaged.append(f"checkpoint {step} in {self.folder} is damaged ({error}) and was passed over")
                notice(damaged[-1])
                continue
            leaves = [_placed(arrays[name], leaf) for name, leaf in wanted.items()]
            return step, jax.tree.unflatten(jax.tree.structure(abstract), leaves)
        if damaged:
            told = "; ".join(damaged) + "; no good checkpoint is left: use another --workdir to start again"
            raise processes.alike(WorkdirError(told))
        return None

    def _read(self, step: int, wanted: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """The arrays of a step, and the sums that those in parts have to have; what is whole is what was saved."""
        try:
            manifest = parsed((self.folder / f"{step}.json").read_text(encoding="utf-8"))
            version = manifest["format_version"]
            saved = {name: _told(facts) for name, facts in manifest["arrays"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _Damaged(f"manifest: {_first_line(error)}") from None
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise WorkdirError(
                f"checkpoint {step} in {self.folder} has format {version!r}, not one that this posx reads"
            )
        problems = _differences(saved, wanted)
        # Only a manifest that is true to all its arrays proves another model; otherwise it is itself damaged.
        names = saved if problems else wanted
        args = {name: _restored_as(saved[name], None if problems else wanted[name]) for name in names}
        try:
            with _one_error_is_enough(), _reader() as checkpointer:
                asked = ocp.args.PyTreeRestore(dict.fromkeys(names, 0), restore_args=args, partial_restore=True)
                arrays = checkpointer.restore(self.folder / str(step), args=asked)
        except Exception as error:  # Orbax reports damage with whatever its storage layers raise.
            raise _Damaged(_first_line(error)) from None
        arrays = {name: x if in_parts(x) else np.asarray(x) for name, x in arrays.items() if name in names}
        for name in names:
            if name not in arrays or not (in_parts(arrays[name]) or is_same(arrays[name], saved[name])):
                raise _Damaged(f"{name} does not match its digest")
        if problems:
            raise WorkdirError(
                f"checkpoint {step} in {self.folder} is of another model: {'; '.join(sorted(problems)[:4])}"
            )
        return arrays, {name: saved[name]["sum"] for name in names if in_parts(arrays[name])}

    def _sweep(self) -> None:
        """Removes what has no manifest: half-written steps, half-deleted ones, Orbax's temporary folders."""
        clear(self.folder)
        good = {str(step) for step in self.steps()}
        for path in self.folder.iterdir() if self.folder.exists() else ():
            if path.is_dir() and path.name not in good and path.name.split(".")[0].isdigit():
                shutil.rmtree(path, ignore_errors=True)


class _Damaged(PosxError):
    pass


#: How what is still under way begins to complain when a save or a restore has failed.
_FOLLOWING = ("Event loop is closed", "Encountered error while reading array index")


@contextlib.contextmanager
def _one_error_is_enough() -> Iterator[None]:
    """Where a save or a restore fails, what is still under way of it finds its event loop gone, or its array, and each
    would print that: now and later, so that what is set here stays then."""
    shown, raised = sys.unraisablehook, sys.excepthook

    def unraisable(found: Any) -> None:
        if not str(found.exc_value).startswith(_FOLLOWING):
            shown(found)

    def uncaught(kind: Any, error: Any, place: Any) -> None:  # TensorStore's threads end here
        if not str(error).startswith(_FOLLOWING):
            raised(kind, error, place)

    sys.unraisablehook, sys.excepthook = unraisable, uncaught
    yield
    sys.unraisablehook, sys.excepthook = shown, raised


def flatten(tree: Tree) -> dict[str, Any]:
    """{"params.layers.layer_00...": leaf}: plain names, the same whatever containers Optax uses."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {k: v if isinstance(v, jax.ShapeDtypeStruct) or in_parts(v) else np.asarray(v) for k, v in named.items()}


def _reader() -> ocp.Checkpointer:
    """Of this process alone: where one of several finds damage, the others do not wait for it."""
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process_{own}"
    )
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone)


def _differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """How what is wanted is not what was saved, one line each.

    Whole trees may be left unread, such as "opt_state"; of a tree that is read, every array has to be wanted.
    """
    trees = {name.partition(".")[0] for name in wanted}
    problems = [f"{name} is missing" for name in wanted if name not in saved]
    problems += [f"{name} is unknown" for name in saved if name not in wanted and name.partition(".")[0] in trees]
    for name in wanted.keys() & saved.keys():
        have, want = (
            (saved[name]["shape"], saved[name]["dtype"]),
            (list(wanted[name].shape), str(wanted[name].dtype)),
        )
        if have != want:
            problems.append(f"{name} is {have[1]}{have[0]}, not {want[1]}{want[0]}")
    return problems


def _restored_as(saved: Mapping[str, Any], wanted: Any) -> ocp.RestoreArgs:
    """In parts where that is wanted and was saved so; else whole, as its digest is of the whole."""
    sharding = getattr(wanted, "sharding", None)
    if sharding is None or "sum" not in saved:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=wanted.shape, dtype=wanted.dtype)


def _placed(array: Any, wanted: Any) -> Any:
    """An array that was read whole, where it is wanted in parts."""
    sharding = getattr(wanted, "sharding", None)
    if sharding is None or isinstance(array, jax.Array):
        return array
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def _check_sums(arrays: Mapping[str, Any], wanted: Mapping[str, str]) -> None:
    found = facts_of({name: arrays[name] for name in wanted})
    for name, one in wanted.items():
        if found[name]["sum"] != one:
            raise _Damaged(f"{name} does not match its digest")


def _told(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says of an array, if it says enough to know it again: sha256 if it was whole, else the sum."""
    digest = "sum" if "sum" in facts and "sha256" not in facts else "sha256"
    return {key: facts[key] for key in ("shape", "dtype", digest)}


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
