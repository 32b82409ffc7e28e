"""Published perplexities: the file that holds them, the claims that quote them, and the tables beside the studies."""

import math
import re
import tomllib

import pytest

from experiments import anchors
from experiments.leaderboard import leaderboard
from posx.encodings.grammar import parse
from posx.evaluation.protocols import PROTOCOLS
from tests.experiments.readme import bodies

ANCHORS = anchors.load_anchors()


def test_every_anchor_is_whole():
    for one in ANCHORS:
        assert list(one.lengths) == sorted({*one.lengths}) and one.lengths[0] == one.train_len, one.name
        assert (
            one.protocol in PROTOCOLS
            and one.paper
            and re.search(r"Table|appendix|on the Pile|experiments\.txt", one.source)
        )
        for name, values in one.perplexity.items():
            assert parse(name) and len(values) == len(one.lengths) and values[0] >= 1, (one.name, name)


def names(text, anchor):
    """Whether a text names the paper of an anchor, and its table if it names one."""
    said, own = (set(re.findall(r"(?:Tables? |and )(\d+)", words)) for words in (text, anchor.source))
    paper = re.search(r"\d{4}\.\d{5}|bob80333", anchor.source)[0]
    return paper in text and (not said or bool(said & own))


def test_claims_quote_the_anchors():
    """A claim that names a table of the file has its numbers from there, whole or rounded."""
    quoted = 0
    for claim in tomllib.loads(leaderboard.CLAIMS.read_text())["claim"]:
        for part in re.split(r"; (?=[A-Z])", claim["source"]):
            own = [one for one in ANCHORS if names(part, one)]
            numbers = re.findall(r"(\d+\.\d+) to (\d+\.\d+|\d+)", part)
            if "second hand" in part or not own:
                continue
            known = [value for one in own for values in one.perplexity.values() for value in values]
            for number in {text for pair in numbers for text in pair}:
                places = len(number.partition(".")[2])
                assert any(f"{value:.{places}f}" == number for value in known), (number, claim)
                quoted += 1
    assert quoted > 50


@pytest.mark.parametrize(("study", "number"), [("train_short_test_long", 4), ("leaderboard", -1)])
def test_tables_beside_the_studies(study, number):
    lines = anchors.table(anchors.runs_of(study), ANCHORS)
    assert bodies(study)[number] == lines
    assert all(re.fullmatch(r"([\d.,]+ / [\d.,]+( \(k = [\d.]+\))?)?", cell) for line in lines for cell in line[2:6])


def test_a_cell_names_another_k():
    (anchor,) = (one for one in ANCHORS if one.source.endswith("Table 5") and one.train_len == 64)
    assert anchor.ratios("alibi")[8] == pytest.approx(22.09 / 28.46) and anchor.ratios("rope") == {}
    assert anchors.nearest({15.0: 1.0}, 16) == 15 and anchors.nearest({8.81: 1.0, 6.86: 1.0}, 8) is None
    (table,) = (one for one in ANCHORS if one.source.endswith("Table 3") and one.paper == "Press 2022")
    assert list(table.ratios("t5")) == pytest.approx([2024 / 1024, 3024 / 1024, 4024 / 1024, 8024 / 1024])
    assert all(map(math.isfinite, table.ratios("t5").values()))
