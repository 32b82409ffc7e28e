"""Choose a folder for files that can be made again: the user's cache folder, or a temporary one."""

from __future__ import annotations

import functools
import os
import stat
import tempfile
from pathlib import Path

from posx.progress import say


@functools.cache
def usable(folder: Path) -> Path:
    """Return `folder` if files can be written in it, else a temporary folder of this user, which a notice names."""
    try:
        with tempfile.TemporaryFile(dir=next(path for path in (folder, *folder.parents) if path.exists())):
            return folder
    except OSError as error:
        why = error.strerror
    try:
        instead = _temporary()
    except OSError:
        return folder  # nothing can be written anywhere: the writer will say so
    say(
        f"notice: {folder} cannot be written ({why}); caches are kept in {instead} instead. "
        "Set XDG_CACHE_HOME=FOLDER to choose another folder"
    )
    return instead


def _temporary() -> Path:
    """Return one folder for all processes of this user, unless another user has made a folder of that name."""
    user = getattr(os, "getuid", lambda: "")()
    folder = Path(tempfile.gettempdir(), f"posx-{user}")
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or user not in ("", facts.st_uid):
        return Path(tempfile.mkdtemp(prefix="posx-"))
    return folder
