"""The table, the figure and the gates of the study of tasks.

    posx sweep --config tasks_cpu --workdir runs/tasks_cpu
    python -m experiments.tables collect runs/tasks_cpu cells > experiments/tasks/runs.jsonl
    python -m experiments.tasks.tasks commands | sh
    python -m experiments.tables collect runs/tasks_gates gates >> experiments/tasks/runs.jsonl
    python -m experiments.tasks.tasks table
    python -m experiments.tasks.tasks rates
    python -m experiments.tasks.tasks figure
    python -m experiments.tasks.tasks gates
    python -m experiments.tasks.tasks catalogue
    python -m experiments.tasks.tasks recall
    python -m experiments.tasks.tasks more
    python -m experiments.tasks.tasks weights
    python -m experiments.tasks.tasks zeros

`gates.toml` holds a published number a gate, with the settings of the run that is held to it. `commands` prints what
trains and measures these runs. A gate is met if each of its seeds is on the right side of the bound, and missed if none
is. A run that is not right at L says nothing of a length beyond it.
"""

from __future__ import annotations

import shlex
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.tables import HERE, Row, Run, length_name, load, markdown, rows_of
from posx.lab.config.sections import CLASSIC

GATES = HERE / "tasks" / "gates.toml"
#: The share of right answers at L from which on a task counts as learned.
LEARNED = 0.95
FACTORS = (1, 2, 4)
#: Columns of the table of attention weights: {title: (field of a row, format)}.
WEIGHTS = {
    "right": ("exact_match", ".1%"),
    "on the right token": ("right_weight", ".2f"),
    "entropy, nats": ("attention_entropy", ".2f"),
    "exactly 0": ("zero_weights", ".1%"),
    "L or more back": ("far_weight", ".2f"),
}

#: {encoding: {task: rows of all lengths and seeds}}
Cells = dict[str, dict[str, list[Row]]]


def task_name(row: Row) -> str:
    return row["data_source"].removeprefix("task:")


def short_name(task: str) -> str:
    return task.partition("(")[0]


def read_cells(runs: Sequence[Run]) -> Cells:
    """Return the rows of the sweep by encoding and task, in the order of their seeds."""
    cells: Cells = defaultdict(lambda: defaultdict(list))
    for row in rows_of(sorted(runs, key=lambda run: run["seed"])):
        cells[row["encoding"]][task_name(row)].append(row)
    return cells


def catalogue() -> list[Run]:
    """Return the runs of the whole catalogue: those of its part, and of the ten on the same tasks."""
    runs = load("tasks", "catalogue")
    tasks = {run["data_source"] for run in runs}
    return [*(run for run in load("tasks", "cells") if run["data_source"] in tasks), *runs]


def values_at(rows: Sequence[Row], factor: float, metric: str = "exact_match") -> list[float]:
    """Return a number of the answers at `factor` training lengths, of each seed that has one."""
    found = [row for row in rows if row["eval_len"] == round(factor * row["train_len"])]
    return [row[metric] for row in found if row["status"] == "ok"]


def range_text(values: Sequence[float]) -> str:
    """Return the mean in per cent, with the lowest and the highest seed."""
    if not values:
        return "-"
    text = f"{100 * fmean(values):.1f}"
    return text if len(values) == 1 else f"{text} ({100 * min(values):.1f}-{100 * max(values):.1f})"


def mark(text: str, rows: Sequence[Row]) -> str:
    """Return a cell, in italics if a seed is not right at L: it says nothing about length."""
    return f"*{text}*" if text != "-" and min(values_at(rows, 1), default=1) < LEARNED else text


def answers_text(rows: Sequence[Row], factor: float) -> str:
    """Return the right items at `factor` training lengths as a cell: `range_text`, marked."""
    return mark(range_text(values_at(rows, factor)), rows)


def tasks_in(cells: Cells) -> list[str]:
    return list(dict.fromkeys(task for by_task in cells.values() for task in by_task))


def order_rows(cells: Cells, tasks: Sequence[str]) -> list[str]:
    """Return the encodings from the best mean beyond the training length to the worst."""

    def mean_beyond(encoding: str) -> float:
        each = [values_at(cells[encoding].get(task, ()), k) for task in tasks for k in FACTORS[1:]]
        return fmean(fmean(values) if values else 0.0 for values in each)

    return sorted(cells, key=mean_beyond, reverse=True)


