"""Copies of finished folders, in another folder or at any URL that fsspec knows."""

from __future__ import annotations

from pathlib import Path

from posx.errors import ConfigError, WorkdirError

#: What tells that a folder is whole: copied last, and compared before anything is.
LAST = "DONE"

#: What may be written again later, in a folder that is whole: compared by its size.
GROWING = "eval.jsonl"

#: What is written, and removed, to see whether that is allowed.
TRIED = ".posx"


class Copies:
    """Where copies are kept. Raises ConfigError where nothing can be written, before hours are spent on what is to be
    copied there."""

    def __init__(self, url: str):
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        try:
            self.system, self.root = url_to_fs(self.url)
            self.system.makedirs(self.root, exist_ok=True)
            self.system.pipe_file(f"{self.root}/{TRIED}", b"")
            self.system.rm_file(f"{self.root}/{TRIED}")
        except Exception as error:  # every file system has its own
            told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ConfigError(f"--copy_to={url} cannot be written to ({told})") from None

    def keep(self, folder: Path) -> None:
        """Copies a folder that holds DONE, unless its copy has that same DONE and as many rows. Raises WorkdirError.

        Not copied are hidden files: locks, and what is being written.
        """
        there = f"{self.root}/{folder.name}"
        try:
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
        except Exception as error:  # every file system has its own
            told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise WorkdirError(f"{folder.name} could not be copied to {self.url} ({told})") from None
