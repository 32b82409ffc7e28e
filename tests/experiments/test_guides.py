"""The tables of the pages that choose and compare encodings are those of the studies' data files."""

import pytest

from experiments import guides
from experiments.tables import HERE

PAGES = HERE.parent / "docs/guides"


@pytest.mark.parametrize("page", ["choose", "compare"])
def test_tables_of_the_guides_are_the_data(page, capsys):
    guides.main([page])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    lines = (PAGES / f"{page}.md").read_text(encoding="utf-8").splitlines()
    assert len(rows) > 20 and not [row for row in rows if row not in lines]
