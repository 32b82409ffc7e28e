import jax
import pytest

from posx.attention import EXECUTORS
from tests.encodings.cases import EVEN_TILES, SMALL_TILES, even_tiles, small_tiles


@pytest.fixture(scope="session", autouse=True)
def executors_with_small_tiles():
    """`executor="small_tiles"` and "even_tiles": blockwise with tiles smaller than the tests' sequences."""
    EXECUTORS[SMALL_TILES], EXECUTORS[EVEN_TILES] = small_tiles, even_tiles
    yield
    del EXECUTORS[SMALL_TILES], EXECUTORS[EVEN_TILES]


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_code():
    """Modules share no compiled code, and all of it together would take gigabytes."""
    yield
    jax.clear_caches()
