"""What the checks of an encoding found: numbers compared, one line for each check."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from posx.encodings import Encoding

#: An effect: far above rounding in float64, far below what random parameters do.
SEEN = 1e-6


class Findings:
    """Collects what one check compares; nothing is raised, so that the first difference does not hide the others."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        #: The largest difference of all that was compared.
        self.worst: float | None = None
        #: Why there is nothing to check.
        self.reason = ""

    def nothing(self, reason: str) -> None:
        self.reason = reason

    def holds(self, condition: Any, problem: str) -> None:
        if not condition:
            self.problems.append(problem)

    def equal(self, what: str, found: Any, wanted: Any, atol: float, rtol: float = 0.0) -> None:
        """Every number of tree `found` lies within atol + rtol * |wanted| of `wanted`, and none is NaN or infinite."""
        found, wanted = jax.device_get((found, wanted))
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            name = f"{what}{jax.tree_util.keystr(path)}"
            if a.shape != b.shape:
                self.problems.append(f"{name} has shape {list(a.shape)}, not {list(b.shape)}")
                continue
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                self.problems.append(f"{name} is not finite")
                continue
            off, allowed = np.abs(a - b), atol + rtol * np.abs(b)
            if not off.size:
                continue
            self.worst = max(self.worst or 0.0, float(off.max()))
            if (off > allowed).any():
                place = np.unravel_index(np.argmax(off - allowed), off.shape)
                self.problems.append(f"{name} differs by {off[place]:.2g}, {allowed[place]:.2g} is allowed")

    def differ(self, what: str, found: Any, wanted: Any, least: float) -> None:
        """Some number of tree `found` is further than `least` from `wanted`."""
        pairs = zip(*(jax.tree.leaves(jax.device_get(tree)) for tree in (found, wanted)), strict=True)
        off = max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max(initial=0) for a, b in pairs)
        self.holds(off > least, f"{what}: nothing changes by more than {off:.2g}")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One check: "ok", "FAILED", or "-" if there was nothing to check; what differed by how much, and what it shows."""

    name: str
    status: str
    detail: str
    shows: str

    def __str__(self) -> str:
        return f"{self.name:18} {self.status:6} {': '.join(filter(None, (self.shows, self.detail)))}".rstrip()


def outcome(name: str, findings: Findings, shows: str) -> Outcome:
    """Return the line of a check: its first problem and the number of others, or how far numbers were apart."""
    if findings.problems:
        more = len(findings.problems) - 1
        return Outcome(name, "FAILED", findings.problems[0] + (f" (and {more} more)" if more else ""), shows)
    if findings.reason:
        return Outcome(name, "-", findings.reason, shows)
    return Outcome(name, "ok", "" if findings.worst is None else f"differs by at most {findings.worst:.1g}", shows)


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcomes of all checks of one encoding, in order; printed, a line for each."""

    encoding: Encoding
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that did not hold."""
        return tuple(outcome.name for outcome in self.outcomes if outcome.status == "FAILED")

    def __str__(self) -> str:
        return "\n".join([str(self.encoding), *map(str, self.outcomes)])
