"""`posx autopsy`: a run as trained and under each change, on the same targets, and what follows."""

import json
import math

import numpy as np
import pytest

from posx.lab.config import base_config, run_config
from posx.lab.runs import autopsy
from posx.lab.runs.folder import RunFolder
from tests import tiny
from tests.lab.commands import refused

L = 16
CAUSES = {"narrow": "angles", "wide": "tokens"}


def settings_of(encoding, masks=()):
    config = base_config(encoding)
    config.model.mask_policy = masks or config.model.mask_policy
    config.train.length, config.model.model_dim, config.model.num_heads = 32, 64, 4  # 16 channels of a head
    return run_config(config)


@pytest.mark.slow
def test_a_rope_run_is_measured_under_each_change(site, tmp_path, capsys):
    run, targets = tmp_path / "rope", "--num_targets=520"
    words = ["--config.train.steps=3", "--config.eval.lengths=16,"]
    assert tiny.call(capsys, "train", f"--config={site / 'tiny.py'}:rope", f"--workdir={run}", *words)[0] == 0
    again = ["evaluate", f"--workdir={run}", "--masks=window", "--protocol=nonoverlapping", "--lengths=512", targets]
    assert tiny.call(capsys, *again)[0] == 0  # the window was measured on other targets, those of 512 tokens
    asked = ["autopsy", str(run), "--lengths=32", targets]
    code, text, err = tiny.call(capsys, *asked)
    assert code == 0, err
    folders = [run, *(child.path for child in RunFolder(run).children())]
    names = [
        "as trained",
        "logits times log length",
        "slow planes 2 times slower",
        "distances held at 15",
        "window of 16",
    ]
    assert len(folders) == len(names)
    before = [(folder / "eval.jsonl").read_bytes() for folder in folders]
    code, out, err = tiny.call(capsys, *asked, "--json")
    found = json.loads(out)
    assert code == 0 and [(folder / "eval.jsonl").read_bytes() for folder in folders] == before, "measured again"

    rows = {name: tiny.rows(tmp_path / name / "eval.jsonl") for name in {folder.name for folder in folders}}
    runs = {"as trained": "rope"} | {change["name"]: change["run"] for change in found["changes"]}
    assert list(runs) == names and found["left_out"] == {}
    lines = {(line["change"], line["eval_len"]): line for line in found["lines"]}
    assert set(lines) == {(name, length) for name in names for length in (16, 32)}
    for (name, length), line in lines.items():
        own = [row for row in rows[runs[name]] if row["eval_len"] == length and row["protocol"] == "nonoverlapping"]
        assert own[-1]["nll"] == line["nll"] and own[-1]["targets"] == found["targets"], "of the same targets"
        assert line["ratio"] == pytest.approx(line["ppl"] / lines["as trained", 16]["ppl"])
        assert [
            part for part in text.splitlines() if part.strip().startswith(f"{name}  ") and f"{line['ppl']:.3f}" in part
        ]
    held = lines["distances held at 15", 16]["nll"]
    assert held == pytest.approx(lines["as trained", 16]["nll"], rel=1e-6), "no distance in training is above 15"

    at_16, at_32 = found["observations"]
    row = [row for row in rows["rope"] if row["eval_len"] == 32 and row["protocol"] == "nonoverlapping"][-1]
    assert at_16["far_weight"] == 0 < at_32["far_weight"] == row["far_weight"] and row["attention_items"] == 16
    assert (at_16["new_planes"], at_32["new_planes"]) == (0, 0.875), "one of eight planes turns within 16 tokens"
    shown = text.splitlines()
    assert any(line.split() == ["planes", "that", "meet", "new", "angles", "0%", "88%"] for line in shown)
    assert [line for line in shown if line.startswith("  layer 1: entropy")]
    assert [one["from"] for one in found["positions"]] == [0, 8, 16]
    assert shown[-1] == found["conclusion"]


def test_changes_are_those_that_the_encoding_allows():
    allowed = {
        "rope": ["logits", "slow", "distances", "window"],
        "rope+alibi": ["logits", "slow", "distances", "window"],
        "xpos": ["logits", "slow", "window"],
        "rope(frequencies=yarn(factor=2))": ["logits", "distances", "window"],
        "rope+log_length": ["slow", "distances", "window"],
        "alibi": ["logits", "window"],
        "tupe+rope": ["slow", "distances", "window"],
        "rope+tupe": ["slow", "window"],
    }
    for spec, names in allowed.items():
        found = autopsy.changes(settings_of(spec), 128)
        assert [change.name.partition(" ")[0] for change in found] == names, spec
    chain = {change.name: change for change in autopsy.changes(settings_of("rope+alibi"), 128)}
    assert chain["distances held at 31"].encoding == "self_extend(window=31,group=0)+alibi"


def test_new_planes_follow_from_frequencies_alone():
    """With 16 channels and base 10000, the planes of 1 and 0.316 radians per token turn within 32 tokens."""
    assert autopsy.new_planes(settings_of("rope"), 32) == 0
    assert autopsy.new_planes(settings_of("rope"), 64) == autopsy.new_planes(settings_of("xpos"), 64) == 6 / 8
    assert autopsy.new_planes(settings_of("rope(frequencies=whole_turns)"), 64) == 0
    assert autopsy.new_planes(settings_of("rope(rotary_dim=4)"), 64) == 1 / 2
    assert autopsy.new_planes(settings_of("alibi"), 64) is None
    assert autopsy.new_planes(settings_of("rope", ("window(size=32)", "causal")), 64) == 3 / 8, "half of the layers"


