"""The options and devices that posx gives JAX, and guards against a fault that makes sums after products wrong.

From jaxlib 0.10.2 on XLA's CPU compiler passes sums and maxima, with the products just before them, to YNNPACK as one
kernel. The kernel fails if the right operand of the product is constant along the product's output axis. Examples are a
constant, one number per token, and keys that are all equal. It then reads memory that is not its own. The result is
1e33 or NaN instead of 64, without a message. On jaxlib 0.10.2 and 0.12.0.1, 137 of 1,324 random programs of products,
broadcasts, element-wise maps and reductions were wrong, all with this pattern. With reductions kept out of these
kernels 169 fixed programs, 32 of them wrong before, and the first 169 random ones were right.

There are two guards:

* Importing posx adds --xla_cpu_experimental_ynn_fusion_type=-reduce to XLA_FLAGS: no reductions in these kernels. It
  covers the hooks of a user's encoding and a user's own model too. A value of the flag that is already there stays.
  `python -m benchmarks.guard_cost` measures what the flag costs.
* If the flag cannot be set, or is not known to this jaxlib, `barrier` stands around posx's own products and makes the
  pattern impossible there. It costs 2 to 3 % of a training step, so it is left out if the flag is set.

The flag is set only for versions of jaxlib that were tested to have the fault and to know it. XLA ends the process over
an unknown name, so that `known_flags` asks other versions for their flags. Processes started from this one inherit the
flag. Nothing is compiled and no JAX is imported for this. A notice says so if posx comes too late, because JAX has
started its devices or XLA_FLAGS says otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jaxlib

from posx.errors import ConfigError
from posx.notices import say

FLAG = "--xla_cpu_experimental_ynn_fusion_type"
SAFE = f"{FLAG}=-reduce"
#: Versions of jaxlib tested to have the fault, and to know this flag and the flags of `posx.machine.devices`.
FAULTY = ("0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1")

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


class Guard(NamedTuple):
    """The state of this process.

    Attributes:
      open: the fault can strike outside of posx's own products.
      text: how the fault is kept out, or why it is not.
      flag_set: no reductions are in the kernels, so that `barrier` is not needed.
    """

    open: bool
    text: str
    flag_set: bool = False


@functools.cache
def guard() -> Guard:
    """Keep the fault out of this process if that is still possible, else print a notice."""
    state = _guard()
    if state.open:
        say(
            f"notice: {state.text}, so sums after products other than posx's own may be wrong. Import posx "
            f"before JAX starts, with {SAFE} or nothing of that name in XLA_FLAGS."
        )
    return state


def _guard() -> Guard:
    """Set the flag if it is needed and possible; return the state of this process."""
    if jaxlib.__version__ not in FAULTY:
        return Guard(False, f"jaxlib {jaxlib.__version__} is not known to have the fault, no flag is set")
    fault = f"a fault of jaxlib {jaxlib.__version__} on CPUs"
    if (fused := _fuses_reductions(_flags())) is not None:
        return Guard(fused, f"XLA_FLAGS {'lets' if fused else 'keeps'} {fault} {'in' if fused else 'out'}", not fused)
    if jax_has_started():
        from posx.machine.platforms import is_on_cpu, platform

        if not is_on_cpu():
            return Guard(False, f"{fault} cannot reach {platform()} programs")
        return Guard(True, f"JAX was started before posx could keep out {fault}")
    if _names_file():
        return Guard(True, f"XLA_FLAGS names a file, which lets {fault} in")
    if _libtpu_reads_flags():
        return Guard(False, f"{fault} cannot reach TPUs; libtpu reads XLA_FLAGS too and may not know the flag")
    add_flags({FLAG: "-reduce"})
    return Guard(False, f"posx set {SAFE}, which keeps out {fault}", True)


def _flags() -> str:
    return os.environ.get("XLA_FLAGS", "").strip()


def _names_file() -> bool:
    """Return whether XLA_FLAGS is no flags, but the path of a file that holds them."""
    return bool(_flags()) and not _flags().startswith("-")


def _fuses_reductions(flags: str) -> bool | None:
    """Return whether these XLA flags, or a file of them, let reductions into the fusion; None for the default."""
    if _names_file():
        with contextlib.suppress(OSError):
            flags = Path(flags).read_text(encoding="utf-8")
    values = re.findall(rf"{FLAG}=(\S*)", flags)
    if not values:
        return None
    kinds = values[-1].strip("\"'").lower().split(",")
    changes_default = any(kind.startswith(("+", "-")) for kind in kinds)
    return "-reduce" not in kinds if changes_default else "reduce" in kinds


def barrier(tree: Any) -> Any:
    """Return `tree` bit for bit, behind a barrier that XLA's CPU compiler neither looks through nor fuses across.

    It returns `tree` itself on other platforms, and if `Guard.flag_set`.

    It is for the operands of products, so that none is seen to be constant along an axis, and for results that may be
    summed. XLA's own barrier is removed before kernels are formed (jaxlib 0.10.2 and 0.11.0; not from 0.11.2 on), and
    rounding alone lets constants through. Derivatives of every kind and order pass, behind a barrier too.
    """
    import jax

    from posx.machine.platforms import is_on_cpu

    if guard().flag_set or not is_on_cpu():
        return tree

    def one(x: Any) -> Any:
        """Return an array of floating-point numbers behind the barrier."""
        if not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
            return x
        form = jax.numpy.finfo(x.dtype)
        return jax.lax.reduce_precision(jax.lax.optimization_barrier(x), form.nexp, form.nmant)

    return jax.tree.map(one, tree)


def add_flags(flags: Mapping[str, object]) -> None:
    """Add the flags that XLA_FLAGS does not have yet, if this version of XLA knows them."""
    if _names_file() or _libtpu_reads_flags():
        return
    new = [f"{name}={value}" for name, value in flags.items() if name not in _flags()]
    new = new if jaxlib.__version__ in FAULTY else known_flags(new)  # the versions in FAULTY know all of posx's flags
    if new:
        os.environ["XLA_FLAGS"] = " ".join([_flags(), *new]).strip()


def known_flags(flags: Sequence[str]) -> list[str]:
    """Return the flags, each as --name=value, that this version of XLA knows.

    XLA ends a process over a flag that it does not know, and names it. So a process of its own reads them: 0.1 s.
    """
    if not flags:
        return []
    asked = [sys.executable, "-P", "-c", "from jaxlib import xla_client; xla_client.CompileOptions()"]
    given = os.environ | {"XLA_FLAGS": " ".join(flags)}
    done = subprocess.run(
        asked, env=given, capture_output=True, encoding="utf-8", errors="replace", check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode == 0:
        return [*flags]
    named = done.stderr.partition("in XLA_FLAGS:")[2].split()
    return [flag for flag in flags if flag not in named] if named else []


def _libtpu_reads_flags() -> bool:
    """Return whether libtpu, which ends the process over an unknown flag, is used."""
    return importlib.util.find_spec("libtpu") is not None and os.environ.get("JAX_PLATFORMS") != "cpu"


def jax_has_started() -> bool:
    """Return whether JAX has made its devices, without making them: a setting that is fixed by then is changed."""
    if "jax" not in sys.modules:
        return False
    import jax

    now = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_num_cpu_devices", now + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", now)
    return False


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
        f"JAX_PLATFORMS={asked}: JAX finds no such device: {reason}. Unset JAX_PLATFORMS to use the devices "
        "of this machine. Plugins come with the extras cuda12, cuda13 and tpu: pip install 'posx[cuda12]'"
    )


@functools.cache
def uses_cpus() -> bool:
    """Return whether JAX computes on CPUs here: as JAX_PLATFORMS says, else as a process of its own finds.

    JAX is not started in this process, because it would take an accelerator away from others. Raises ConfigError if it
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
