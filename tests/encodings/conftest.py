import jax
import pytest

from posx.attention import EXECUTORS
from tests.encodings.cases import SMALL_TILES, small_tiles


@pytest.fixture(scope="session", autouse=True)
def small_tiles_executor():
    """`executor="small_tiles"`: blockwise with tiles smaller than the tests' sequences."""
    EXECUTORS[SMALL_TILES] = small_tiles
    yield
    del EXECUTORS[SMALL_TILES]


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_code():
    """Modules share no compiled code, and all of it together would take gigabytes."""
    yield
    jax.clear_caches()
