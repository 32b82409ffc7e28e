"""Tables of stored rows as Markdown, CSV, JSON and LaTeX: one set of numbers in four forms."""

import csv
import io
import json
import re
import statistics

import pytest

from posx.errors import ConfigError, WorkdirError
from posx.lab import plots
from posx.lab.commands import FORMS
from posx.lab.plots import look
from posx.lab.results.table import read_results
from tests import made_rows, tiny


@pytest.fixture
def runs(tmp_path):
    return made_rows.write(tmp_path, made_rows.sweep_rows(("alibi", "t5", "rope"), seeds=3))


def cells(line, sign):
    return [cell.strip() for cell in line.strip().strip("|").removesuffix(r"\\").split(sign)]


def test_every_form_has_the_same_numbers(runs):
    """Values are those of the rows: the mean over seeds, and the sample standard deviation."""
    stored = read_results(runs)
    found = list(csv.DictReader(io.StringIO(plots.format_table(runs, "csv"))))
    (one,) = [x for x in found if (x["encoding"], x["column"]) == ("alibi", "perplexity at L = 64")]
    values = stored.ppl[(stored.encoding == "alibi") & (stored.eval_len == 64)]
    assert float(one["mean"]) == pytest.approx(statistics.fmean(values), rel=1e-12) and one["seeds"] == "3"
    assert float(one["std_over_seeds"]) == pytest.approx(statistics.stdev(values), rel=1e-12)
    assert (one["num_targets"], one["protocol"], one["train_len"]) == ("262144", "nonoverlapping", "64")
    written = json.loads(plots.format_table(runs, "json"))
    assert [{k: "" if v is None else str(v) for k, v in x.items()} for x in written["numbers"]] == found
    tables = [plots.format_table(runs, form).splitlines() for form in ("markdown", "latex")]
    markdown = [cells(line, "|") for line in tables[0] if line.startswith("| ")][2:]
    latex = [cells(line, "&") for line in tables[1] if line.startswith(r"\texttt")]
    plain = [
        [re.sub(r"\\texttt{(.*)}", r"\1", cell).replace(" $\\pm$ ", " ± ").replace("--", "-") for cell in line]
        for line in latex
    ]
    assert plain == markdown and len(plain) == 3


def test_latex_shows_names_literally(tmp_path):
    made_rows.write(tmp_path, [made_rows.row("rope", 64) | {"encoding": r"my_{x}%&#$^~\b:A"}])
    (line,) = [one for one in plots.format_table(tmp_path, "latex").splitlines() if one.startswith(r"\texttt")]
    assert line.startswith(r"\texttt{my\_\{x\}\%\&\#\$\textasciicircum{}\textasciitilde{}\textbackslash{}b:A} &")


def test_table_command_prints_each_form(capsys, runs, tmp_path):
    assert FORMS == plots.FORMS
    for form in FORMS:
        code, out, err = tiny.call(capsys, "table", f"--workdir={runs}", f"--format={form}")
        assert code == 0 and out == plots.format_table(runs, form), err
    with pytest.raises(ConfigError, match="Did you mean 'latex'"):
        plots.format_table(runs, "latx")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WorkdirError, match="Measure with posx evaluate"):
        plots.format_table(tmp_path / "empty", "csv")


def test_each_number_has_its_own_window_and_unit(runs):
    """The stride of windows side by side is their length, R_k has the unit 1, and targets are those of the length."""
    found = json.loads(plots.format_table(runs, "json"))["numbers"]
    facts = {x["column"]: (x["eval_len"], x["stride"], x["unit"], x["num_targets"]) for x in found}
    assert facts["perplexity at L = 64"] == (64, 64, "per token", 262144)
    assert facts["bits per byte at 64"] == (64, 64, "bits per byte", 262144)
    assert facts["R_4"] == (256, 256, "1", 262144)


def test_pseudo_perplexity_is_per_token(tmp_path):
    made_rows.write(tmp_path, [made_rows.row("rope", 64, protocol="pseudo_perplexity")])
    (number, *_) = json.loads(plots.format_table(tmp_path, "json"))["numbers"]
    assert (number["column"], number["unit"]) == ("pseudo-perplexity at L = 64", "per token")


def test_names_are_text_in_spreadsheets_and_in_latex(tmp_path):
    """A name that looks like a formula has a quote before it in CSV. LaTeX without packages knows no Greek."""
    made_rows.write(tmp_path, [made_rows.row("rope", 64) | {"encoding": "=1+θ:A", "layers": ["=1+θ:A"]}])
    (line, *_) = csv.DictReader(io.StringIO(plots.format_table(tmp_path, "csv")))
    assert line["encoding"] == "'=1+θ:A" and r"\texttt{=1+\textbackslash{}u03b8:A}" in plots.format_table(
        tmp_path, "latex"
    )


def test_shares_never_read_as_all_or_none_unless_they_are():
    """A share of 0.9995 is no 1, and one of 0.000355 no 0. Ratios and entropies keep three decimals."""
    facts = {"protocol": "answers", "stride": None, "num_items": 2000, "attention_items": 8}
    weights = {"zero_weights": 0.000355, "right_weight": 0.999996, "attention_entropy": 0.5}
    exact = {64: 0.9995, 128: 1.0, 256: 0.0}
    rows = [made_rows.row("rope", n, **facts, **weights, exact_match=share) for n, share in exact.items()]
    text = plots.table(made_rows.as_table(rows))
    right, read = [one for one in text.splitlines() if one.startswith("| rope")]
    assert [cell.split(" ")[0] for cell in cells(right, "|")[2:]] == ["0.9995", "1.0000", "0.0000"]
    assert {*cells(read, "|")[2:]} == {"0.999996", "0.0004", "0.500"}


def test_lengths_of_a_million_tokens_have_all_digits(tmp_path):
    million = 1048576
    rows = [made_rows.row("rope", n, train_len=n0, run_id=f"rope-{n0}", ppl=5.0)
            for n0 in (64, million) for n in (64, million, 3 * million)]  # fmt: skip
    made_rows.write(tmp_path, rows)
    text = plots.format_table(tmp_path, "markdown")
    assert "e+0" not in text and "| perplexity at 1048576 |" in text
    with look.style():
        ax = look.figure(3, 3).subplots()
        look.train_line(ax, million)
    assert ax.texts[0].get_text() == "L = 1048576"
    assert look.plain_number(4 / 3) == "1.33333" and look.plain_number(1e6) == "1000000"
