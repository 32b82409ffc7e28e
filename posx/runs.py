"""A run's folder: who holds it, what was asked for, where it ran, and its JSON lines."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from posx.config import RunConfig
from posx.data import Dataset, Tokenizer, load_tokenizer
from posx.errors import OutOfMemoryError, WorkdirError
from posx.model import Model
from posx.positions import sequential
from posx.progress import say
from posx.stored import differences, digest, digests, from_stored, like, to_stored
from posx.training.ceiling import num_cpus
from posx.training.checkpoints import Checkpoints


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths of one run. `config.json`, `env.json`, `metrics.jsonl`, `eval.jsonl`, `checkpoints/`, `DONE`."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def env_file(self) -> Path:
        return self.path / "env.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def eval_file(self) -> Path:
        return self.path / "eval.jsonl"

    @property
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def done_file(self) -> Path:
        return self.path / "DONE"

    def checkpoints(self, keep: int = 1) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints", keep)

    def read_config(self) -> RunConfig:
        """The settings this run was started with, as resolved then. Raises WorkdirError where they cannot be read."""
        try:
            return from_stored(json.loads(self.config_file.read_text()))
        except FileNotFoundError:
            raise WorkdirError(f"{self.path} holds no run: there is no {self.config_file.name} in it") from None
        except (OSError, ValueError) as error:
            raise WorkdirError(f"{self.config_file} cannot be read: {error}") from None

    def resumed(self, run: RunConfig) -> RunConfig:
        """`run` as this folder holds it: what it leaves open is as it was resolved when it was started here.

        Raises WorkdirError with every differing setting if the folder holds another run.
        """
        if not self.config_file.exists():
            return run
        held = self.read_config()
        if changed := differences(held, like(run, held)):
            raise WorkdirError(
                f"{self.path} holds a run of another config ({'; '.join(changed)}): use another --workdir, or the same "
                "settings to resume"
            )
        return dataclasses.replace(held, data=run.data, train=run.train, eval=run.eval)

    def as_started(self, run: RunConfig) -> RunConfig:
        """`run` as this folder resolved it, if it is the one that was started here."""
        try:
            return like(run, self.read_config())
        except WorkdirError:
            return run

    def finished(self, run: RunConfig, data_digest: str = "") -> bool:
        """Whether `run` was trained and evaluated to the end here (on just this text, if its digest is given)."""
        try:
            values, done = (json.loads(file.read_text()) for file in (self.config_file, self.done_file))
            held = from_stored(values)
            same = done["digest"] in digests(values) and digest(like(run, held)) == digest(held)
            return same and data_digest in ("", done["data_digest"])
        except (OSError, ValueError, KeyError):
            return False

    def write_config(self, run: RunConfig, **facts: Any) -> None:
        """The settings, with `facts` beside what they were resolved to."""
        write_json(self.config_file, to_stored(run, **facts))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds the folder for one process. Raises WorkdirError if it cannot be written or another live process has it.

        The lock is the kernel's, so it is free again as soon as its holder is gone, however it went.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(self.path / ".lock", "a+")
        except OSError as error:
            raise WorkdirError(f"work folder {self.path} cannot be written: {error.strerror}") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise WorkdirError(f"work folder {self.path} is in use by {holder}") from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
            file.flush()
            yield


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes atomically: readers see the old file or the new one. Raises OutOfMemoryError if the disk is full."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path):
        try:
            with open(temporary, "w") as file:
                json.dump(finite(values), file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """One JSON line; a torn last line of a killed process is closed first."""
    line = json.dumps(finite(row)) + "\n"
    with disk_errors(path), open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file; torn lines are left out, a missing file is empty."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def finite(value: Any) -> Any:
    """`value` with NaN and infinities as text, which every JSON parser reads."""
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a failed write into one line: a full disk is exit 6, any other fault exit 4."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfMemoryError(f"the disk is full, {path} could not be written: free space and resume") from None
        raise WorkdirError(f"{path} could not be written: {error.strerror}") from None


def environment(dataset: Dataset) -> dict[str, Any]:
    """What the numbers may depend on besides the config: versions, code state, device, threads, data."""
    device = jax.devices()[0]
    packages = ("posx", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "datasets", "tokenizers")
    return {
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in packages},
        "git": _git_state(),
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "num_devices": jax.device_count(),
        "cpu": platform.processor() or platform.machine(),
        "num_cpus": num_cpus(),
        "threads": {name: os.environ[name] for name in ("NPROC", "OMP_NUM_THREADS", "XLA_FLAGS") if name in os.environ},
        "data_source": dataset.source,
        "data_digest": dataset.digest,
        "tokenizer": dataset.tokenizer.name,
        "tokenizer_digest": dataset.tokenizer.digest,
    }


def layout_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differences between two environments that break bit-for-bit resuming."""
    names = ("versions", "backend", "device", "num_devices", "num_cpus", "threads")
    return [f"{name}: {old.get(name)} -> {new.get(name)}" for name in names if old.get(name) != new.get(name)]


def _git_state() -> str:
    """Commit of the code posx runs from, with "+changes" where it was edited; "" outside a git work tree."""
    here = Path(__file__).parent

    def ask(*words: str) -> str:
        command = ["git", "-C", str(here), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        commit, changed = ask("rev-parse", "HEAD"), ask("status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit + ("+changes" if changed else "")


@dataclasses.dataclass(frozen=True)
class Apply:
    """A trained model's forward pass as a function of parameters and tokens."""

    model: Model

    def __call__(self, params: dict[str, Any], tokens: jax.Array, pos: Any = None) -> jax.Array:
        """Logits [b, t, v], float32, of the tokens after tokens [b, t]; positions 0 .. t - 1 unless given.

        Raises UndefinedLength where an encoding is not defined for t tokens.
        """
        length = tokens.shape[1]
        return self.model.at_length(length)(params, tokens, sequential(length) if pos is None else pos)


def load(workdir: str | Path) -> tuple[Apply, dict[str, Any], Tokenizer]:
    """(apply, params, tokenizer) of a trained run: `apply(params, tokens [b, t]) -> logits [b, t, v]`.

    Raises WorkdirError if the folder holds no run, or no checkpoint that verifies.
    """
    model, params, tokenizer, _ = load_model(RunFolder(Path(workdir).expanduser().resolve()))
    return Apply(model), params, tokenizer


def load_model(folder: RunFolder) -> tuple[Model, dict[str, Any], Tokenizer, int]:
    """The model of a run, its newest good parameters, its tokenizer, and the step they are from."""
    run = folder.read_config()
    if not folder.tokenizer_file.exists():
        raise WorkdirError(f"{folder.path} holds no trained model yet: run `posx train` with this --workdir first")
    tokenizer = load_tokenizer(folder.tokenizer_file)
    model = run.make_model(tokenizer.vocab_size)
    restored = folder.checkpoints().restore({"params": model.abstract()}, notice=say)
    if restored is None:
        raise WorkdirError(f"{folder.path} holds no checkpoint yet: run `posx train` with this --workdir first")
    step, state = restored
    return model, jax.tree.map(jnp.asarray, state["params"]), tokenizer, step
