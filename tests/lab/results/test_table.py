"""The table of results: its columns, the rows that it uses, and why it leaves others out."""

from pathlib import Path

import posx
from posx.lab.results.columns import COLUMNS, plain_rows
from posx.lab.results.table import build_results
from tests.made_rows import config, logged, row, start, write

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_on_results_lists_every_column():
    page = (DOCS / "guides" / "results.md").read_text()
    listed = [line for line in page.splitlines() if line.startswith("| `")]
    assert listed == [f"| `{name}` | {c.dtype} | {c.unit or '-'} | {c.meaning} |" for name, c in COLUMNS.items()]


def test_every_column_has_its_dtype_whatever_is_missing(tmp_path):
    made = [row("rope", 64), {**row("alibi", 64), "stride": 64, "ppl": None, "nll": None, "status": "oom"}]
    del made[0]["num_separators"]
    for table in (posx.read_results(write(tmp_path, made)), posx.read_results([tmp_path]), build_results({})):
        dtypes = {name: str(table[name].dtype).replace("object", "text") for name in COLUMNS}
        assert dtypes == {name: column.dtype.replace("object", "text") for name, column in COLUMNS.items()}
    plain = {one["method"]: one for one in plain_rows(posx.read_results(tmp_path))}
    assert plain["rope"]["num_separators"] is None and plain["alibi"]["ppl"] is None and plain["rope"]["env"] is None


def test_left_out_rows_stay_in_the_table_with_their_reason(tmp_path):
    own = [row("rope", n, step=20, data_digest="a") for n in (64, 128)]
    early = row("rope", 64, step=10, data_digest="a")
    other = row("rope", 64, step=20, data_digest="b", targets="b", own_text=False)
    table = posx.read_results(write(tmp_path, [early, other, *own]))
    reasons = dict(table.groupby("left_out").size())
    assert reasons == {"": 2, "measured on other text (not comparable)": 1, "measured earlier in training": 1}
    assert set(table[table.left_out == ""].step) == {20} and set(table.scored_text) == {"a"}


def test_a_repeated_measurement_counts_once_with_its_last_value(tmp_path):
    made = [row("rope", 64, ppl=9.0), row("rope", 128, ppl=8.0), row("rope", 64, ppl=4.0)]
    assert posx.read_results(write(tmp_path, made)).ppl.tolist() == [4.0, 8.0]


def test_of_a_task_the_row_of_most_items_counts():
    known = {"protocol": "answers", "stride": None, "targets": "items", "own_text": True}
    made = [row("rope", 64, **known, num_items=n, exact_match=0.5) for n in (20, 2000, 20, 100)]
    table = build_results({"run": made})
    used = {n: not why for n, why in zip(table.num_items, table.left_out, strict=True)}
    assert used == {20: False, 100: False, 2000: True} and "of fewer items than are used" in {*table.left_out}


def test_a_run_that_ended_with_nan_is_a_row_without_values(tmp_path):
    start(tmp_path / "bad", config("t5"))
    (tmp_path / "bad" / "metrics.jsonl").write_text(logged(5.5) + logged("nan", step=3))
    (found,) = plain_rows(posx.read_results(tmp_path))
    assert (found["run"], found["status"], found["step"], found["ppl"]) == ("bad", "diverged", 3, None)


def test_an_infinite_perplexity_is_a_number():
    made = row("rope", 64) | {"nll": 800.0, "ppl": "inf", "bpb": None}
    assert build_results({"run": [made]}).ppl.tolist() == [float("inf")]
