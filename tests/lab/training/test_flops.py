"""Operations of a training step, against the visible pairs of each mask."""

import numpy as np
import pytest

import posx
from posx.lab.config import EvalConfig, base_config, read_sections
from posx.lab.config.sections import ModelConfig
from posx.lab.model import make_model
from posx.lab.runs.cost import pass_cost
from posx.lab.sweeps import plan as planning
from posx.lab.training.step import flops_per_token
from tests.made_rows import UNDISTURBED

HEADS, HEAD_DIM = 2, 24
MASKS = {
    "causal": posx.causal(), "full": posx.full(), "window(size=3)": posx.window(3), "window(size=64)": posx.window(64),
    "window(size=3, sinks=2)": posx.window(3, sinks=2), "window(size=4, sinks=64)": posx.window(4, sinks=64),
}  # fmt: skip


def model_of(*masks):
    """A model whose heads are wider than its width over their number."""
    sizes = ModelConfig(num_layers=2, model_dim=32, num_heads=HEADS, head_dim=HEAD_DIM, mask_policy=masks)
    return make_model(sizes, "nope", 257, 64)


@pytest.mark.parametrize("text", MASKS)
@pytest.mark.parametrize("length", [1, 5, 17])
def test_flops_count_the_visible_pairs_of_each_layer(text, length):
    idx = np.arange(length)
    pairs = sum(int(mask.visible(idx, idx).sum()) for mask in (MASKS[text], posx.causal()))
    weights = flops_per_token(model_of("causal"), 1) - 12 * HEADS * HEAD_DIM * 2  # each layer has one pair
    found = flops_per_token(model_of(text, "causal"), length) - weights
    assert found == pytest.approx(12 * HEADS * HEAD_DIM * pairs / length)


def test_estimates_of_time_count_windows_as_causal():
    """Executors skip only whole tiles, and a window of 64 was no faster at 4,096 tokens on CPUs."""
    costs = [pass_cost(model_of(mask), EvalConfig(), 4096, 3) for mask in ("causal", "window(size=64)")]
    assert costs[0] == costs[1]


def test_speeds_of_windowed_runs_are_scaled_to_estimates(tmp_path, monkeypatch):
    """The logged share counts fewer operations than the estimate, which a run with a window must not make longer."""
    monkeypatch.setattr(planning, "stored_ceiling", lambda *_: 0.0)
    monkeypatch.setattr(planning, "machine_ceiling", lambda folder, dtype, **how: 1e11)
    config = base_config("nope")
    config.model.mask_policy = ("window(size=4)",)
    config.sweep.update(encodings=("nope",), train_lens=(4096,), seeds=(0,))
    (job,) = planning.plan(read_sections(config), tmp_path)

    def shown() -> str:
        return planning.preview([job], {"jobs": 1, "on": "local", "cpus": 1}).partition("start of 10 s, ")[2]

    before = shown().partition(".")[0]
    model = make_model(job.run.model, "nope", 257, 4096)
    useful, computed = (flops_per_token(model, 4096, windows) for windows in (True, False))
    job.folder.path.mkdir()
    job.folder.write_config(job.run)
    row = {"step": 1, "hash": job.run.hash, "mfu": planning.USUAL_SHARE * useful / computed} | UNDISTURBED
    job.folder.append(job.folder.metrics_file, row)
    assert useful < computed / 2 and shown().startswith(before.partition(" on this")[0])
