"""The training loop: batches in, checkpoints and metrics out; the same call resumes."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tensorboardX import SummaryWriter

from posx.config import RunConfig
from posx.data import Dataset, batch
from posx.data.store import cache_folder
from posx.errors import NonFiniteError, OutOfMemoryError
from posx.model import Model
from posx.progress import Meter, say
from posx.runs import RunFolder, append_row, disk_errors, read_rows
from posx.training.ceiling import flops_per_token, matmul_ceiling
from posx.training.optimizer import learning_rate
from posx.training.step import State, init_state, train_step


def train(run: RunConfig, model: Model, dataset: Dataset, folder: RunFolder) -> State:
    """Trains to `train.steps` from the newest good checkpoint in `folder`, or from step 0; returns the final state.

    Continues bit for bit as if never interrupted: the state holds all that changes, batches and dropout are functions
    of the step. Raises NonFiniteError with the step; the last good checkpoint stays.
    """
    config = run.train
    checkpoints = folder.checkpoints(config.keep_checkpoints)
    with memory_errors(f"{folder.path.name}: memory ran out; raise train.accumulation (now {config.accumulation})"):
        restored = checkpoints.restore(jax.eval_shape(lambda: init_state(model, config)), notice=say)
        if restored is None:
            state = init_state(model, config)
        else:
            state = jax.tree.map(jnp.asarray, restored[1])
            if 0 < restored[0] < config.steps:
                say(f"resuming {folder.path.name} at step {restored[0]}")
        start = int(state["step"])
        if start >= config.steps:
            return state
        log = _Log(run, model, dataset, folder, start)
        with Meter(folder.path.name, config.steps, start) as meter, log:
            for step in range(start, config.steps):
                tokens = batch(
                    dataset.train.tokens, digest=dataset.digest, seed=config.seed, step=step,
                    batch_size=config.batch_size, length=config.length,
                )  # fmt: skip
                state, metrics = train_step(model, config, state, tokens)
                log.add(metrics)
                done = step + 1
                due = done % config.checkpoint_steps == 0 or done == config.steps
                if due or done % config.log_steps == 0:
                    meter.update(done, f"{done}/{config.steps}  {log.write(done)}")
                if due:
                    checkpoints.save(done, _finite(jax.device_get(state), folder, done))
                    log.restart_clock()
    return state


@contextlib.contextmanager
def memory_errors(text: str) -> Iterator[None]:
    """Turns an accelerator's or the host's out-of-memory error into OutOfMemoryError with `text`."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(f"{text}, or lower the model's sizes or the batch") from None


def _finite(state: State, folder: RunFolder, step: int) -> State:
    """`state`, if its parameters are finite: what is not must never become the last good checkpoint."""
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state["params"])):
        raise NonFiniteError(
            f"{folder.path.name}: a parameter is not finite after step {step}; the last checkpoint before it is kept: "
            "lower train.learning_rate or train.clip_norm"
        )
    return state


class _Log:
    """Metrics of the steps since the last line, kept on the device until a line is written."""

    def __init__(self, run: RunConfig, model: Model, dataset: Dataset, folder: RunFolder, start: int):
        self.run, self.folder, self.last_step = run, folder, start
        self.pending: list[dict[str, jax.Array]] = []
        self.schedule = learning_rate(run.train)
        self.bytes_per_token = dataset.train.num_bytes / len(dataset.train.tokens)
        self.flops_per_token = flops_per_token(model, run.train.length)
        self.ceiling = matmul_ceiling(cache_folder(run.data) / "machine", run.model.dtype)
        self.attempt = 1 + max((row.get("attempt", 0) for row in read_rows(folder.metrics_file)), default=0)
        self.clock = 0.0  # set when the first step has compiled

    def __enter__(self) -> _Log:
        with disk_errors(self.folder.path):
            suffix = f".{self.attempt}.{os.getpid()}"
            self.board = SummaryWriter(str(self.folder.path / "tensorboard"), filename_suffix=suffix)
        return self

    def __exit__(self, *_: Any) -> None:
        self.board.close()

    def add(self, metrics: dict[str, jax.Array]) -> None:
        self.pending.append(metrics)
        if not self.clock:  # the first step compiles: tokens/s count from its end
            jax.block_until_ready(metrics)
            self.clock, self.timed_from = time.perf_counter(), self.last_step + 1

    def restart_clock(self) -> None:
        """Leaves what was done since the last line out of the next one's tokens/s."""
        self.clock = time.perf_counter()

    def write(self, step: int) -> str:
        """Writes one line for the steps up to `step`; returns the facts to show. Raises NonFiniteError."""
        fetched = jax.device_get(self.pending)
        losses = np.array([metrics["loss"] for metrics in fetched], np.float64)
        norms = np.array([metrics["grad_norm"] for metrics in fetched], np.float64)
        bad = ~(np.isfinite(losses) & np.isfinite(norms))
        if bad.any():
            first = int(bad.argmax())
            where = self.last_step + first + 1
            row = {"step": where, "loss": losses[first], "grad_norm": norms[first], "attempt": self.attempt}
            append_row(self.folder.metrics_file, row)
            raise NonFiniteError(
                f"{self.folder.path.name}: loss {losses[first]}, gradient norm {norms[first]} at step {where}; the "
                "last checkpoint before it is kept: lower train.learning_rate or train.clip_norm"
            )
        row = self._row(step, losses, norms)
        append_row(self.folder.metrics_file, row)
        for name in ("loss", "ppl", "bpb", "grad_norm", "learning_rate", "tokens_per_second", "mfu"):
            if row[name] is not None:
                self.board.add_scalar(name, row[name], step)
        self.pending.clear()
        self.last_step = step
        speed = f"  {row['tokens_per_second']:,.0f} tokens/s" if row["tokens_per_second"] else ""
        return f"loss {row['loss']:.3f}  ppl {row['ppl']:.2f}{speed}"

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
            "bpb": loss / math.log(2) / self.bytes_per_token,
            "grad_norm": float(norms.mean()),
            "learning_rate": float(self.schedule(step - 1)),
            "tokens_per_second": speed,
            "mfu": speed * self.flops_per_token / self.ceiling if speed else None,
        }
