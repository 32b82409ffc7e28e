"""Checkpoints through Orbax, behind one adapter.

Orbax writes the arrays. A manifest `<step>.json` beside them, written last and synced, names every array with shape,
type and digest, and every file with its digest (`posx.lab.files.manifests`). A step without a manifest does not exist.
A step that does not match its manifest is passed over for the next older one, with a notice. Old steps lose their
manifest first.

Arrays that are sharded over devices are written by the processes that hold their shards. All processes then call the
methods here, on a folder that all see.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from posx.errors import Damaged, OutOfMemoryError, WorkdirError
from posx.lab import interrupts
from posx.lab.files import manifests
from posx.lab.files.atomic import clear, disk_full
from posx.lab.machine import processes

#: The words of TensorStore for a full disk.
_FULL = ("NO_SPACE", "No space", "RESOURCE_EXHAUSTED", "File too large")
#: Beginnings of the errors that pending tasks of Orbax and TensorStore report after a failed save or restore.
_FOLLOWING = ("Event loop is closed", "Encountered error while reading array index")

Tree = Any


class Checkpoints:
    """The checkpoints in `folder` of the run whose hash is `run`; the newest `keep` are kept.

    The caller holds the run's lock. Without a hash, checkpoints of any run are taken.
    """

    def __init__(self, folder: Path, keep: int = 1, run: str = ""):
        self.folder = folder.absolute()
        self.keep, self.run = keep, run

    def steps(self) -> list[int]:
        """List the steps with a manifest, oldest first, as process 0 sees them."""
        return processes.broadcast(lambda: manifests.steps(self.folder))

    def save(self, step: int, state: Tree) -> None:
        """Write `state` as `step`, then remove all but the newest `keep`. Raises OutOfMemoryError, WorkdirError."""
        arrays = flatten(state)
        processes.on_first(lambda: self._try_part(step, self._make_room, step))
        self._try_part(step, self._write, step, arrays)
        facts = {name: _facts(array, _is_sharded(array)) for name, array in arrays.items()}
        processes.on_first(lambda: self._try_part(step, self._finish, step, facts))

    def _try_part(self, step: int, part: Callable[..., object], *arguments: Any) -> None:
        """Call a part of a save. Its errors become those of posx, with the path that was to be written."""
        target = self.folder / str(step)
        try:
            part(*arguments)
        except (OSError, ValueError) as error:
            if processes.is_first():
                self._sweep()
            full = any(words in str(error) for words in _FULL) or (isinstance(error, OSError) and disk_full(error))
            if full:
                raise OutOfMemoryError(
                    f"the disk is full, so checkpoint {target} could not be written. Free space and run the same "
                    "command again."
                ) from None
            reason = getattr(error, "strerror", None) or _first_line(error)
            raise WorkdirError(f"checkpoint {target} could not be written: {reason}") from None

    def _make_room(self, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        manifests.manifest_path(self.folder, step).unlink(missing_ok=True)  # a damaged step that was passed over
        self._sweep()

    def _write(self, step: int, arrays: dict[str, Any]) -> None:
        with interrupts.defer_signals(), _one_error_is_enough(), ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(self.folder / str(step), arrays)

    def _finish(self, step: int, arrays: dict[str, Any]) -> None:
        """Write the manifest, with which the step exists, and remove later and older steps."""
        manifests.write_manifest(self.folder, step, self.run, arrays)
        until_now = [other for other in manifests.steps(self.folder) if other <= step]  # later ones are damaged
        for other in set(manifests.steps(self.folder)).difference(until_now[-self.keep :]):
            manifests.manifest_path(self.folder, other).unlink()
        self._sweep()

    def _sweep(self) -> None:
        """Remove folders without a manifest: steps half written or half deleted, and Orbax's temporary folders."""
        clear(self.folder)
        good = {str(step) for step in manifests.steps(self.folder)}
        for path in self.folder.iterdir() if self.folder.exists() else ():
            if path.is_dir() and path.name not in good and path.name.split(".")[0].isdigit():
                shutil.rmtree(path, ignore_errors=True)

    def restore(self, abstract: Tree, notice: Callable[[str], object] = lambda text: None) -> tuple[int, Tree] | None:
        """Return the newest step that verifies, as (step, state), None if none was ever saved.

        Args:
          abstract: the wanted tree, shapes and types, perhaps a part of the saved tree. Arrays are NumPy's, or sharded
            as their shardings here say, however they were sharded when they were saved.
          notice: called with a line for each damaged step that was passed over.

        Raises:
          WorkdirError: if no step verifies, or if the newest holds other shapes or types. Nothing is cast to fit.
        """
        wanted = flatten(abstract)
        damaged: list[str] = []
        for step in reversed(self.steps()):
            try:
                arrays, sharded = processes.on_all(functools.partial(self._read, step, wanted))
                _check({name: _facts(arrays[name], True) for name in sharded}, sharded)
            except Damaged as error:
                damaged.append(f"checkpoint {step} in {self.folder} is damaged ({error}) and was skipped")
                notice(damaged[-1])
                continue
            leaves = [_place(arrays[name], leaf) for name, leaf in wanted.items()]
            return step, jax.tree.unflatten(jax.tree.structure(abstract), leaves)
        if damaged:
            every = "; ".join(damaged)
            raise processes.mark_alike(
                WorkdirError(f"{every}. No good checkpoint is left. Use another --workdir to start again.")
            )
        return None

    def _read(self, step: int, wanted: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the arrays of a step, and the saved facts of those that are sharded. All others are verified."""
        manifest = manifests.read_manifest(self.folder, step)
        saved = manifest["arrays"]
        problems = _differences(saved, wanted)
        # Only a manifest that matches all its arrays proves that the model differs. Otherwise the manifest is damaged.
        names = saved if problems else wanted
        args = {name: _restore_args(saved[name], None if problems else wanted[name]) for name in names}
        try:
            with _one_error_is_enough(), _reader() as checkpointer:
                asked = ocp.args.PyTreeRestore(dict.fromkeys(names, 0), restore_args=args, partial_restore=True)
                arrays = flatten(checkpointer.restore(self.folder / str(step), args=asked))
        except Exception as error:  # Orbax reports damage with whatever its storage layers raise.
            raise Damaged(_first_line(error)) from None
        sharded = {name: saved[name] for name in names if _is_sharded(arrays.get(name))}
        read_facts = {name: _facts(x, "sum" in saved[name]) for name, x in arrays.items() if name not in sharded}
        _check(read_facts, {name: saved[name] for name in names if name not in sharded})
        if problems:
            raise WorkdirError(
                f"checkpoint {step} in {self.folder} is of another model: {'; '.join(sorted(problems)[:4])}"
            )
        if self.run and manifest.get("run") != self.run:
            raise WorkdirError(
                f"checkpoint {step} in {self.folder} is of the run {manifest.get('run') or 'without a hash'}, but the "
                f"settings beside it are those of {self.run}. Restore that run's own checkpoints."
            )
        return arrays, sharded


@contextlib.contextmanager
def _one_error_is_enough() -> Iterator[None]:
    """Hide the errors that pending tasks report after a failed save or restore, however late they come."""
    shown, raised = sys.unraisablehook, sys.excepthook

    def unraisable(report: Any) -> None:
        if not str(report.exc_value).startswith(_FOLLOWING):
            shown(report)

    def uncaught(kind: Any, error: Any, place: Any) -> None:  # TensorStore's threads end here
        if not str(error).startswith(_FOLLOWING):
            raised(kind, error, place)

    sys.unraisablehook, sys.excepthook = unraisable, uncaught
    yield
    sys.unraisablehook, sys.excepthook = shown, raised


def flatten(tree: Tree) -> dict[str, Any]:
    """Return {"params.layers.layer_00...": leaf}, the same names for all containers that Optax uses.

    Arrays become NumPy's unless they are sharded.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {k: v if isinstance(v, jax.ShapeDtypeStruct) or _is_sharded(v) else np.asarray(v) for k, v in named.items()}


def _reader() -> ocp.Checkpointer:
    """Make a reader of this process alone: if a process finds damage, others do not wait for it."""
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process_{own}"
    )
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone)


