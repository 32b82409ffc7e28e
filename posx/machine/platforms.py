"""The platform that functions are traced for. Every choice between a CPU and an accelerator asks here.

JAX traces a function once and reuses the result, so the answer must be one that JAX's caches know. `trace_platform` is
a user context of JAX, which is part of their keys.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import jax
from jax.export import default_export_platform

#: The names of platforms, as `jax.export` has them.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

_stated = jax.make_user_context(None)


def platform() -> str:
    """Return the platform that functions are traced for, one of PLATFORMS.

    It is the platform of `trace_platform`, else of `jax.default_device`, else of JAX's devices.
    """
    if _stated.value:
        return _stated.value
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    kind = getattr(device, "platform", device)  # "gpu" for both kinds of GPU
    return kind if kind in ("cpu", "tpu") else default_export_platform()


def is_on_cpu() -> bool:
    """Return whether functions are traced for CPUs."""
    return platform() == "cpu"


def compute_capability() -> float:
    """Return the generation of an NVIDIA GPU, 9.0 for an H100; 0 without one."""
    return float(getattr(jax.devices()[0], "compute_capability", 0))


def trace_platform(name: str) -> AbstractContextManager:
    """Return a context in which functions are traced for another platform than this machine's, to be exported."""
    if name not in PLATFORMS:
        raise ValueError(f"platform {name!r} is unknown; allowed: {', '.join(PLATFORMS)}.")
    return _stated(name)


def product_precision(precision: str) -> AbstractContextManager:
    """Return a context in which products of float32 arrays are traced in a precision: "default" or "highest".

    By default a GPU rounds their operands to TF32, 10 bits, and a TPU to bfloat16. CPUs have float32 alone, so programs
    for them are the same in both.
    """
    return contextlib.nullcontext() if is_on_cpu() else jax.default_matmul_precision(precision)
