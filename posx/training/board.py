"""TensorBoard's copy of a run's metrics."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def open_board(folder: Path, suffix: str) -> Any:
    """A tensorboardX writer into `folder`; `suffix` ends the name of its file.

    tensorboardX imports torch wherever it is installed, two seconds of every start for a type that posx never passes:
    torch is hidden from it unless it is there already.
    """
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hide:
            del sys.modules["torch"]
    return SummaryWriter(str(folder), filename_suffix=suffix)
