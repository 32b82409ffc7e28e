"""A row of results agrees with itself: each disagreement is named, even if its checksum was renewed."""

import math

import pytest

from posx.lab.files.checksums import checksum_problem, with_checksum
from posx.lab.files.rows import POSITION_ROUNDING, log_problem, read_row_file, row_problem
from tests.made_rows import agreeing, as_lines, logged, position_row, row

SUMS = [300.0, 340.0, 320.0, 70.0]
BLOCKS = {"num_targets": 800, "num_bytes": 400, "num_separators": 0, "block_len": 256, "block_nll": SUMS}
WHOLE = agreeing(row("rope", 64, **BLOCKS))
ENDS = {"nll_interval": [WHOLE["nll"] - 0.25, WHOLE["nll"] + 0.25]}
BY_POSITION = agreeing(position_row("rope"))
DISTANCES = {"distance_edges": [0, 1, 2, 4], "distance_accuracy": [1.0, None, 0.5], "distance_targets": [3, 0, 797]}
BY_DISTANCE = WHOLE | DISTANCES


@pytest.mark.parametrize("made", [WHOLE, WHOLE | ENDS, BY_POSITION, BY_DISTANCE, row("learned", 128)])
def test_whole_rows_have_no_problem(made):
    assert row_problem(with_checksum(made)) == ""
    assert row_problem(made) == "it has no checksum"
    assert "does not match its checksum" in row_problem(with_checksum(made) | {"seed": 7})


@pytest.mark.parametrize(
    ("made", "changes", "problem"),
    [
        (WHOLE, {"ppl": WHOLE["ppl"] + 100}, f"ppl is {WHOLE['ppl'] + 100:.6g}, but exp(nll) is {WHOLE['ppl']:.6g}"),
        (WHOLE, {"ppl": None}, "ppl is None, but exp(nll)"),
        (WHOLE, {"ppl": "inf"}, "ppl is inf, but exp(nll)"),
        (WHOLE, {"nll": 2.0, "ppl": math.exp(2.0)}, "bpb is"),
        (WHOLE, {"nll": 2.0, "ppl": math.exp(2.0), "bpb": 4 / math.log(2)}, "but the mean of block_nll is 1.2875"),
        (WHOLE, {"bpb": 1.01 * WHOLE["bpb"]}, "over 400 bytes gives"),
        (WHOLE, {"bpb": 1.01 * WHOLE["bpb"], "num_separators": 5}, "gives at most"),
        (WHOLE, {"block_nll": SUMS[:3]}, "block_nll has 3 sums, but 800 targets are 4 blocks of 256"),
        (WHOLE, {"block_nll": [*SUMS[:3], 71.0]}, "but the mean of block_nll is 1.28875"),
        (WHOLE, {"block_nll": "many"}, "block_nll is 'many'"),
        (WHOLE, {"num_targets": 1024}, "bpb is"),
        (WHOLE | ENDS, {"nll_interval": [1.0, 1.5]}, "the middle of nll_interval is 1.25"),
        (WHOLE, {"status": "fine"}, "status is 'fine', not one of ok"),
        (WHOLE, {"status": "oom"}, "status is 'oom', but it has nll"),
        (WHOLE, {"nll": None, "ppl": None, "bpb": None, "block_nll": None}, "status is 'ok', but nll is 'None'"),
        (WHOLE, {"num_stretches": 900}, "num_stretches is 900, but num_targets is 800"),
        (WHOLE, {"eval_len": True}, "eval_len is 'True'"),
        (WHOLE, {"schema_version": 4}, "a row of version 4"),
        (BY_POSITION, {"position_targets": BY_POSITION["position_targets"][1:]}, "bins, position_edges"),
        (BY_POSITION, {"eval_len": 512}, "position_edges go from 0 to 1024, but the window is 512"),
        (BY_POSITION, {"num_targets": 9, "bpb": None}, "position_targets are"),
        (BY_DISTANCE, {"distance_targets": [3, 0]}, "distance_accuracy has 3 bins"),
        (BY_DISTANCE, {"distance_edges": [0, 1, 1, 4]}, "distance_edges are [0, 1, 1, 4], which do not rise"),
        (BY_DISTANCE, {"distance_targets": [3, 0, 798]}, "distance_targets are 801, but num_targets is 800"),
        (BY_DISTANCE, {"distance_accuracy": [1.0, 0.0, 0.5]}, "distance_accuracy is [1.0, 0.0, 0.5]"),
        (BY_POSITION, {"position_nll": [BY_POSITION["position_nll"][0] + 1, *BY_POSITION["position_nll"][1:]]}, "nll"),
    ],
)
def test_disagreements_of_a_row_are_named(made, changes, problem):
    assert problem in row_problem(with_checksum(made | changes))


def test_rounded_sums_agree_with_the_mean():
    """Sums over blocks are stored to three decimals, losses by position to five."""
    shift = 0.0005 * len(SUMS) / 800
    assert (
        row_problem(with_checksum(agreeing(WHOLE) | {"nll": WHOLE["nll"]} | {"block_nll": [s + 5e-4 for s in SUMS]}))
        == ""
    )
    nll = BY_POSITION["nll"] + POSITION_ROUNDING / 2
    assert (
        shift < 1e-5 and row_problem(with_checksum(BY_POSITION | {"nll": nll, "ppl": math.exp(nll), "bpb": None})) == ""
    )


def test_readers_leave_out_rows_that_are_not_whole(tmp_path):
    path, said = tmp_path / "eval.jsonl", list[str]()
    first, second = as_lines([row("rope", 64)]), as_lines([row("rope", 128)])
    edited = second.replace('"seed": 0', '"seed": 1')
    path.write_text(first + edited + "\0" * 40 + "\n" + first + second + second[:50])
    assert [one["eval_len"] for one in read_row_file(path, said.append)] == [64, 128]
    assert [text.removeprefix(f"{path}, ") for text in said] == [
        "line 2: it does not match its checksum, so it was edited or damaged",
        "line 3: it is cut, or no object of JSON",
        "line 4: it repeats line 1",
        "line 6: it is cut, or no object of JSON",
    ]
    said.clear()
    assert len(read_row_file(path, said.append, run="abc")) == 2 and len(said) == 4, "these rows name no run"
    path.write_text(as_lines([row("rope", 64, hash="def"), row("rope", 128, hash="abc")]))
    assert [one["hash"] for one in read_row_file(path, said.append, run="abc")] == ["abc"]
    assert said[-1].endswith("line 1: it is of the run def, but config.json is of abc")


def test_rows_of_a_log_agree_with_themselves(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(logged(2.0, ppl=math.exp(2.0)) + logged(2.0, ppl=8.0, step=1) + logged(2.0, step=2)[:-9] + "\n")
    said = list[str]()
    assert [one["step"] for one in read_row_file(path, said.append, log_problem)] == [0]
    assert [text.rpartition(": ")[2] for text in said] == [
        "ppl is 8, but exp(loss) is 7.38906", "it is cut, or no object of JSON"
    ]  # fmt: skip


def test_a_checksum_is_of_the_values_and_not_of_their_order():
    made = with_checksum({"a": [1, 2.5, float("inf")], "b": {"c": None}})
    assert made["a"][2] == "inf" and checksum_problem(dict(reversed(made.items()))) == ""
    assert checksum_problem(made | {"a": [1, 2.5]}) and checksum_problem(made | {"new": 1})
    assert with_checksum(made) == made
