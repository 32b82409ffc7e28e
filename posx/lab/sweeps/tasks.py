"""The tasks of a sweep: to train a run, or to evaluate it. A worker does each from the settings in the run's folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from posx.errors import PosxError
from posx.evaluation.protocols import protocol_class, run_protocols
from posx.lab.config import RunConfig
from posx.lab.files import lines
from posx.lab.files.checksums import write_checked
from posx.lab.files.locks import holder
from posx.lab.files.rows import result_text
from posx.lab.progress import quantity
from posx.lab.runs.cost import EVALUATION_MEMORY, STARTING, pass_cost
from posx.lab.runs.damage import Damage, damages
from posx.lab.runs.describe import Expected, expected_cost, expected_model
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.requests import Request
from posx.lab.runs.targets import is_answer
from posx.lab.runs.text import with_saved_tokenizer
from posx.lab.sweeps.axes import Point
from posx.lab.sweeps.schedule import CORE_SPEED, START, Cost


@dataclasses.dataclass(frozen=True)
class _Task:
    """Work on the folder of a run. It logs to `log.txt` there, and prints results to its `output` if it has one.

    Each kind of task has a `cost`, and `prepare_worker` writes its settings for a worker. Its `progress` is the
    finished part, below 1 until it ends. `state` describes the running task in a few words, `outcome` its result.
    """

    run: RunConfig
    folder: RunFolder
    output: Path | None = None
    debug: bool = dataclasses.field(default=False, kw_only=True)  # its worker shows tracebacks

    @property
    def name(self) -> str:
        return self.folder.path.name

    @functools.cached_property
    def _readable_run(self) -> RunConfig:
        """The run with the tokenizer that its folder may hold. Raises PosxError if that is damaged."""
        return with_saved_tokenizer(self.folder, self.run)

    @functools.cached_property
    def expected_cost(self) -> Expected:
        """The cost of the whole run. Raises PosxError if it is not known."""
        return expected_cost(self._readable_run)

    def part_of_rows(self, before: int = 0) -> float:
        """Return the finished part of the evaluation, by operations, from the rows after the first `before` ones.

        The first `before` rows are not computed again, so they do not count. Raises PosxError if the cost is not known.
        """
        rows, weights = self.folder.measured_rows(), self.expected_cost.rows
        done = sum(weights.get(row, 0.0) for row in self._answered_rows(rows[before:]))
        left = sum(flops for row, flops in weights.items() if row not in self._answered_rows(rows))
        return done / (done + left) if done else 0.0

    def _answered_rows(self, rows: Sequence[dict[str, Any]]) -> set[tuple[str, int]]:
        """Return the required rows, by protocol and length, that `rows` answer, on as many targets."""
        wanted = {one.name: one.num_targets for one, _ in run_protocols(self.run.eval, self.run.train.length)}
        same = (row for row in rows if row.get("max_targets") == wanted.get(row["protocol"], -1))
        return {(row["protocol"], row["eval_len"]) for row in same if is_answer(row, self.run.eval)}


@dataclasses.dataclass(frozen=True)
class Job(_Task):
    """One run of a sweep, trained and evaluated. `point` has its values on the axes."""

    point: Point = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def cost(self) -> Cost:
        train = self.run.train
        expected, rows = self.expected_cost, train.batch_size // train.accumulation
        work = expected.slower * (expected.flops + (expected.eval_flops or 0.0))
        return Cost(work, expected.lengths, expected.memory, train.steps, rows, train.seed)

    def prepare_worker(self) -> list[str]:
        """Write the settings of the run into its folder; return the arguments of its worker. Raises WorkdirError."""
        write_checked(self.folder.asked_file, self.run.to_json())
        self.folder.status_file.unlink(missing_ok=True)
        return [str(self.folder.path), *["--debug"] * self.debug]

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever started here."""
        return not self.folder.path.exists()

    def failure(self) -> str:
        """Return why the last process failed, "" if it did not."""
        return "" if self.is_new else self.folder.failure().removeprefix(f"{self.name}: ")

    def is_finished(self) -> bool:
        """Tell whether these settings were trained and evaluated to the end, and all files are whole."""
        return self.folder.is_finished(self.run) and not self.damages()

    def damages(self) -> list[Damage]:
        """Return the damage in the run's folder."""
        return [] if self.is_new else damages(self.folder)

    @functools.cached_property
    def _uncertain_count(self) -> int:
        """The number of logged rows at the first look, 0 if a process holds the folder. Their work may be lost."""
        return 0 if holder(self.folder.path / ".lock") else len(self.folder.logged_rows())

    def progress(self) -> float:
        """Return the finished part of the expected work after the start.

        A process resumes at the newest checkpoint, so steps that a killed one logged after it do not count.
        """
        logged = self.folder.logged_rows()[self._uncertain_count :]
        steps = logged[-1]["step"] if logged else self.folder.newest_step or 0
        training = self.expected_cost.slower * self.expected_cost.flops / CORE_SPEED / (self.cost.seconds(1) - START)
        trained = 1.0 if steps and self.folder.solved_step == steps else min(steps / self.run.train.steps, 1)
        return 0.99 * (training * trained + (1 - training) * self.part_of_rows())

    def part(self) -> float:
        """Return the finished part. 1 means that the run is finished."""
        if self.is_new:
            return 0.0
        return 1.0 if self.is_finished() else self.progress()

    def state(self) -> str:
        if measured := self._answered_rows(self.folder.measured_rows()):
            return f"{self.name} evaluating, {quantity(len(measured), 'row')} measured"
        last = self.folder.logged_rows()[-1:]
        if not last:
            return self.name
        loss = last[0].get("loss")
        told = f" loss {loss:.3f}" if isinstance(loss, float) else ""
        return f"{self.name} {last[0]['step']}/{self.run.train.steps}{told}"

    def outcome(self) -> str:
        """Return the results of the first protocol at the shortest and the longest length."""
        first = protocol_class(self.run.eval.protocols[0]).name
        rows = {row["eval_len"]: row for row in self.folder.measured_rows() if row["protocol"] == first}
        ends = sorted({min(rows), max(rows)}) if rows else []
        return ", ".join(f"{result_text(rows[length])} at {length}" for length in ends)


