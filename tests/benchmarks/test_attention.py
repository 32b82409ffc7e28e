"""`python -m benchmarks attention`: the table says what the stored numbers say, and a wrong contestant is found."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from tests.benchmarks.tables import cells, middle

SIZES = "--heads=2 --head_dim=8 --train_len=16 --rounds=1 --turn_seconds=0.001 --check_length=24".split()


@pytest.mark.slow
def test_table_and_stored_numbers_agree(bench, tmp_path, capsys):
    words = ["attention", "--encodings=sinusoidal,shaw", "--lengths=16,32", "--dense_limit=16", *SIZES]
    who = "--contestants=posx-dense,jax.nn"
    bench.main([*words, who, f"--out={tmp_path}/a.json"])
    text, report = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())
    assert report["left_out"] == ["sinusoidal"] and report["problems"] == []
    assert {row["encoding"] for row in report["checks"]} == {"nope", "shaw"}
    first, second = report["groups"]
    times = {(r["kind"], r["encoding"], r["contestant"]): r["seconds"][0] for r in first["results"]}
    assert len(times) == 2 * (2 + 1), "jax.nn cannot serve Shaw"
    for kind, name, products in (("forward", "forward", 2), ("gradient", "forward + backward", 6)):
        for line, row in cells(text, 2, f"L = 16, {name}").items():
            encoding, contestant = line.split(" ")
            seconds, pairs = times[kind, encoding, contestant], 2 * 16 * 17 / 2
            dense = times[kind, encoding, "posx-dense" if encoding == "shaw" else "jax.nn"]
            assert middle(row[0]) == pytest.approx(1e3 * seconds, abs=0.0051)
            assert float(row[1]) == pytest.approx(products * 2 * 8 * pairs / seconds / 1e9, abs=0.51)
            assert middle(row[3]) == pytest.approx(dense / seconds, abs=0.0051)
            assert middle(row[4]) == pytest.approx(seconds / times[kind, "nope", contestant], abs=0.0051)
    assert second["results"] == []
    assert sum("longer than --dense_limit" in line for line in text.splitlines()) == 2 * (2 + 2), (
        "tried at every encoding"
    )


def test_ratios_are_formed_per_round(bench):
    """Ratios 2, 0.5 and 0.25: the median is 0.5, where that of the medians would be 0.8."""
    results = [
        {"contestant": name, "encoding": "nope", "kind": "forward", "useful_flops": 8.0, "seconds": seconds}
        for name, seconds in (("posx-blockwise", [5.0, 2.0, 16.0]), ("jax.nn", [10.0, 1.0, 4.0]))
    ]
    ours, _ = bench.attention.summarise({"groups": [{"length": 8, "ceiling": [3.2], "results": results}]})
    assert ours["over_dense"][0] == 0.5 and ours["to_nope"] == (1.0, 1.0, 1.0)
    assert ours["flops"] == 1.6 and ours["share"] == 0.5


def test_tables_repeat_their_last_row_beyond_the_training_length(bench):
    """Where nothing else was asked for: `attend` would refuse positions that have none."""
    from benchmarks.calls import Case

    def beyond(text):
        value = Case(text, length=24, heads=2, head_dim=8, train_len=16).value
        return [part.beyond for part in getattr(value, "parts", (value,)) if hasattr(part, "beyond")]

    assert beyond("tupe") == beyond("learned(num_positions=8)+alibi") == ["clamp"]
    assert beyond("learned(beyond=interpolate)") == ["interpolate"] and beyond("rope+alibi") == []


def served(monkeypatch, bench, contestants):
    """These and no others, for the command and for the processes that it starts."""
    for module in ("benchmarks.attention.contestants", "benchmarks.calls.contestants"):
        monkeypatch.setattr(module, lambda: contestants)


def test_the_fastest_form_of_torch_is_the_bar(bench):
    """Ratios 3, 1.5 and 2 to the fastest."""
    found = {"posx": [1.0, 2.0, 2.0], "torch-eager": [9.0, 9.0, 9.0], "torch-sdpa": [3.0, 3.0, 4.0]}
    results = [
        {"contestant": name, "encoding": "rope", "kind": "forward", "useful_flops": 8.0, "seconds": seconds}
        for name, seconds in found.items()
    ]
    rows = bench.attention.summarise({"groups": [{"length": 4096, "ceiling": [1.0], "results": results}]})
    assert rows[0]["best"] == "torch-sdpa"
    assert cells("\n".join(bench.attention.against_torch(rows)), 4) == {
        "4096 forward rope torch-eager": ["4.50 [4.50, 6.75]"],
        "4096 forward rope torch-sdpa, best": ["2.00 [1.75, 2.50]"],
    }


@pytest.mark.slow
def test_a_wrong_contestant_is_named_and_the_exit_code_says_so(bench, monkeypatch, capsys, tmp_path):
    right = functools.cache(bench.attention.contestants()["posx-dense"])  # compiles once for all

    def spoilt(what, case):
        call = right(case)
        return call._replace(answers=lambda: {k: v * (1.001 if k == what else 1) for k, v in call.answers().items()})

    everyone = {"right": right} | {f"off-{what}": functools.partial(spoilt, what) for what in ("o", "q", "table")}
    served(monkeypatch, bench, everyone)
    with pytest.raises(SystemExit) as stop:
        who = f"--contestants={','.join(everyone)}"
        bench.main(["attention", "--encodings=t5", "--lengths=8", who, *SIZES, f"--out={tmp_path}/a.json"])
    words = [line.split()[1:5] for line in str(stop.value.code).splitlines() if line.startswith("wrong: ")]
    assert words == [
        ["off-o", "with", "nope,", "o"], ["off-q", "with", "nope,", "q"],
        *([f"off-{what}", "with", "t5,", what] for what in ("o", "q", "table")),
    ]  # fmt: skip
    assert len(json.loads((tmp_path / "a.json").read_text())["groups"]) == 1, "what was measured is kept"


def test_missing_and_non_finite_answers_are_wrong(bench):
    from benchmarks.calls import errors

    truth = {"o": np.array([1.0, -2.0]), "q": np.zeros(1)}
    assert errors({"o": np.array([1.0, -1.0]), "q": np.zeros(1)}, truth) == {"o": 0.5, "q": 0.0}
    assert errors({"o": np.array([np.nan, -2.0])}, truth) == {"o": float("inf"), "q": float("inf")}


@pytest.mark.slow
def test_failing_contestant_is_reported_and_others_continue(bench, monkeypatch, capsys):
    def refuses(case):
        raise ValueError("not for me\nat all")

    everyone = {"posx-dense": bench.attention.contestants()["posx-dense"], "fused": refuses}
    served(monkeypatch, bench, everyone)
    bench.main(["attention", "--encodings=nope", "--lengths=8", "--contestants=fused,posx-dense", *SIZES])
    out = capsys.readouterr().out
    for kind in ("forward", "forward + backward"):
        assert f"not measured: fused, nope, 8, {kind}: ValueError: not for me" in out.splitlines()
    assert list(cells(out, 2, "L = 8, forward")) == ["nope posx-dense"]


def checked(bench, case, names):
    """The rows of those that serve the case."""
    from benchmarks.calls import Calls

    calls = Calls()
    return [row for name in names if (row := calls.check(name, dataclasses.asdict(case)))]


#: The others of JAX take maps of q and k as wide as v, logit scales by position, and biases: an encoding for each hook.
SERVED = ("nope", "sinusoidal", "rope", "t5", "alibi", "fire", "ssmax")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["fox", *SERVED])
def test_all_of_jax_agree_with_the_oracle(bench, encoding):
    case = bench.attention.Case(encoding, 40, heads=2, head_dim=16, train_len=16)
    rows = checked(bench, case, ["posx", "posx-dense", "posx-blockwise", "jax.nn", "flax.nnx"])
    assert len(rows) == (5 if encoding in SERVED else 3)
    assert all(row["error"] < bench.attention.TOLERANCE["float32"] for row in rows), rows


@pytest.mark.peers
@pytest.mark.parametrize("encoding", ["nope", "rope", "alibi", "t5"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_gives_the_same_output_and_gradients(bench, encoding, dtype):
    case = bench.attention.Case(encoding, 40, heads=2, head_dim=16, train_len=16, dtype=dtype)
    rows = checked(bench, case, ["torch-sdpa", "torch-sdpa-column", "torch-eager"])
    assert len(rows) == (3 if encoding == "alibi" else 2)
    assert all(row["error"] < bench.attention.TOLERANCE[dtype] for row in rows), rows


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("encoding", ["rope", "alibi", "t5"])
def test_compiled_torch_gives_the_same(bench, encoding):
    """A whole block of keys: with 40 the first flex attention of a process was often wrong, as the bench would tell."""
    case = bench.attention.Case(encoding, 128, heads=2, head_dim=16, train_len=16)
    rows = checked(bench, case, ["torch-sdpa-compiled", "torch-flex"])
    assert {row["contestant"] for row in rows} == {"torch-sdpa-compiled", "torch-flex"}
    assert all(row["error"] < bench.attention.TOLERANCE["float32"] for row in rows), rows


def test_an_accelerator_measures_a_part_before_the_next(bench, monkeypatch):
    """Two encodings are measured at a time. The report grows by parts, and a part that was cut has a table."""
    log, saved = [], []

    class Stub:
        def call(self, method, name, case, *more):
            log.append((method, case["encoding"]))
            return {"check": {"contestant": name, "encoding": case["encoding"], "answer": "o", "error": 0.0},
                    "prepare": {"forward": 0.01}, "turn": 2.0}[method]  # fmt: skip

        def close(self):
            pass

    module = bench.attention
    for place in (module, bench.measure):
        monkeypatch.setattr(place, "is_on_cpu", lambda: False)
    monkeypatch.setattr("posx.machine.platforms.is_on_cpu", lambda: False)
    monkeypatch.setattr(module, "COPIES", 2)
    monkeypatch.setattr(module, "start", lambda names: {name: Stub() for name in names})
    monkeypatch.setattr(bench.measure, "fresh_ceiling", lambda: 1e12)
    words = "attention --encodings=nope,rope,alibi --lengths=8 --contestants=posx --rounds=2".split()
    report = module.run(bench.arguments(words), lambda part: saved.append(json.loads(json.dumps(part))))
    done = [[row["encoding"] for row in part["groups"][0]["results"]] for part in saved]
    assert done[0] != [] and done[3] == ["nope", "rope"] and done[-1] == ["nope", "rope", "alibi"]
    assert max(log.index(("turn", name)) for name in ("nope", "rope")) < log.index(("prepare", "alibi"))
    assert [len(row["seconds"]) for row in report["groups"][0]["results"]] == [2, 2, 2]
    assert len(report["groups"][0]["ceiling"]) == 2 and len(report["checks"]) == 3
    tables = [module.table(measured_at(bench) | part) for part in saved]
    assert all("| nope | posx |" in text or "| rope | posx |" in text for text in tables)


def measured_at(bench):
    return {"load_average": [[0.1], [0.1]], "cpu": "one", "cores": 1, "device": "cpu"}
