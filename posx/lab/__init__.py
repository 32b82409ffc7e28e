"""The laboratory: all that trains, stores, schedules, draws, imports models and talks to a person.

It stands on the library, which knows nothing of it: `tests/test_architecture.py` holds that.
"""

from posx.lazy import modules_of

__getattr__ = modules_of(__name__)
