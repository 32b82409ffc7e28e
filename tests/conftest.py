"""One strict JAX for the whole suite: CPU, float32, no silent broadcasting between ranks, no silent mixing of types."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jaxlib
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_x64", False)

# Compile time dominates here, and LLVM's optimizer and the newer of XLA's two ways to emit a fusion are most of it.
# XLA's own passes stay, and the processes that tests start run as users run them.
CHEAP = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if tuple(map(int, jaxlib.__version__.split(".")[:2])) < (0, 12):  # later ones know no such flag, and would abort
    CHEAP.append("--xla_cpu_use_fusion_emitters=false")
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XLA_FLAGS", " ".join([os.environ.get("XLA_FLAGS", ""), *CHEAP]))
    jax.devices()  # reads the flags
