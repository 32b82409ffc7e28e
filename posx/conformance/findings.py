"""The findings of the checks of one encoding: what was compared, as one line for each check."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from posx.contract import Encoding

#: The least change that counts as an effect: far above rounding in float64, far below the effect of random parameters.
SEEN = 1e-6
#: So many problems of a check are printed.
SHOWN = 3


def leaves(*trees: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the dotted path of each leaf, and the leaf of every tree as float64."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(trees[0])]
    for path, *values in zip(paths, *map(jax.tree.leaves, jax.device_get(trees)), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        yield name, *(np.asarray(a, np.float64) for a in values)


class Findings:
    """The comparisons of one check. None of them raises, so that the first problem does not hide later ones.

    Args:
      name: of the check.
      shows: the property that the encoding has if the check passes.
    """

    def __init__(self, name: str, shows: str) -> None:
        self.name, self.shows = name, shows
        self.problems: list[str] = []
        #: The largest difference of all comparisons.
        self.worst: float | None = None
        #: Why there is nothing to check.
        self.reason = ""

    @property
    def status(self) -> str:
        """Return "ok", "FAILED", or "-" if there was nothing to check."""
        return "FAILED" if self.problems else "-" if self.reason else "ok"

    @property
    def detail(self) -> str:
        """Return the first problems and the number of others, the reason, or the largest difference."""
        if self.problems:
            more = len(self.problems) - SHOWN
            return "; ".join(self.problems[:SHOWN]) + (f" (and {more} more)" if more > 0 else "")
        return self.reason or ("" if self.worst is None else f"largest difference {self.worst:.1g}")

    def __str__(self) -> str:
        return f"{self.name:18} {self.status:6} {': '.join(filter(None, (self.shows, self.detail)))}".rstrip()

    def nothing(self, reason: str) -> None:
        self.reason = reason

    def holds(self, condition: Any, problem: str) -> None:
        """Record the problem unless the condition holds."""
        if not condition:
            self.problems.append(problem)

    def equal(self, name: str, result: Any, wanted: Any, atol: float, rtol: float = 0.0) -> None:
        """Record each leaf of `result` that is not within atol + rtol * |wanted| of `wanted`, or not finite."""
        for leaf, a, b in leaves(result, wanted):
            what = f"{name} {leaf}".strip()
            if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
                shape = f"shape {list(a.shape)}, not {list(b.shape)}"
                self.problems.append(f"{what} has {shape if a.shape != b.shape else 'NaN or infinite values'}")
                continue
            off, allowed = np.abs(a - b), atol + rtol * np.abs(b)
            self.worst = max(self.worst or 0.0, float(off.max(initial=0)))
            if (off > allowed).any():
                place = np.unravel_index(np.argmax(off - allowed), off.shape)
                self.problems.append(f"{what} off by {off[place]:.2g}, allowed {allowed[place]:.2g}")

    def differ(self, problem: str, result: Any, wanted: Any) -> None:
        """Record the problem unless some number of `result` is further than SEEN from `wanted`."""
        off = max(np.abs(a - b).max(initial=0) for _, a, b in leaves(result, wanted))
        self.holds(off > SEEN, f"{problem} (largest change {off:.2g})")


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings of all checks of one encoding, in order. `print(report)` prints a line for each."""

    encoding: Encoding
    outcomes: tuple[Findings, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """The names of the checks that failed."""
        return tuple(outcome.name for outcome in self.outcomes if outcome.status == "FAILED")

    def __str__(self) -> str:
        return "\n".join([str(self.encoding), *map(str, self.outcomes)])
