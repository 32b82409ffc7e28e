"""What a sweep would take."""

from posx.config import base_config
from posx.sweeps import preview
from posx.sweeps.plan import plan


def test_the_machine_is_measured_once_for_all_runs_and_a_start_is_counted_for_each(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(preview, "matmul_ceiling", lambda folder, dtype, keep: measured.append(dtype) or 1e30)
    config = base_config("rope")
    config.sweep.update(encodings=("rope", "alibi"), seeds=(0, 1, 2))
    text = preview.preview(plan(config, tmp_path))
    assert measured == ["float32"]
    assert "about 1 min 00 s left one after another" in text and "which no run here has measured" in text
