"""Contestants in processes of their own, which live through all rounds and work only when it is their turn.

JAX's devices are fixed when it starts, thread pools when they start, code when it is imported: contestants that differ
in one of these cannot share a process. Their pools sleep while others have their turn.

Run as a script, this file is that process. It makes an object and calls its methods: JSON lines of [name, arguments] on
standard input, {"value": ...} or {"error": ...} on what was its standard output.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class WorkerError(Exception):
    """What a call in a worker raised, in one line."""


class Worker:
    """One process with one object: `call` is `send`, which does not wait, and `receive`.

    made: "file:Class" in this folder, called with `arguments` as JSON carries them. cpus: cores to run on, by default
    those of this process. devices: JAX's CPU devices, by default as posx has them. code: the checkout whose posx and
    benchmarks are imported.
    """

    def __init__(
        self, made: str, *arguments: Any, cpus: Sequence[int] = (), devices: int | None = None, code: Path = ROOT
    ):
        words = [json.dumps(part) for part in (list(arguments), list(cpus), devices)]
        self.name = made
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, made, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=worker_environment(code),
        )  # fmt: skip

    def send(self, method: str, *arguments: Any) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # `receive` says how it ended
            self._process.stdin.write(json.dumps([method, arguments]) + "\n")
            self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"the process of {self.name} ended with exit code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["value"]

    def call(self, method: str, *arguments: Any) -> Any:
        self.send(method, *arguments)
        return self.receive()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def worker_environment(code: Path) -> dict[str, str]:
    """The environment of a process that imports posx and the benchmarks from `code`.

    What posx set in this process is left out: that of the checkout, another version perhaps, sets its own.
    """
    # Not above: a worker is to set its cores before it imports anything.
    from posx.machine.devices import PATIENCE
    from posx.machine.guard import SAFE

    own = {SAFE, *(f"{name}={seconds}" for name, seconds in PATIENCE.items())}
    # An older checkout has its benchmarks in scripts/benches.
    paths = [str(code), str(code / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
    flags = [word for word in os.environ.get("XLA_FLAGS", "").split() if word not in own]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "XLA_FLAGS": " ".join(flags)}


def call_all(workers: Sequence[Worker], method: str, *arguments: Any) -> list[Any]:
    """What each answers, all of them at work at the same time. Raises WorkerError once all have answered."""
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


@contextlib.contextmanager
def closing(workers: Sequence[Worker]) -> Iterator[None]:
    """Ends the workers with the block, however it ends."""
    try:
        yield
    finally:
        for worker in workers:
            worker.close()


def use_devices(count: int) -> None:
    """JAX of this process has so many CPU devices; before it starts."""
    import jax

    import posx  # noqa: F401  keeps the compiler's fault out, before JAX starts
    from posx.machine.devices import use_every_core

    jax.config.update("jax_num_cpu_devices", count)
    use_every_core()


def serve(made: str, arguments: Sequence[Any], cpus: Sequence[int], devices: int | None) -> None:
    if cpus:  # before anything starts a thread
        os.sched_setaffinity(0, cpus)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if devices:
        use_devices(devices)
    file, _, name = made.partition(":")
    spec = importlib.util.spec_from_file_location(f"served_{file}", Path(__file__).with_name(f"{file}.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    served = getattr(module, name)(*arguments)
    for line in sys.stdin:
        method, given = json.loads(line)
        try:
            answer = {"value": getattr(served, method)(*given)}
        except Exception as error:  # whatever a contestant raises is told, and the others go on
            answer = {"error": one_line(error)}
        print(json.dumps(answer), file=answers, flush=True)


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


if __name__ == "__main__":
    serve(sys.argv[1], *(json.loads(word) for word in sys.argv[2:]))