def table(cells: Cells) -> str:
    """Return right answers in per cent by encoding, task and length as Markdown."""
    tasks = tasks_in(cells)
    places = [f"{short_name(task)}, {length_name(k)}" for task in tasks for k in FACTORS]
    body = []
    for encoding in order_rows(cells, tasks):
        counts = {len({row["seed"] for row in cells[encoding].get(task, ())}) for task in tasks}
        each = (answers_text(cells[encoding].get(task, ()), k) for task in tasks for k in FACTORS)
        body.append([f"`{encoding}`", " or ".join(map(str, sorted(counts))), *each])
    return markdown(["encoding", "seeds", *places], body)


def rates(runs: Sequence[Run]) -> str:
    """Return right answers in per cent at each length of seed 0, by encoding, task and learning rate, as Markdown."""
    found = dict[tuple[str, str, float], list[Row]]()
    for run in runs:
        if run["seed"] == 0:
            rows = rows_of([run])
            found[run["encoding"], task_name(rows[0]), run["settings"]["train.learning_rate"]] = rows
    columns = sorted({(task, rate) for _, task, rate in found})
    body = []
    for encoding in dict.fromkeys(encoding for encoding, _, _ in found):
        line = [f"`{encoding}`"]
        for task, rate in columns:
            rows = found.get((encoding, task, rate), ())
            line.append(mark(", ".join(range_text(values_at(rows, k)) for k in FACTORS), rows) if rows else "-")
        body.append(line)
    return markdown(["encoding", *(f"{short_name(task)}, {rate:g}" for task, rate in columns)], body)


def line_name(encoding: str, task: str) -> str:
    return f"`{encoding}`, {short_name(task).replace('_', ' ')}"


def weights(cells: Cells) -> str:
    """Return what the attention weights of one seed do at 1, 2 and 4 L as Markdown, by task and encoding."""

    def read(rows: Sequence[Row], name: str, form: str) -> str:
        return ", ".join(format(value, form) for k in FACTORS for value in values_at(rows, k, name))

    body = [
        [line_name(encoding, task), *(read(cells[encoding][task], name, form) for name, form in WEIGHTS.values())]
        for task in sorted(tasks_in(cells))
        for encoding in CLASSIC
    ]
    return markdown(["encoding, task", *WEIGHTS], body)


def zeros(cells: Cells) -> str:
    """Return right answers and weights that are exactly 0 at 1, 4 and 16 L, in per cent, as Markdown."""
    columns = {"right": "exact_match", "weights of 0": "zero_weights"}
    body = [
        [
            line_name(encoding, task),
            *(range_text(values_at(cells[encoding][task], k, name)) for name in columns.values() for k in (1, 4, 16)),
        ]
        for task in tasks_in(cells)
        for encoding in cells
    ]
    return markdown(["encoding, task", *(f"{title}, {k} L" for title in columns for k in (1, 4, 16))], body)


def figure(cells: Cells, path: Path) -> None:
    """Draw right answers as a heat map: a line an encoding, three columns a task."""
    import matplotlib.pyplot as plt
    import numpy as np

    tasks = tasks_in(cells)
    names = order_rows(cells, tasks)
    size = (1 + 2 * len(tasks) + 0.07 * max(map(len, names)), 1.4 + 0.26 * len(names))
    drawn, axes = plt.subplots(1, len(tasks), figsize=size, layout="constrained", sharey=True)
    for axis, task in zip(np.atleast_1d(axes), tasks, strict=True):
        found = [[values_at(cells[name].get(task, ()), k) for k in FACTORS] for name in names]
        means = np.array([[100 * fmean(one) if one else np.nan for one in line] for line in found])
        image = axis.imshow(means, vmin=0, vmax=100, aspect="auto", cmap="viridis")
        for (line, column), value in np.ndenumerate(means):
            text = "-" if np.isnan(value) else f"{value:.0f}"
            color = "white" if value <= 55 else "black"
            axis.text(column, line, text, ha="center", va="center", color=color, fontsize=8)
        axis.set_xticks(range(len(FACTORS)), [length_name(k) for k in FACTORS])
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.set_title(f"{short_name(task)}\nexact match, %", fontsize=9)
    drawn.colorbar(image, ax=axes, fraction=0.05, label="right, %")
    drawn.savefig(path, dpi=120)


