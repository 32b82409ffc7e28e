"""Runs with the weights of another under a change: layers, masks, and changes that change nothing."""

import dataclasses

import jax
import numpy as np
import pytest

from posx.encodings import Rope, spec_text
from posx.encodings.frequencies import Geometric, Yarn
from posx.errors import ConfigError
from posx.lab.config import base_config, run_config
from posx.lab.data import ByteTokenizer
from posx.lab.runs.changes import change_run, run_differences
from posx.lab.runs.describe import make_run_model
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.load import inherit_arrays
from posx.lab.training.checkpoints import Checkpoints


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
    found = change_run(run, "rope(frequencies=yarn(factor=4))", layers=layers)
    assert [layer.base for layer in found.layers] == [500, 100000] * 2 and rules(found) == wanted
    texts = [spec_text(layer) for layer in run_config(found.asked).layers]
    assert texts == [spec_text(layer) for layer in found.layers], "the stored words resolve to the stored layers"


def test_a_rule_can_be_kept_off_window_layers():
    run = run_of(mask_policy=("window(size=8)", "causal"))
    both, full = (change_run(run, "frequencies=yarn(factor=4)", layers=layers) for layers in ("", "full"))
    assert rules(both) == [Yarn] * 4 and rules(full) == [Geometric, Yarn] * 2
    assert full.layer_texts == ("rope(base=100000)", "rope(base=100000, frequencies=yarn(factor=4))") * 2
    (line,) = run_differences(both, run, " (FIX)")
    assert "frequencies: geometric -> yarn(factor=4, original_len=64" in line
    assert line.endswith("in all layers, 2 of which see a window alone (FIX)")
    assert run_differences(full, run)[0].endswith("in 2 of 4 layers (2, 4)")
    assert run_differences(full, run)[1] == "2 of 4 layers are as trained"


def test_a_field_changes_in_the_layers_that_have_it():
    run = run_of(layer_policy=("encoding", "encoding", "nope"), mask_policy=("window(size=8)", "causal", "causal"))
    for layers, wanted in (("full", [0, 1, 0, 0]), ("window", [1, 0, 0, 1]), ("all", [1, 1, 0, 1])):
        found = change_run(run, "frequencies=yarn(factor=4)", layers=layers)
        assert [isinstance(getattr(one, "frequencies", None), Yarn) for one in found.layers] == wanted
    with pytest.raises(ConfigError, match="no such field"):
        change_run(run, "max_distance=4", layers="full")


def test_masks_keep_the_fields_that_are_not_named():
    run = run_of(mask_policy=("window(size=8, sinks=4)", "causal"))
    found = change_run(run, masks=["window(size=16)"], layers="window")
    assert found.model.mask_policy == ("window(size=16, sinks=4)", "causal")
    assert change_run(run, masks=["window(size=16)", "causal"]).model.mask_policy == (
        "window(size=16, sinks=4)",
        "causal",
    )
    assert change_run(run, masks=["window(size=8)", "causal"]) is run
    assert change_run(run, masks=["window"]).model.mask_policy == (
        "window(size=8, sinks=4)",
        "window(size=64)",
    ), "a layer without a window gets one of the training length"
    for masks, layers, problem in (
        (["causal"], "some", "Give all, full or window"),
        (["causal"] * 5, "", "none of the 4 layers"),
        (["causal"], "window", "no layer would change"),
    ):
        with pytest.raises(ConfigError, match=problem):
            change_run(run_of(), masks=masks, layers=layers)


def test_open_fields_of_a_rule_follow_the_named_one():
    """YaRN's factor of the logits is 0.1 ln f + 1 unless it was given."""
    run = run_of("rope(frequencies=yarn(factor=4, original_len=16))")
    (found, *_) = change_run(run, "factor=8").layers
    assert found.frequencies == Yarn(factor=8, original_len=16).resolve(run.dims)
    run = run_of("rope(frequencies=yarn(factor=4, attention_factor=1.5))")
    assert change_run(run, "factor=8").layers[0].frequencies.magnitude == 1.5
    run = run_of("t5+rope(frequencies=yarn(factor=4))")  # the buckets of the learned table stay beside it
    t5, rope = change_run(run, "t5(max_distance=128)+rope(frequencies=yarn(factor=8))").layers[0].parts
    assert t5.num_buckets == run.layers[0].parts[0].num_buckets and t5.max_distance == 128
    assert rope.frequencies == Yarn(factor=8).resolve(run.dims)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "other"), [(16, 15), (1000, 999)])
def test_remaps_that_differ_at_one_distance_are_two_runs(window, other):
    """Self-Extend moves distance 15 if w = 15. All other distances are those of w = 16."""
    run = run_of(f"self_extend(window={window})")
    assert change_run(run, f"window={other}") is not run


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
    assert change_run(run, "gain=2").layers[0].gain == 2


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
    assert (change_run(run, text) is run) == alike


