"""`bench.py train`: the table says what the stored numbers say."""

import json
import re
import sys

import pytest

from tests.benches.tables import cells, middle


def test_table_and_stored_numbers_agree(bench, tmp_path, capsys):
    words = "train --shape=tiny --posx_only --encodings=nope,alibi --rounds=1 --steps=1".split()
    bench.main([*words, f"--out={tmp_path}/new/train.json", f"--figure={tmp_path}/train.png"])
    shown = cells(capsys.readouterr().out)
    report = json.loads((tmp_path / "new" / "train.json").read_text())
    stored = {row["encoding"]: row for row in report["results"]}
    assert list(stored) == ["nope", "alibi"]
    (nope,), (alibi,), (ceiling,) = (
        stored["nope"]["tokens_per_second"], stored["alibi"]["tokens_per_second"], report["ceiling"],
    )  # fmt: skip
    assert min(nope, alibi, ceiling) > 0
    for name, rate in (("nope", nope), ("alibi", alibi)):
        row = shown[name]
        assert middle(row[0]) == round(rate)
        assert float(row[1]) == round(rate * stored[name]["flops_per_token"] / ceiling, 2)
        assert middle(row[2]) == pytest.approx(nope / rate, abs=0.0051)
        assert row[3:] == ["-", "-"]
        assert len(stored[name]["losses"]) == 1 + 2 + 1 + 1, "first, settling, untimed and timed steps"
    assert report["versions"]["jax"] and report["cores"] >= 1 and len(report["load_average"]) == 2
    assert (tmp_path / "train.png").stat().st_size > 1000


def test_ratios_are_formed_per_round(bench):
    """Ratios 2, 0.5 and 0.25: the median is 0.5, where that of the medians would be 0.8. Under autocast 1, 1 and 4."""
    autocast = [10.0, 1.0, 1.0]
    sides = {"posx": [10.0, 1.0, 4.0], "x-transformers": [5.0, 2.0, 16.0], "x-transformers, autocast": autocast}
    results = [
        {"library": name, "encoding": "rope", "parameters": 1, "flops_per_token": 2.0, "tokens_per_second": rates}
        for name, rates in sides.items()
    ]
    (row,) = bench.train.summarise({"results": results, "ceiling": [16.0]})
    assert {name: peer["ratio"][0] for name, peer in row["peers"].items()} == {
        "x-transformers": 0.5, "x-transformers, autocast": 1.0,
    }  # fmt: skip
    assert row["share"] == 0.5 and row["step_time_to_nope"] is None


def test_every_contestant_has_one_turn_a_round_in_changing_order(bench, capsys):
    log, turns = [], [lambda n=n: log.append(n) or float(n) for n in range(3)]
    assert bench.measure.interleave(turns, 3, lambda: log.append("ceiling")) == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    rounds = " ".join(map(str, log)).split("ceiling")[1:]
    assert [sorted(one.split()) for one in rounds] == [["0", "1", "2"]] * 3
    assert len({one.strip() for one in rounds}) == 3


def test_without_the_peers_extra_posx_runs_alone(bench, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    bench.main("train --shape=tiny --encodings=rope --rounds=1 --steps=1".split())
    out = capsys.readouterr().out
    assert len(re.findall("^posx alone: torch is missing", out, re.MULTILINE)) == 1
    assert cells(out)["rope"][3:] == ["-", "-"]


@pytest.mark.parametrize("words", [
    "train --encodings=rope,ropes", "train --rounds=0", "train --steps=-1", "trian", "attention --contestants=posx",
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
    sides += [train.peer_contestant(encoding, shape, batches, False, autocast) for autocast in (False, True)]
    assert len({side.parameters for side in sides}) == 1
    for side in sides:
        side.run(60)
        assert float(side.losses[-1]) < float(side.losses[1]) - 0.5


def test_another_length_keeps_the_tokens_and_bfloat16_reaches_the_model(bench, monkeypatch, capsys, tmp_path):
    out = tmp_path / "train.json"
    monkeypatch.setattr(bench.train, "contestants", lambda options, shape: [])
    words = "train --shape=tiny --length=8 --dtype=bfloat16 --posx_only --encodings=t5 --rounds=1 --steps=1".split()
    bench.main([*words, f"--out={out}"])
    shape = json.loads(out.read_text())["shape"]
    assert (shape["length"], shape["batch"], shape["dtype"]) == (8, 4, "bfloat16")
    assert bench.train.Shape(**shape).config.dtype == "bfloat16"
    assert "4 windows of 8, 32 tokens a step, posx in bfloat16" in capsys.readouterr().out
