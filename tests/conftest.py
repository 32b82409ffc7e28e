"""One strict JAX for the whole suite: CPU, float32, no silent broadcasting between ranks, no silent mixing of types."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_x64", False)

# Compile time dominates here, and LLVM's optimizer is much of it. XLA's own passes stay, and the processes that tests
# start run as users run them.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0")
    jax.devices()  # reads the flags
