"""How many runs at once and on which cores: chosen from the plan and the machine alone."""

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from posx.errors import ConfigError
from posx.lab.config import base_config, read_sections
from posx.lab.progress import duration
from posx.lab.runs.folder import RunFolder
from posx.lab.sweeps.engines import local as machine
from posx.lab.sweeps.engines.local import LocalEngine
from posx.lab.sweeps.plan import plan
from posx.lab.sweeps.schedule import CORE_SPEED, START, Cost, choose

PLENTY, GB = 1e15, 1e9
HOUR = Cost(flops=3600 * CORE_SPEED, lengths=0, memory=0.2 * GB, steps=2000, rows=64)


def chosen(*costs: Cost, cores: int = 4, memory: float = PLENTY, jobs: int = 0):
    return choose(costs, cores, memory, jobs)


def seconds(schedule, *costs: Cost) -> float:
    """The expected wall time of runs."""
    ordered = sorted(costs, key=lambda cost: cost.order)
    return schedule.wall_seconds(cost.seconds(schedule.width) for cost in ordered)


@pytest.mark.parametrize(
    ("runs", "cores", "at_once", "width"),
    [
        (40, 4, 4, 1),  # many small runs: a core each
        (1, 4, 1, 4),
        (2, 4, 2, 2),
        (2, 7, 2, 3),
        (5, 4, 5, 1),  # turns leave nothing over for a last round
        (10, 4, 6, 1),
        (3, 1, 1, 1),
    ],
)
def test_equal_runs_get_the_cores_that_end_them_soonest(runs, cores, at_once, width):
    schedule = chosen(*[HOUR] * runs, cores=cores)
    assert (schedule.at_once, schedule.width) == (at_once, width)


def test_one_run_that_outlasts_all_others_gets_more_than_a_core():
    long = HOUR._replace(flops=20 * HOUR.flops)
    assert chosen(HOUR, HOUR, long, HOUR, HOUR).width == 4


def test_a_start_does_not_divide_so_short_runs_get_a_core_each():
    assert chosen(*[HOUR._replace(flops=1e10)] * 4, cores=8).at_once == 4


@pytest.mark.parametrize(("runs", "at_once", "rounds"), [(5, 5, 5 / 4), (7, 7, 7 / 4), (8, 4, 2), (11, 7, 11 / 4)])
def test_short_runs_of_an_incomplete_last_round_take_turns(runs, at_once, rounds):
    short = HOUR._replace(flops=1e10)
    schedule = chosen(*[short] * runs)
    assert schedule.at_once == at_once
    assert seconds(schedule, *[short] * runs) == pytest.approx(rounds * short.seconds(1), rel=0.04)
    assert ("taking turns on 4 cores" in str(schedule)) == (at_once > 4)


def test_steps_that_devices_meet_in_have_their_price():
    short = HOUR._replace(steps=80_000)
    assert short.seconds(1) == HOUR.seconds(1) and HOUR.seconds(4) < short.seconds(4) < short.seconds(1)
    assert [chosen(*[run] * 3).at_once for run in (HOUR, short)] == [1, 3]


def test_no_more_runs_at_once_than_fit_into_memory():
    schedule = chosen(*[HOUR._replace(memory=4.6 * GB)] * 8, memory=16 * GB)
    assert schedule.at_once == schedule.width == 2 and "as 2 runs fit into 16.0 GB" in str(schedule)
    assert chosen(HOUR._replace(memory=99 * GB), HOUR, memory=16 * GB).width == 4


def test_cores_that_cannot_share_the_rows_are_worth_nothing():
    odd = HOUR._replace(rows=3)
    assert odd.seconds(4) == odd.seconds(3) and HOUR.seconds(3) == HOUR.seconds(2) > HOUR.seconds(4)
    assert HOUR._replace(rows=0).seconds(3) < HOUR.seconds(3), "evaluation fills up its last windows"


@pytest.mark.parametrize(("jobs", "at_once", "width"), [(1, 1, 4), (2, 2, 2), (3, 3, 1), (4, 4, 1), (9, 5, 1)])
def test_a_number_of_runs_that_is_asked_for_is_taken(jobs, at_once, width):
    schedule = chosen(*[HOUR] * 5, memory=GB, jobs=jobs)
    assert schedule.at_once == at_once and schedule.width == width


