"""Several processes, on one machine or many, that make one run together by JAX's own runtime.

`carry_out` runs a command in this process, or in step with others. Process 0 alone writes the run's folder and its
checkpoints (`posx.lab.runs.folder`, `posx.lab.training.checkpoints`). These give all processes the same rows. A process
that runs alone is process 0 of one, at no cost.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from posx import notices
from posx.errors import ConfigError, Lost, PosxError, at_failure
from posx.lab import interrupts
from posx.machine.devices import use_every_core

T = TypeVar("T")

#: Variables in which launchers give the number of processes. TPU pods name their workers instead.
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
WORKERS = "TPU_WORKER_HOSTNAMES"

#: Seconds until a lost process is noticed, unless a collective operation with it fails before.
MISSED_SECONDS = 60

#: Seconds in which all processes must connect.
MEETING_SECONDS = 120

_joined = False
_in_step = False  # from `check_same` on
_on_abort: Any = None


def are_asked(values: Mapping[str, Any]) -> bool:
    """Return whether flags or a launcher say that this process is one of several."""
    return bool(values["coordinator"]) or (values["processes"] != 1 and _is_launched())


def carry_out(command: Callable[[dict[str, Any]], Callable[[], object] | None], values: dict[str, Any]) -> None:
    """Call `command` with its `values`, with the other processes of its run if flags or a launcher say so.

    Every command calls `check_same` once it has read all that it needs. Until then a PosxError of one process is raised
    in all. Later an error ends its process at once, and the others notice that.

    Args:
      command: returns a function that process 0 calls at the end while all wait, or None.
      values: "coordinator" is "HOST:PORT" of process 0, or "auto" to let JAX find it. "processes" is their number, and
        "process" the number of this one. If SLURM or Open MPI has started several, none of the three is needed.

    Raises:
      ConfigError: the flags do not fit together, or the processes do not find each other.
    """
    _join(values)
    try:
        rest = command(values | {"processes": jax.process_count()} if _joined else values)
    except PosxError as error:
        if _joined and not (_in_step or error.alike):
            _agree(error)
        raise
    if rest:
        on_first(rest)


def _join(values: Mapping[str, Any]) -> None:
    """Connect this process to the others of its run, before JAX starts its devices."""
    global _joined
    coordinator, count, number = values["coordinator"], values["processes"], values["process"]
    if (count is not None and count < 1) or (number is not None and number < 0):
        raise ConfigError(
            f"--processes={count}, --process={number}: processes count from 1 and their numbers from 0. Leave "
            "out both for one process."
        )
    if not are_asked(values):
        if (count or 1) > 1 or number is not None:
            raise ConfigError("--coordinator is missing. Give the address of process 0, as --coordinator=10.0.0.1:1234")
        return
    address = "" if coordinator == "auto" else coordinator
    if address and not (address.rpartition(":")[0] and address.rpartition(":")[2].isdigit()):
        raise ConfigError(f"--coordinator={coordinator}: HOST:PORT is expected, or auto.")
    known = number is not None and count is not None and number < count
    if address and not _is_launched() and not known:
        raise ConfigError(
            f"--processes={count}, --process={number}: give both, the number of processes and the number of "
            "this one, from 0."
        )
    if address and number == 0:
        _check_free(address)
    use_every_core()
    missed = threading.Timer(MEETING_SECONDS, _nobody_came)  # JAX would end this process without a message of posx
    missed.daemon = True
    missed.start()
    try:
        with interrupts.keep_handlers():  # JAX has a handler of its own for SIGTERM
            jax.distributed.initialize(
                address or None, count, number, initialization_timeout=2 * MEETING_SECONDS,
                heartbeat_timeout_seconds=MISSED_SECONDS, shutdown_timeout_seconds=MISSED_SECONDS,
            )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"the processes of this run did not find each other: {reason}") from None
    finally:
        missed.cancel()
    _joined = jax.process_count() > 1
    if _joined:
        _end_in_one_line()
        _results_alone()
        at_failure.append(_end)
    if not is_first():
        notices.be_quiet()
    here = [sum(device.process_index == n for device in jax.devices()) for n in range(jax.process_count())]
    if len(set(here)) > 1:
        raise mark_alike(ConfigError(f"the processes of this run have different numbers of devices: {here}"))


def _check_free(address: str) -> None:
    """Raise ConfigError if the port is in use. The processes of two runs would mix."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", int(address.rpartition(":")[2])))
            tried.listen()
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--coordinator={address}: the port cannot be opened ({error}). Name another one."
            ) from None


def _nobody_came() -> None:
    line = f"some processes of this run did not start within {MEETING_SECONDS} s. Start all of them again."
    with contextlib.suppress(OSError, ValueError):
        print(f"posx: {line}", file=sys.stderr, flush=True)
    os._exit(Lost.exit_code)


