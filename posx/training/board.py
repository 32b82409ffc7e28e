"""TensorBoard's copy of a run's metrics."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any


def open_board(folder: Path, suffix: str, start: int) -> Any:
    """Return a tensorboardX writer into `folder` whose file name ends with `suffix`.

    The run goes on after step `start`: TensorBoard drops later steps that a process before this one wrote.

    It writes in a thread of its own. What the disk refuses it there is not said: the metrics themselves meet the same
    disk, and their failure is the run's.

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
    _let_its_thread_end_quietly()
    return SummaryWriter(str(folder), filename_suffix=suffix, purge_step=start + 1)


def close_board(board: Any) -> None:
    """Flushes and closes it, as far as the disk takes it; nothing is tried again when the process ends."""
    writer = board.file_writer
    try:
        board.close()
    except OSError:
        writer.event_writer._closed = True


def _let_its_thread_end_quietly() -> None:
    told = threading.excepthook

    def hook(args: Any) -> None:
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboardX")):
            told(args)

    threading.excepthook = hook
