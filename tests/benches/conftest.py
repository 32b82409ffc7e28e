"""`scripts/bench.py` and its modules, importable. Nothing in these tests depends on how long anything takes."""

import pathlib

import jax
import pytest

from posx.machine import ceiling
from tests import cheap

SCRIPTS = pathlib.Path(__file__).parent.parent.parent / "scripts"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(ceiling, "SIZE", 64)  # seconds of products otherwise
    monkeypatch.setenv("XLA_FLAGS", cheap.FLAGS)  # of the processes that a bench starts
    import bench

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # Optax, jax.nn
        yield bench
