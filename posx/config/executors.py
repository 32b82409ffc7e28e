"""The setting `executor`, which training and evaluation share."""

from posx.attention import EXECUTORS


def executor_problems(section: str, executor: str) -> list[str]:
    """One line if there is no such executor of attention; `section` of the config names it."""
    allowed = ("auto", *EXECUTORS)
    return [] if executor in allowed else [f"{section}.executor={executor!r} is unknown; allowed: {', '.join(allowed)}"]
