"""Which kind of machine JAX will compute on, and one line if there is none of the kind that was asked for."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from importlib import metadata

from posx.errors import ConfigError


def start_devices() -> None:
    """Start JAX's devices. Raises ConfigError if there is none of the kind that JAX_PLATFORMS names."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise no_device(str(error)) from None


def no_device(reason: str) -> ConfigError:
    """Return the error of a process that finds no device; `reason` is what JAX says, which may be nothing."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    reason = " ".join(reason.split()) or "its plugin is not installed"
    if not asked:
        return ConfigError(f"JAX finds no device: {reason}")
    return ConfigError(
        f"JAX_PLATFORMS={asked}: JAX finds no such device: {reason}. Unset JAX_PLATFORMS to use what this machine has; "
        "the extras cuda12, cuda13 and tpu of posx install the plugins"
    )


@functools.cache
def on_cpus() -> bool:
    """Whether JAX computes on CPUs here: as the user says, else as what is installed and what a process finds.

    JAX is not started in this process, which would take an accelerator away from others. Raises ConfigError if it finds
    no device.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms == "cpu":
        return True
    others = any(map(importlib.util.find_spec, ("jax_plugins", "libtpu"))) or metadata.entry_points(group="jax_plugins")
    if not (platforms or others):
        return True
    asked = [sys.executable, "-P", "-c", "import jax; print(jax.default_backend())"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode and platforms:
        kind, _, reason = (done.stderr.strip().splitlines() or [""])[-1].partition(": ")
        raise no_device(reason if kind.endswith("Error") else "")
    return done.stdout.split()[-1:] in ([], ["cpu"])
