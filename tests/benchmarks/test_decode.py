"""`python -m benchmarks decode`: the table says what the stored numbers say, and wrong tokens are found."""

import json

import numpy as np
import pytest

from tests.benchmarks.tables import cells, middle

WORDS = "decode --prompt=6 --new=5 --layers=1 --width=16 --heads=2 --samples=2 --rounds=1".split()


@pytest.mark.slow
def test_table_and_stored_numbers_agree(bench, tmp_path, capsys):
    bench.main([*WORDS, "--encodings=nope", f"--out={tmp_path}/d.json"])
    shown, report = cells(capsys.readouterr().out), json.loads((tmp_path / "d.json").read_text())
    stored = {row["encoding"]: row for row in report["results"]}
    for name, row in stored.items():
        cached, recomputed = row["cached"][0], row["recomputed"][0]
        assert middle(shown[name][0]) == round(cached)
        assert middle(shown[name][2]) == pytest.approx(cached / recomputed, abs=0.051)
        assert middle(shown[name][3]) == pytest.approx(cached / stored["nope"]["cached"][0], abs=0.0051)
        assert shown[name][4:6] == ["5 of 5", "0"]
    assert report["samples"] == 2


def test_sampled_steps_span_the_first_to_the_last_new_token(bench):
    options = bench.arguments([*WORDS, "--encodings=rope"])
    contestant = bench.decode.Contestant("rope", options)
    assert [prefix.shape for prefix in contestant.prefixes] == [(1, 6), (1, 10)]
    assert len(contestant.text) == 11
    for prefix in contestant.prefixes:
        chosen = bench.decode.next_token(contestant.model, contestant.params, prefix)
        assert int(chosen) == contestant.text[prefix.shape[1]]


def test_ties_may_differ_and_nothing_else(bench):
    logits = np.array([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0 + 5e-5], [np.nan, 0.0]])
    found = bench.decode.differences(logits, np.array([1, 0, 0, 1]))
    assert found == {"tokens": 4, "different": 3, "wrong": 2}, "one tie, one wrong, one not a number"


class Wrong:
    """Stands in for a contestant, with one token that no tie explains."""

    def __init__(self, encoding, options):
        self.encoding, self.text, self.prefixes = encoding, np.arange(11), [None] * 2
        self.cached, self.recomputed = lambda: 2.0, lambda: 1.0

    def compare(self):
        return {"tokens": 5, "different": 2, "wrong": 1}


def test_wrong_tokens_fail_the_bench(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.decode, "Contestant", Wrong)
    with pytest.raises(SystemExit, match="wrong: 1 tokens cached with rope"):
        bench.main([*WORDS, "--encodings=rope"])
    assert cells(capsys.readouterr().out)["rope"][4:6] == ["3 of 5", "1"]


def test_the_cache_alone_continues_one_text(bench, capsys):
    words = [word for word in WORDS if not word.startswith("--samples")]
    bench.main([*words, "--samples=0", "--rounds=2", "--encodings=nope"])
    shown = capsys.readouterr().out
    assert "5 new tokens a round after 11" in shown and cells(shown)["nope"][1] == "1.00 [1.00, 1.00]"
