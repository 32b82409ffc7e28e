"""JSON from outside."""

import json
from typing import Any


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for whatever is wrong with it, nesting beyond all measure too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
