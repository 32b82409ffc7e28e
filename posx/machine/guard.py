"""XLA's CPU compiler, and the fault in it that posx keeps out of its numbers.

From jaxlib 0.10.2 on XLA hands sums and maxima, with the products just before them, to YNNPACK as one kernel. Where the
right operand of such a product is the same along the product's output axis (a constant, one number per token, keys that
are all alike) the kernel reads memory that is not its own: 1e33 or NaN instead of 64, without a word. Of 1,324 random
programs of products, broadcasts, element-wise maps and reductions 137 were wrong, on jaxlib 0.10.2 and 0.12.0.1, all of
them with this pattern. With reductions kept out of these kernels 169 fixed programs, 32 of them wrong before, and the
first 169 random ones were right.

Two guards, as neither reaches everything:

* `posx.machine.compiler.barrier` stands around posx's own products and makes the pattern impossible there, whatever the
  flags.
* Importing posx adds --xla_cpu_experimental_ynn_fusion_type=-reduce to XLA_FLAGS: no reductions in these kernels. The
  hooks of a user's encoding and a user's own model end in numbers that posx prints too, and `apart` does not reach into
  them. `python -m benchmarks.guard_cost` measures what it costs. Whoever wants these kernels can have them: a value of
  the flag that is there already stays.

The flag is set only for versions of jaxlib tested to have the fault and to know the flag, since XLA ends the process
over a name that it does not know. Nothing is compiled to find out. Processes started from this one inherit the flag.
Where posx comes too late, because JAX has started its devices or XLA_FLAGS says otherwise, one line says so. No JAX is
imported for all that.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jaxlib

FLAG = "--xla_cpu_experimental_ynn_fusion_type"
SAFE = f"{FLAG}=-reduce"
#: Versions of jaxlib tested to have the fault, and to know the flag and those that posx sets elsewhere.
FAULTY = TESTED = ("0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1")


class Guard(NamedTuple):
    """How this process stands to the fault. open: it can strike outside of posx's own products."""

    open: bool
    text: str


@functools.cache
def guard() -> Guard:
    """Keeps the fault out of this process, where that is still possible; says so on standard error where it is not."""
    found = _guard()
    if found.open:
        print(
            f"notice: {found.text}, so sums after products other than posx's own may be wrong; "
            f"import posx before JAX starts, with {SAFE} or nothing of that name in XLA_FLAGS",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return found


def _guard() -> Guard:
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
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _fuses_reductions(flags: str) -> bool | None:
    """Whether these XLA flags let reductions into the fusion; None where they leave it to XLA's default, which does."""
    values = re.findall(rf"{FLAG}=(\S*)", flags)
    if not values:
        return None
    kinds = values[-1].strip("\"'").lower().split(",")
    changes_default = any(kind.startswith(("+", "-")) for kind in kinds)
    return "-reduce" not in kinds if changes_default else "reduce" in kinds


def add_flags(flags: Mapping[str, str]) -> None:
    """Adds those of `flags` to XLA_FLAGS that are not given there, where XLA is known to know them."""
    given = os.environ.get("XLA_FLAGS", "").strip()
    if jaxlib.__version__ not in TESTED or (given and not given.startswith("-")) or _libtpu_reads_flags():
        return
    new = [f"{name}={value}" for name, value in flags.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([*([given] if given else []), *new])


def _libtpu_reads_flags() -> bool:
    return importlib.util.find_spec("libtpu") is not None and os.environ.get("JAX_PLATFORMS") != "cpu"


def jax_has_started() -> bool:
    """Whether JAX has its devices. The public way to ask without making them is to change what is fixed by then."""
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
