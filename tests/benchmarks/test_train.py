"""`python -m benchmarks train`: the table says what the stored numbers say."""

import dataclasses
import json
import re

import pytest

from tests.benchmarks.tables import cells, middle


@pytest.mark.slow
def test_tables_and_stored_numbers_agree(bench, tmp_path, capsys):
    words = "train --shape=tiny --contestants=posx,one_device --rounds=1 --steps=1".split()
    words.append("--encodings=nope, learned( num_positions = 99 )+alibi")
    bench.main([*words, f"--out={tmp_path}/new/train.json"])
    text, report = capsys.readouterr().out, json.loads((tmp_path / "new" / "train.json").read_text())
    names = ("nope", "learned(num_positions=99)+alibi")
    shown, stored = cells(text), {(row["library"], row["encoding"]): row for row in report["results"]}
    assert list(stored) == [(who, name) for name in names for who in ("posx", "posx, one device")]
    rates, (ceiling,) = {key: row["tokens_per_second"][0] for key, row in stored.items()}, report["ceiling"]
    assert min(*rates.values(), ceiling) > 0
    for name in names:
        rate, row = rates["posx", name], shown[name]
        assert middle(row[0]) == round(rate)
        assert float(row[1]) == round(rate * stored["posx", name]["flops_per_token"] / ceiling, 2)
        assert middle(row[2]) == pytest.approx(rates["posx", "nope"] / rate, abs=0.0051)
        assert row[3:] == ["-"] * 3, "no rival"
        assert len(stored["posx", name]["losses"]) == 1 + 2 + 1 + 1, "first, settling, untimed and timed steps"
        assert f"| {name} | {rates['posx, one device', name]:,.0f} [" in text
    assert report["versions"]["jax"] and report["cores"] >= 1 and len(report["load_average"]) == 2


def peer():
    from benchmarks import train_peer

    return train_peer


def made_up(rates):
    """A report of one shape: {(library, encoding): tokens/s per round}."""
    results = [
        {"library": who, "encoding": name, "parameters": 1, "flops_per_token": 2.0, "tokens_per_second": found,
         "losses": [5.0]}
        for (who, name), found in rates.items()
    ]  # fmt: skip
    shape = {"layers": 4, "width": 128, "heads": 4, "batch": 2, "length": 2048, "dtype": "float32"}
    return {"results": results, "ceiling": [16.0], "shape": shape, "steps": 1, "cores": 4, "cpu": "one",
            "load_average": [[0.0]], "baseline": "3891e0e"}  # fmt: skip


def test_ratios_are_per_round_over_the_fastest_rival(bench):
    """Ratios 2, 0.5 and 0.25: the median is 0.5, where that of the medians would be 0.8."""
    report = made_up({
        ("posx", "rope"): [10.0, 1.0, 4.0], ("x-transformers", "rope"): [1.0, 1.0, 1.0],
        ("x-transformers, flash compiled", "rope"): [5.0, 2.0, 16.0],
        ("posx, pinned processes", "rope"): [20.0, 20.0, 20.0],
    })  # fmt: skip
    (row,) = bench.train.summarise(report)
    assert row["best"] == "x-transformers, flash compiled", "the fastest pinned processes are no rival"
    assert {name: other["ratio"][0] for name, other in row["others"].items()} == {
        "x-transformers": 4.0, "x-transformers, flash compiled": 0.5, "posx, pinned processes": 0.2,
    }  # fmt: skip
    assert row["share"] == 0.5 and row["step_time_to_nope"] is None
    assert cells(bench.train.table(report))["rope"][3:] == ["flash compiled", "5 [4, 10]", "0.50 [0.38, 1.25]"]


def test_who_fails_is_named_and_processes_add_up(bench, monkeypatch, capsys):
    """Two pinned processes at 3 tokens/s each make 6; one form refuses, the others go on."""

    class Made:
        def __init__(self, shape):
            pass

        def add(self, form, encoding):
            if form == "flash":
                raise AssertionError("not with me\nat all")
            return {"parameters": 7, "flops_per_token": 1.0}

        def turn(self, form, encoding, steps):
            return 3.0

        def losses(self, form, encoding):
            return [5.0]

    monkeypatch.setattr("benchmarks.train_worker.Training", Made)
    monkeypatch.setattr(bench.measure, "core_list", lambda: [0, 1])
    monkeypatch.setattr(bench.measure, "version", lambda name: "1")
    bench.main("train --shape=tiny --contestants=posx,pinned,eager,flash --encodings=rope --rounds=1".split())
    out = capsys.readouterr().out
    assert cells(out)["rope"][3:6] == ["x-transformers", "3 [3, 3]", "1.00 [1.00, 1.00]"]
    assert "| rope | 6 [6, 6] | 0.50 [0.50, 0.50] |" in out
    assert "failed: x-transformers, flash, rope: AssertionError: not with me" in out.splitlines()


