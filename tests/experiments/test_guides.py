"""What the pages that choose and compare encodings say is what the studies' data files hold."""

import pytest

from experiments import guides
from experiments.tables import HERE
from tests.experiments.readme import tables_of

PAGES = HERE.parent / "docs/guides"


@pytest.mark.parametrize("page", ["choose", "compare"])
def test_guides_say_what_the_data_says(page, capsys):
    guides.main([page])
    made, shown = capsys.readouterr().out, (PAGES / f"{page}.md").read_text(encoding="utf-8")
    tables = tables_of(made)
    assert len(tables) > 4 and not [table for table in tables if table not in tables_of(shown)]
    sentences = [line for line in made.splitlines() if line and not line.startswith("|")]
    assert sentences and not [line for line in sentences if line not in " ".join(shown.split())]
