"""The file of `posx report`: its numbers, its policy, and the texts of users in it."""

import base64
import hashlib
import html
import json
import math
import re

import numpy as np
import pytest

from posx.lab import plots
from posx.lab.config import base_config, run_config
from posx.lab.files.checksums import with_checksum
from posx.lab.report import gallery, page
from posx.lab.report.content import content
from posx.lab.results.table import read_results
from tests import tiny
from tests.lab.commands import refused
from tests.lab.report.pages import put
from tests.made_rows import UNDISTURBED, as_lines

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """The page without Vega-Lite, which the extra `report` brings."""
    monkeypatch.setattr(page, "_library", lambda: "window.vegaEmbed = async () => {};")


def written(capsys, tmp_path, *folders):
    out = tmp_path / "report.html"
    code, said, err = tiny.call(capsys, "report", *map(str, folders), f"--out={out}")
    assert code == 0, err
    text = out.read_text("utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return text, json.loads(data), said


def test_report_holds_the_numbers_of_the_rows(capsys, tmp_path):
    for seed in range(2):
        put(tmp_path / "sweep", "rope", seed)
        put(tmp_path / "sweep", "alibi", seed)
    _, data, said = written(capsys, tmp_path, tmp_path / "sweep")
    assert "4 runs" in said
    assert [curve["label"] for curve in data["curves"]] == ["alibi", "rope"]
    (panel,) = data["panels"]
    point = next(p for p in panel["points"] if (p["measure"], p["curve"], p["x"]) == ("ppl", 1, 128))
    stored = [json.loads(line) for path in sorted(tmp_path.glob("sweep/rope*")) for line in open(path / "eval.jsonl")]
    values = [one["ppl"] for one in stored if one["eval_len"] == 128 and one["protocol"] == "nonoverlapping"]
    assert sorted(point["values"]) == sorted(values) and point["mean"] == pytest.approx(sum(values) / 2)
    table, names = panel["table"], [curve["label"] for curve in data["curves"]]
    lines = zip(table["curves"], table["body"], strict=True)
    cells = {names[n]: dict(zip(table["head"][1:], line, strict=True)) for n, line in lines}
    far, near = ([r["ppl"] for r in stored if r["eval_len"] == n and "ppl" in r] for n in (128, 64))
    ratios = [a / b for a, b in zip(far, near, strict=True)]
    assert cells["rope"]["R_2"]["value"] == pytest.approx(sum(ratios) / 2) and cells["rope"]["seeds"]["text"] == "2"
    assert cells["rope"]["R_2"]["text"] in plots.table(read_results(tmp_path / "sweep"))
    assert {name: line["horizon / L"]["text"] for name, line in cells.items()} == {"alibi": ">= 4", "rope": "1"}
    places = [(None, 64), (None, 128), (None, 256), (2, 128), (4, 256)]
    assert [(*v[:2], *data["places"][v[2]][3:1:-1]) for v in data["verdicts"]] == [(0, 1, *place) for place in places]
    at_train = data["verdicts"][0]
    for low, high, *_ in at_train[4:6]:
        assert low < at_train[3] < high and at_train[3] == pytest.approx(4.54 / 4.35, rel=0.05)
    assert (at_train[5][3], data["families"]) == ("too few seeds (2)", [5, 0])
    assert len(data["rows"]) == 2 * len(stored) and data["columns"].index("ppl") > 0
    assert data["training"][0]["steps"][-1] == pytest.approx([50, 2 + math.exp(-50 / 9), 204800, 25.0])
    assert data["positions"][0]["points"]


@pytest.mark.slow
def test_copies_of_the_page_are_those_of_posx_table(capsys, tmp_path):
    for seed in range(2):
        put(tmp_path / "sweep", "rope", seed)
        put(tmp_path / "sweep", "alibi", seed)
    _, data, _ = written(capsys, tmp_path, tmp_path / "sweep")
    assert data["copies"] == {form: plots.format_table(tmp_path / "sweep", form) for form in ("csv", "json", "latex")}
    (convergence,) = data["convergence"]
    steps = [[cell["text"] for cell in line[2:]] for line in convergence["body"]]
    assert convergence["head"][3] == "steps to the loss of rope" and steps == 2 * [["2.004", "50", "25"]]


def test_defaults_are_no_differences(tmp_path):
    """Neither the default text, named with the version of Python, nor a size that follows from another."""
    changed = base_config("rope")
    changed.model.model_dim, changed.model.num_layers, changed.train.learning_rate = 64, 2, 0.5
    changed.train.positions = "offset(longest=99)"
    for name, config in (("plain", base_config("rope")), ("changed", changed)):
        settings = run_config(config).settings
        named = {"data_source": "stdlib (Python 3.11.7)", "tokenizer": "bytes"}
        put(tmp_path, "rope", name=name, settings=settings, **named)
    found = {run: line for run, line in zip(("plain", "changed"), content([tmp_path])["settings"], strict=True)}
    assert found["plain"] == {}
    assert found["changed"] == {
        "model.model_dim": "64", "model.num_layers": "2", "train.learning_rate": "0.5",
        "train.positions": "offset(longest=99)",
    }  # fmt: skip


def test_an_encoding_without_a_picture_says_why(tmp_path):
    path = put(tmp_path, "rope", name="mine")
    (path / "config.json").write_text(json.dumps({"encoding": {"name": "no_module:Mine"}}))
    put(tmp_path, "alibi")
    data = content([tmp_path])
    (why,) = data["no_pictures"]
    assert data["pictures"] == [] and why.startswith("No picture of mine: ") and str(tmp_path) not in why


def test_texts_of_users_are_data(capsys, tmp_path):
    """No name of a run or a folder becomes an element or ends the script that holds it."""
    folder = tmp_path / "a&b"
    put(folder, "rope", name="<script><b>")
    put(folder, "rope", 1, name="one", encoding=EVIL, layers=[EVIL])
    text, data, _ = written(capsys, tmp_path, folder)
    assert "<img" not in text and "<script><b>" not in text and "<title>posx: a&amp;b</title>" in text
    assert {run for curve in data["curves"] for run in curve["runs"]} == {"<script><b>", "one"}


def test_scripts_run_by_their_digests_alone(capsys, tmp_path):
    put(tmp_path / "sweep", "rope")
    text, _, _ = written(capsys, tmp_path, tmp_path / "sweep")
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in policy and "http" not in policy
    for kind, pattern in (
        ("script-src", r'<script type="module">(.*?)</script>'),
        ("style-src", r"<style>(.*?)</style>"),
    ):
        digests = [
            base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in re.findall(pattern, text, re.S)
        ]
        assert rules[kind].split() == [f"'sha256-{digest}'" for digest in digests]
    assert not re.search(r'\son\w+="|style="|src="|href="', text)


def test_report_says_what_it_leaves_out(capsys, tmp_path):
    put(tmp_path / "sweep", "rope")
    put(tmp_path / "sweep", "learned")
    put(tmp_path / "sweep", "t5", targets="other")
    damaged = put(tmp_path / "sweep", "alibi") / "eval.jsonl"
    damaged.write_text('{"ppl": 3}\n' + damaged.read_text())
    data = content([tmp_path / "sweep"])
    assert any("line 1: it is a row of version None" in warning for warning in data["warnings"])
    for why in ("learned: undefined at", "on other targets"):
        assert any(why in note for note in data["panels"][0]["notes"]), why
    (tmp_path / "one").mkdir()
    put(tmp_path / "one", "rope")
    assert content([tmp_path / "one"])["verdicts"] == []


def test_page_has_the_warnings_of_the_figures(tmp_path):
    """On positions in windows of other lengths, and on training losses of other texts than are measured."""
    for n, encoding in enumerate(("rope", "tupe")):
        settings = {"encoding.name": encoding, "train.length": 64, "train.seed": 0, "data": str(n) * 64}
        path = put(tmp_path / "sweep", encoding, settings=settings) / "eval.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    bins = {name: rows[-1][name][:24] for name in ("position_nll", "position_targets")}
    rows[-1] |= bins | {"eval_len": 64, "position_edges": [*rows[-1]["position_edges"][:24], 64]}
    path.write_text(as_lines(rows))
    data = content([tmp_path / "sweep"])
    (positions,), (panel,) = data["positions"], data["panels"]
    assert any("In windows of 64 tokens, so on other targets" in note for note in positions["notes"])
    warning = "different training texts or tokenizers: losses are not comparable"
    assert panel["training"] == positions["training"] == warning not in panel["notes"]
    assert content([path.parent])["panels"][0]["training"] == ""


def test_runs_of_two_sweeps_keep_their_curves(tmp_path):
    """Equal names in two folders, one of them named twice; a run that resumed counts its kept steps once."""
    for n, folder in enumerate("ab"):
        path = put(tmp_path / folder, "rope", name="rope", settings={"train.learning_rate": n, "train.seed": 0})
        rows = [json.loads(line) for line in open(path / "metrics.jsonl")]
        again = [row | {"tokens_per_second": 4096.0, "attempt": 2, "attempt_start": 20} for row in rows[2:]]
        lines = [json.dumps(with_checksum(row)) + "\n" for row in rows[: 3 + n] + again]
        (path / "metrics.jsonl").write_text("".join(lines))
    data = content([tmp_path / "a", tmp_path / "b", tmp_path / "a" / "."])
    assert [(run["curve"], run["run"]) for run in data["training"]] == [(0, "a/rope"), (1, "b/rope")]
    assert [step[3] for step in data["training"][0]["steps"]] == [5, 10, 20, 30, 40]


def test_long_logs_are_averaged(tmp_path):
    """As in the figure of training losses: one step in several would be noise. The seconds are those of the end."""
    facts = UNDISTURBED | {"tokens_per_second": 8192.0}
    rows = [{"step": n, "tokens": 4096 * n, "loss": 1.0 + 2 * (n % 2)} | facts for n in range(1, 301)]
    path = put(tmp_path / "sweep", "rope") / "metrics.jsonl"
    path.write_text("".join(json.dumps(with_checksum(row)) + "\n" for row in rows))
    (run,) = content([tmp_path / "sweep"])["training"]
    assert len(run["steps"]) == 150 and {step[1] for step in run["steps"]} == {2.0}
    assert run["steps"][-1][2:] == [4096 * 299.5, 149.75] and run["seconds"] == 150.0


def test_pairs_that_are_not_compared_are_named(tmp_path):
    put(tmp_path, "rope")
    put(tmp_path, "alibi")
    path = put(tmp_path, "t5", block_nll=None) / "eval.jsonl"
    only_positions = [line for line in path.read_text().splitlines() if "per_position" in line]
    data = content([tmp_path])
    assert len(data["verdicts"]) == 5 and any("t5 store no losses" in why for why in data["no_verdicts"])
    path.write_text("".join(line + "\n" for line in only_positions))
    data = content([tmp_path])
    assert len(data["verdicts"]) == 5 and any("no protocol and window" in why for why in data["no_verdicts"])


def test_reports_of_nothing_are_refused(capsys, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    refused(capsys, 4, ["report", str(tmp_path / "empty")], "no run has results")
    refused(capsys, 4, ["report", str(tmp_path / "none")], "does not exist")
    put(tmp_path / "sweep", "rope")
    refused(capsys, 2, ["report", str(tmp_path / "sweep"), "--out=report.txt"], "must end with .html")
    refused(capsys, 2, ["report"], "--workdir is missing")


def test_the_gallery_shows_all_distances_and_counts_heads():
    """Twice 1,024 tokens are at most 512 places, the last among them. Four of eight heads are named as such."""
    slopes = 2.0 ** -np.arange(1, 9)
    curve = gallery._curve("added to logits", "distance in tokens", np.arange(2048), -np.outer(slopes, np.arange(2048)))
    assert (curve["x"][0], curve["x"][-1]) == (0, 2047) and 400 < len(curve["x"]) <= gallery.MOST_POINTS
    assert [line[-1] for line in curve["lines"]] == pytest.approx(list(-2047 * slopes[:4]), rel=1e-3)
    assert curve["title"] == "added to logits, heads 1 to 4 of 8"
    fast = gallery._curve("product", "distance in tokens", np.arange(2048), np.cos(np.arange(2048))[None])
    assert fast["x"] == list(range(512)) and fast["title"] == "product, the first 512 places"


@pytest.mark.slow
def test_the_gallery_has_curves_and_sliders(capsys, tmp_path, monkeypatch):
    """ALiBi's slopes are at the ends of its lines, RoPE's base moves its curve, and NoPE has none."""
    monkeypatch.setattr(gallery, "ENCODINGS", ("nope", "sinusoidal", "alibi", "rope", "tupe"))
    out = tmp_path / "gallery.html"
    code, said, err = tiny.call(
        capsys, "encodings", f"--html={out}", "--num_heads=2", "--model_dim=16", "--train_len=16"
    )
    assert code == 0 and "5 encodings" in said, err
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', out.read_text("utf-8"), re.S)
    nope, sinusoidal, alibi, rope, tupe = json.loads(text)["encodings"]
    assert nope["curves"] == [] and nope["note"] == "It acts on nothing." and sinusoidal["curves"]
    (curve,) = alibi["curves"]
    assert [line[-1] for line in curve["lines"]] == pytest.approx([-31 * 2**-4, -31 * 2**-8], rel=1e-3)
    assert curve["title"] == "added to logits" and alibi["sliders"] == []
    assert tupe["curves"][0]["title"] == "added to logits, mean over pairs"
    (base,) = (slider for slider in rope["sliders"] if slider["field"] == "base")
    values = [place["value"] for place in base["places"]]
    assert values == [2500, 5000, 10000, 20000, 40000] and base["at"] == 2
    assert base["places"][2]["curves"] == rope["curves"] != base["places"][0]["curves"]
    refused(capsys, 2, ["encodings", "rope", f"--html={out}"], "no name of an encoding")
    refused(capsys, 2, ["encodings", "--html=gallery.txt"], "ends with .html")
