from tests.encodings.conftest import forget_compiled_code  # noqa: F401  (a fixture for all modules here)
