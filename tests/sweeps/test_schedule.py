"""How many runs at once and on which cores: chosen from the plan and the machine alone."""

import os
from types import SimpleNamespace

import pytest

from posx.config import base_config
from posx.errors import ConfigError
from posx.sweeps.clock import Clock
from posx.sweeps.engines import here as machine
from posx.sweeps.engines.here import here
from posx.sweeps.plan import plan
from posx.sweeps.schedule import CORE_SPEED, START, Cost, choose, longest_first

PLENTY, GB = 1e15, 1e9
HOUR = Cost(flops=3600 * CORE_SPEED, lengths=0, memory=0.2 * GB, steps=2000, rows=64)


def chosen(*costs: Cost, cores: int = 4, memory: float = PLENTY, jobs: int = 0):
    return choose(costs, cores, memory, jobs)


@pytest.mark.parametrize(
    ("runs", "cores", "widths"),
    [
        (40, 4, (1,) * 40),  # many small runs: a core each
        (1, 4, (4,)),
        (2, 4, (2, 2)),
        (2, 7, (4, 3)),
        (5, 4, (1, 1, 1, 1, 4)),  # and what is left over for a last round gets all cores
        (10, 4, (1,) * 8 + (2, 2)),
        (3, 1, (1, 1, 1)),
    ],
)
def test_equal_runs_get_the_cores_that_end_them_soonest(runs, cores, widths):
    assert chosen(*[HOUR] * runs, cores=cores).widths == widths


def test_one_run_that_outlasts_all_others_gets_more_than_a_core():
    long = HOUR._replace(flops=20 * HOUR.flops)
    assert chosen(HOUR, HOUR, long, HOUR, HOUR).widths[2] == 4


def test_a_start_does_not_divide_so_short_runs_get_a_core_each():
    assert chosen(*[HOUR._replace(flops=1e10)] * 4, cores=8).at_once == 4


@pytest.mark.parametrize(("runs", "at_once", "rounds"), [(5, 5, 5 / 4), (7, 7, 7 / 4), (8, 4, 2), (11, 7, 11 / 4)])
def test_short_runs_that_do_not_fill_their_last_round_take_turns_on_the_cores(runs, at_once, rounds):
    short = chosen(*[HOUR._replace(flops=1e10)] * runs)
    assert short.at_once == at_once and short.wall_seconds() == pytest.approx(rounds * short.seconds(0), rel=0.04)
    assert ("taking turns on 4 cores" in str(short)) == (at_once > 4)


def test_steps_that_devices_meet_in_have_their_price():
    short = HOUR._replace(steps=80_000)
    assert short.seconds(1) == HOUR.seconds(1) and HOUR.seconds(4) < short.seconds(4) < short.seconds(1)
    assert [chosen(*[run] * 3).at_once for run in (HOUR, short)] == [2, 3]


def test_no_more_at_once_than_fit_into_memory_whatever_the_machine():
    schedule = chosen(*[HOUR._replace(memory=4 * GB)] * 8, memory=16 * GB)
    assert schedule.at_once == 2 and set(schedule.widths) == {2} and "as 2 runs fit into 16.0 GB" in str(schedule)
    assert chosen(HOUR._replace(memory=99 * GB), HOUR, memory=16 * GB).widths == (4, 4)


def test_cores_that_cannot_share_the_rows_are_worth_nothing():
    odd = HOUR._replace(rows=3)
    assert odd.seconds(4) == odd.seconds(3) and HOUR.seconds(3) == HOUR.seconds(2) > HOUR.seconds(4)
    assert HOUR._replace(rows=0).seconds(3) < HOUR.seconds(3), "evaluation fills up its last windows"


@pytest.mark.parametrize(("jobs", "widths"), [(1, (4,) * 5), (3, (2, 1, 1, 2, 1)), (4, (1,) * 5), (9, (1,) * 5)])
def test_a_number_of_runs_that_is_asked_for_is_taken(jobs, widths):
    schedule = chosen(*[HOUR] * 5, memory=GB, jobs=jobs)
    assert schedule.at_once == jobs and schedule.widths == widths


