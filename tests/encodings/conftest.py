import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_code():
    """Modules share no compiled code, and all of it together would take gigabytes."""
    yield
    jax.clear_caches()
