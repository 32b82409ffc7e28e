"""Parse JSON from outside."""

import json
from typing import Any


def parsed(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for every fault in it, excessive nesting too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
