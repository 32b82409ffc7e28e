"""Measuring the runs of a sweep side by side, each as `posx evaluate` of its own."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from posx.config import RunConfig
from posx.errors import PosxError
from posx.evaluation.protocols import rows_owed
from posx.files import lines
from posx.runs.describe import expected
from posx.runs.folder import RunFolder
from posx.runs.text import at_hand
from posx.sweeps.schedule import Cost
from posx.sweeps.tasks import ALONE


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One run to be measured as the flags `words` say; `run`: its settings with those that the words set."""

    run: RunConfig
    folder: RunFolder
    words: tuple[str, ...]
    output: Path

    @functools.cached_property
    def cost(self) -> Cost:
        """0 where its folder does not tell: its process will say what is missing there."""
        try:
            found = expected(at_hand(self.folder, self.run))
        except PosxError:
            return Cost(0.0, 0, 0.0)
        return Cost(found.slower * (found.eval_flops or 0.0), found.lengths, found.memory, turn=self.run.train.seed)

    def command(self) -> list[str]:
        """Its words as a command."""
        return ["evaluate", f"--workdir={self.folder.path}", "--json", ALONE, *self.words]

    def rows(self) -> list[dict[str, Any]]:
        """What it measured; empty where it could not."""
        return lines.read(self.output)

    def progress(self) -> float:
        """The part of the rows that it has added to its folder, 0 to 1, where 1 is only for those that have ended."""
        owed = rows_owed(self.run.eval, self.run.train.length)
        return 0.99 * min(1.0, (self._stored() - self._before) / owed)

    @functools.cached_property
    def _before(self) -> int:
        return self._stored()

    def _stored(self) -> int:
        return len(self.folder.measured())

    def state(self) -> str:
        """Its name."""
        return self.folder.path.name

    def outcome(self) -> str:
        """How many rows it has."""
        return f"{len(self.rows())} rows"
