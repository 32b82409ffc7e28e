"""Sweeps on a real Ray cluster of several raylets on this machine."""

import json
import os
import signal

import pytest

from tests import tiny

pytestmark = pytest.mark.engines

#: Steps of runs that last long enough, wherever they are made, to be caught in the middle.
LONG = 600
LONGER = [f"--config.train.steps={LONG}", f"--config.train.checkpoint_steps={LONG // 10}"]
#: Those of a run that ends when it is stopped, however late that is on a busy machine.
ENDLESS = ["--config.train.steps=1000000", LONGER[1]]


@pytest.fixture
def cluster(monkeypatch):
    """Two machines of one CPU each, and a head that makes no runs."""
    monkeypatch.setenv("RAY_worker_niceness", "0")  # other tests run beside
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.workers = [made.add_node(num_cpus=1) for _ in range(2)]
    yield made
    made.shutdown()


def sweep(site, workdir, *more: str) -> list[str]:
    return ["sweep", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}", "--config.sweep.encodings=t5", *more]


def machine_of(folder) -> str:
    """The process of Ray that a run was last started by."""
    lines = [line for line in (folder / "log.txt").read_text().splitlines() if line.startswith("at work on ")]
    return lines[-1] if lines else ""


def held(folder) -> int:
    """The process that makes a run, stopped in the middle of it."""
    number = int((folder / ".lock.holder").read_text().split()[1])
    os.kill(number, signal.SIGSTOP)
    return number


def parent(process: int) -> int:
    return int(open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[1])


def is_told_to_stop(process: int) -> bool:
    """Whether a process that is held has a SIGTERM before it."""
    lines = open(f"/proc/{process}/status").read().splitlines()
    pending = next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd"))
    return bool(pending >> (signal.SIGTERM - 1) & 1)


def is_on(machine, process: int) -> bool:
    """Whether a machine's raylet has started the worker that has started `process`."""
    return parent(parent(process)) == machine.all_processes["raylet"][0].process.pid


def test_runs_of_a_machine_that_is_lost_go_on_elsewhere(cluster, site, tmp_path):
    workdir, copies = tmp_path / "sweep", tmp_path / "copies"
    engine = [f"--on=ray:{cluster.address}", f"--copy_to={copies}"]
    words = sweep(site, workdir, "--config.sweep.seeds=0,1", *LONGER, *engine)
    process = tiny.start(*words)
    runs = [workdir / f"t5-L16-s{seed}" for seed in (0, 1)]
    makers = []
    for run in runs:  # whichever is first does not end before the other has begun
        tiny.until(lambda run=run: tiny.step(run) > LONG // 10, process)
        makers.append(held(run))
    lost, left = sorted(makers, key=lambda maker: not is_on(cluster.workers[0], maker))
    worker = parent(lost)
    cluster.remove_node(cluster.workers[0], allow_graceful=False)
    for gone in (worker, lost):  # they go with their machine
        os.kill(gone, signal.SIGKILL)
    os.kill(left, signal.SIGCONT)
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0 and "| t5 | 2 |" in out and "on 3 machines of Ray, 1 CPU each" in err, err
    for run, maker in zip(runs, makers, strict=True):
        attempts = {row["attempt"] for row in tiny.rows(run / "metrics.jsonl")}
        assert attempts == ({1, 2} if maker == lost else {1})
    for run in runs:
        assert machine_of(run) and json.loads((copies / run.name / "DONE").read_text())["step"] == LONG
        assert (copies / run.name / "eval.jsonl").read_bytes() == (run / "eval.jsonl").read_bytes()
    assert tiny.run("train", f"--config={site / 'tiny.py'}:t5", f"--workdir={tmp_path / 'here'}", *LONGER)[0] == 0
    found, wanted = (tiny.rows(folder / "eval.jsonl") for folder in (runs[0], tmp_path / "here"))
    assert [row["nll"] for row in found] == pytest.approx([row["nll"] for row in wanted], rel=1e-5)
    code, _, err = tiny.run(*words)
    assert code == 0 and "2 of 2 runs are finished already" in err


def test_a_stopped_sweep_saves_and_a_failing_run_is_named(cluster, site, tmp_path):
    workdir = tmp_path / "sweep"
    words = sweep(site, workdir, "--config.sweep.seeds=0", *ENDLESS, f"--on=ray:{cluster.address}")
    process = tiny.start(*words)
    run = workdir / "t5-L16-s0"
    tiny.until(lambda: tiny.step(run) > LONG // 10, process)
    maker = held(run)
    process.terminate()
    tiny.until(lambda: is_told_to_stop(maker), process)
    os.kill(maker, signal.SIGCONT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 75 and "Traceback" not in err, err
    saved = max(int(path.stem) for path in (run / "checkpoints").glob("*.json") if path.stem.isdigit())
    assert f"stopped and saved at step {saved}" in (run / "log.txt").read_text()
    code, out, _ = tiny.run(*words, "--status")
    assert code == 0 and "done" in out and "0 of 1 runs are finished" in out
    (run / "checkpoints").rename(run / "kept")
    (run / "checkpoints").touch()
    code, _, err = tiny.run(*words)
    assert code == 7 and "1 of 1 runs failed (t5-L16-s0: " in err and "Traceback" not in err, err
    (run / "checkpoints").unlink()
    (run / "kept").rename(run / "checkpoints")
    before, process = tiny.step(run), tiny.start(*words)
    tiny.until(lambda: tiny.step(run) > before, process)
    process.terminate()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 75 and f"resuming {run.name} at step {saved}" in (run / "log.txt").read_text(), err


def test_where_there_is_no_cluster_one_line_says_so(site, tmp_path):
    code, _, err = tiny.run(*sweep(site, tmp_path / "sweep", "--on=ray:127.0.0.1:1"), **os.environ)
    assert code == 2 and "--on ray:127.0.0.1:1: no Ray cluster there" in err.splitlines()[-1] and "Traceback" not in err