def _differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """List the differences of the wanted arrays from the saved ones, one line each.

    Whole trees, such as "opt_state", may be left unread. If a tree is read, every array of it must be wanted.
    """
    trees = {name.partition(".")[0] for name in wanted}
    problems = [f"{name} is missing" for name in wanted if name not in saved]
    problems += [f"{name} is unknown" for name in saved if name not in wanted and name.partition(".")[0] in trees]
    have = {name: _array_text(**facts) for name, facts in saved.items()}
    want = {name: _array_text(leaf.shape, leaf.dtype) for name, leaf in wanted.items()}
    return problems + [f"{n} is {have[n]}, not {want[n]}" for n in have.keys() & want if have[n] != want[n]]


def _array_text(shape: Any, dtype: Any, **digests: str) -> str:
    return f"{dtype}{list(shape)}"


def _restore_args(saved: Mapping[str, Any], wanted: Any) -> ocp.RestoreArgs:
    """Return how to read an array: sharded if wanted and saved so, else whole, as its digest is of the whole."""
    sharding = getattr(wanted, "sharding", None)
    if sharding is None or "sum" not in saved:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=wanted.shape, dtype=wanted.dtype)


def _place(array: Any, wanted: Any) -> Any:
    """Shard an array that was read whole, if it is wanted so."""
    sharding = getattr(wanted, "sharding", None)
    if sharding is None or isinstance(array, jax.Array):
        return array
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def _check(read_facts: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for name, facts in saved.items():
        if read_facts.get(name) != facts:
            raise Damaged(f"{name} does not match its digest")


def _is_sharded(array: Any) -> bool:
    return isinstance(array, jax.Array) and not array.is_fully_replicated


def _facts(array: Any, by_sum: bool) -> dict[str, Any]:
    """Return shape, type and digest of an array. All processes call it for a sharded one, which has a `sum`."""
    digest = {"sum": _sum(array)} if by_sum else {"sha256": array_sha256(array)}
    return {"shape": list(array.shape), "dtype": str(array.dtype), **digest}


def array_sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _sum(array: Any) -> str:
    """Return a digest that is the same however an array is sharded, computed on the devices of its shards."""
    return "".join(f"{int(one):08x}" for one in np.asarray(_sums(array)))


@jax.jit
def _sums(array: jax.Array) -> jax.Array:
    """Sum, modulo 2^32, two terms for every entry, which mix its place and its bits (the finalizer of MurmurHash3)."""
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)
    axes = (jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) for axis in range(array.ndim))
    strides = (math.prod(array.shape[axis + 1 :]) % 2**32 for axis in range(array.ndim))
    place = sum((axis * jnp.uint32(stride) for axis, stride in zip(axes, strides, strict=True)), jnp.zeros_like(bits))

    def mix(x: jax.Array) -> jax.Array:
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    terms = (mix(bits ^ mix(place ^ jnp.uint32(seed))) for seed in (0x9E3779B9, 0x7F4A7C15))
    return jnp.stack([jnp.sum(term, dtype=jnp.uint32) for term in terms])
