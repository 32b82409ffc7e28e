"""The metrics of training: `metrics.jsonl` and TensorBoard's copy of it, which process 0 writes."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from posx import interrupts
from posx.config import RunConfig
from posx.data.store import cache_folder
from posx.errors import NonFiniteError
from posx.files.atomic import disk_errors
from posx.machine import processes
from posx.machine.compile_cache import start_cost
from posx.machine.devices import machine_ceiling
from posx.model import Model
from posx.runs.folder import RunFolder
from posx.training.checkpoints import Checkpoints
from posx.training.optimizer import learning_rate
from posx.training.step import Metrics, flops_per_token

#: The numbers of a row that TensorBoard shows.
SHOWN = ("loss", "ppl", "grad_norm", "learning_rate", "tokens_per_second", "mfu")


class MetricsLog:
    """The metrics of the steps since the last row, kept on the device until a row is written."""

    def __init__(self, run: RunConfig, model: Model, folder: RunFolder, start: int):
        self.run, self.folder, self.last_step = run, folder, start
        self.pending: list[tuple[Metrics, int]] = []
        self.schedule = learning_rate(run.train)
        self.flops_per_token = flops_per_token(model, run.train.length)
        self.ceiling = processes.told(lambda: machine_ceiling(cache_folder(run.data) / "machine", run.model.dtype))
        self.attempt = 1 + max((row["attempt"] for row in folder.logged()), default=0)
        self.clock = 0.0  # set when the first step has compiled
        self.start: dict[str, Any] = {}  # goes into the first row

    def __enter__(self) -> MetricsLog:
        with disk_errors(self.folder.path):
            suffix = f".{self.attempt}.{os.getpid()}"
            self.board = open_board(self.folder.path / "tensorboard", suffix, self.last_step)
        return self

    def __exit__(self, *_: Any) -> None:
        with interrupts.deferred():  # its writer has a thread and a lock: interrupted between them, it would hang
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

    def write(self, step: int) -> str:
        """Write one row for the steps up to `step`, and return the facts to show. Raises NonFiniteError."""
        fetched = jax.device_get(self.pending)
        losses, norms = (
            np.concatenate([np.float64(metrics[name][:count]) for metrics, count in fetched])
            for name in ("loss", "grad_norm")
        )
        bad = ~(np.isfinite(losses) & np.isfinite(norms))
        if bad.any():
            first = int(bad.argmax())
            loss, norm, at = losses[first], norms[first], self.last_step + first + 1
            self._append({"step": at, "loss": loss, "grad_norm": norm, "attempt": self.attempt})
            raise diverged(self.folder, f"loss {loss}, gradient norm {norm} at step {at}")
        row = self._row(step, losses, norms) | self.start
        self._append(row)
        self.pending, self.start, self.last_step = [], {}, step
        speed = f"  {row['tokens_per_second']:,.0f} tokens/s" if row["tokens_per_second"] else ""
        ppl = f"{row['ppl']:.2f}" if row["ppl"] < 1e6 else f"{row['ppl']:.1e}"
        return f"loss {row['loss']:.3f}  ppl {ppl}{speed}"

    def _append(self, row: dict[str, Any]) -> None:
        self.folder.append(self.folder.metrics_file, row)
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


def diverged(folder: RunFolder, what: str) -> NonFiniteError:
    """Return the error of a run that diverged, with the checkpoint that is left and the settings to change."""
    steps = Checkpoints(folder.checkpoints).steps()
    kept = f"; the checkpoint of step {steps[-1]} is kept" if steps else ""
    return NonFiniteError(f"{folder.path.name}: {what}{kept}. Lower train.learning_rate or train.clip_norm.")


def open_board(folder: Path, suffix: str, start: int) -> Any:
    """Return a tensorboardX writer into `folder` whose file name ends with `suffix`, for steps after `start`.

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
    writes = processes.is_first()
    return SummaryWriter(str(folder), filename_suffix=suffix, purge_step=start + 1, write_to_disk=writes)


def close_board(board: Any) -> None:
    """Flush and close the writer as far as the disk takes it. Nothing is tried again when the process ends."""
    writer = board.file_writer
    try:
        board.close()
    except OSError:
        writer.event_writer._closed = True
