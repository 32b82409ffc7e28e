"""`python -m benchmarks cost`: curves from stored reports, nothing measured."""

import json

import pytest

SHAPE = {"layers": 1, "width": 8, "heads": 1, "dtype": "float32"}


def train_report(length, rates):
    rows = [
        {"library": "posx", "encoding": name, "parameters": 1, "flops_per_token": 1.0, "tokens_per_second": rate}
        for name, rate in rates.items()
    ]
    return {"shape": SHAPE | {"length": length, "batch": 64 // length}, "ceiling": [1.0], "results": rows, "cores": 2}


def attention_report(times):
    groups = [
        {"length": length, "ceiling": [1e9],
         "results": [{"contestant": who, "encoding": name, "kind": "forward", "useful_flops": 1.0, "seconds": seconds}
                     for (who, name), seconds in by_encoding.items()]}
        for length, by_encoding in times.items()
    ]  # fmt: skip
    return {"groups": groups, "case": {"heads": 1, "head_dim": 8, "batch": 1, "dtype": "float32"}, "cores": 2}


@pytest.fixture
def reports():
    """Speeds relative to NoPE, per round: 2, 0.5 and 0.25 at length 16, half at 32."""
    ours = {("posx-blockwise", "nope"): [1.0, 1.0], ("posx-blockwise", "t5"): [4.0, 4.0], ("jax.nn", "t5"): [9.0, 9.0]}
    points = [
        {"contestant": "posx-blockwise", "encoding": "t5", "kind": "gradient", "length": n, "status": "ok",
         "value": n << 20}
        for n in (64, 128, 256)
    ]  # fmt: skip
    train = [
        train_report(32, {"nope": [2.0] * 3, "t5": [1.0] * 3}),
        train_report(16, {"nope": [5.0, 2.0, 16.0], "t5": [10.0, 1.0, 4.0]}),
    ]
    memory = {"points": points, "settings": {"heads": 2, "head_dim": 8, "batch": 1}}
    return train, attention_report({128: ours}), memory


def test_curves_are_the_medians_of_ratios_per_round(bench, reports):
    train, attention, _ = reports
    assert bench.cost.training_curves(train)["t5"] == {
        16: (0.5, pytest.approx(1 / 3), pytest.approx(0.8)), 32: (0.5, 0.5, 0.5),
    }  # fmt: skip
    assert bench.cost.forward_curves(attention)["t5"] == {128: (0.25, 0.25, 0.25)}
    assert list(bench.cost.training_curves(train)["t5"]) == [16, 32], "in order of length"


def test_the_figure_needs_only_files(bench, reports, tmp_path):
    (first, second), attention, memory = reports
    files = {"t1": first, "t2": second, "a": attention, "m": memory}
    for name, report in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    words = [f"--{option}={tmp_path}/{name}.json" for option, name in (("attention", "a"), ("memory", "m"))]
    both = f"--train={tmp_path}/t1.json,{tmp_path}/t2.json"
    bench.main(["cost", both, *words, f"--figure={tmp_path}/new/cost.png"])
    assert (tmp_path / "new" / "cost.png").stat().st_size > 1000
    second["shape"]["layers"] = 2
    (tmp_path / "t2.json").write_text(json.dumps(second))
    with pytest.raises(SystemExit, match="different models"):
        bench.main(["cost", both, *words, f"--figure={tmp_path}/cost.png"])