def test_the_longest_run_is_first_and_equal_ones_that_share_programs_are_apart(tmp_path):
    config = base_config("rope")
    config.sweep.update(encodings=("rope", "nope"), seeds=(0, 1), train_lens=(64, 128))
    jobs = plan(config, tmp_path)
    order = [jobs[n].name for n in longest_first([job.cost for job in jobs])]
    assert order == [f"{e}-L{length}-s{s}" for length in (128, 64) for s in (0, 1) for e in ("rope", "nope")]


def test_runs_that_work_on_every_pair_are_longer_and_lengths_that_are_not_defined_cost_nothing(tmp_path):
    config = base_config("rope")
    config.sweep.update(encodings=("learned", "nope", "shaw"), train_lens=(64,))
    config.eval.lengths = (64, 1024)
    learned, nope, shaw = (job.cost for job in plan(config, tmp_path))
    assert longest_first([learned, nope, shaw]) == [2, 1, 0] and (learned.lengths, nope.lengths) == (1, 2)


def starts(schedule, cores, waiting, running=()):
    return machine.starts(waiting, running, schedule, cores)


def test_runs_that_are_at_work_together_have_cores_of_their_own():
    schedule = chosen(*[HOUR] * 5)
    first = starts(schedule, (2, 3, 6, 7), [0, 1, 2, 3, 4])
    assert first == [(0, (2,)), (1, (3,)), (2, (6,)), (3, (7,))]
    assert starts(schedule, (2, 3, 6, 7), [4], [(2,)]) == [] and starts(schedule, (2, 3, 6, 7), [4]) == [
        (4, (2, 3, 6, 7))
    ]
    shared = chosen(*[HOUR] * 5, cores=2, jobs=3)
    assert starts(shared, (0, 1), [0, 1, 2, 3, 4]) == [(0, (0,)), (1, (1,)), (2, (0,))]
    assert starts(shared, (0, 1), [3, 4], [(0,), (1,)]) == [(3, (0,))]


def test_accelerators_serve_one_run_at_a_time_and_nothing_is_bound(monkeypatch):
    monkeypatch.setattr(machine, "on_cpus", lambda: False)
    tasks = [SimpleNamespace(cost=HOUR)] * 3
    schedule, cores = here(tasks, 0).schedule, here(tasks, 0).cores
    assert (schedule.at_once, cores, str(schedule)) == (1, (), "one run at a time")
    assert starts(schedule, cores, [0, 1, 2]) == [(0, ())]
    assert here(tasks, 2).schedule.at_once == 2
    with pytest.raises(ConfigError, match="--jobs=-1 must be at least 1"):
        here([], -1)


def test_a_process_that_cannot_be_bound_is_told_its_devices(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "")
    told = [machine.environment(HOUR, cores).get("JAX_NUM_CPU_DEVICES") for cores in (0, 1, 3, 4)]
    assert told == [None, "1", "2", "4"]
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    assert machine.environment(HOUR, 4)["JAX_NUM_CPU_DEVICES"] == "8"


def test_time_left_knows_that_runs_go_side_by_side_and_that_some_take_longer():
    long = HOUR._replace(flops=2 * HOUR.flops)
    schedule = chosen(long, HOUR, HOUR, cores=2)
    assert schedule.widths == (1, 1, 1)
    whole = schedule.wall_seconds()
    clock = Clock(schedule, [0.0, 0.0, 0.0])
    assert clock.seconds_left([0, 1]) is None
    clock.tick(1.5 * (START + 1800), [0, 1])  # half as fast as expected
    clock.see(0, 0.25)
    clock.see(1, 0.5)
    assert clock.seconds_left([0, 1]) == pytest.approx(1.5 * (whole - START - 1800), rel=1e-3)
    clock.end(1, failed=True)  # what it left undone was no work
    assert clock.seconds_left([0]) == pytest.approx(1.5 * 5400, rel=1e-2)
    resumed = Clock(schedule, [0.5, 1.0, 1.0])
    resumed.tick(START + 900, [0])
    resumed.see(0, 0.625)
    assert resumed.seconds_left([0]) == pytest.approx(2700)
    resumed.end(0, failed=False)
    assert resumed.seconds_left([]) == 0
