"""A protocol is one class: what the registry, settings and rows need to know of it is its own."""

import dataclasses

import numpy as np
import pytest

from posx.errors import ConfigError
from posx.evaluation import evaluate, protocols
from posx.evaluation.base import Protocol
from posx.evaluation.targets import place
from posx.lab.config import EvalConfig, base_config, run_config
from posx.lab.runs.checks import unused_settings

STREAM = np.arange(65) % 4


def uniform(tokens):
    return np.full(tokens.shape, -np.log(4), np.float32)


@dataclasses.dataclass(frozen=True)
class Shortest(Protocol):
    """Consecutive windows of the shortest length alone."""

    name, title = "shortest", "shortest windows"
    reads = ("stride",)
    num_targets: int = 0

    @classmethod
    def from_run(cls, config, train_len, longest):
        return cls(config.num_targets)

    @classmethod
    def run_lengths(cls, config, train_len):
        return (train_len, 2 * train_len)

    @classmethod
    def problems(cls, config, train_len):
        return [] if config.stride == 0 else [f"eval.stride={config.stride} means nothing here"]

    def required_lengths(self, lengths, defined=lambda length: True):
        return tuple(lengths[:1])

    def targets(self, stream, lengths, documents):
        return place(stream, self.num_targets, documents=documents)

    def measure(self, model, lengths):
        targets = self.targets(model.stream, lengths, model.documents)
        scored = model.score_windows(self.windows(targets, lengths[0], lengths[0]), lengths[0])
        yield self.row(model, lengths[0], lengths[0], targets, scored) | {"mine": True}


def test_a_new_protocol_is_one_class_and_its_line(monkeypatch):
    monkeypatch.setitem(protocols.PROTOCOLS, "shortest", Shortest)
    for protocol in ("shortest", Shortest()):
        (row,) = evaluate(uniform, STREAM, protocol, [8, 16])
        assert (row["protocol"], row["eval_len"], row["mine"]) == ("shortest", 8, True)
        assert row["ppl"] == pytest.approx(4)
    config = EvalConfig(protocols=("shortest",), lengths=(16, 32), num_targets=32)
    assert protocols.run_protocols(config, 16) == [(Shortest(32), (16, 32))]
    assert protocols.problems(dataclasses.replace(config, stride=4), 16) == ["eval.stride=4 means nothing here"]


def test_a_protocol_says_which_settings_and_strides_it_chooses(monkeypatch):
    monkeypatch.setitem(protocols.PROTOCOLS, "shortest", Shortest)
    run = dataclasses.replace(run_config(base_config()), eval=EvalConfig(protocols=("shortest",)))
    why = unused_settings(run)
    assert why["eval.sliding_targets"] == "eval.protocols has no sliding" and "eval.stride" not in why
    assert why["eval.num_targets"].startswith("eval.protocols has no nonoverlapping or per_position or ")
    row = {"eval_len": 16, "stride": 4}
    strides = [cls.chosen_stride(row) for cls in (Shortest, protocols.Sliding, protocols.HfStrided)]
    assert strides == [None, 4, 4] and protocols.HfStrided.chosen_stride(row | {"stride": 8}) is None
    whole = [cls.has_whole_windows for cls in (Shortest, protocols.Sliding, protocols.PerPosition)]
    assert whole == [False, False, True]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("nonoverlapping", "per_position"), "eval.num_targets=100 is less than the longest window, of 512 tokens"),
        (("pseudo_perplexity",), "eval.num_targets=100 is less than the longest window, of 512 tokens"),
        (("answers",), "eval.attention_items=3000 is more than eval.num_items=2000"),
        (("sliding", "hf_strided", "lm_eval_rolling"), ""),
    ],
)
def test_limits_are_those_of_the_protocols_that_have_them(names, problem):
    """The last two read a text that may be shorter than a window, and sliding windows have their own targets."""
    asked = EvalConfig(lengths=(512,), num_targets=100, attention_items=3000, protocols=names)
    found = protocols.problems(asked, 16)
    assert not asked.problems() and len(found) == bool(problem) and "".join(found).startswith(problem)


def test_settings_of_a_run_make_each_protocol_what_it_is():
    config = EvalConfig(protocols=("nonoverlapping", "sliding", "per_position"), lengths=(16, 64), num_targets=128)
    found = {protocol.name: (protocol, lengths) for protocol, lengths in protocols.run_protocols(config, 16)}
    assert found["nonoverlapping"] == (protocols.Nonoverlapping(128, 64), (16, 64))
    assert found["sliding"] == (protocols.Sliding(4, 65536, warm_up=64), (16, 32, 64))
    assert found["per_position"] == (protocols.PerPosition(128, 64), (16, 64))
    with pytest.raises(ConfigError, match=r"'slide' is unknown. Did you mean 'sliding'"):
        protocols.protocol_class("slide")


@pytest.mark.parametrize("cls", [cls for cls in protocols.PROTOCOLS.values() if cls.measures == "text"])
def test_a_run_scores_the_same_targets_at_each_length(cls):
    """The laboratory asks for the targets of one length at a time."""
    config = EvalConfig(lengths=(16, 2048), num_targets=8192, sliding_targets=8192)
    protocol, stream = cls.from_run(config, 16, 2048), np.arange(50001) % 7
    short, long = (protocol.targets(stream, [length], None).digest for length in config.lengths)
    assert short == long


def test_per_position_owes_one_row_at_its_longest_defined_length():
    assert protocols.PerPosition().required_lengths((8, 16, 32), lambda length: length <= 16) == (16,)
    assert protocols.PerPosition().required_lengths((8,), lambda length: False) == ()
    assert protocols.Sliding().required_lengths((8, 16), lambda length: False) == (8, 16)


def test_begin_every_window_predicts_after_the_begin_token():
    """Windows of 3 tokens: begin and two tokens of text. The last window has one target."""
    seen = []

    def log_probs(
        tokens,
    ):  # 10 times the first token of the window, plus the token before the target, plus a tenth of it
        seen.append(tokens.copy())
        return -(10.0 * tokens[:, :1] + tokens[:, :-1] + 0.1 * tokens[:, 1:])

    stream = np.array([9, 1, 2, 3, 4, 5, 6, 7])
    (row,) = evaluate(log_probs, stream, "begin_every_window", [3], documents=[1, 4], batch_tokens=9)
    # Windows after the begin token 9: (1, 2, 3), (4, 5, 6), (7).
    losses = [90 + before + 0.1 * n for n, before in zip(range(1, 8), (9, 1, 2, 9, 4, 5, 9), strict=True)]
    assert row["nll"] * 7 == pytest.approx(sum(losses)) and row["num_targets"] == 7 and row["num_windows"] == 3
    assert seen[-1].tolist() == [[9, 1, 2, 3], [9, 4, 5, 6], [9, 7, 7, 7]]
    plain, same = evaluate(log_probs, stream, ["nonoverlapping", "begin_every_window"], [3], documents=[1, 4])
    assert plain["targets"] == same["targets"] and same["nll"] == row["nll"] != plain["nll"]
    assert max(tokens.shape[1] for tokens in seen) == 4  # no more than 3 tokens are read, and one predicted


def test_begin_every_window_is_a_setting_of_a_run():
    config = EvalConfig(protocols=("begin_every_window",), lengths=(16, 64), num_targets=128)
    [(protocol, lengths)] = protocols.run_protocols(config, 16)
    assert (protocol, lengths) == (protocols.BeginEveryWindow(128, 64), (16, 64))
