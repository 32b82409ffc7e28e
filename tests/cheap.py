"""XLA flags under which programs compile in a third of the time.

Compile time dominates here, and LLVM's optimizer and the newer of XLA's two ways to emit a fusion are most of it. XLA's
own passes stay. For the tests' own processes and those they start, unless it is the point how users' programs are
compiled: AS_USERS_HAVE_IT is their environment then.
"""

from importlib import metadata

FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (
    0,
    12,
):  # later ones know no such flag, and would abort
    FLAGS += " --xla_cpu_use_fusion_emitters=false"

#: posx adds its own flag.
AS_USERS_HAVE_IT = {"XLA_FLAGS": ""}