def test_lower_seeds_go_first_then_the_longest_runs(tmp_path):
    config = base_config("rope")
    config.sweep.update(encodings=("rope", "nope"), seeds=(0, 1), train_lens=(64, 128))
    jobs = plan(read_sections(config), tmp_path)
    order = [job.name for job in sorted(jobs, key=lambda job: job.cost.order)]
    assert order == [f"{e}-L{length}-s{s}" for s in (0, 1) for length in (128, 64) for e in ("rope", "nope")]


def test_work_on_pairs_costs_more_and_undefined_lengths_nothing(tmp_path):
    config = base_config("rope")
    config.sweep.update(encodings=("learned", "nope", "shaw"), train_lens=(64,))
    config.eval.lengths = (64, 1024)
    learned, nope, shaw = (job.cost for job in plan(read_sections(config), tmp_path))
    assert shaw.order < nope.order < learned.order and (learned.lengths, nope.lengths) == (1, 2)


@pytest.fixture
def starts(monkeypatch, tmp_path):
    """Return a function that gives the cores of the next runs beside those on the `running` cores."""
    monkeypatch.setattr(machine.subprocess, "Popen", lambda *words, **how: None)

    def start(schedule, cores, count, *running):
        engine = LocalEngine([], 0)
        engine.schedule, engine.cores = schedule, cores
        engine.running = [SimpleNamespace(cores=taken) for taken in running]
        task = SimpleNamespace(folder=RunFolder(tmp_path), output=None, prepare_worker=list, cost=HOUR)
        while count and (worker := engine.start(task)):
            engine.running.append(worker)
            count -= 1
        return [worker.cores for worker in engine.running[len(running) :]]

    return start


def test_concurrent_runs_have_cores_of_their_own(starts):
    cores = (2, 3, 6, 7)
    assert starts(chosen(*[HOUR] * 40), cores, 5) == [(2,), (3,), (6,), (7,)]
    assert starts(chosen(*[HOUR] * 40), cores, 5, (2,), (3,), (7,)) == [(6,)]
    assert starts(chosen(HOUR, HOUR), cores, 1, (2, 3)) == [(6, 7)]
    assert starts(chosen(HOUR), cores, 1) == [cores]
    shared = chosen(*[HOUR] * 5, cores=2, jobs=3)
    assert starts(shared, (0, 1), 5) == [(0,), (1,), (0,)]
    assert starts(shared, (0, 1), 5, (0,), (1,)) == [(0,)]


def test_an_accelerator_serves_one_run_at_a_time(monkeypatch, starts):
    monkeypatch.setattr(machine, "uses_cpus", lambda: False)
    runs = [SimpleNamespace(cost=HOUR)] * 3
    engine = LocalEngine(runs, 0)
    assert (engine.schedule.at_once, engine.cores, str(engine.schedule)) == (1, (), "1 run at a time")
    assert starts(engine.schedule, engine.cores, 3) == [()]
    assert HOUR.seconds(engine.schedule.width) == HOUR.seconds(1)
    assert LocalEngine(runs, 2).schedule.at_once == 2


def test_a_process_that_cannot_be_bound_is_told_its_devices(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "")
    told = [machine.core_variables(HOUR, cores).get("JAX_NUM_CPU_DEVICES") for cores in (0, 1, 3, 4)]
    assert told == [None, "1", "2", "4"]
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    assert machine.core_variables(HOUR, 4)["JAX_NUM_CPU_DEVICES"] == "8"


