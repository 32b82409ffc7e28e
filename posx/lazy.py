"""Access to a package's modules and public names as attributes, without importing them with the package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


def module_getter(package: str, places: Mapping[str, str] = MappingProxyType({})) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` that imports a public name, or a module, when it is first asked for.

    `posx.machine.devices` then works after `import posx`, although `posx.machine` itself imports no JAX.

    Args:
      package: its full name.
      places: the modules of public names, {name: full name of the module that defines it}.
    """

    def __getattr__(name: str) -> Any:
        """Import what `name` stands for in the package. Raises AttributeError if there is nothing."""
        if name in places:
            value = getattr(importlib.import_module(places[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
