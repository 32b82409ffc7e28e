"""`python -m benchmarks`, its workers in this process. Nothing in these tests depends on how long anything takes."""

import importlib
import json

import jax
import pytest

from posx.lab.machine import ceiling


class Here:
    """A worker in this process, where all see the devices that there are: seconds less for each that is not started."""

    def __init__(self, made, *arguments, cpus=(), devices=None, code=None):
        module, _, name = made.partition(":")
        self.served = getattr(importlib.import_module(module), name)(*json.loads(json.dumps(arguments)))
        self.sent = []

    def send(self, method, *arguments):
        self.sent.append((method, json.loads(json.dumps(arguments))))

    def receive(self):
        from benchmarks.workers import WorkerError, one_line

        method, arguments = self.sent.pop(0)
        try:
            return json.loads(json.dumps(getattr(self.served, method)(*arguments)))
        except Exception as error:
            raise WorkerError(one_line(error)) from None

    def call(self, method, *arguments):
        self.send(method, *arguments)
        return self.receive()

    def close(self):
        pass


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(ceiling, "SIZE", 64)  # seconds of products otherwise
    from benchmarks import __main__ as bench

    for module in (bench.train, bench.attention):
        monkeypatch.setattr(module, "Worker", Here)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # Optax, jax.nn
        yield bench
