"""The attention calls that one process makes, served by `workers`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.calls import Arrays, Call, Case, contestants, errors, oracle
from benchmarks.workers import one_line

KINDS = ("forward", "gradient")
FAILURES = (ValueError, TypeError, NotImplementedError, RuntimeError, MemoryError)


class Calls:
    """Prepared calls by contestant and case, as `dataclasses.asdict` has it."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, Case], Call] = {}
        self.truths: dict[Case, Arrays] = {}

    def check(self, name: str, case: dict[str, Any]) -> dict[str, Any] | None:
        """The worst answer against posx's dense executor in float64; None where the contestant has none."""
        made = Case(**case)
        try:
            call = contestants()[name](made)
            answers = call.answers() if call else None
        except FAILURES:  # `prepare` tells
            return None
        if answers is None:
            return None
        if made not in self.truths:
            self.truths = {made: oracle(made)}
        truth = self.truths[made]
        if name == "torch-flex":  # forward only
            truth = {key: truth[key] for key in answers}
        answer, error = max(errors(answers, truth).items(), key=lambda item: item[1])
        return {"contestant": name, "encoding": made.encoding, "answer": answer, "error": error}

    def prepare(self, name: str, case: dict[str, Any]) -> dict[str, Any] | None:
        """{kind: seconds of a call once it is compiled, or the reason as text}; None where the call does not apply."""
        made = Case(**case)
        self.calls = {key: call for key, call in self.calls.items() if key[1].length == made.length}
        try:
            call = contestants()[name](made)
        except FAILURES as error:
            return dict.fromkeys(KINDS, one_line(error))
        if call is None:
            return None
        self.calls[name, made] = call
        return {kind: self._first(getattr(call, kind)) for kind in KINDS}

    def _first(self, once: Callable[[], Any]) -> float | str:
        try:
            once()
            return seconds(once, 1)
        except FAILURES as error:
            return one_line(error)

    def turn(self, name: str, case: dict[str, Any], kind: str, repeats: int) -> float:
        return seconds(getattr(self.calls[name, Case(**case)], kind), repeats)


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Seconds per call, after some that are not timed."""
    for _ in range(1 + repeats // 4):
        call()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
