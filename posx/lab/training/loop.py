"""The training loop: batches in, checkpoints and metrics out; the same call resumes.

Metrics go to `metrics.jsonl`, and to TensorBoard's copy of it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.errors import Interrupted, NonFiniteError, OutOfMemoryError, Stopped
from posx.evaluation.scoring import out_of_memory
from posx.evaluation.statistics import LARGEST_NLL
from posx.lab import interrupts
from posx.lab.config import RunConfig, TrainConfig
from posx.lab.data import Dataset
from posx.lab.data.masking import masked_batch
from posx.lab.data.store import cache_folder
from posx.lab.files.atomic import disk_errors
from posx.lab.machine import processes
from posx.lab.machine.ceiling import machine_ceiling
from posx.lab.machine.compile_cache import start_cost
from posx.lab.model import Model
from posx.lab.progress import Meter
from posx.lab.runs.folder import RunFolder
from posx.lab.training.checkpoints import Checkpoints
from posx.lab.training.layout import Layout, agreement
from posx.lab.training.step import Metrics, State, flops_per_token, learning_rate
from posx.lab.training.watchdog import Watchdog
from posx.notices import say

#: The remedy for a run that diverged.
LOWER = "Lower train.learning_rate or train.clip_norm."
#: The numbers of a row that TensorBoard shows.
SHOWN = ("loss", "ppl", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "exact_match")


def train(
    run: RunConfig,
    model: Model,
    dataset: Dataset,
    folder: RunFolder,
    layout: Layout = Layout(),
    first: Callable[[dict[str, Any]], dict[str, Any]] = lambda params: params,
    exact_match: Callable[[dict[str, Any]], float] | None = None,
) -> State:
    """Train to `train.steps` from the newest good checkpoint in `folder`, or from step 0; return the final state.

    A resumed run continues bit for bit as if it had never stopped. The state holds all that changes, and batches and
    dropout are functions of the step. So is the end of a run whose answers are all right before `train.steps`.

    Args:
      run: its settings.
      model: of the run.
      dataset: the text.
      folder: of the run.
      layout: the devices.
      first: maps fresh parameters to those of step 0.
      exact_match: returns the share of items that parameters answer right; None if no step ends training early.

    Raises:
      NonFiniteError: with the step. The last good checkpoint stays.
    """
    config, rates, name = run.train, run.rates, folder.path.name
    checkpoints = Checkpoints(folder.checkpoints, config.keep_checkpoints, run.hash)
    with _memory_errors(name, config.accumulation), Meter(name, config.steps) as meter:
        meter.show_waiting("compiling", folder.usual_start())
        state = _first_state(model, config, layout, checkpoints, first)
        start = int(state["step"])
        if start >= config.steps or (exact_match and _was_solved(config, folder, state, exact_match)):
            return state
        if start:
            say(f"resuming {name} at step {start}")
        log, stops = MetricsLog(run, model, folder, start), agreement(layout)
        with interrupts.save_first(), log, Watchdog(folder.path, config.dispatch_steps) as watchdog:
            for steps in dispatches(config, start):
                interrupts.raise_pending()
                if stops(interrupts.was_terminated() or interrupts.was_interrupted()):
                    _save_and_stop(checkpoints, state, folder, steps.start, log)
                batches = layout.batches(config.batch_size, functools.partial(_batches, dataset, config, steps))
                state, metrics = layout.steps(model, config, state, batches, len(steps), rates)
                log.add(metrics, len(steps))
                done, right = steps.stop, None
                if exact_match and may_end(config, done):
                    watchdog.pause()
                    with log.leave_out():
                        right = exact_match(state["params"])
                is_last = done == config.steps or right == 1
                due = done % config.checkpoint_steps == 0 or is_last
                if due or right is not None or done % config.log_steps == 0:
                    meter.total = done if is_last else config.steps
                    meter.update(done, f"{done}/{config.steps}  {log.write(done, right)}")
                elif steps.start == start:  # compiled
                    meter.update(done, f"{done}/{config.steps}")
                if due:
                    watchdog.pause()
                    checkpoints.save(done, _finite(state, folder, done))
                    log.restart_clock()
                watchdog.beat()
                if right == 1:
                    return _end_solved(state, folder, done)
    return state


def _first_state(
    model: Model, config: TrainConfig, layout: Layout, checkpoints: Checkpoints, first: Callable[[Any], Any]
) -> State:
    """Return the state of the newest good checkpoint, or that of step 0 if there is none."""
    restored = checkpoints.restore(layout.abstract(model, config), notice=say)
    if restored is not None:
        return layout.put(jax.tree.map(jnp.asarray, restored[1]))
    state = layout.init(model, config)
    return state | {"params": layout.put(first(state["params"]))}


def may_end(config: TrainConfig, step: int) -> bool:
    """Tell whether the answers of the weights of `step` are measured, to end training there if all are right."""
    return 0 < step < config.steps and bool(config.stop_check_steps) and step % config.stop_check_steps == 0


def _was_solved(
    config: TrainConfig, folder: RunFolder, state: State, exact_match: Callable[[dict[str, Any]], float]
) -> bool:
    """Tell whether training ended at a restored state. It is measured if a process was killed before it said so."""
    step = int(state["step"])
    if step and folder.solved_step == step:
        return True
    if may_end(config, step) and exact_match(state["params"]) == 1:
        _end_solved(state, folder, step)
        return True
    return False


def _end_solved(state: State, folder: RunFolder, step: int) -> State:
    """Say and store that training ended at a saved step because all answers were right; return the state."""
    folder.mark_solved(step)
    say(f"{folder.path.name}: all answers are right at step {step}, so training ends")
    return state


def _save_and_stop(checkpoints: Checkpoints, state: State, folder: RunFolder, step: int, log: MetricsLog) -> None:
    """Save the state and the metrics up to `step`, and raise Stopped, or Interrupted."""
    if log.pending:
        log.write(step)
    if step and step not in checkpoints.steps():
        checkpoints.save(step, _finite(state, folder, step))
    error = Interrupted if interrupts.was_interrupted() else Stopped
    raise error(f"{folder.path.name}: stopped and saved at step {step}")


def dispatches(config: TrainConfig, start: int) -> Iterator[range]:
    """Yield steps `start` .. `train.steps` - 1 as they are sent to the device.

    None passes a log line, a checkpoint or a measurement of answers. The first step is sent alone, so that the cost of
    a start is compiling and one step.
    """
    size, every = 1, [n for n in (config.log_steps, config.checkpoint_steps, config.stop_check_steps) if n]
    while start < config.steps:
        due = (start - start % each + each for each in every)
        steps = range(start, min(start + size, config.steps, *due))
        yield steps
        start, size = steps.stop, config.dispatch_steps


def _batches(dataset: Dataset, config: TrainConfig, steps: range, rows: slice) -> Any:
    """Return rows of the batches of `steps`, arrays [n, rows, ...].

    n is always `dispatch_steps`, so that one program serves all. The last batch stands in for those that are not run.
    """
    sizes = {"seed": config.seed, "batch_size": config.batch_size, "length": config.length}
    make = functools.partial(masked_batch, dataset) if config.objective == "masked" else dataset.batch
    batches = [make(step=step, rows=rows, **sizes) for step in steps]
    batches += batches[-1:] * (config.dispatch_steps - len(batches))
    return jax.tree.map(lambda *each: np.stack(each), *batches)


@contextlib.contextmanager
def _memory_errors(name: str, accumulation: int) -> Iterator[None]:
    """Turn an accelerator's or the host's out-of-memory error into OutOfMemoryError."""
    try:
        yield
    except Exception as error:  # JAX has several for one thing
        if not out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"{name}: memory ran out. Raise train.accumulation (now {accumulation}), or lower the model's sizes "
            "or the batch."
        ) from None


def _finite(state: State, folder: RunFolder, step: int) -> State:
    """Return `state` if its parameters are finite. Other parameters must never become the last good checkpoint."""
    params: list[Any] = jax.tree.leaves(state["params"])
    if all(param.is_fully_replicated for param in params):
        finite = all(np.isfinite(np.asarray(param)).all() for param in params)
    else:
        finite = bool(jax.jit(lambda arrays: jnp.stack([jnp.isfinite(x).all() for x in arrays]).all())(params))
    if not finite:
        raise divergence_error(folder, f"a parameter is not finite after step {step}")
    return state


class MetricsLog:
    """The metrics of the steps since the last row, kept on the device until a row is written."""

    def __init__(self, run: RunConfig, model: Model, folder: RunFolder, start: int):
        self.run, self.folder, self.last_step = run, folder, start
        self.pending: list[tuple[Metrics, int]] = []
        self.schedule = learning_rate(run.train)
        self.flops_per_token = flops_per_token(model, run.train.length)
        place, dtype = cache_folder(run.data) / "machine", run.model.dtype
        self.ceiling = machine_ceiling(place, dtype) if processes.is_first() else math.nan  # `logged_rows` waits for it
        self.attempt = 1 + max((row["attempt"] for row in folder.logged_rows()), default=0)
        self.facts = {"attempt": self.attempt, "attempt_start": start, "hash": run.hash}  # of every row
        self.clock = 0.0  # set when the first step has compiled
        self.start: dict[str, Any] = {}  # goes into the first row

    def __enter__(self) -> MetricsLog:
        with disk_errors(self.folder.path):
            suffix = f".{self.attempt}.{os.getpid()}"
            place, writes = self.folder.path / "tensorboard", processes.is_first()
            self.board = open_board(place, suffix, self.last_step, writes)
        return self

    def __exit__(self, *_: Any) -> None:
        with interrupts.defer_signals():  # its writer has a thread and a lock: interrupted between them, it would hang
            close_board(self.board)

    def add(self, metrics: Metrics, count: int) -> None:
        """Add metrics [n] of the next `count` steps."""
        self.pending.append((metrics, count))
        if len(self.pending) > 1:  # one call ahead of the device and no more: earlier calls have ended
            jax.block_until_ready(self.pending[-2][0])
        if not self.clock:  # the first step compiles: tokens/s count from its end
            jax.block_until_ready(metrics)
            self.clock, self.timed_from = time.perf_counter(), self.last_step + count
            self.start = {"start": start_cost()}

    def restart_clock(self) -> None:
        """Leave the time since the last row out of the tokens/s of the next row."""
        self.clock = time.perf_counter()

    @contextlib.contextmanager
    def leave_out(self) -> Iterator[None]:
        """Leave the time inside out of the tokens/s of the next row."""
        jax.block_until_ready(self.pending[-1][0])
        began = time.perf_counter()
        yield
        self.clock += time.perf_counter() - began

    def write(self, step: int, exact_match: float | None = None) -> str:
        """Write one row for the steps up to `step`, and return the facts to show. Raises NonFiniteError.

        exact_match: the share of items that are right at `step`, None if it was not measured.
        """
        fetched = jax.device_get(self.pending)
        losses, norms = (
            np.concatenate([np.float64(metrics[name][:count]) for metrics, count in fetched])
            for name in ("loss", "grad_norm")
        )
        bad = ~(np.isfinite(losses) & np.isfinite(norms))
        if bad.any():
            first = int(bad.argmax())
            loss, norm, at = losses[first], norms[first], self.last_step + first + 1
            self._append({"step": at, "loss": loss, "grad_norm": norm})
            own = at == 1 and self.run.code  # before any update: no rate can help
            remedy = f"posx check {next(iter(own))} finds arrays without a finite gradient." if own else LOWER
            raise divergence_error(self.folder, f"loss {loss}, gradient norm {norm} at step {at}", remedy)
        row = self._row(step, losses, norms) | self.start
        row |= {} if exact_match is None else {"exact_match": exact_match}
        self._append(row)
        self.pending, self.start, self.last_step = [], {}, step
        speed = f"  {row['tokens_per_second']:,.0f} tokens/s" if row["tokens_per_second"] else ""
        ppl = f"{row['ppl']:.2f}" if row["ppl"] < 1e6 else f"{row['ppl']:.1e}"
        right = "" if exact_match is None else f"  {exact_match:.1%} right"
        return f"loss {row['loss']:.3f}  ppl {ppl}{right}{speed}"

    def _append(self, row: dict[str, Any]) -> None:
        self.folder.append(self.folder.metrics_file, row | self.facts)
        with interrupts.defer_signals():
            for name in SHOWN:
                if row.get(name) is not None and math.isfinite(row[name]):  # else tensorboardX prints a warning
                    self.board.add_scalar(name, row[name], row["step"])

    def _row(self, step: int, losses: np.ndarray, norms: np.ndarray) -> dict[str, Any]:
        now = time.perf_counter()
        tokens_per_step = self.run.train.batch_size * self.run.train.length
        timed = step - self.timed_from
        speed = timed * tokens_per_step / (now - self.clock) if timed else None
        self.clock, self.timed_from = now, step
        loss = float(losses.mean())
        return {
            "step": step,
            "tokens": step * tokens_per_step,
            "loss": loss,
            "ppl": math.exp(min(loss, LARGEST_NLL)),
            "grad_norm": float(norms.mean()),
            "learning_rate": float(self.schedule(step - 1)),
            "tokens_per_second": speed,
            "mfu": speed * self.flops_per_token / self.ceiling if speed else None,
        }


def divergence_error(folder: RunFolder, what: str, remedy: str = LOWER) -> NonFiniteError:
    """Return the error of a run that diverged, with the checkpoint that is left and what to do."""
    steps = Checkpoints(folder.checkpoints).steps()
    kept = f"; the checkpoint of step {steps[-1]} is kept" if steps else ""
    return NonFiniteError(f"{folder.path.name}: {what}{kept}. {remedy}")


def open_board(folder: Path, suffix: str, start: int, writes: bool = True) -> Any:
    """Return a tensorboardX writer into `folder` whose file name ends with `suffix`, for steps after `start`.

    It writes nothing unless it `writes`.

    TensorBoard drops later steps that a process before this one wrote. The writer has a thread of its own, whose write
    errors are hidden: `metrics.jsonl` is on the same disk and reports them. tensorboardX imports torch if it is
    installed, two seconds of every start for a type that posx never passes. So torch is hidden from it.
    """
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hide:
            del sys.modules["torch"]
    shown = threading.excepthook

    def hook(args: Any) -> None:
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboardX")):
            shown(args)

    threading.excepthook = hook
    return SummaryWriter(str(folder), filename_suffix=suffix, purge_step=start + 1, write_to_disk=writes)


def close_board(board: Any) -> None:
    """Flush and close the writer as far as the disk takes it. Nothing is tried again when the process ends."""
    writer = board.file_writer
    try:
        board.close()
    except OSError:
        writer.event_writer._closed = True
