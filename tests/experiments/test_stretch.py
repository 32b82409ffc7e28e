"""The tables of the study of trained models are those of its rows."""

import math

import pytest

from experiments.stretch import stretch
from tests.experiments.readme import bodies, of_markdown


@pytest.mark.parametrize("number", range(len(stretch.SUBJECTS)))
def test_tables_of_the_study_are_its_rows(number):
    subject = list(stretch.SUBJECTS.values())[number]
    assert bodies("stretch")[number] == of_markdown(stretch.table(subject))


def test_the_table_of_transformers_is_its_rows():
    assert bodies("stretch")[len(stretch.SUBJECTS)] == of_markdown(stretch.peers())


def test_rules_of_a_model_score_the_same_targets():
    for subject in stretch.SUBJECTS.values():
        rows = [row for row in stretch.load() if row["subject"] == subject.name and "targets" in row]
        assert len({row["targets"] for row in rows}) == 1 and all(math.isfinite(row["nll"]) for row in rows)