@dataclasses.dataclass(frozen=True)
class Evaluation(_Task):
    """The evaluation of a run, whose rows its worker prints to `output`.

    Attributes:
      run: its settings, with those that the command sets.
      request: what its worker does; None for a task that is only scheduled.
      speed: of one core, in FLOP/s.
    """

    request: Request | None = None
    speed: float = CORE_SPEED

    @functools.cached_property
    def cost(self) -> Cost:
        """The expected cost, 0 if the folder does not tell it. The process of the task then says what is missing."""
        with contextlib.suppress(PosxError):
            expected, stored = self.expected_cost, self._answered_rows(self.folder.measured_rows())
            missing = {length: n for (name, length), n in expected.rows.items() if n and (name, length) not in stored}
            flops = sum(n for row, n in expected.rows.items() if row not in stored and expected.eval_flops is not None)
            model = expected_model(self._readable_run)
            memory = max(
                [EVALUATION_MEMORY, *(pass_cost(model, self.run.eval, length, 1).memory for length in missing)]
            )
            return Cost(
                expected.slower * flops, len(missing), memory, seed=self.run.train.seed, speed=self.speed,
                start=STARTING,
            )  # fmt: skip
        return Cost(0.0, 0, EVALUATION_MEMORY)

    def prepare_worker(self) -> list[str]:
        """Write the request beside the output; return the arguments of its worker. Raises OSError."""
        file = Path(f"{self.output}.request")
        file.write_bytes(pickle.dumps(self.request))  # read by a child of this process, at once
        return [str(self.folder.path), str(file), *["--debug"] * self.debug]

    def rows(self) -> list[dict[str, Any]]:
        """Return the measured rows, none if the task failed."""
        return lines.read_lines(self.output) if self.output else []

    def progress(self) -> float:
        with contextlib.suppress(PosxError):  # the process of the task says what is missing
            return 0.99 * self.part_of_rows(self._first_count)
        return 0.0

    @functools.cached_property
    def _first_count(self) -> int:
        """The number of rows at the first look."""
        return len(self.folder.measured_rows())

    def state(self) -> str:
        return self.name

    def outcome(self) -> str:
        return quantity(len(self.rows()), "row")


Task: TypeAlias = Job | Evaluation
