"""The table of the study of layers is that of its rows."""

from experiments.layers import layers
from tests.experiments.readme import bodies, of_markdown


def test_the_table_of_layers_is_its_rows():
    assert bodies("layers")[0] == of_markdown(layers.table(layers.by_pattern()))


def test_all_patterns_score_the_same_targets():
    runs = [run for members in layers.by_pattern().values() for run in members]
    for length in (64, 1024):
        assert len({row["targets"] for run in runs for row in run["rows"] if row["eval_len"] == length}) == 1
    assert {run["settings"]["train.steps"] for run in runs} == {500}
