"""Access to a package's modules as attributes, without importing them with the package."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any


def modules_of(package: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` that imports a module of it when it is first asked for.

    `posx.machine.devices` then works after `import posx`, although `posx.machine` itself imports no JAX.
    """

    def __getattr__(name: str) -> Any:
        """Import the module `name` of the package. Raises AttributeError if there is none."""
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
