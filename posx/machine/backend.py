"""JAX's options and devices as posx has them: what is set, what is recorded, and one line if there is no device."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from importlib import metadata

from posx.errors import ConfigError
from posx.progress import say

#: The values that posx sets for variables that choose another type of numbers or other random numbers, or that forbid a
#: step of every run. The same settings then give the same numbers in every user's shell.
SET = {
    "JAX_ENABLE_X64": "0", "JAX_NUMPY_DTYPE_PROMOTION": "standard", "JAX_NUMPY_RANK_PROMOTION": "allow",
    "JAX_DEFAULT_PRNG_IMPL": "threefry2x32", "JAX_THREEFRY_PARTITIONABLE": "1", "JAX_ENABLE_CUSTOM_PRNG": "0",
    "JAX_RANDOM_SEED_OFFSET": "0", "JAX_TRANSFER_GUARD": "allow", "JAX_NO_TRACING": "0", "JAX_NO_EXECUTION": "0",
}  # fmt: skip

#: Further options that decide how numbers are computed. They are the user's, and a run records them.
RECORDED = (
    "jax_default_matmul_precision", "jax_disable_jit", "jax_disable_most_optimizations", "jax_softmax_custom_jvp",
    "jax_optimization_level", "jax_exec_time_optimization_effort", "jax_memory_fitting_level",
    "jax_memory_fitting_effort", "jax_use_shardy_partitioner", "jax_enable_pgle",
)  # fmt: skip


def set_options() -> None:
    """Set the variables in SET, for this process and its children, if JAX is not imported yet.

    A notice names each variable that the user has set to another value.
    """
    if "jax" in sys.modules:
        return
    for name, value in SET.items():
        given = os.environ.get(name, value)
        if _meaning(given) != _meaning(value):
            why = f"posx sets it to {value}, so that the same settings give the same bits"
            say(f"notice: {name}={given} is not used: {why}")
        os.environ[name] = value


#: The words that JAX reads as false and true.
_WORDS = dict.fromkeys(("", "n", "no", "f", "false", "off"), "0") | dict.fromkeys(("y", "yes", "t", "true", "on"), "1")


def _meaning(text: str) -> str:
    """Return the value of a variable as JAX reads it."""
    return _WORDS.get(text.lower(), text.lower())


def options() -> dict[str, str]:
    """Return the present values of JAX's options that decide numbers, by name, if this JAX knows them."""
    import jax

    names = (*(name.lower() for name in SET), *RECORDED)
    return {name: str(getattr(jax.config, name)) for name in sorted(names) if hasattr(jax.config, name)}


def start_devices() -> None:
    """Start JAX's devices. Raises ConfigError if there is none of the kind that JAX_PLATFORMS names."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise no_device(str(error)) from None


def no_device(reason: str) -> ConfigError:
    """Return the error of a process that finds no device; `reason` is JAX's own message, or empty."""
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
    """Return whether JAX computes on CPUs here: as JAX_PLATFORMS says, else as a process of its own finds.

    JAX is not started in this process, where it would take an accelerator away from others. Raises ConfigError if it
    finds no device.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms == "cpu":
        return True
    others = any(map(importlib.util.find_spec, ("jax_plugins", "libtpu"))) or metadata.entry_points(group="jax_plugins")
    if not (platforms or others):
        return True
    asked = [sys.executable, "-P", "-c", "import jax; print(jax.default_backend())"]
    done = subprocess.run(
        asked, capture_output=True, encoding="utf-8", errors="replace", check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode and platforms:
        kind, _, reason = (done.stderr.strip().splitlines() or [""])[-1].partition(": ")
        raise no_device(reason if kind.endswith("Error") else "")
    return done.stdout.split()[-1:] in ([], ["cpu"])
