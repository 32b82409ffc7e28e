"""`bench.py attention`: the table says what the stored numbers say, and a wrong contestant is found."""

import json

import numpy as np
import pytest

from tests.benches.tables import cells, middle

SIZES = "--heads=2 --head_dim=8 --train_len=16 --rounds=1 --turn_seconds=0.001 --check_length=24".split()


def test_table_and_stored_numbers_agree(bench, tmp_path, capsys):
    words = ["attention", "--encodings=alibi,sinusoidal,shaw", "--lengths=16,32", "--dense_limit=16", *SIZES]
    who = "--contestants=posx-blockwise,posx-dense,jax.nn,flax.nnx"
    bench.main([*words, who, f"--out={tmp_path}/a.json", f"--figure={tmp_path}/a.png"])
    text, report = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())
    assert report["left_out"] == ["sinusoidal"] and report["problems"] == []
    assert {row["encoding"] for row in report["checks"]} == {"nope", "alibi", "shaw"}
    first, second = report["groups"]
    times = {(r["kind"], r["encoding"], r["contestant"]): r["seconds"][0] for r in first["results"]}
    assert len(times) == 2 * (4 + 4 + 2), "jax.nn and flax.nnx cannot serve Shaw"
    for kind, name, products in (("forward", "forward", 2), ("gradient", "forward + backward", 6)):
        for line, row in cells(text, 2, f"L = 16, {name}").items():
            encoding, contestant = line.split(" ")
            seconds, pairs = times[kind, encoding, contestant], 2 * 16 * 17 / 2
            dense = times[kind, encoding, "posx-dense" if encoding == "shaw" else "jax.nn"]
            assert middle(row[0]) == pytest.approx(1e3 * seconds, abs=0.0051)
            assert float(row[1]) == pytest.approx(products * 2 * 8 * pairs / seconds / 1e9, abs=0.51)
            assert middle(row[3]) == pytest.approx(dense / seconds, abs=0.0051)
            assert middle(row[4]) == pytest.approx(seconds / times[kind, "nope", contestant], abs=0.0051)
    assert {r["contestant"] for r in second["results"]} == {"posx-blockwise"}
    assert sum("longer than --dense_limit" in line for line in text.splitlines()) == 10
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_ratios_are_formed_per_round(bench):
    """Ratios 2, 0.5 and 0.25: the median is 0.5, where that of the medians would be 0.8."""
    results = [
        {"contestant": name, "encoding": "nope", "kind": "forward", "useful_flops": 8.0, "seconds": seconds}
        for name, seconds in (("posx-blockwise", [5.0, 2.0, 16.0]), ("jax.nn", [10.0, 1.0, 4.0]))
    ]
    ours, _ = bench.attention.summarise({"groups": [{"length": 8, "ceiling": [3.2], "results": results}]})
    assert ours["over_dense"][0] == 0.5 and ours["to_nope"] == (1.0, 1.0, 1.0)
    assert ours["flops"] == 1.6 and ours["share"] == 0.5


@pytest.mark.parametrize("spoilt", ["o", "q", "table"])
def test_a_wrong_contestant_is_named_and_the_exit_code_says_so(bench, monkeypatch, capsys, tmp_path, spoilt):
    right = bench.attention.contestants()["posx-dense"]

    def wrong(case):
        call = right(case)
        return call._replace(answers=lambda: {k: v * (1.001 if k == spoilt else 1) for k, v in call.answers().items()})

    monkeypatch.setattr(bench.attention, "contestants", lambda: {"posx-dense": right, "spoilt": wrong})
    with pytest.raises(SystemExit) as stop:
        out = f"--out={tmp_path}/a.json"
        bench.main(["attention", "--encodings=t5", "--lengths=8", "--contestants=posx-dense,spoilt", *SIZES, out])
    problems = str(stop.value.code).split()
    assert problems.count("wrong:") == (1 if spoilt == "table" else 2), "NoPE has no table"
    assert "posx-dense" not in problems and f"t5, {spoilt} is off" in str(stop.value.code)
    assert len(json.loads((tmp_path / "a.json").read_text())["groups"]) == 1, "what was measured is kept"


def test_missing_and_non_finite_answers_are_wrong(bench):
    errors, truth = bench.attention.errors, {"o": np.array([1.0, -2.0]), "q": np.zeros(1)}
    assert errors({"o": np.array([1.0, -1.0]), "q": np.zeros(1)}, truth) == {"o": 0.5, "q": 0.0}
    assert errors({"o": np.array([np.nan, -2.0])}, truth) == {"o": float("inf"), "q": float("inf")}


def test_a_contestant_that_fails_is_reported_and_the_others_go_on(bench, monkeypatch, capsys):
    def refuses(case):
        raise ValueError("not for me\nat all")

    everyone = {"posx-dense": bench.attention.contestants()["posx-dense"], "fused": refuses}
    monkeypatch.setattr(bench.attention, "contestants", lambda: everyone)
    bench.main(["attention", "--encodings=nope", "--lengths=8", "--contestants=fused,posx-dense", *SIZES])
    out = capsys.readouterr().out
    assert "not measured: fused, nope, 8: ValueError: not for me\n" in out + "\n"
    assert list(cells(out, 2, "L = 8, forward")) == ["nope posx-dense"]


@pytest.mark.peers
@pytest.mark.parametrize("encoding", ["nope", "rope", "alibi", "t5"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_gives_the_same_output_and_gradients(bench, encoding, dtype):
    case = bench.attention.Case(encoding, 40, heads=2, head_dim=16, train_len=16, dtype=dtype)
    rows = bench.attention.check(case, ["torch-sdpa", "torch-sdpa-column", "torch-eager"])
    assert len(rows) == (3 if encoding == "alibi" else 2)
    assert all(row["error"] < bench.attention.TOLERANCE[dtype] for row in rows), rows
