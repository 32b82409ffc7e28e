"""Pseudo-perplexity of hidden tokens: which tokens are hidden, in which windows, and the mean of their losses."""

import numpy as np
import pytest

from posx.errors import ConfigError, DataError
from posx.evaluation import evaluate
from posx.evaluation.masked import PseudoPerplexity
from posx.evaluation.protocols import problems
from posx.evaluation.scoring import Measured
from posx.evaluation.settings import EvalConfig
from posx.evaluation.statistics import few_places

N = 40_000
STREAM = np.arange(N + 1)


def measured(protocol, lengths, stream=STREAM, documents=None):
    """Rows, and {length: windows of (tokens, hidden)} that a model of loss token / n was given."""
    seen = {length: [] for length in lengths}

    def log_probs(tokens, hidden):
        seen[tokens.shape[1] - 1] += [(a[1:], b[1:]) for a, b in zip(tokens, hidden, strict=True) if b.any()]
        return -tokens[:, 1:].astype(np.float32) / len(stream)

    model = Measured(log_probs, stream, None, None, documents, batch_tokens=2048)
    return list(protocol.measure(model, lengths)), seen


def hidden_tokens(windows):
    return [set(tokens[hidden].tolist()) for tokens, hidden in windows]


@pytest.mark.parametrize("protocol", [PseudoPerplexity(1200), PseudoPerplexity()], ids=["some", "all"])
def test_the_same_tokens_are_hidden_at_every_length(protocol):
    rows, seen = measured(protocol, (32, 64, 512, 700))
    each = [set().union(*hidden_tokens(windows)) for windows in seen.values()]
    assert all(one == each[0] for one in each)
    assert {row["num_targets"] for row in rows} == {len(each[0])} == {protocol.num_targets or N // 20 * 3}
    assert len({row["targets"] for row in rows}) == 1
    mean = np.mean([*each[0]]) / len(STREAM)
    for row in rows:
        np.testing.assert_allclose(row["nll"], mean, rtol=1e-5)
        np.testing.assert_allclose(row["ppl"], np.exp(mean), rtol=1e-5)
        assert row["bpb"] is None and row["protocol"] == "pseudo_perplexity"


def test_three_of_every_twenty_tokens_of_a_stretch_are_hidden():
    _, seen = measured(PseudoPerplexity(), (100,))
    places = np.sort([*set().union(*hidden_tokens(seen[100]))]) - 1
    assert (np.bincount(places // 20) == 3).all()
    counts = np.bincount(places % 20, minlength=20)  # 2,000 groups: each place of a group is hidden in 300 of them
    assert (np.abs(counts - 300) < 5 * np.sqrt(300 * 0.85)).all()


def test_windows_hold_text_alone_and_hide_what_others_score():
    """The ragged last window begins earlier, since a model of both sides would read padding."""
    _, seen = measured(PseudoPerplexity(), (700,))
    *_, before, last = [tokens for tokens, _ in seen[700]]
    assert all((np.diff(tokens) == 1).all() for tokens, _ in seen[700])
    assert last[-1] == N and last[0] < before[-1]
    shared = np.intersect1d(before, last)
    one, other = (tokens[hidden] for tokens, hidden in seen[700][-2:])
    np.testing.assert_array_equal(np.intersect1d(one, shared), np.intersect1d(other, shared))


def test_few_places_give_no_interval():
    begins = np.arange(1, N, 2000)
    (row,), _ = measured(PseudoPerplexity(6000 // 20 * 3), (6000,), documents=begins)
    assert row["num_targets"] == row["max_targets"] == 900 and few_places(row)
    (row,), _ = measured(PseudoPerplexity(), (6000,), documents=begins)
    assert not few_places(row), "the whole text"


def test_short_texts_and_few_targets_are_refused():
    with pytest.raises(DataError, match="a window of 512 tokens needs 512"):
        measured(PseudoPerplexity(), (512,), STREAM[:400])
    with pytest.raises(ConfigError, match="num_targets=2: at least 3"):
        measured(PseudoPerplexity(2), (32,))
    few, enough = (EvalConfig((8,), ("pseudo_perplexity",), num_targets=count) for count in (19, 20))
    assert "eval.num_targets=19" in problems(few, 8)[0] and not problems(enough, 8)


def test_functions_of_next_tokens_are_not_measured():
    with pytest.raises(ConfigError, match=r"pseudo_perplexity measures runs of train\.objective=masked"):
        evaluate(lambda tokens: 0.0 * tokens - 1, STREAM, "pseudo_perplexity", [32])
