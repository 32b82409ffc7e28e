"""The table of the audit of other libraries is that of its outcomes."""

import re

from experiments.golden import audit
from experiments.tables import HERE
from golden.build import FAR, KINDS, TOLERANCE
from golden.families import FAMILIES
from tests.experiments.readme import bodies, of_markdown


def test_the_table_of_the_audit_is_its_outcomes():
    rows = audit.load()
    assert bodies("golden")[0] == of_markdown("\n".join(audit.table(rows)))
    in_float32 = [row["passed"] for row in rows if row["dtype"] == "float32"]
    numbers = sum(row["passed"] for row in rows), len(rows), sum(in_float32), len(in_float32)
    said = re.search(r"(\d+) of (\d+) computed cases passed: (\d+) of (\d+)", (HERE / "golden/README.md").read_text())
    assert tuple(map(int, said.groups())) == numbers


def test_outcomes_are_of_the_cases_that_are_built():
    rows = audit.load()
    names = [tuple(row[key] for key in ("library", "implementation", "dtype", "family", "case")) for row in rows]
    assert len(set(names)) == len(names)
    for row in rows:
        assert row["case"] in KINDS and row["case"] not in FAMILIES[row["family"]].without
        tolerance = TOLERANCE | ({"float32": FAR[row["case"]]} if row["case"] in FAR else {})
        assert row["passed"] == (row["error"] is not None and row["error"] <= tolerance[row["dtype"]])
