"""What a sweep would take."""

from types import SimpleNamespace

from posx.lab.config import base_config, read_sections
from posx.lab.sweeps import plan as planning
from posx.lab.sweeps.plan import plan, preview
from posx.lab.sweeps.schedule import choose


def test_preview_measures_once_and_counts_each_start(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(planning, "machine_ceiling", lambda folder, dtype, **how: measured.append(dtype) or 1e30)
    config = base_config("rope")
    config.sweep.update(encodings=("rope", "alibi"), seeds=(0, 1, 2))
    jobs = plan(read_sections(config), tmp_path)
    schedule = choose([job.cost for job in jobs], cores=2, memory=64e9)
    monkeypatch.setattr(planning, "LocalEngine", lambda jobs, at_once: SimpleNamespace(schedule=schedule))
    text = preview(jobs, {"jobs": 0, "on": "", "cpus": 1})
    assert measured == ["float32"]
    assert "about 1 min 15 s left, 2 runs at a time, one core each\n" in text
    assert "a start of 10 s, then 50%" in text and "No run here has measured them" in text
