"""Evaluate the runs of a sweep side by side, each as its own `posx evaluate`."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from posx.config import RunConfig
from posx.errors import PosxError
from posx.evaluation.protocols import num_required_rows
from posx.files import lines
from posx.runs.describe import expected
from posx.runs.folder import RunFolder
from posx.runs.text import at_hand
from posx.sweeps.schedule import Cost
from posx.sweeps.tasks import ALONE


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A task that evaluates one run. run: its settings, with those that the flags `words` set."""

    run: RunConfig
    folder: RunFolder
    words: tuple[str, ...]
    output: Path

    @functools.cached_property
    def cost(self) -> Cost:
        """The expected cost, 0 if the folder does not tell it: the task's process will say what is missing there."""
        try:
            found = expected(at_hand(self.folder, self.run))
        except PosxError:
            return Cost(0.0, 0, 0.0)
        return Cost(found.slower * (found.eval_flops or 0.0), found.lengths, found.memory, seed=self.run.train.seed)

    def command(self) -> list[str]:
        """Return the words of `posx evaluate`."""
        return ["evaluate", f"--workdir={self.folder.path}", "--json", ALONE, *self.words]

    def rows(self) -> list[dict[str, Any]]:
        """Return the measured rows, none if the task failed."""
        return lines.read(self.output)

    def progress(self) -> float:
        """Return the fraction of the expected rows that were added to the folder, below 1 until the task ends."""
        expected = num_required_rows(self.run.eval, self.run.train.length)
        return 0.99 * min(1.0, (len(self.folder.measured()) - self._before) / expected)

    @functools.cached_property
    def _before(self) -> int:
        """The number of rows at the first look."""
        return len(self.folder.measured())

    def state(self) -> str:
        """Return the name of the run."""
        return self.folder.path.name

    def outcome(self) -> str:
        """Return the number of rows."""
        return f"{len(self.rows())} rows"
