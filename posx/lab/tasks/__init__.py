"""Tasks: items made from a seed, whose answers a model that understands them can give at every length.

    text   -> task    `parse_task("flip_flop(ignore=0.98)")`: a frozen value, with its fields in parentheses.
    key, n -> item    `Task.row`: one pure function, jitted and mapped over keys by `draw_rows`.

A file holds tasks of one kind: `counting`, `copying`, `recall`, `languages`, `groups`.
"""

from posx.lab.tasks.base import Items, Task, draw_rows
from posx.lab.tasks.registry import TASKS, parse_task, shortest_text
from posx.lazy import module_getter

__all__ = ["TASKS", "Items", "Task", "draw_rows", "parse_task", "shortest_text"]

__getattr__ = module_getter(__name__)
