"""Copies of finished folders, in another folder or at any URL that fsspec knows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posx.errors import ConfigError, PosxError, WorkdirError
from posx.lab.files.lines import parse_json

#: The file that shows that a folder is complete: copied last, and compared first.
LAST = "DONE"
#: The file of a complete folder that may grow later: compared by its size.
GROWING = "eval.jsonl"
#: The file that names the run of a folder by its hash.
SETTINGS = "config.json"
#: The file that is written and removed to test whether that is allowed.
TRIED = ".posx"


class CopyTarget:
    """A place for copies. Raises ConfigError if it cannot be written, before hours are spent on the runs to copy."""

    def __init__(self, url: str):
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        with _one_line(ConfigError, f"--copy_to={url} cannot be written"):
            self.system, self.root = url_to_fs(self.url)
            self.system.makedirs(self.root, exist_ok=True)
            self.system.pipe_file(f"{self.root}/{TRIED}", b"")
            self.system.rm_file(f"{self.root}/{TRIED}")

    def check(self, name: str, run: str) -> None:
        """Raise ConfigError if the copy that is called `name` is not of `run`, the hash of a run: it would be lost."""
        there = f"{self.root}/{name}/{SETTINGS}"
        held: Any = run
        with _one_line(ConfigError, f"--copy_to={self.url} cannot be read"):
            if self.system.exists(there):
                with contextlib.suppress(ValueError):  # it was not copied to its end
                    held = dict(parse_json(self.system.cat_file(there))).get("hash")
        if held != run:
            raise ConfigError(
                f"--copy_to={self.url}: {name} is there already as the copy of another run ({held}, not {run}), which "
                "would be replaced. Give another --copy_to."
            )

    def keep(self, folder: Path) -> None:
        """Copy a finished folder, unless its copy has the same DONE and as many rows. Raises WorkdirError.

        Hidden files, which are locks and unfinished files, are not copied.
        """
        there = f"{self.root}/{folder.name}"
        with _one_line(WorkdirError, f"{folder.name} could not be copied to {self.url}"):
            if self.system.exists(f"{there}/{LAST}"):
                same = self.system.cat_file(f"{there}/{LAST}") == (folder / LAST).read_bytes()
                if same and self.system.size(f"{there}/{GROWING}") == (folder / GROWING).stat().st_size:
                    return
                self.system.rm_file(f"{there}/{LAST}")
            files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
            for path in sorted(files, key=lambda path: path.name == LAST):
                if not any(part.startswith(".") for part in path.parts):
                    self.system.makedirs(f"{there}/{path.parent.as_posix()}", exist_ok=True)
                    self.system.put_file(str(folder / path), f"{there}/{path.as_posix()}")


@contextlib.contextmanager
def _one_line(kind: type[PosxError], text: str) -> Iterator[None]:
    """Turn any error of a file system, each of which has its own, into one line."""
    try:
        yield
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise kind(f"{text} ({told})") from None
