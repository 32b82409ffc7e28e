"""Contestants in processes of their own, which live through all rounds and work only when it is their turn.

JAX's devices are fixed when it starts, thread pools when they start, code when it is imported. Contestants that differ
in one of these cannot share a process. Their pools sleep while other contestants have their turn.

Run as a script, this file is that process. It makes an object and calls its methods: JSON lines of [name, arguments] on
standard input, {"value": ...} or {"error": ...} on the first standard output.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

ROOT = Path(__file__).parents[1]
NO_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "MemoryError", "not enough memory", "bad_alloc")
POLL_SECONDS = 0.02
T = TypeVar("T")


class WorkerError(Exception):
    """The exception of a call in a worker, in one line."""


class Worker:
    """One process with one object: `call` is `send`, which does not wait, and `receive`.

    Args:
      made: "module:Class", called with `arguments` as JSON carries them; or "module:function", for `call` below.
      arguments: of the class.
      cpus: cores to run on, by default those of this process.
      devices: JAX's CPU devices, by default as posx has them.
      code: the checkout whose posx and benchmarks are imported.
      stderr: the file of the process's standard error.
    """

    def __init__(
        self, made: str, *arguments: Any, cpus: Sequence[int] = (), devices: int | None = None, code: Path = ROOT,
        stderr: IO[str] | None = None,
    ):  # fmt: skip
        words = [json.dumps(part) for part in (arguments, list(cpus), devices)]
        self.name = made
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, made, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=stderr, text=True, env=worker_environment(code),
        )  # fmt: skip

    def send(self, method: str, *arguments: Any) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # `receive` says how it ended
            self.process.stdin.write(json.dumps([method, arguments]) + "\n")
            self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(f"the process of {self.name} ended with exit code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["value"]

    def call(self, method: str, *arguments: Any) -> Any:
        self.send(method, *arguments)
        return self.receive()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def worker_environment(code: Path) -> dict[str, str]:
    """Return the environment of a process that imports posx and the benchmarks from `code`.

    The flags that posx set in this process are left out: the posx of the checkout sets its own.
    """
    # Not above: a worker must set its cores before it imports anything.
    from posx.machine.devices import PATIENCE
    from posx.machine.guard import SAFE

    own = {SAFE, *(f"{name}={seconds}" for name, seconds in PATIENCE.items())}
    # An older checkout has its benchmarks in scripts/benches, and takes this one's worker.
    paths = [str(code), str(code / "scripts"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    flags = [word for word in os.environ.get("XLA_FLAGS", "").split() if word not in own]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "XLA_FLAGS": " ".join(flags)}


def call_all(workers: Sequence[Worker], method: str, *arguments: Any) -> list[Any]:
    """Call a method of all workers at the same time. Raises WorkerError once all have answered."""
    for worker in workers:
        worker.send(method, *arguments)
    answers, failed = [], []
    for worker in workers:
        try:
            answers.append(worker.receive())
        except WorkerError as error:
            failed.append(error)
    if failed:
        raise failed[0]
    return answers


def side_by_side(function: Callable[..., T], calls: Sequence[tuple[Any, ...]], process: Callable[..., Any]) -> list[T]:
    """Return `function` of each call, in order. Calls in other processes, by `process` of a call, run at the same time.

    On CPUs all are made one after the other: they would share the cores.
    """
    from posx.machine.platforms import is_on_cpu

    found: dict[int, T] = {}
    own: dict[int, list[int]] = {}
    for n, call in enumerate(calls):
        own.setdefault(0 if is_on_cpu() else id(process(*call)), []).append(n)

    def all_of(numbers: list[int]) -> None:
        found.update({n: function(*calls[n]) for n in numbers})

    if len(own) == 1:
        all_of(next(iter(own.values())))
    else:
        with ThreadPoolExecutor(max(len(own), 1)) as several:
            list(several.map(all_of, own.values()))
    return [found[n] for n in range(len(calls))]


def fresh(
    function: Callable[..., Any], *arguments: Any, limit_bytes: float = float("inf"), limit_seconds: float = 3600
) -> dict[str, Any]:
    """Call a function in a new process, where nothing is compiled, cached or allocated yet.

    Returns {"status": "ok", "value": ...}, or "oom", "timeout" or "failed" with the reason in "why". A process that
    holds more than `limit_bytes` is killed and counts as out of memory.
    """
    deadline = time.monotonic() + limit_seconds
    with tempfile.TemporaryFile("w+") as errors:
        worker = Worker(f"{function.__module__}:{function.__qualname__}", stderr=errors)
        with contextlib.closing(worker):
            worker.send("", *arguments)
            while not select.select([worker.process.stdout], [], [], POLL_SECONDS)[0]:
                if _resident(worker.process.pid) > limit_bytes:
                    return {"status": "oom", "why": f"held more than {limit_bytes / 2**30:g} GiB"}
                if time.monotonic() > deadline:
                    return {"status": "timeout", "why": f"took more than {limit_seconds:g} s"}
            try:
                return {"status": "ok", "value": worker.receive()}
            except WorkerError as error:
                why = str(error)
        errors.seek(0)
        said = why + errors.read()
    killed = worker.process.returncode == -9 and "exit code -9" in why  # by the kernel: no one else here would
    return {"status": "oom" if killed or any(word in said for word in NO_MEMORY) else "failed", "why": why}


def _resident(pid: int) -> int:
    """Return the bytes that a process holds now; 0 if the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Make a work tree of an older commit for the block. Raises SystemExit if git does not have it."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "posx"
        made = git("worktree", "add", "--detach", str(tree), commit)
        if made.returncode:
            raise SystemExit(f"--baseline={commit} cannot be checked out: {made.stderr.strip().splitlines()[-1]}")
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def serve(made: str, arguments: Sequence[Any], cpus: Sequence[int], devices: int | None) -> None:
    if cpus:  # before anything starts a thread
        os.sched_setaffinity(0, cpus)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the prints of libraries are no answers
    if devices:
        import jax

        import posx  # noqa: F401  keeps the compiler's fault out, before JAX starts
        from posx.machine.devices import use_every_core

        jax.config.update("jax_num_cpu_devices", devices)
        use_every_core()
    module, _, name = made.partition(":")
    served = getattr(importlib.import_module(module), name)
    served = served(*arguments) if isinstance(served, type) else served
    for line in sys.stdin:
        method, given = json.loads(line)
        try:
            answer = {"value": (getattr(served, method) if method else served)(*given)}
        except Exception as error:  # the worker continues with its other contestants
            answer = {"error": one_line(error)}
        print(json.dumps(answer), file=answers, flush=True)


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


if __name__ == "__main__":
    serve(sys.argv[1], *(json.loads(word) for word in sys.argv[2:]))
