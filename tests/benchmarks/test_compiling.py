"""`python -m benchmarks compile`: ratios per turn, the cache that is hit, executors that refuse."""

import pytest

from tests.benchmarks.tables import cells


def turn(cold, warm):
    one = {"lower": 0.5, "first_step": 9.0, "hits": 1}
    return {"cold": one | {"compile": cold - 0.5, "hits": 0}, "warm": one | {"compile": warm - 0.5}}


def test_ratios_are_formed_per_turn_and_who_refuses_is_named(bench, monkeypatch, capsys):
    """Ratios 2, 0.5 and 0.25: the median is 0.5, where that of the medians would be 0.8."""
    refused = {"failed": {"status": "failed", "why": "ValueError: not for me"}}
    turns = {"dense": iter([turn(10, 5), turn(1, 2), turn(4, 16)]), "blockwise": iter([refused] * 3)}
    monkeypatch.setattr(bench.compiling, "turn", lambda encoding, executor, shape: next(turns[executor]))
    bench.main("compile --encodings=t5 --executors=dense,blockwise --rounds=3".split())
    out = capsys.readouterr().out
    assert cells(out, 2) == {
        "t5 dense": [
            "4.00 [2.50, 7.00]", "5.00 [3.50, 10.50]", "0.50 [0.38, 1.25]", "9.00 [9.00, 9.00]", "9.00 [9.00, 9.00]",
            "1",
        ]
    }  # fmt: skip
    assert "failed: t5, blockwise: ValueError: not for me" in out


@pytest.mark.slow
def test_the_second_process_finds_the_step_in_the_cache(bench):
    found = bench.compiling.turn("nope", "dense", bench.train.SHAPES["tiny"])
    assert found["cold"]["hits"] == 0 and found["warm"]["hits"] >= 1
    for times in found.values():
        assert 0 < times["lower"] + times["compile"] < times["first_step"]


def test_a_process_that_fails_is_told(bench, monkeypatch):
    monkeypatch.setattr(bench.compiling.workers, "fresh", lambda *_: {"status": "failed", "why": "so"})
    assert bench.compiling.turn("nope", "dense", bench.train.SHAPES["tiny"]) == {
        "failed": {"status": "failed", "why": "so"}
    }
