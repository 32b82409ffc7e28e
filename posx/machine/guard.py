"""Guards against a fault in XLA's CPU compiler that makes sums after products wrong.

From jaxlib 0.10.2 on XLA passes sums and maxima, with the products just before them, to YNNPACK as one kernel. If the
right operand of such a product is constant along the product's output axis (a constant, one number per token, keys that
are all equal), the kernel reads memory that is not its own: 1e33 or NaN instead of 64, without a message. On jaxlib
0.10.2 and 0.12.0.1, 137 of 1,324 random programs of products, broadcasts, element-wise maps and reductions were wrong,
all with this pattern. With reductions kept out of these kernels 169 fixed programs, 32 of them wrong before, and the
first 169 random ones were right.

Two guards are needed, as neither covers everything:

* `barrier` is put around posx's own products and makes the pattern impossible there, whatever the flags.
* Importing posx adds --xla_cpu_experimental_ynn_fusion_type=-reduce to XLA_FLAGS: no reductions in these kernels. It
  covers the hooks of a user's encoding and a user's own model, which `barrier` does not reach. A value of the flag that
  is already there stays. `python -m benchmarks.guard_cost` measures what the flag costs.

The flag is set only for versions of jaxlib that were tested to have the fault and to know it. XLA ends the process over
an unknown name. Processes started from this one inherit the flag. Nothing is compiled and no JAX is imported for this.
A notice says so if posx comes too late, because JAX has started its devices or XLA_FLAGS says otherwise.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jaxlib

FLAG = "--xla_cpu_experimental_ynn_fusion_type"
SAFE = f"{FLAG}=-reduce"
#: Versions of jaxlib tested to have the fault, and to know this flag and the flags of `posx.machine.devices`.
FAULTY = ("0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1")


class Guard(NamedTuple):
    """The state of this process. open: the fault can strike outside of posx's own products."""

    open: bool
    text: str


@functools.cache
def guard() -> Guard:
    """Keep the fault out of this process if that is still possible, else print a notice."""
    found = _guard()
    if found.open:
        print(
            f"notice: {found.text}, so sums after products other than posx's own may be wrong; "
            f"import posx before JAX starts, with {SAFE} or nothing of that name in XLA_FLAGS",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return found


def _guard() -> Guard:
    """Set the flag if it is needed and possible; return the state of this process."""
    if jaxlib.__version__ not in FAULTY:
        return Guard(False, f"jaxlib {jaxlib.__version__} is not known to have the fault, no flag is set")
    fault = f"a fault of jaxlib {jaxlib.__version__} on CPUs"
    given = os.environ.get("XLA_FLAGS", "").strip()
    names_file = bool(given) and not given.startswith("-")
    if (fused := _fuses_reductions(_read(given) if names_file else given)) is not None:
        return Guard(fused, f"XLA_FLAGS {'lets' if fused else 'keeps'} {fault} {'in' if fused else 'out'}")
    if jax_has_started():
        import jax

        if jax.default_backend() != "cpu":
            return Guard(False, f"{fault} cannot reach {jax.default_backend()} programs")
        return Guard(True, f"JAX was started before posx could keep out {fault}")
    if names_file:
        return Guard(True, f"XLA_FLAGS names a file, which lets {fault} in")
    if _libtpu_reads_flags():
        return Guard(False, f"{fault} cannot reach TPUs; libtpu reads XLA_FLAGS too and may not know the flag")
    os.environ["XLA_FLAGS"] = f"{given} {SAFE}".strip()
    return Guard(False, f"posx set {SAFE}, which keeps out {fault}")


def _read(path: str) -> str:
    """Return the text of a file, empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _fuses_reductions(flags: str) -> bool | None:
    """Return whether these XLA flags let reductions into the fusion; None for XLA's default, which does."""
    values = re.findall(rf"{FLAG}=(\S*)", flags)
    if not values:
        return None
    kinds = values[-1].strip("\"'").lower().split(",")
    changes_default = any(kind.startswith(("+", "-")) for kind in kinds)
    return "-reduce" not in kinds if changes_default else "reduce" in kinds


def barrier(tree: Any) -> Any:
    """Return `tree` bit for bit, behind a barrier that XLA's CPU compiler neither looks through nor fuses across.

    It is for the operands of products, so that none is seen to be constant along an axis, and for results that may be
    summed. XLA's own barrier is removed before kernels are formed (jaxlib 0.10.2 and 0.11.0; not from 0.11.2 on), and
    rounding alone lets constants through. Derivatives of every kind and order pass, behind a barrier too.
    """
    import jax

    if jax.default_backend() != "cpu":
        return tree

    def one(x: Any) -> Any:
        """Return an array of floating-point numbers behind the barrier."""
        if not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
            return x
        form = jax.numpy.finfo(x.dtype)
        return jax.lax.reduce_precision(jax.lax.optimization_barrier(x), form.nexp, form.nmant)

    return jax.tree.map(one, tree)


def add_flags(flags: Mapping[str, str]) -> None:
    """Add the flags that XLA_FLAGS does not have yet, if this version of XLA is known to know them."""
    given = os.environ.get("XLA_FLAGS", "").strip()
    if jaxlib.__version__ not in FAULTY or (given and not given.startswith("-")) or _libtpu_reads_flags():
        return
    new = [f"{name}={value}" for name, value in flags.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([*([given] if given else []), *new])


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