@pytest.mark.parametrize("trained", ["rope+learned_sinks", "t5+self_extend", "dape(base=rope)"])
def test_a_rule_of_factor_1_changes_no_learned_encoding(trained):
    run = run_of(trained)
    assert change_run(run, "frequencies=yarn(factor=1)") is run
    for rule in ("yarn(factor=1.001)", "dynamic_ntk(factor=1)", "resonance"):
        assert change_run(run, f"frequencies={rule}") is not run


FAR, NEAR = (f"t5(num_buckets=16, max_distance={far})" for far in (40, 20))


@pytest.mark.parametrize(
    ("trained", "policy", "text", "layers", "problem"),
    [
        *(("sinusoidal", ["encoding"], text, "full", "acts on all through the embeddings") for text in (
            "base=500", "nope")),
        ("rope", ["encoding"], "sinusoidal+rope", "full", "acts on all through the embeddings"),
        ("learned", ["encoding"], "beyond=clamp", "window", "acts on all through the embeddings"),
        ("t5", ["encoding"], "max_distance=40", "full", "arrays that layers share"),
        # The tables of the two would change places: arrays are stored by the order of distinct encodings.
        (FAR, [NEAR, "encoding", NEAR, "encoding"], "max_distance=40", "window", "would change 1 of 4 layers, but arr"),
    ],
)  # fmt: skip
def test_change_of_a_part_of_what_layers_share_is_refused(trained, policy, text, layers, problem):
    masks = ("window(size=8)", "causal", "causal", "causal")
    with pytest.raises(ConfigError, match=problem):
        change_run(run_of(trained, layer_policy=policy, mask_policy=masks), text, layers=layers)
    whole = run_of("sinusoidal", layer_policy=("encoding", "nope"))
    assert set(change_run(whole, "nope").layer_texts) == {"nope"}, "all layers of the encoding change"


def test_training_on_takes_no_array_of_another_part(tmp_path):
    """The tables of `learned` and TUPE have one name and one shape, but another meaning."""
    held = run_of("learned+log_length", num_layers=1)
    folder, tokenizer = RunFolder(tmp_path), ByteTokenizer()
    tokenizer.save(folder.tokenizer_file)
    folder.write_config(held)
    params = make_run_model(held, tokenizer.vocab_size).init(jax.random.key(1))
    Checkpoints(folder.checkpoints, run=held.hash).save(1, {"params": params})
    for text, is_kept in (("tupe+log_length", False), ("learned(beyond=clamp)+log_length", True)):
        run = dataclasses.replace(run_of(text, num_layers=1), parent=held.as_parent() | {"step": "1"})
        fresh = make_run_model(run, tokenizer.vocab_size).init(jax.random.key(2))
        found = inherit_arrays(fresh, run, tokenizer, folder)
        np.testing.assert_array_equal(found["embedding"], params["embedding"])
        table = (params if is_kept else fresh)["shared"]["encoding_0"]["0.table"]
        np.testing.assert_array_equal(found["shared"]["encoding_0"]["0.table"], table)


def test_a_notice_says_that_a_parent_held_out_other_text(tmp_path, capsys):
    held = dataclasses.replace(run_of("nope", num_layers=1), held_out="one")
    folder, tokenizer = RunFolder(tmp_path), ByteTokenizer()
    tokenizer.save(folder.tokenizer_file)
    folder.write_config(held)
    params = make_run_model(held, tokenizer.vocab_size).init(jax.random.key(1))
    Checkpoints(folder.checkpoints, run=held.hash).save(1, {"params": params})
    for text in ("one", "other"):
        run = dataclasses.replace(held, held_out=text, parent=held.as_parent() | {"step": "1"})
        inherit_arrays(params, run, tokenizer, folder)
        assert ("held out other text" in capsys.readouterr().err) == (text == "other")


def test_models_of_other_depths_are_compared():
    old, deeper = run_of("rope(base=5)", num_layers=2), run_of("rope(base=7)", num_layers=3)
    assert run_differences(deeper, old) == ["base: 5 -> 7, in all layers"]
    assert run_differences(old, deeper) == ["base: 7 -> 5, in all layers"]


def test_parameters_that_do_not_fit_are_refused():
    for text in ("t5", "alibi+learned"):
        with pytest.raises(ConfigError, match="needs the parameters"):
            change_run(run_of(), text)
    with pytest.raises(ConfigError, match="no layer would change, because model.layer_policy=rope"):
        change_run(run_of(layer_policy=("rope",)), "rope")
    assert change_run(run_of(layer_policy=("rope",)), "base=5", layers="all").layers == (Rope(5, rotary_dim=16),) * 4
