"""Which kind of machine JAX will compute on, found out without starting it in this process."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from importlib import metadata


@functools.cache
def on_cpus() -> bool:
    """Whether JAX computes on CPUs here: as the user says, else as what is installed and what a process finds."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms.split(",")[0] == "cpu"
    others = any(map(importlib.util.find_spec, ("jax_plugins", "libtpu"))) or metadata.entry_points(group="jax_plugins")
    if not others:
        return True
    asked = [sys.executable, "-P", "-c", "import jax; print(jax.default_backend())"]
    done = subprocess.run(
        asked, capture_output=True, encoding="utf-8", errors="replace", check=False, stdin=subprocess.DEVNULL
    )
    return done.stdout.split()[-1:] in ([], ["cpu"])
