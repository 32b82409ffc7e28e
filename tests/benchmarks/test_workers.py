"""Processes that take turns, and the cores that all run on."""

import contextlib
import os

import pytest


def test_a_worker_answers_fails_and_ends_in_one_line(bench):
    """The object is a path: any class that the file knows will do."""
    from benchmarks import workers

    core = bench.measure.core_list()[-1]
    pair = [workers.Worker("pathlib:Path", name, cpus=[core]) for name in ("a/b", "c")]
    with contextlib.closing(pair[0]), contextlib.closing(pair[1]):
        assert workers.call_all(pair, "as_posix") == ["a/b", "c"]
        assert os.sched_getaffinity(pair[0].process.pid) == {core}
        with pytest.raises(workers.WorkerError, match=r"^FileNotFoundError: \[Errno 2\] No such file or directory"):
            pair[0].call("read_text")
        assert pair[0].call("as_posix") == "a/b", "it goes on"
        pair[1].process.kill()
        with pytest.raises(workers.WorkerError, match="^the process of pathlib:Path ended with exit code -9$"):
            workers.call_all(pair[::-1], "as_posix")
        assert pair[0].call("as_posix") == "a/b", "all have answered, the dead one aside"


def test_cores_bind_this_process_and_its_children(bench):
    all_cores, measure = bench.measure.core_list(), bench.measure
    try:
        measure.use_cores(1)
        assert measure.core_list() == all_cores[:1]
        with pytest.raises(SystemExit, match="^--cores=2 is more than the 1 usable cores$"):
            measure.use_cores(2)
    finally:
        os.sched_setaffinity(0, all_cores)