def _end_in_one_line() -> None:
    """Make an abort by JAX's runtime, which follows the loss of another process, end as `Lost` does."""
    global _on_abort

    def abort(_: int) -> None:
        os.write(2, f"posx: {Lost()}\n".encode())
        os._exit(Lost.exit_code)

    _on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(abort)  # kept, as C calls it
    with contextlib.suppress(OSError, AttributeError):  # Windows
        ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort)


def _results_alone() -> None:
    """Keep native code from standard output: Gloo prints its connections there."""
    try:
        own = os.dup(1)
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        sys.stdout = open(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    except OSError:  # closed by who started this
        return


def _is_launched() -> bool:
    told = [os.environ.get(name, "") for name in LAUNCHERS]
    return "," in os.environ.get(WORKERS, "") or any(text.isdigit() and int(text) > 1 for text in told)


def is_first() -> bool:
    """Tell whether this is process 0, which writes and prints."""
    return not _joined or jax.process_index() == 0


def broadcast(function: Callable[[], T]) -> T:
    """Call `function` in process 0 and broadcast its JSON-serialisable result. Its PosxError is raised in all."""
    if not _joined:
        return function()
    results: list[T] = []
    on_first(lambda: results.append(function()))
    return json.loads(_texts(json.dumps(results))[0])[0]


def on_first(function: Callable[[], object]) -> None:
    """Call `function` in process 0 while all wait. Its PosxError is raised in all."""
    on_all(lambda: function() if is_first() else None)


def on_all(function: Callable[[], T]) -> T:
    """Return the result of `function`, called in every process. A PosxError in one is raised in all.

    `function` must not synchronise processes, because a process that failed does not take part. This holds for
    `on_first` and `broadcast` too.
    """
    if not _joined:
        return function()
    failed: PosxError | None = None
    try:
        result = function()
    except PosxError as error:
        failed = error
    _agree(failed)
    return result


def _agree(failed: PosxError | None) -> None:
    """Raise in all processes the error of the first one that `failed`. Every process must call this."""
    said = _texts(json.dumps([type(failed).__name__, str(failed)]) if failed else "")
    if not any(said):
        return
    name, text = json.loads(next(filter(None, said)))
    kind = next((cls for cls in _kinds(PosxError) if cls.__name__ == name), PosxError)
    shared = kind.__new__(kind)
    shared.args = (text,)
    raise mark_alike(shared) from None


def _kinds(kind: type[PosxError]) -> Iterator[type[PosxError]]:
    """Yield a kind of error and all kinds below it."""
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def check_same(facts: Mapping[str, str]) -> None:
    """Wait for all processes, then raise ConfigError in all of them if a fact is not the same in all."""
    global _in_step
    if not _joined:
        return
    _agree(None)
    _in_step = True
    own, *others = map(json.loads, _texts(json.dumps(dict(facts))))
    if differing := [name for name in own if any(other[name] != own[name] for other in others)]:
        told = (
            f"the processes of this run were started with different settings: {', '.join(differing)}. Start all "
            "of them with the same command."
        )
        raise mark_alike(ConfigError(told))


def mark_alike(error: PosxError) -> PosxError:
    """Mark `error` as raised in all processes."""
    error.alike = True
    return error


def _end(error: BaseException, code: int, line: str) -> None:
    """End this process at once, with its line, if it failed alone; without a `line` the error is unknown.

    At its regular end this process would wait for the others, and they for it.
    """
    if getattr(error, "alike", False):
        return
    if _is_loss(error):
        code, line = Lost.exit_code, str(Lost())
    if not line:
        traceback.print_exception(error)
    number = "" if is_first() else f"process {jax.process_index()}: "
    with contextlib.suppress(OSError, ValueError):  # nobody listens any more
        print(f"posx: {number}{line or repr(error)}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(code)


def _is_loss(error: BaseException) -> bool:
    """Tell whether an error of JAX's runtime says that another process is gone."""
    words = ("gloo", "nccl", "connection", "unavailable", "coordination", "deadline", "heartbeat")
    of_runtime = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") or "Gloo" in str(error)
    return of_runtime and any(word in str(error).lower() for word in words)


def _texts(text: str) -> list[str]:
    """Return the `text` that each process gives, in the order of their numbers."""
    own = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(own), np.int32))
    if not sizes.any():
        return [""] * len(sizes)
    padded = multihost_utils.process_allgather(np.pad(own, (0, sizes.max() - len(own))))
    return [row[:size].tobytes().decode() for row, size in zip(np.asarray(padded), sizes, strict=True)]