@pytest.mark.parametrize(
    "masks",
    [
        ("causal",), ("window(size=32)", "causal"), ("window(size=50)",), ("window(size=10, sinks=40)",),
        ("window(size=40, sinks=3)", "window(size=200)"),
    ],
)  # fmt: skip
def test_equal_far_weights_are_of_the_tokens_in_sight(masks):
    """Against all pairs of 128 tokens, under the mask of each layer. L is 32."""
    run, back = settings_of("rope", masks), np.arange(128)[:, None] - np.arange(128)
    wanted = []
    for mask in run.model.masks:
        seen = (back >= 0) & ((back < (mask.window or 128)) | (np.arange(128) < mask.sinks))
        wanted.append((seen & (back >= 32)).sum(axis=1) / seen.sum(axis=1))
    found = autopsy.observations(run, {"eval_len": 128})["equal_far_weight"]
    assert found == pytest.approx(np.mean(wanted), abs=1e-6)


@pytest.mark.parametrize(
    ("trained", "narrow", "wide", "wanted"),
    [
        (2.0, 1.05, 1.0, "Narrow: restores 95% of the loss at 64 tokens, so the failure comes from angles."),
        (2.0, 1.4, 1.0, "Wide: restores 100% of the loss at 64 tokens, so the failure comes from tokens."),
        (2.0, 1.4, 1.9, "Narrow: restores 60% of the loss at 64 tokens, so most of the failure comes from angles."),
        (
            2.0,
            1.8,
            1.9,
            "No change restores half of the loss at 64 tokens: the cause is none of these. The most is 20%",
        ),
        (
            2.0,
            None,
            3.0,
            "No change restores half of the loss at 64 tokens: the cause is none of these. The most is -100%",
        ),
        (1.04, 1.0, 1.0, "The run does not fail up to 64 tokens: perplexity is 1.041 times that at 16."),
        (None, 1.0, 1.0, "Nothing follows: there is no loss as trained at 64 (oom) tokens."),
    ],
)
def test_conclusions_follow_the_rules_of_the_guide(trained, narrow, wide, wanted):
    rows = {
        name: [
            {"eval_len": length, "nll": nll, "ppl": nll and math.exp(nll), "status": "oom" if nll is None else "ok"}
            for length, nll in ((L, 1.0), (64, at_64))
        ]
        for name, at_64 in ((autopsy.TRAINED, trained), ("narrow", narrow), ("wide", wide))
    }
    assert autopsy.conclude(autopsy.loss_lines(rows, L), CAUSES, L).startswith(wanted)


@pytest.mark.parametrize("at_32", [1.0, 2.0])
def test_a_conclusion_names_longer_windows_without_a_loss(at_32):
    """The run of this change has a loss at 64 tokens. The trained one has NaN there, so it may fail."""
    losses = {autopsy.TRAINED: (1.0, at_32, None), "narrow": (1.0, 1.0, 1.0)}
    rows = {
        name: [
            {"eval_len": length, "nll": nll, "ppl": nll and math.exp(nll), "status": "ok" if nll else "nonfinite"}
            for length, nll in zip((L, 32, 64), own, strict=True)
        ]
        for name, own in losses.items()
    }
    first, _, second = autopsy.conclude(autopsy.loss_lines(rows, L), CAUSES, L).partition(". ")
    assert second == "There is no loss as trained at 64 (nonfinite) tokens."
    assert first.startswith("The run does not fail up to 32 tokens" if at_32 == 1 else "Narrow: restores 100% of the")


def test_losses_by_position_are_means_over_targets():
    row = {
        "eval_len": 48, "position_edges": [*range(0, 49, 4)], "position_nll": [*range(12)],
        "position_targets": [1, 3] + [2] * 10,
    }  # fmt: skip
    found = autopsy.losses_by_position(row, L)
    assert [(one["from"], one["to"]) for one in found] == [(0, 8), (8, 16), (16, 32), (32, 48)]
    np.testing.assert_allclose([one["nll"] for one in found], [0.75, 2.5, 5.5, 9.5])
    assert autopsy.losses_by_position({"eval_len": 48}, L) == []


@pytest.mark.parametrize("positions", ["randomised(longest=99)", "grid", "offset(longest=99)"])
def test_positions_with_other_distances_are_refused(tmp_path, capsys, positions):
    settings = base_config("nope")
    settings.train.update({"length": 16, "positions": positions})
    settings.eval.lengths = (16,)
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_config(run_config(settings), num_params=1)
    has_others = not positions.startswith("offset")
    wanted = f"train.positions={positions} gives others" if has_others else "above the training length, 16"
    refused(capsys, 2, ["autopsy", str(folder.path), "--lengths=16"], wanted)


def test_what_cannot_be_opened_is_one_line(whole, capsys):
    asked = ["autopsy", str(whole)]
    refused(capsys, 2, [*asked, "--lengths=16"], "--lengths", "above the training length, 16")
    refused(capsys, 2, [*asked, "--config.eval.protocols=sliding"], "eval.protocols", "nonoverlapping and per_position")
    refused(capsys, 2, [*asked, f"--workdir={whole}"], "Name it once")
    refused(capsys, 2, ["autopsy"], "--workdir is missing")
    assert "--config.train.length=16" in tiny.call(capsys, *asked, "--print_config")[1]
    code, out, _ = tiny.call(capsys, *asked, "--lengths=32", "--dry_run")
    assert code == 0 and out.splitlines() == [
        "as trained: whole at (32,)",
        "window of 16: whole@window-size=16 at (32,)",
    ]
