"""The tasks by name, and tasks from their text."""

from __future__ import annotations

from posx.contract.fields import field_problems, snake_case
from posx.encodings.grammar import parse
from posx.errors import ConfigError, join_problems, nearest
from posx.lab.tasks.base import Task
from posx.lab.tasks.copying import RepeatCopy, SelectiveCopy, Sort, UniqueCopy
from posx.lab.tasks.counting import Addition, BinaryMajority, Majority, Parity
from posx.lab.tasks.groups import S5
from posx.lab.tasks.languages import AaStar, AbStar, ContainsAb, EndsWithA, StartsWithA
from posx.lab.tasks.recall import FlipFlop, Mqar, Passkey
from posx.parsing import typed_fields

TASKS: dict[str, type[Task]] = {snake_case(cls): cls for cls in (
    BinaryMajority, Majority, Sort, UniqueCopy, RepeatCopy, Parity, Addition, FlipFlop, Mqar, Passkey, SelectiveCopy,
    AaStar, AbStar, StartsWithA, EndsWithA, ContainsAb, S5,
)}  # fmt: skip


def parse_task(text: str) -> Task:
    """Return the task that a text names, as "flip_flop(ignore=0.98)". Raises ConfigError."""
    spec = parse(text)
    if not isinstance(spec, dict) or spec["name"] not in TASKS:
        name = text if not isinstance(spec, dict) else spec["name"]
        raise ConfigError(f"task {name!r} is unknown. {nearest(name, list(TASKS))}The tasks are: {', '.join(TASKS)}.")
    cls = TASKS[spec.pop("name")]
    task = cls(**typed_fields(cls, spec, f"task {text!r}", ""))
    if problems := list(field_problems(task)):
        raise ConfigError(join_problems([f"task {text}: {problem}" for problem in problems]))
    return task
