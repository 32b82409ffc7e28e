"""An older state of the code, to measure beside the present one."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.workers import ROOT


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A work tree of `commit` in a temporary folder, gone with the block. Raises SystemExit where git has it not."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "posx"
        made = _git("worktree", "add", "--detach", str(tree), commit)
        if made.returncode:
            raise SystemExit(f"--baseline={commit} cannot be checked out: {made.stderr.strip().splitlines()[-1]}")
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
