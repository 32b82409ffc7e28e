import jax
import pytest

from posx.attention import EXECUTORS
from tests.encodings.cases import EVEN_TILES, SMALL_SLABS, SMALL_TILES, even_tiles, small_slabs, small_tiles

SMALL = {SMALL_TILES: small_tiles, EVEN_TILES: even_tiles, SMALL_SLABS: small_slabs}


@pytest.fixture(scope="session", autouse=True)
def executors_with_small_tiles():
    """Blockwise and fused, cut into pieces smaller than the tests' sequences."""
    EXECUTORS.update(SMALL)
    yield
    for name in SMALL:
        del EXECUTORS[name]


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_code():
    """Modules share no compiled code, and all of it together would take gigabytes."""
    yield
    jax.clear_caches()
