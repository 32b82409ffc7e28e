"""Hold the guides that choose and compare encodings to the data files of the studies."""

import pytest

from experiments import guides
from experiments.tables import HERE
from tests.experiments.readme import tables_of

PAGES = HERE.parent / "docs/guides"


@pytest.mark.parametrize("page", ["choose", "compare"])
def test_guides_say_what_the_data_says(page, capsys):
    guides.main([page])
    made, shown = capsys.readouterr().out, (PAGES / f"{page}.md").read_text(encoding="utf-8")
    rows = [line for line in made.splitlines() if line.startswith("|")]
    lines = shown.splitlines()
    assert len(rows) > 20 and not [row for row in rows if row not in lines]
    tables, tables_shown = tables_of(made), tables_of(shown)
    assert len(tables) > 4 and not [table for table in tables if table not in tables_shown]
    sentences = [line for line in made.splitlines() if line and not line.startswith("|")]
    text = " ".join(shown.split())
    assert sentences and not [sentence for sentence in sentences if sentence not in text]