class MadeUp(machine.Engine):
    """An engine whose workers end on their own, with their exit codes in turn, after so many looks each."""

    def __init__(self, schedule, looks, codes):
        self.schedule, self.looks, self.codes = schedule, looks, codes

    def start(self, task):
        number = int(task.name.removeprefix("run"))
        if len(self.running) == self.schedule.at_once:
            return None
        if not self.codes[number]:
            raise ConfigError("it cannot start")
        task.done, code, looks = 0.0, self.codes[number].pop(0), iter(range(self.looks))

        def look():
            task.done += 1 / self.looks
            return None if next(looks, None) is not None else code

        return SimpleNamespace(
            task=task, code=look, begun=True, lines=lambda: ["a line"], why=lambda code: f"code {code}",
            terminate=lambda: None, kill_later=lambda seconds: None,
        )  # fmt: skip


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Return a function that runs tasks with these exit codes; its clock passes 100 s a look."""
    clock = itertools.count(step=50)
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(machine.time, "monotonic", lambda: float(next(clock)))

    def run(codes, looks=3, **how):
        folders = [RunFolder(tmp_path / f"run{number}") for number in range(len(codes))]
        made = [
            SimpleNamespace(
                folder=folder, name=folder.path.name, cost=HOUR, done=0.0, state=str, outcome=lambda: "well"
            )
            for folder in folders
        ]
        for task in made:
            task.progress = lambda task=task: 0.99 * min(task.done, 1.0)
        schedule = chosen(*[HOUR] * len(codes), cores=2)
        return machine.Engine.run(MadeUp(schedule, looks, codes), made, "sweep", **how), made

    return run


def test_a_stopped_task_starts_again_and_failures_are_named(made_up, capfd):
    failed, _ = made_up([[0], [75, 0], [75] * 9, [], [5]], echo=True)
    reasons = {folder.path.name: why for folder, why in failed.items()}
    assert reasons == {"run2": "code 75", "run3": "it cannot start", "run4": "code 5"}
    said = capfd.readouterr().err
    assert said.count("run2 was stopped and resumes") == machine.STARTS - 1
    assert "run1 was stopped and resumes" in said and "run1 done: well" in said and "run3 failed: it cannot" in said
    assert "a line\n" in said


def test_a_task_whose_end_fails_has_failed(made_up):
    def ended(task):
        raise ConfigError("no room")

    failed, made = made_up([[0]], ended=ended)
    assert failed == {made[0].folder: "no room"}


def test_ctrl_c_says_that_runs_save(made_up, monkeypatch, capfd):
    monkeypatch.setattr(machine.interrupts, "_received", {KeyboardInterrupt})
    with pytest.raises(KeyboardInterrupt):
        made_up([[0], [0]])
    assert "waiting up to 25 s for 2 runs to save. Ctrl-C again ends at once" in capfd.readouterr().err


def test_time_left_knows_that_runs_go_side_by_side(monkeypatch):
    long = HOUR._replace(flops=2 * HOUR.flops)
    schedule, now = chosen(long, HOUR, HOUR, cores=2, jobs=2), [0.0]
    whole = seconds(schedule, long, HOUR, HOUR)
    monkeypatch.setattr(machine.time, "monotonic", lambda: now[0])

    def work(*parts):
        """Return the state of runs that are finished in parts, the first two unfinished ones running, and the runs."""
        made = [
            SimpleNamespace(
                folder=RunFolder(Path(f"run{number}")),
                name=f"run{number}",
                cost=cost,
                part=part,
                state=str,
                outcome=str,
            )
            for number, (cost, part) in enumerate(zip((long, HOUR, HOUR), parts, strict=True))
        ]
        for task in made:
            task.progress = lambda task=task: task.part
        found = MadeUp(schedule, 0, [])
        found.take([task for task in made if task.part < 1], "sweep")
        for task in found.waiting[:2]:
            found.running.append(SimpleNamespace(task=task, code=lambda: None, begun=True, lines=lambda: []))
        del found.waiting[:2]
        return found, made

    def left(found, time):
        """Return the time left that is shown at some time."""
        now[0], found.looked = time, -9.0
        found.look(False, lambda task: None)
        return str(found.meter).strip()

    sweep, made = work(0.0, 0.0, 0.0)
    assert "left" not in left(sweep, 5.0), "nothing is known yet"
    made[0].part, made[1].part = 0.25, 0.5
    spent = 1.5 * (START + 1800)  # half as fast as expected
    assert left(sweep, spent).startswith(f"{duration(1.5 * (whole - START - 1800))} left  0 of 3 runs")
    del sweep.running[1]
    sweep.end(made[1], "it failed")  # what it left undone was no work
    assert left(sweep, spent).startswith(f"{duration(1.5 * 5400)} left  1 of 3 runs ended")
    now[0] = 0.0
    resumed, made = work(0.5, 1.0, 1.0)
    made[0].part = 0.625
    assert left(resumed, START + 900).startswith(f"{duration(2700)} left  0 of 1 runs")
    del resumed.running[0]
    resumed.end(made[0], "")
    assert left(resumed, 4000.0).startswith("took 1 h 06 min  1 of 1 runs")


def test_no_runs_take_no_time():
    """As of a folder in which no run can be read."""
    assert chosen().wall_seconds([]) == 0 and str(chosen()).startswith("1 run at a time")