def test_every_contestant_has_one_turn_a_round_in_changing_order(bench, capsys):
    log, turns = [], [lambda n=n: log.append(n) or float(n) for n in range(3)]
    assert bench.measure.interleave(turns, 3, lambda: log.append("ceiling")) == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    rounds = " ".join(map(str, log)).split("ceiling")[1:]
    assert [sorted(one.split()) for one in rounds] == [["0", "1", "2"]] * 3
    assert len({one.strip() for one in rounds}) == 3


def test_without_the_peers_extra_posx_runs_alone(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.measure, "version", lambda name: None)
    words = bench.arguments("train --encodings=rope".split())
    assert bench.train.chosen(words) == ["posx", "one_device", "pinned"]
    assert len(re.findall("^posx alone: torch is missing", capsys.readouterr().out, re.MULTILINE)) == 1


def test_an_unknown_baseline_is_one_line(bench):
    with pytest.raises(SystemExit, match=r"^--baseline=no-such-commit cannot be checked out: [^\n]+$"):
        bench.main("train --shape=tiny --contestants=baseline --baseline=no-such-commit --encodings=rope".split())


@pytest.mark.parametrize("words", [
    "train --encodings=rope,ropes", "train --rounds=0", "train --contestants=posx,peers", "train --cores=0",
    "train --steps=-1", "trian", "attention --contestants=jax", "sweep --config=configs/quick.py", "sweep --jobs=0",
    "memory --lengths=64,x", "compile --executors=dens", "cost --train=a.json --attention=b.json",
])  # fmt: skip
def test_bad_words_stop_before_anything_runs(bench, words, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(words.split())
    assert stop.value.code == 2 and "error:" in capsys.readouterr().err


@pytest.mark.peers
@pytest.mark.parametrize("encoding", ["nope", "learned", "t5", "rope", "alibi"])
def test_both_sides_have_equally_many_parameters_and_learn(bench, encoding):
    """x-transformers' scaled sinusoid has one weight more; all else is equal."""
    train, shape = bench.train, bench.train.SHAPES["tiny"]
    batches = train.text_batches(shape, count=2)
    sides = [train.posx_contestant(encoding, shape, batches)]
    for dtype in ("float32", "bfloat16"):
        rival = dataclasses.replace(shape, dtype=dtype)
        forms = ("eager",) if encoding == "t5" else ("eager", "flash")
        sides += [peer().peer_contestant(encoding, rival, batches, form) for form in forms]
    assert len({side.parameters for side in sides}) == 1
    for side in sides:
        side.run(60)
        assert float(side.losses[-1]) < float(side.losses[1]) - 0.5


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("form", ["eager", "flash"])
def test_a_compiled_rival_computes_what_the_eager_one_does(bench, form):
    shape = bench.train.SHAPES["tiny"]
    batches = bench.train.text_batches(shape, count=2)
    words = (form, "compiled" if form == "eager" else "flash_compiled")
    eager, compiled = (peer().peer_contestant("rope", shape, batches, word) for word in words)
    for side in (eager, compiled):
        side.run(10)
    assert [float(x) for x in compiled.losses] == pytest.approx([float(x) for x in eager.losses], abs=1e-4)


def test_length_keeps_tokens_and_bfloat16_reaches_the_model(bench, monkeypatch, capsys, tmp_path):
    out = tmp_path / "train.json"
    monkeypatch.setattr(bench.train, "sides", lambda *_: ([], []))
    words = (
        "train --shape=tiny --length=8 --dtype=bfloat16 --contestants=posx --encodings=t5 --rounds=1 --steps=1".split()
    )
    bench.main([*words, f"--out={out}"])
    shape = json.loads(out.read_text())["shape"]
    assert (shape["length"], shape["batch"], shape["dtype"]) == (8, 4, "bfloat16")
    assert bench.train.Shape(**shape).config.dtype == "bfloat16"
    assert "4 windows of 8, 32 tokens a step, bfloat16" in capsys.readouterr().out
