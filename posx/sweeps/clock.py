"""Time left for runs that go side by side, of which some take longer than others."""

from __future__ import annotations

from collections.abc import Sequence

from posx.sweeps.schedule import Schedule


class Clock:
    """Expected seconds of each run against those that its place took: the pace of what is done tells the rest.

    parts: what is done of each run already, 0 to 1, where 1 is for those that are not to be made.
    """

    def __init__(self, schedule: Schedule, parts: Sequence[float]):
        self.schedule, self.parts = schedule, list(parts)
        self.left = [schedule.seconds(run, 1 - part) if part < 1 else 0.0 for run, part in enumerate(parts)]
        self.made = self.spent = 0.0  # seconds of one place of its own: expected, and on the clock

    def tick(self, seconds: float, begun: Sequence[int]) -> None:
        """So many seconds have passed for those that have `begun`."""
        self.spent += seconds * len(begun) * self.schedule.share(begun)

    def see(self, run: int, part: float) -> bool:
        """The `part` that is done of a run by now; whether it got on. The first progress says: its start is over."""
        if part <= self.parts[run]:
            return False
        self.parts[run] = part
        left = self.schedule.seconds(run, 1 - part) - self.schedule.costs[run].start
        self.made, self.left[run] = self.made + self.left[run] - left, left
        return True

    def end(self, run: int, failed: bool) -> None:
        """A run has ended; what a failed one leaves undone was no work."""
        self.made += 0.0 if failed else self.left[run]
        self.left[run] = 0.0

    def seconds_left(self, begun: Sequence[int]) -> float | None:
        """Wall time until all have ended; None while nothing tells how fast this machine is."""
        if not any(self.left):
            return 0.0
        return self.schedule.wall_seconds(self.left, begun) * self.spent / self.made if self.made else None
