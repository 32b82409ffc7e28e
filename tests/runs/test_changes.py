"""Runs with the weights of another under a change: layers, masks, and changes that change nothing."""

import pytest

from posx.config import base_config, run_config
from posx.encodings import Rope, spec_text
from posx.encodings.frequencies import Geometric, Yarn
from posx.errors import ConfigError
from posx.runs.changes import differences, under


def run_of(encoding="rope(base=100000)", **model):
    config = base_config(encoding)
    config.model.update({"num_layers": 4, "model_dim": 32, "num_heads": 2, **model})
    return run_config(config)


#: Local layers with a base of their own, as Gemma has them.
GEMMA = {
    "layer_policy": ("rope(base=500)", "encoding"),
    "mask_policy": ("window(size=8)", "causal"),
}


def rules(run):
    return [type(layer.frequencies) for layer in run.layers]


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        ("", [Geometric, Yarn] * 2),
        ("all", [Yarn] * 4),
        ("full", [Geometric, Yarn] * 2),
        ("window", [Yarn, Geometric] * 2),
    ],
)
def test_each_layer_keeps_its_own_base(layers, wanted):
    run = run_of(**GEMMA)
    found = under(run, "rope(frequencies=yarn(factor=4))", layers=layers)
    assert [layer.base for layer in found.layers] == [500, 100000] * 2 and rules(found) == wanted
    texts = [spec_text(layer) for layer in run_config({**found.asked}).layers]
    assert texts == [spec_text(layer) for layer in found.layers], "the stored words resolve to the stored layers"


def test_a_rule_can_be_kept_off_window_layers():
    run = run_of(mask_policy=("window(size=8)", "causal"))
    both, full = (under(run, "frequencies=yarn(factor=4)", layers=layers) for layers in ("", "full"))
    assert rules(both) == [Yarn] * 4 and rules(full) == [Geometric, Yarn] * 2
    assert full.layer_texts == ("rope(base=100000)", "rope(base=100000, frequencies=yarn(factor=4))") * 2
    (line,) = differences(both, run, " (FIX)")
    assert "frequencies: geometric -> yarn(factor=4, original_len=64" in line
    assert line.endswith("in all layers, 2 of which see a window alone (FIX)")
    assert differences(full, run)[0].endswith("in 2 of 4 layers (2, 4)")
    assert differences(full, run)[1] == "2 of 4 layers are as trained"


def test_masks_keep_the_fields_that_are_not_named():
    run = run_of(mask_policy=("window(size=8, sinks=4)", "causal"))
    found = under(run, masks=["window(size=16)"], layers="window")
    assert found.model.mask_policy == ("window(size=16, sinks=4)", "causal")
    assert under(run, masks=["window(size=16)", "causal"]).model.mask_policy == ("window(size=16, sinks=4)", "causal")
    assert under(run, masks=["window(size=8)", "causal"]) is run
    for masks, layers, problem in (
        (["causal"], "some", "Give all, full or window"),
        (["causal"] * 5, "", "none of the 4 layers"),
        (["causal"], "window", "no layer would change"),
    ):
        with pytest.raises(ConfigError, match=problem):
            under(run_of(), masks=masks, layers=layers)


def test_open_fields_of_a_rule_follow_the_named_one():
    """YaRN's factor of the logits is 0.1 ln f + 1 unless it was given."""
    run = run_of("rope(frequencies=yarn(factor=4, original_len=16))")
    (found, *_) = under(run, "factor=8").layers
    assert found.frequencies == Yarn(factor=8, original_len=16).resolve(run.dims)
    run = run_of("rope(frequencies=yarn(factor=4, attention_factor=1.5))")
    assert under(run, "factor=8").layers[0].frequencies.magnitude == 1.5


@pytest.mark.parametrize(("window", "other"), [(16, 15), (1000, 999)])
def test_remaps_that_differ_at_one_distance_are_two_runs(window, other):
    """Self-Extend moves distance 15 if w = 15. All other distances are those of w = 16."""
    run = run_of(f"self_extend(window={window})")
    assert under(run, f"window={other}") is not run


def test_own_encoding_that_reads_features_can_be_put_on_a_run(tmp_path, monkeypatch):
    (tmp_path / "gained.py").write_text(
        "import dataclasses, posx\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Gained(posx.Encoding):\n"
        "    gain: float = 1.0\n"
        "    def features(self, params, x, pos, carry):\n"
        "        return {'mean': x.mean(-1)}, carry\n"
        "    def query(self, params, vectors, pos, features):\n"
        "        return vectors * (1 + self.gain * features['mean'][:, None, None])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = run_of("gained:Gained")
    assert under(run, "gain=2").layers[0].gain == 2


@pytest.mark.parametrize(
    ("text", "alike"),
    [
        *((f"frequencies={rule}", True) for rule in (
            "yarn(factor=1)", "linear(factor=1)", "ntk(factor=1)", "ntk_by_parts(factor=1)", "llama3(factor=1)",
            "proportional(share=1)", "geometric")),
        ("self_extend(group=1)", True), ("rope+nope", True), ("rope(rotary_dim=16)", True),
        ("frequencies=dynamic_ntk(factor=1)", False),  # it differs beyond L
        ("frequencies=dynamic_ntk(factor=2, original_len=1000)", False),  # beyond 1000
        ("self_extend(window=1000000)", False), ("rope(base=100000.01)", False),
        ("frequencies=yarn(factor=1.001)", False),
    ],
)  # fmt: skip
def test_a_change_that_changes_nothing_is_the_run_itself(text, alike):
    run = run_of()
    assert (under(run, text) is run) == alike


def test_parameters_that_do_not_fit_are_refused():
    for text in ("t5", "alibi+learned"):
        with pytest.raises(ConfigError, match="needs the parameters"):
            under(run_of(), text)
    with pytest.raises(ConfigError, match="no layer would change, because model.layer_policy=rope"):
        under(run_of(layer_policy=("rope",)), "rope")
    assert under(run_of(layer_policy=("rope",)), "base=5", layers="all").layers == (Rope(5, rotary_dim=16),) * 4
