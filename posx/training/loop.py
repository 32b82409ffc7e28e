"""The training loop: batches in, checkpoints and metrics out; the same call resumes."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx import interrupts
from posx.config import RunConfig, TrainConfig
from posx.data import Dataset, batch
from posx.data.store import cache_folder
from posx.errors import Interrupted, NonFiniteError, OutOfMemoryError, Stopped
from posx.files import lines
from posx.files.atomic import disk_errors
from posx.machine import processes
from posx.machine.ceiling import machine_ceiling
from posx.machine.compile_cache import start_cost
from posx.model import Model
from posx.progress import Meter, say
from posx.runs.folder import RunFolder
from posx.training.board import close_board, open_board
from posx.training.checkpoints import Checkpoints
from posx.training.layout import Copies, Layout, agreement
from posx.training.optimizer import learning_rate
from posx.training.step import Metrics, State, flops_per_token
from posx.training.watchdog import Watchdog


def train(run: RunConfig, model: Model, dataset: Dataset, folder: RunFolder, layout: Layout = Copies()) -> State:
    """Trains to `train.steps` from the newest good checkpoint in `folder`, or from step 0; returns the final state.

    Continues bit for bit as if never interrupted: the state holds all that changes, batches and dropout are functions
    of the step. Raises NonFiniteError with the step; the last good checkpoint stays.
    """
    config, rates = run.train, run.rates
    checkpoints = Checkpoints(folder.checkpoints, config.keep_checkpoints)
    memory = f"{folder.path.name}: memory ran out; raise train.accumulation (now {config.accumulation})"
    with memory_errors(memory), Meter(folder.path.name, config.steps) as meter:
        meter.waiting("compiling", folder.usual_start())
        restored = checkpoints.restore(layout.abstract(model, config), notice=say)
        if restored is None:
            state = layout.init(model, config)
        else:
            step, saved = restored
            state = layout.put(jax.tree.map(jnp.asarray, saved))
            if 0 < step < config.steps:
                say(f"resuming {folder.path.name} at step {step}")
        start = int(state["step"])
        if start >= config.steps:
            return state
        log, stops = _Log(run, model, folder, start), agreement(layout)
        shape = (config.dispatch_steps, config.batch_size, config.length + 1)
        with interrupts.saved_first(), log, Watchdog(folder.path, config.dispatch_steps) as watchdog:
            for steps in dispatches(config, start):
                interrupts.check()
                if stops(interrupts.terminated() or interrupts.interrupted()):
                    _save_and_stop(checkpoints, layout.to_save(state), folder, steps.start, log)
                tokens = layout.tokens(shape, functools.partial(_batches, dataset, config, steps))
                state, metrics = layout.steps(model, config, state, tokens, len(steps), rates)
                log.add(metrics, len(steps))
                done = steps.stop
                due = done % config.checkpoint_steps == 0 or done == config.steps
                if due or done % config.log_steps == 0:
                    meter.update(done, f"{done}/{config.steps}  {log.write(done)}")
                elif steps.start == start:  # compiled
                    meter.update(done, f"{done}/{config.steps}")
                if due:
                    watchdog.pause()
                    checkpoints.save(done, _finite(layout.to_save(state), folder, done))
                    log.restart_clock()
                watchdog.beat()
    return state


def _save_and_stop(checkpoints: Checkpoints, state: State, folder: RunFolder, step: int, log: _Log) -> None:
    """Keeps what was done up to `step`, metrics too, and raises Stopped, or Interrupted."""
    if log.pending:
        log.write(step)
    if step and step not in processes.told(checkpoints.steps):
        checkpoints.save(step, _finite(state, folder, step))
    error = Interrupted if interrupts.interrupted() else Stopped
    raise error(f"{folder.path.name}: stopped and saved at step {step}")


def dispatches(config: TrainConfig, start: int) -> Iterator[range]:
    """Steps `start` .. `train.steps` - 1 as they are sent to the device: none passes a log line or a checkpoint.

    The first goes alone, so that what a start costs is known from what compiling and one step take.
    """
    size = 1
    while start < config.steps:
        due = (start - start % every + every for every in (config.log_steps, config.checkpoint_steps))
        steps = range(start, min(start + size, config.steps, *due))
        yield steps
        start, size = steps.stop, config.dispatch_steps


def _batches(dataset: Dataset, config: TrainConfig, steps: range, rows: slice) -> np.ndarray:
    """Rows of the batches of `steps`, int32 [n, rows, t + 1] with n always `dispatch_steps`: one program serves all."""
    count = len(range(config.batch_size)[rows])
    block = np.zeros((config.dispatch_steps, count, config.length + 1), np.int32)
    for n, step in enumerate(steps):
        block[n] = batch(
            dataset.train.tokens, digest=dataset.digest, seed=config.seed, step=step,
            batch_size=config.batch_size, length=config.length, rows=rows,
        )  # fmt: skip
    return block


@contextlib.contextmanager
def memory_errors(text: str) -> Iterator[None]:
    """Turns an accelerator's or the host's out-of-memory error into OutOfMemoryError with `text`."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError, MemoryError) as error:  # JAX has several for one thing
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(f"{text}, or lower the model's sizes or the batch") from None


