"""The versions, devices and data that may change the numbers of a run, beside its settings: `env.json`."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

import posx
from posx.lab.config import EvalConfig, RunConfig
from posx.lab.data import Dataset
from posx.lab.files import checksums
from posx.lab.runs.folder import RunFolder
from posx.machine import platforms
from posx.machine.cores import cpu_name, usable_cores
from posx.machine.devices import PATIENCE
from posx.machine.guard import options
from posx.notices import say

if TYPE_CHECKING:
    from posx.lab.training.layout import Layout


#: Variables that XLA, its kernels and BLAS read and that may change bits.
VARIABLES = (
    "NPROC", "OMP_NUM_THREADS", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip


#: Packages whose versions may change the numbers of a run.
PACKAGES = ("posx", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "datasets", "tokenizers")


def version(package: str) -> str:
    """Return the version of a package. That of posx is in its code: a clone may be newer than its installation."""
    return posx.__version__ if package == "posx" else metadata.version(package)


def versions() -> dict[str, str]:
    """Return the versions of PACKAGES."""
    return {name: version(name) for name in PACKAGES}


def started_devices(folder: RunFolder) -> int | None:
    """Return the number of devices that the run in `folder` was started on, None for a new run."""
    devices = checksums.read_verified(folder.env_file).get("num_devices")
    return devices if isinstance(devices, int) else None


def record(folder: RunFolder, run: RunConfig, dataset: Dataset, layout: Layout) -> None:
    """Write `env.json` until training has begun. List later starts in it, with a notice if bits may differ."""
    now = environment(run, dataset, layout)
    if not (folder.env_file.exists() and folder.is_begun):
        checksums.write_checked(folder.env_file, now | {"resumed": []})
        return
    first = checksums.read_verified(folder.env_file)
    if not first.get("text_digest"):
        place = checksums.set_aside(folder.env_file).name
        say(
            f"notice: {folder.env_file} is damaged and is written again. The run may not resume bit for bit. The old "
            f"file is now {place}"
        )
        first = now
    changes = layout_changes(first, now)
    if changes:
        say(f"notice: {folder.path.name} resumes under another layout, not bit for bit ({'; '.join(changes)})")
    before = first.get("resumed")
    resumed = [*(before if isinstance(before, list) else []), {"git": now["git"], "changes": changes}]
    checksums.write_checked(folder.env_file, first | {"resumed": resumed})


def environment(run: RunConfig, dataset: Dataset, layout: Layout) -> dict[str, Any]:
    """Return versions, state of the code, devices, threads and data."""
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "versions": versions(),
        "git": _git_state(),
        "backend": platforms.platform(),
        "device": device.device_kind,
        "precision": run.train.precision,
        "num_devices": layout.num_devices,
        "layout": str(layout),
        "processes": jax.process_count(),
        "cpu": cpu_name(),
        "num_cpus": len(usable_cores()),
        "threads": _threads(),
        "jax": options(),
        "data_source": dataset.source,
        "text_digest": dataset.digest,
        "tokenizer": dataset.tokenizer.name,
        "tokenizer_digest": dataset.tokenizer.digest,
    }


def measuring_facts(config: EvalConfig) -> dict[str, Any]:
    """Return the fields of a row of `eval.jsonl` that say how it is measured now: settings, versions and the device."""
    env = {name: version(name) for name in ("posx", "jax", "jaxlib")} | {"device": jax.devices()[0].device_kind}
    return {"executor": config.executor, "precision": config.precision, "env": env}


def _threads() -> dict[str, str]:
    """Return the variables of XLA and BLAS that may change bits. Timeouts do not."""
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if "XLA_FLAGS" in variables:
        words = variables["XLA_FLAGS"].split()
        variables["XLA_FLAGS"] = " ".join(word for word in words if word.partition("=")[0] not in PATIENCE)
    return variables


def layout_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences between two environments after which a run does not resume bit for bit."""
    names = ("versions", "backend", "device", "num_devices", "num_cpus", "threads", "layout", "processes")
    before = old.get("jax")
    old, new = {**old, **(before if isinstance(before, dict) else {})}, {**new, **new["jax"]}
    names += tuple(new["jax"])
    return [f"{name}: {old.get(name)} -> {new.get(name)}" for name in names if old.get(name) != new.get(name)]


def _git_state() -> str:
    """Return the commit of the running code, with "+changes" if it was edited, "" outside a git work tree."""
    here = Path(__file__).parents[2]

    def ask(*words: str) -> str:
        command = ["git", "-C", str(here), *words]
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=True
        ).stdout.strip()

    try:
        commit, changed = ask("rev-parse", "HEAD"), ask("status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit + ("+changes" if changed else "")
