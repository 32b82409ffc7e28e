"""The faults, and the outcomes of provoking them."""

from __future__ import annotations

import functools
import resource
import subprocess
import traceback
from collections.abc import Callable
from typing import NamedTuple

from tests.tiny import ROOT, Scene

#: In the order of their numbers; several may share one.
FAULTS: list[Fault] = []

#: Returns the text for the table; for None the table shows what the processes of the scene ended with and printed.
#: Raises AssertionError if posx does not answer as expected.
Provoke = Callable[[Scene], str | None]


class Fault(NamedTuple):
    number: int
    what: str
    expected: str
    provoke: Provoke | None  # None: not provoked, and `expected` says why
    slow: bool = False

    @property
    def name(self) -> str:
        return f"F{self.number} {self.what}"


class Outcome(NamedTuple):
    number: int
    what: str
    expected: str
    got: str
    unmet: str  # why it is not as expected, or ""
    commit: str = ""  # of posx


def fault(number: int, what: str, expected: str, *, slow: bool = False) -> Callable[[Provoke | None], Provoke | None]:
    """Add a function to the campaign. `slow`: takes more than some 20 seconds; not in --quick."""

    def add(provoke: Provoke | None) -> Provoke | None:
        new = Fault(number, what, expected, provoke, slow)
        if any(known.name == new.name for known in FAULTS):
            raise ValueError(f"{new.name} is there already")
        FAULTS.append(new)
        FAULTS.sort(key=lambda known: known.number)
        return provoke

    return add


def not_provoked(number: int, what: str, why: str) -> None:
    """Add a fault that is in the table with the reason why nothing was tried."""
    fault(number, what, why)(None)


def limited(kind: int, most: int) -> Callable[[], None]:
    """Return `ulimit` for a process that starts: `kind` is one of `resource`, `most` in bytes."""
    return lambda: resource.setrlimit(kind, (most, most))


def provoked(fault: Fault, scene: Scene) -> Outcome:
    """Return the outcome of a fault. Nothing is raised, so that a campaign runs to its end."""
    got, unmet = None if fault.provoke else "not provoked", ""
    try:
        if fault.provoke:
            got = fault.provoke(scene)
    except AssertionError as error:
        unmet = str(error) or traceback.format_exc()
    except Exception:  # the campaign's own: it must not look like an answer
        unmet = f"the campaign failed: {traceback.format_exc()}"
    return Outcome(*fault[:3], scene.plain(got or scene.got), scene.plain(unmet), commit())


@functools.cache
def commit() -> str:
    """Return the short commit of the code, with "+" if it was edited."""

    def ask(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False).stdout.strip()

    return ask("rev-parse", "--short", "HEAD") + ("+" if ask("status", "--porcelain", "--", "posx") else "")


def table(outcomes: list[Outcome]) -> str:
    """Return a Markdown table."""
    lines = ["| fault | provoked | expected | got |", "| :-- | :-- | :-- | :-- |"]
    for o in outcomes:
        cells = o.what, o.expected, f"**not as expected** {o.unmet}" if o.unmet else o.got
        plain = (" ".join(cell.replace("|", r"\|").split()) for cell in cells)
        lines.append(f"| F{o.number} | {' | '.join(plain)} |")
    return "\n".join(lines)