def commands(published: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the commands that train the runs of the gates, and measure those on another task."""
    folders, made = dict[str, str](), dict[str, None]()
    for gate in published:
        lengths = f"{gate['length']},{gate['length'] * gate['at']}" if gate["at"] > 1 else str(gate["length"])
        asked = {
            "sweep.encodings": gate["encoding"], "sweep.train_lens": gate["length"], "eval.lengths": lengths,
            "sweep.axes.data.source": f"task:{gate['task']}", "sweep.axes.train.learning_rate": rate_of(gate),
            **gate.get("settings", {}),
        }  # fmt: skip
        flags = flags_text(asked)
        folder = folders.setdefault(flags, f"runs/tasks_gates/{len(folders) + 1:02}")
        made[f"posx sweep --config tasks_cpu --workdir {folder} {flags}"] = None
        if other := gate.get("measured_on"):
            flags = flags_text({"data.source": f"task:{other}", "eval.lengths": lengths})
            made[f"posx evaluate --workdir {folder} {flags}"] = None
    return list(made)


def flags_text(settings: Mapping[str, Any]) -> str:
    return shlex.join(f"--config.{name}={value}" for name, value in settings.items())


def rate_of(gate: Mapping[str, Any]) -> float:
    return gate.get("rate", 2e-3)


def is_held(run: Run, gate: Mapping[str, Any]) -> bool:
    """Return whether a gate judges a run. It judges runs of the part `gates` alone; others have other steps."""
    if run["part"] != "gates":
        return False
    asked = {"train.length": gate["length"], "train.learning_rate": rate_of(gate)} | gate.get("settings", {})
    named = run["encoding"] == gate["encoding"] and run["env"]["data_source"] == f"task:{gate['task']}"
    return named and all(run["settings"].get(name) == value for name, value in asked.items())


def verdict(values: Sequence[float], trained: Sequence[float], gate: Mapping[str, Any]) -> str:
    """Return whether all seeds, some or none are on the right side of a gate's bound.

    Args:
      values: of each seed.
      trained: of each seed, the same number for items of the training lengths. Failure beyond them says nothing if
        these are not `LEARNED`.
      gate: the gate.
    """
    if not values:
        return "not run"
    right = [value >= gate["least"] if "least" in gate else value <= gate["most"] for value in values]
    if min(trained) < LEARNED and not ("least" in gate and all(right)):
        return "says nothing: not learned at L"
    return "met" if all(right) else "seeds disagree" if any(right) else "missed"


def gates(runs: Sequence[Run], published: Sequence[Mapping[str, Any]]) -> str:
    """Return a line of Markdown for each gate, with what the seeds have and the verdict."""
    body = []
    for gate in published:
        metric = gate.get("metric", "exact_match")
        measured_on = gate.get("measured_on", gate["task"])
        rows = rows_of(run for run in runs if is_held(run, gate))
        values = values_at([row for row in rows if task_name(row) == measured_on], gate["at"], metric)
        trained = values_at([row for row in rows if task_name(row) == gate["task"]], 1, metric)
        bound = f"at least {gate['least']:g}" if "least" in gate else f"at most {gate['most']:g}"
        what = f"`{gate['encoding']}`, `{measured_on}`, {metric.replace('_', ' ')} at {length_name(gate['at'])}"
        each = (", ".join(f"{value:.3f}" for value in numbers) or "-" for numbers in (trained, values))
        body.append([what, bound, gate["source"], *each, verdict(values, trained, gate)])
    return markdown(["gate", "bound", "source", "trained on, at L", "here, each seed", "verdict"], body)


def main(words: Sequence[str]) -> None:
    """Run the command that the first word names."""
    match words:
        case ["table"]:
            print(table(read_cells(load("tasks", "cells"))))
        case ["rates"]:
            print(rates([*load("tasks", "cells"), *load("tasks", "rates")]))
        case ["figure"]:
            figure(read_cells(load("tasks", "cells")), HERE / "tasks" / "tasks.png")
        case ["catalogue"]:
            print(table(read_cells(catalogue())))
            figure(read_cells(catalogue()), HERE / "tasks" / "catalogue.png")
        case ["recall"]:
            print(table(read_cells(load("tasks", "recall"))))
            figure(read_cells(load("tasks", "recall")), HERE / "tasks" / "recall.png")
        case ["more"]:
            print(rates(load("tasks", "more")))
        case ["weights"]:
            print(weights(read_cells(load("tasks", "weights"))))
        case ["zeros"]:
            print(zeros(read_cells(load("tasks", "zeros"))))
        case ["commands"]:
            print("\n".join(commands(tomllib.loads(GATES.read_text())["gate"])))
        case ["gates"]:
            print(gates(load("tasks"), tomllib.loads(GATES.read_text())["gate"]))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
