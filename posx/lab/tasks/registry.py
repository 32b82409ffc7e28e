"""The tasks by name, and tasks from their text."""

from __future__ import annotations

import dataclasses

from posx.contract.fields import snake_case
from posx.encodings.grammar import parse, parse_value, unparse
from posx.lab.tasks.base import Task
from posx.lab.tasks.check import check_words
from posx.lab.tasks.copying import RepeatCopy, SelectiveCopy, Sort, UniqueCopy
from posx.lab.tasks.counting import Addition, BinaryMajority, Majority, Parity
from posx.lab.tasks.groups import S5
from posx.lab.tasks.languages import AaStar, AbStar, ContainsAb, EndsWithA, StartsWithA
from posx.lab.tasks.pictures import DeadLeaves
from posx.lab.tasks.recall import FlipFlop, Mqar, Passkey

TASKS: dict[str, type[Task]] = {snake_case(cls): cls for cls in (
    BinaryMajority, Majority, Sort, UniqueCopy, RepeatCopy, Parity, Addition, FlipFlop, Mqar, Passkey, SelectiveCopy,
    AaStar, AbStar, StartsWithA, EndsWithA, ContainsAb, S5, DeadLeaves,
)}  # fmt: skip


def parse_task(text: str) -> Task:
    """Return the task that a text names, as "flip_flop(ignore=0.98)" or "my_module:MyTask". Raises ConfigError."""
    task = parse_value(text, "task", "tasks", TASKS, dict(zip(TASKS, TASKS, strict=True)), Task)
    if type(task) not in TASKS.values():
        check_words(task)
    return task


def shortest_text(text: str) -> str:
    """Return the text of the same task without defaults: all spellings name the same items. Raises ConfigError."""
    task, spec = parse_task(text), parse(text)
    changed = {
        field.name: value for field in dataclasses.fields(task) if (value := getattr(task, field.name)) != field.default
    }
    return unparse({"name": spec["name"]} | changed)  # type: ignore[call-overload]
