"""XLA flags under which programs compile in a third of the time.

Compile time dominates here, and LLVM's optimizer and the newer of XLA's two ways to emit a fusion are most of it. XLA's
own passes stay. For the tests' own processes and those they start, unless it is the point how users' programs are
compiled: AS_USERS_HAVE_IT is their environment then.
"""

import os
from collections.abc import Callable
from typing import Any

import jax

from posx.machine.guard import known_flags

FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_use_fusion_emitters=false",
)

#: posx adds its own flag.
AS_USERS_HAVE_IT = {"XLA_FLAGS": ""}


def in_one_program(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function compiled as one program. It knows its arguments' values, as it does outside of `jit`.

    Outside, JAX compiles every operation of every shape by itself: a layer takes forty of 15 ms each.
    """
    return jax.jit(lambda: function(*args, **options))()


def set_flags() -> None:
    """Add to XLA_FLAGS what this jaxlib knows of FLAGS; a worker's process has them from the one that starts it."""
    given = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join([*given, *known_flags([flag for flag in FLAGS if flag not in given])])
