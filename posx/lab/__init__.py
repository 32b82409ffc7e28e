"""The laboratory: all that trains, stores, schedules, draws, imports models and talks to a person.

It imports the library. The library imports nothing of it, as `tests/test_architecture.py` checks.
"""

from posx.lazy import module_getter

__getattr__ = module_getter(__name__)
