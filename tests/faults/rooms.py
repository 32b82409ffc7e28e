"""The rooms in which faults are kept; one more is one more name."""

import importlib

ROOMS = ("settings", "texts", "folders", "training", "sweeps")


def load() -> None:
    """Fills `table.FAULTS`."""
    for room in ROOMS:
        importlib.import_module(f"tests.faults.{room}")
