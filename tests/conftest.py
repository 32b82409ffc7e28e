"""One strict JAX for the whole suite, float32, no silent broadcasting between ranks, no silent mixing of types; and the
run that tests share.

It is on CPUs unless JAX_PLATFORMS says otherwise. An accelerator then computes float32 products in float32, so that the
tolerances of CPUs hold, and programs are compiled as users' are.
"""

import gc
import os
import shutil
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

import posx  # noqa: F401  before JAX starts: it keeps a fault of the compiler out
from tests import cheap

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_x64", False)
if os.environ["JAX_PLATFORMS"] != "cpu":
    jax.config.update("jax_default_matmul_precision", "highest")

# Tracing makes millions of objects, hardly any of them in cycles: going through them all again and again was a tenth of
# what the suite costs.
gc.freeze()
gc.set_threshold(200_000, 50, 1000)


def pytest_collection_finish() -> None:
    """Let no collection go through the modules and the tests themselves."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the last collection, which pytest asks for, go through nothing."""
    gc.freeze()


# The processes that tests start inherit this; where it is the point how users' programs are compiled, a test says so.
if os.environ["JAX_PLATFORMS"] == "cpu":
    cheap.set_flags()
jax.devices()  # reads the flags


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory) -> Path:
    """One folder for all processes of this session."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def site(session_folder) -> Path:
    """A folder with text, cache, the tiny config and, in `whole`, its run by the real command: made once a session."""
    from tests import tiny

    return tiny.once(session_folder / "site", tiny.make_site)


@pytest.fixture(scope="session")
def whole(site) -> Path:
    """The finished run of `site`, not to be written into."""
    return site / "whole"


@pytest.fixture
def workdir(whole, tmp_path) -> Path:
    """A copy of the finished run."""
    return shutil.copytree(whole, tmp_path / "run")
