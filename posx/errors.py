"""Foreseen failures: one line for the user, one exit code for launchers.

A message names the path and the value, the problem, and the allowed values or the fix.
"""

import difflib
from collections.abc import Callable, Iterable

#: Called with an error that ends the command, its exit code and its line, "" if the error is unknown.
at_failure: list[Callable[[BaseException, int, str], object]] = []


def near_names(name: str, known: Iterable[str], number: int = 1, cutoff: float = 0.5) -> list[str]:
    """Return the `number` known names that are nearest to `name`, in whatever case.

    First are the names of which it is a part or the initials: "lr" and "rate" are near "train.learning_rate".
    """
    by_lower = {one.lower(): one for one in known}
    end = name.lower().rpartition(".")[2]
    ends = {lower: lower.rpartition(".")[2] for lower in by_lower}
    equal = [lower for lower in ends if ends[lower] == end]
    parts = {lower: last.split("_") for lower, last in ends.items()}
    within = [lower for lower, words in parts.items() if end in ("".join(word[:1] for word in words), *words)]
    close = difflib.get_close_matches(name.lower(), by_lower, n=number, cutoff=cutoff)
    return [by_lower[lower] for lower in dict.fromkeys((*equal, *within, *close))][:number]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean 'x'? ", or "" if no known name is near, for a message."""
    return "".join(f"Did you mean {near!r}? " for near in near_names(name, known))


def other_names(given: Iterable[str], wanted: Iterable[str]) -> str:
    """Return "missing: a, b; unknown: c" for the names that only one side has, or "" if both have the same."""
    given, wanted = dict.fromkeys(given), dict.fromkeys(wanted)
    kinds = {"missing": [n for n in wanted if n not in given], "unknown": [n for n in given if n not in wanted]}
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names)


def join_problems(problems: Iterable[str]) -> str:
    """Return several problems as one line, each a sentence with its full stop; one alone stays as it is."""
    first, *others = problems
    return " ".join(f"{text.rstrip('.')}." for text in (first, *others)) if others else first


class PosxError(Exception):
    """A foreseen failure: the command line prints it as one line and exits with `exit_code`.

    alike: whether all processes of one run raise it at the same place.
    """

    exit_code = 1
    alike: bool = False


class ConfigError(PosxError, ValueError):
    """A command, config key or value that cannot be run (exit code 2)."""

    exit_code = 2


class DataError(PosxError):
    """Text, tokenizer or token store that cannot be used (exit code 3)."""

    exit_code = 3


class WorkdirError(PosxError):
    """Work folder or checkpoint that cannot be used (exit code 4)."""

    exit_code = 4


class Damaged(WorkdirError):
    """A file of a work folder that was cut, edited or changed by the disk (exit code 4)."""


class NonFiniteError(PosxError):
    """Training or sampling produced NaN or infinity (exit code 5)."""

    exit_code = 5
    alike = True


class OutOfMemoryError(PosxError):
    """Memory or disk ran out (exit code 6)."""

    exit_code = 6


class UndefinedLength(PosxError, ValueError):
    """Positions past the last one that an encoding is defined for. An evaluation records them as a result."""

    exit_code = 2


class Stopped(PosxError):
    """A run that was asked to stop and can be resumed (exit code 75, EX_TEMPFAIL: launchers start it again)."""

    exit_code = 75
    alike = True

    def __init__(self, event: str = "stopped"):
        super().__init__(f"{event}; the same command resumes (docs/guides/resuming.md)")


class Interrupted(Stopped):
    """A run that saved its last step after Ctrl-C (exit code 130, which no launcher starts again)."""

    exit_code = 130


class Lost(Stopped):
    """The end of a process because another process of its run is gone."""

    alike = False

    def __init__(self) -> None:
        super().__init__("another process of this run has ended, so this one ends too")


class PartialFailure(PosxError):
    """Some runs of a sweep, or some lengths of an evaluation, failed (exit code 7)."""

    exit_code = 7
    alike = True
