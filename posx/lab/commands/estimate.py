"""The table of `posx evaluate --dry_run`: the rows that a command measures, and their cost on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from posx.errors import PosxError
from posx.lab.config import EvalConfig
from posx.lab.data import Dataset, TaskDataset, TextDataset
from posx.lab.progress import duration, quantity, size
from posx.lab.runs import text
from posx.lab.runs.checks import check_stream
from posx.lab.runs.cost import COMPILING, EVALUATION_SHARE, STARTING, Pass, evaluation_speed, pass_cost
from posx.lab.runs.describe import is_defined, make_run_model, slower
from posx.lab.runs.load import stored_step
from posx.lab.runs.targets import Asked, asked_rows, few_documents
from posx.lab.sweeps.engines.local import LocalEngine
from posx.lab.sweeps.plan import align_columns
from posx.lab.sweeps.schedule import Cost, Schedule
from posx.lab.sweeps.tasks import Evaluation
from posx.machine.cores import usable_cores
from posx.machine.guard import start_devices
from posx.notices import say

if TYPE_CHECKING:
    from posx.lab.model import Model
    from posx.lab.runs.requests import Request

_HEAD = ("run", "protocol", "length", "targets", "windows", "documents", "FLOP", "memory", "time", "is")


class _Row(NamedTuple):
    """A row that is asked of a run.

    Attributes:
      facts: its protocol, length, targets, windows and documents, as the table shows them.
      cost: of its pass over the text, None if it needs none.
      state: the state of the row, as the column "is" shows it.
    """

    facts: tuple[str, ...]
    cost: Pass | None
    state: str

    def cells(self, per_flop: float) -> list[str]:
        """Return the cells of the row after the name of its run. per_flop: seconds of one operation."""
        cost = ("-", "-", "-")
        if self.cost:
            cost = (f"{self.cost.flops:.2g}", size(self.cost.memory), duration(self.cost.seconds(per_flop)))
        return [*self.facts, *cost, self.state]


def estimate(requests: Mapping[str, Request], jobs: int) -> tuple[str, dict[str, str]]:
    """Return the table of the rows that are asked of runs, and {name: reason} of the runs that have none.

    Texts are read, as for the evaluation itself. No weights are read, and no model is run. The matrix products of this
    machine are measured, unless they were within the hour. Raises PosxError if the only run has no rows.
    """
    start_devices()
    speeds = {name: evaluation_speed(one.run, keep=False) for name, one in requests.items()}
    cores = len(usable_cores())
    tasks = [Evaluation(one.asked, one.folder, speed=speeds[name] / cores) for name, one in requests.items()]
    schedule = LocalEngine(tasks, jobs).schedule
    texts, rows, failed = dict[str, Dataset](), list[_Row](), dict[str, str]()
    table, seconds = [[*_HEAD]], list[float]()
    for name, request in requests.items():
        try:
            run_rows, relative = _rows(request, texts)
        except PosxError as error:
            if len(requests) == 1:
                raise
            failed[name] = str(error)
            continue
        table += [[name, *row.cells(relative / speeds[name])] for row in run_rows]
        seconds.append(_seconds([row.cost for row in run_rows if row.cost], relative, speeds[name], schedule))
        rows += run_rows
    if not rows:
        return "", failed
    assumed = [_ASSUMED] if any(seconds) else []
    return "\n".join([*align_columns(table), "", _sum(rows, seconds, schedule), *assumed]), failed


def _rows(request: Request, texts: dict[str, Dataset]) -> tuple[list[_Row], float]:
    """Return the rows that are asked of a run, and how many times longer it takes than without its encoding.

    texts: those that are read already. Raises PosxError.
    """
    from posx.lab.runs.answers import asked_answers  # Flax: once the settings are known to be right
    from posx.lab.runs.evaluate import row_facts

    run, config, weights = request.run, request.asked.eval, request.parent or request.folder
    tokenizer = text.saved_tokenizer(weights)
    key = repr((run.text, run.asked.data, request.text, tokenizer.digest))
    if key not in texts:
        texts[key] = text.run_text(weights, run, request.text)
    dataset = texts[key]
    check_stream(config, run.train.length, dataset)
    model = make_run_model(run, tokenizer.vocab_size)
    facts = row_facts(run, model, dataset, request.folder, stored_step(weights))
    if isinstance(dataset, TaskDataset):
        items = asked_answers(run, config, dataset, request.folder, facts)
        rows = [_item_row(model, config, row, known) for _, row, known in items]
    elif isinstance(dataset, TextDataset):
        asked = asked_rows(run, config, model, dataset, request.folder, facts)
        rows = _text_rows(model, config, asked, dataset.validation.num_documents, request.folder.path.name)
    return rows, slower(model)


def _item_row(model: Model, config: EvalConfig, row: dict[str, Any], known: dict[str, Any] | None) -> _Row:
    """Return the row of a length of a task. `known` is the stored row, if there is one."""
    length, items = row["eval_len"], row["num_items"]
    state = "stored" if known else "new" if is_defined(model, length) else "undefined"
    cost = pass_cost(model, config, length, items + config.attention_items) if state == "new" else None
    return _Row((row["protocol"], f"{length:,}", f"{row['num_targets']:,}", f"{items:,}", "-"), cost, state)


def _text_rows(model: Model, config: EvalConfig, asked: list[Asked], num_documents: int, name: str) -> list[_Row]:
    rows, passes, said = list[_Row](), dict[object, str](), list[str]()
    for one in asked:
        cost, targets = None, one.targets
        if one.stored:
            state = "stored"
        elif one.windows is None:
            state = "undefined"
        elif one.key in passes:
            state = f"in the pass of {passes[one.key]}"
        else:
            cost = pass_cost(model, config, one.length, len(one.windows))
            passes[one.key] = one.plan.protocol.name
            state = "new"
        state = "stored on other targets, measured again" if one.length in one.plan.moved else state
        if state == "new" and (few := few_documents(one, num_documents)) and few not in said:
            said.append(few)
            say(f"notice: {name}: {few}")
        windows = "-" if one.windows is None else f"{len(one.windows):,}"
        documents = f"{targets.num_documents} of {num_documents}"
        facts = one.plan.protocol.name, f"{one.length:,}", f"{targets.count:,}", windows, documents
        rows.append(_Row(facts, cost, state))
    return rows


def _seconds(passes: list[Pass], relative: float, speed: float, schedule: Schedule) -> float:
    """Return the expected seconds of a run on its cores, 0 without passes. speed: FLOP/s of all cores."""
    if not passes:
        return 0.0
    work = relative * sum(one.flops for one in passes)
    cost = Cost(work, len(passes), 0.0, speed=speed / (schedule.cores or 1), start=STARTING)
    return cost.seconds(schedule.width or 1)


def _sum(rows: list[_Row], seconds: list[float], schedule: Schedule) -> str:
    """Return one line on all rows together."""
    costs = [row.cost for row in rows if row.cost]
    stored = sum(row.state == "stored" for row in rows)
    if not costs:
        return f"{quantity(len(rows), 'row')}, nothing to compute"
    wall = schedule.wall_seconds(sorted(seconds, reverse=True))
    return (
        f"{quantity(len(rows), 'row')}, {stored} of them stored; {sum(one.flops for one in costs):.2g} FLOP, up to "
        f"{size(max(one.memory for one in costs))} a process, about {duration(wall)}, {schedule}"
    )


_ASSUMED = (
    f"The times assume {EVALUATION_SHARE:.0%} of the speed of matrix products on this machine, {STARTING:.0f} s to "
    f"start a process and {COMPILING:.0f} s to compile each program. Other work on this machine adds to them."
)
