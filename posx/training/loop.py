"""The training loop: batches in, checkpoints and metrics out; the same call resumes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx import interrupts
from posx.config import RunConfig, TrainConfig
from posx.data import Dataset, batch
from posx.errors import Interrupted, OutOfMemoryError, Stopped
from posx.model import Model
from posx.progress import Meter, say
from posx.runs.folder import RunFolder
from posx.training.checkpoints import Checkpoints
from posx.training.layout import Layout, agreement
from posx.training.metrics import MetricsLog, diverged
from posx.training.step import State
from posx.training.watchdog import Watchdog


def train(run: RunConfig, model: Model, dataset: Dataset, folder: RunFolder, layout: Layout = Layout()) -> State:
    """Train to `train.steps` from the newest good checkpoint in `folder`, or from step 0; return the final state.

    Resumes bit for bit as if never interrupted: the state holds all that changes, batches and dropout are functions of
    the step. Raises NonFiniteError with the step; the last good checkpoint stays.
    """
    config, rates, name = run.train, run.rates, folder.path.name
    checkpoints = Checkpoints(folder.checkpoints, config.keep_checkpoints)
    with _memory_errors(name, config.accumulation), Meter(name, config.steps) as meter:
        meter.waiting("compiling", folder.usual_start())
        restored = checkpoints.restore(layout.abstract(model, config), notice=say)
        if restored is None:
            state = layout.init(model, config)
        else:
            step, saved = restored
            state = layout.put(jax.tree.map(jnp.asarray, saved))
            if 0 < step < config.steps:
                say(f"resuming {name} at step {step}")
        start = int(state["step"])
        if start >= config.steps:
            return state
        log, stops = MetricsLog(run, model, folder, start), agreement(layout)
        shape = (config.dispatch_steps, config.batch_size, config.length + 1)
        with interrupts.saved_first(), log, Watchdog(folder.path, config.dispatch_steps) as watchdog:
            for steps in dispatches(config, start):
                interrupts.check()
                if stops(interrupts.terminated() or interrupts.interrupted()):
                    _save_and_stop(checkpoints, state, folder, steps.start, log)
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
                    checkpoints.save(done, _finite(state, folder, done))
                    log.restart_clock()
                watchdog.beat()
    return state


def _save_and_stop(checkpoints: Checkpoints, state: State, folder: RunFolder, step: int, log: MetricsLog) -> None:
    """Save the state and the metrics up to `step`, and raise Stopped, or Interrupted."""
    if log.pending:
        log.write(step)
    if step and step not in checkpoints.steps():
        checkpoints.save(step, _finite(state, folder, step))
    error = Interrupted if interrupts.interrupted() else Stopped
    raise error(f"{folder.path.name}: stopped and saved at step {step}")


def dispatches(config: TrainConfig, start: int) -> Iterator[range]:
    """Yield steps `start` .. `train.steps` - 1 as they are sent to the device: none passes a log line or a checkpoint.

    The first goes alone, so that the cost of a start is known from compiling and one step.
    """
    size = 1
    while start < config.steps:
        due = (start - start % every + every for every in (config.log_steps, config.checkpoint_steps))
        steps = range(start, min(start + size, config.steps, *due))
        yield steps
        start, size = steps.stop, config.dispatch_steps


def _batches(dataset: Dataset, config: TrainConfig, steps: range, rows: slice) -> np.ndarray:
    """Return rows of the batches of `steps`, int32 [n, rows, t + 1].

    n is always `dispatch_steps`, so that one program serves all.
    """
    count = len(range(config.batch_size)[rows])
    block = np.zeros((config.dispatch_steps, count, config.length + 1), np.int32)
    for n, step in enumerate(steps):
        block[n] = batch(
            dataset.train.tokens, digest=dataset.digest, seed=config.seed, step=step,
            batch_size=config.batch_size, length=config.length, rows=rows,
        )  # fmt: skip
    return block


@contextlib.contextmanager
def _memory_errors(name: str, accumulation: int) -> Iterator[None]:
    """Turn an accelerator's or the host's out-of-memory error into OutOfMemoryError."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError, MemoryError) as error:  # JAX has several for one thing
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(
            f"{name}: memory ran out; raise train.accumulation (now {accumulation}), or lower the model's sizes or the "
            "batch"
        ) from None


def _finite(state: State, folder: RunFolder, step: int) -> State:
    """Return `state` if its parameters are finite: others must never become the last good checkpoint."""
    params: list[Any] = jax.tree.leaves(state["params"])
    if all(param.is_fully_replicated for param in params):
        finite = all(np.isfinite(np.asarray(param)).all() for param in params)
    else:
        finite = bool(jax.jit(lambda arrays: jnp.stack([jnp.isfinite(x).all() for x in arrays]).all())(params))
    if not finite:
        raise diverged(folder, f"a parameter is not finite after step {step}")
    return state
