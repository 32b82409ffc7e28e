"""`python -m benchmarks memory` and its fresh processes: fits, points that are kept, limits."""

import json
import math
import operator
import time

import numpy as np
import pytest

from tests.benchmarks.tables import cells

WORDS = "memory --encodings=rope --contestants=posx-blockwise,posx-dense --lengths=4096,8192 --heads=2".split()


def made_up(contestant, encoding, kind, length, options):
    """100 MB, and 1 kB a token or 1 B a pair of tokens; posx-dense with gradients runs out of memory."""
    key = {"contestant": contestant, "encoding": encoding, "kind": kind, "length": length}
    limits = {"limit_gib": options.limit_gib, "limit_seconds": options.limit_seconds}
    if contestant == "posx-dense" and kind == "gradient" and length > 64:
        return key | limits | {"status": "oom", "why": "held more than 8 GiB"}
    return (
        key | limits | {"status": "ok", "value": 10**8 + (length**2 if contestant == "posx-dense" else 1000 * length)}
    )


@pytest.fixture
def measured(bench, monkeypatch):
    """The keys of all points measured, in order."""
    log = []

    def point(*key_and_options):
        log.append(key_and_options[:4])
        return made_up(*key_and_options)

    monkeypatch.setattr(bench.memory, "measure_point", point)
    return log


def test_growth_finds_the_exponent_from_4096_on(bench):
    growth, lengths = bench.memory.growth, [2**n for n in range(8, 16)]
    assert growth({n: 3.0 * n for n in lengths}) == pytest.approx(1.0)
    assert growth({n: 0.5 * n**2 for n in lengths}) == pytest.approx(2.0)
    assert growth({n: float(n if n >= 4096 else 7e9) for n in lengths}) == pytest.approx(1.0)
    assert growth({4096: 1.0}) is None and growth({1024: 1.0, 2048: 2.0}) is None
    assert growth({4096: -5.0, 8192: 2.0}) is None, "below the tiny call: noise"


def test_table_says_what_the_points_say(bench, measured, tmp_path, capsys):
    bench.main([*WORDS, "--dense_limit=8192", f"--out={tmp_path}/m.json"])
    text = capsys.readouterr().out
    forward, both = cells(text, 2, "forward"), cells(text, 2, "forward + backward")
    mib = {n: f"{1000 * (n - 64) / 2**20:,.0f}" for n in (4096, 8192)}
    assert forward["rope posx-blockwise"] == [mib[4096], mib[8192], "1.01"]
    assert forward["nope posx-dense"][1:] == [f"{(8192**2 - 64**2) / 2**20:,.0f}", "2.00"]
    assert both["nope posx-dense"] == ["oom", "oom", "-"], "no longer length is tried"
    assert ("posx-dense", "nope", "gradient", 8192) not in measured
    assert "oom: posx-dense, rope, gradient, 4096: held more than 8 GiB" in text


def test_points_with_the_same_settings_are_not_measured_again(bench, measured, tmp_path, capsys):
    def run(*more):
        measured.clear()
        bench.main([*WORDS, f"--out={tmp_path}/m.json", *more])
        return list(measured)

    assert len(run()) == 2 * (2 * 3 + 2 + 2), "the dense executor stops at 4096 tokens"
    assert run() == []
    assert {key[3] for key in run("--lengths=4096,16384")} == {16384}
    points = json.loads((tmp_path / "m.json").read_text())["points"]
    assert {point["length"] for point in points} == {64, 4096, 8192, 16384}, "what was there stays"
    assert {(key[0], key[2], key[3]) for key in run("--limit_gib=9")} == {("posx-dense", "gradient", 4096)}
    assert len(run("--heads=4")) == 2 * (2 * 3 + 2 + 2), "other settings, other points"


def test_an_interrupted_run_goes_on(bench, measured, monkeypatch, tmp_path, capsys):
    point, calls = bench.memory.measure_point, []

    def stops(*key_and_options):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(key_and_options[:4])
        return point(*key_and_options)

    monkeypatch.setattr(bench.memory, "measure_point", stops)
    with pytest.raises(KeyboardInterrupt):
        bench.main([*WORDS, f"--out={tmp_path}/m.json"])
    monkeypatch.setattr(bench.memory, "measure_point", point)
    measured.clear()
    bench.main([*WORDS, f"--out={tmp_path}/m.json"])
    assert len(measured) == 20 - 3 and not {*calls} & {*measured}


@pytest.mark.parametrize("words", [["--contestants=posx-dense"], ["--model"]])
def test_points_measure_the_call_they_name(bench, monkeypatch, capsys, words):
    """In this process, where the peak says nothing: that calls of both kinds, and a model's, run."""
    here = lambda function, *arguments, **_: {"status": "ok", "value": function(*arguments)}  # noqa: E731
    monkeypatch.setattr(bench.memory.workers, "fresh", here)
    sizes = "--lengths=72 --heads=2 --head_dim=8 --train_len=16".split()
    sizes.append("--encodings=nope" if words != ["--model"] else "--encodings=learned")
    bench.main(["memory", *sizes, *words])
    out = capsys.readouterr().out
    if words == ["--model"]:
        assert list(cells(out, 2, "evaluation of one window")) == ["learned posx-auto"]
    else:
        assert list(cells(out, 2, "forward + backward")) == ["nope posx-dense"]


def test_fresh_processes_tell_how_they_ended(bench):
    call = bench.memory.workers.fresh
    assert call(math.sqrt, 4) == {"status": "ok", "value": 2.0}
    assert call(math.sqrt, -1)["status"] == "failed" and "ValueError" in call(math.sqrt, -1)["why"]
    assert call(operator.mul, "x", 1 << 62)["status"] == "oom"
    assert call(operator.mul, "x", 1 << 29, limit_bytes=1 << 27)["why"] == "held more than 0.125 GiB"
    assert call(time.sleep, 60, limit_seconds=0.2)["status"] == "timeout"


@pytest.mark.slow
def test_a_fresh_process_does_not_inherit_the_peak_of_this_one(bench):
    np.ones(10**8)  # 800 MB
    assert bench.measure.peak_rss() > 8 * 10**8
    assert bench.memory.workers.fresh(bench.measure.peak_rss)["value"] < 7 * 10**8