def _finite(state: State, folder: RunFolder, step: int) -> State:
    """`state`, if its parameters are finite: what is not must never become the last good checkpoint."""
    if not _are_finite(jax.tree.leaves(state["params"])):
        raise NonFiniteError(f"{folder.path.name}: a parameter is not finite after step {step}{_lower(folder)}")
    return state


def _lower(folder: RunFolder) -> str:
    """Return the end of the message about a run that diverged."""
    steps = Checkpoints(folder.checkpoints).steps()
    kept = f"; the checkpoint of step {steps[-1]} is kept" if steps else ""
    return f"{kept}. Lower train.learning_rate or train.clip_norm."


def _are_finite(arrays: list[Any]) -> bool:
    if all(isinstance(array, np.ndarray) for array in arrays):
        return all(np.isfinite(array).all() for array in arrays)
    return bool(jax.jit(lambda arrays: jnp.stack([jnp.isfinite(x).all() for x in arrays]).all())(arrays))


#: Of a line of metrics, what TensorBoard shows.
SHOWN = ("loss", "ppl", "grad_norm", "learning_rate", "tokens_per_second", "mfu")


class _Log:
    """Metrics of the steps since the last line, kept on the device until a line is written."""

    def __init__(self, run: RunConfig, model: Model, folder: RunFolder, start: int):
        self.run, self.folder, self.last_step = run, folder, start
        self.pending: list[tuple[Metrics, int]] = []
        self.schedule = learning_rate(run.train)
        self.flops_per_token = flops_per_token(model, run.train.length)
        self.ceiling = processes.told(lambda: machine_ceiling(cache_folder(run.data) / "machine", run.model.dtype))
        self.attempt = 1 + max((row["attempt"] for row in folder.logged()), default=0)
        self.board: Any = None  # of the first of several processes, which alone writes
        self.clock = 0.0  # set when the first step has compiled
        self.start: dict[str, Any] = {}  # goes into the first row

    def __enter__(self) -> _Log:
        if processes.is_first():
            with disk_errors(self.folder.path):
                suffix = f".{self.attempt}.{os.getpid()}"
                self.board = open_board(self.folder.path / "tensorboard", suffix, self.last_step)
        return self

    def __exit__(self, *_: Any) -> None:
        if self.board is not None:
            with interrupts.deferred():  # its writer has a thread and a lock: interrupted between them, it would hang
                close_board(self.board)

    def add(self, metrics: Metrics, count: int) -> None:
        """Metrics [n] of the next `count` steps."""
        self.pending.append((metrics, count))
        if len(self.pending) > 1:  # one call ahead of the device and no more: what has passed here was computed
            jax.block_until_ready(self.pending[-2][0])
        if not self.clock:  # the first step compiles: tokens/s count from its end
            jax.block_until_ready(metrics)
            self.clock, self.timed_from = time.perf_counter(), self.last_step + count
            self.start = {"start": start_cost()}

    def restart_clock(self) -> None:
        """Leaves what was done since the last line out of the next one's tokens/s."""
        self.clock = time.perf_counter()

    def write(self, step: int) -> str:
        """Writes one line for the steps up to `step`; returns the facts to show. Raises NonFiniteError."""
        fetched = jax.device_get(self.pending)
        losses, norms = (
            np.concatenate([np.float64(metrics[name][:count]) for metrics, count in fetched])
            for name in ("loss", "grad_norm")
        )
        bad = ~(np.isfinite(losses) & np.isfinite(norms))
        if bad.any():
            first = int(bad.argmax())
            where = self.last_step + first + 1
            self._append({"step": where, "loss": losses[first], "grad_norm": norms[first], "attempt": self.attempt})
            raise NonFiniteError(
                f"{self.folder.path.name}: loss {losses[first]}, gradient norm {norms[first]} at step "
                f"{where}{_lower(self.folder)}"
            )
        row = self._row(step, losses, norms) | self.start
        self._append(row)
        self.pending.clear()
        self.start = {}
        self.last_step = step
        speed = f"  {row['tokens_per_second']:,.0f} tokens/s" if row["tokens_per_second"] else ""
        ppl = f"{row['ppl']:.2f}" if row["ppl"] < 1e6 else f"{row['ppl']:.1e}"
        return f"loss {row['loss']:.3f}  ppl {ppl}{speed}"

    def _append(self, row: dict[str, Any]) -> None:
        if self.board is None:
            return
        lines.append(self.folder.metrics_file, row)
        with interrupts.deferred():
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
            "attempt": self.attempt,
            "tokens": step * tokens_per_step,
            "loss": loss,
            "ppl": math.exp(min(loss, 700.0)),
            "grad_norm": float(norms.mean()),
            "learning_rate": float(self.schedule(step - 1)),
            "tokens_per_second": speed,
            "mfu": speed * self.flops_per_token / self.ceiling if speed else None,
        }
