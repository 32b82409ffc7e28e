"""The tables of the cost study are those of its measurements."""

import statistics

import pytest

from experiments.cost import cost
from tests.experiments.readme import bodies, of_markdown


@pytest.mark.parametrize("number", range(len(cost.TABLES)))
def test_tables_of_the_study_are_its_measurements(number):
    table = list(cost.TABLES.values())[number]()
    assert bodies("cost")[number] == of_markdown(table)


def test_every_table_of_the_study_is_covered():
    assert len(bodies("cost")) == len(cost.TABLES)


def test_ratio_to_the_rival_is_formed_in_each_round():
    """Compute one ratio of each table of rivals from the stored rounds alone."""
    for number, shape in ((6, "small"), (7, "medium")):
        found = {(row["library"], row["encoding"]): row["tokens_per_second"]
                 for row in cost.REPORTS[f"rivals_{shape}"]["results"]}  # fmt: skip
        forms = {lib: rates for (lib, name), rates in found.items() if name == "rope" and lib.startswith("x-")}
        best = max(forms.values(), key=statistics.median)
        ratio = statistics.median(a / b for a, b in zip(found["posx", "rope"], best, strict=True))
        (line,) = (line for line in bodies("cost")[number] if line[0] == "rope")
        assert line[-1].startswith(f"{ratio:.2f} [")


def test_reports_are_of_one_machine_and_its_versions():
    facts = {(report["cpu"], report["versions"]["jaxlib"])
             for report in cost.REPORTS.values() if "cpu" in report}  # fmt: skip
    assert len(facts) == 1
