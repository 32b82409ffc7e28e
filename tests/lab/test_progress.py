"""What a person sees while something runs: times that move, and few lines in a log."""

import io
import re

import pytest

from posx import notices
from posx.lab import progress
from posx.lab.progress import Meter
from posx.lab.runs import folder
from posx.lab.runs.folder import RunFolder


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand, in seconds."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def said(meter: Meter, clock: list[float], *times: float) -> list[str]:
    """What the line of a meter reads at these times."""
    lines = []
    for clock[0] in times:
        lines.append(str(meter))
    return lines


def test_compiling_shows_its_time_and_counts_for_nothing(clock):
    meter = Meter("run", 101)
    meter.show_waiting("compiling")
    assert said(meter, clock, 0, 3, 70) == ["compiling 0 s", "compiling 3 s", "compiling 1 min 10 s"]
    meter.update(1, "1/101")
    assert said(meter, clock, 72) == ["1/101"], "nothing is known of the time of a step"
    meter.update(21, "21/101")  # 20 steps in 2 s
    assert said(meter, clock, 72, 90, 75) == ["8 s left  21/101", "0 s left  21/101", "5 s left  21/101"]
    meter.show_waiting("compiling for another length", 4.0)
    assert said(meter, clock, 76, 80) == [
        "5 s left  compiling for another length 1 s, about 3 s left", "5 s left  compiling for another length 5 s",
    ]  # fmt: skip


def test_what_an_earlier_process_did_counts_for_nothing(clock):
    meter = Meter("run", 100)
    meter.show_waiting("reading its checkpoint")
    meter.update(50, "")
    clock[0] = 10
    meter.update(60, "")
    assert str(meter) == "40 s left"
    meter.update(100, "done")
    assert str(meter) == "took 10 s  done"


def test_no_time_is_left_by_progress_of_rounding_alone(clock):
    meter = Meter("sweep", 0.1 + 0.2)
    clock[0] = 20
    meter.update(meter.total - 0.3, "0 of 4 runs")
    assert meter.done > 0 and str(meter) == "0 of 4 runs"


def test_time_left_falls_while_nothing_is_finished(clock):
    meter = Meter("evaluate", 720)
    clock[0] = 10
    meter.update(10, "0 of 4 runs")
    shown = []
    for clock[0] in range(20, 101, 20):  # the engine looks at its runs, and none has a new row
        meter.update(10, "0 of 4 runs")
        shown.append(str(meter).partition(" left")[0])
    assert shown == ["11 min 40 s", "11 min 20 s", "11 min 00 s", "10 min 40 s", "10 min 20 s"]
    meter.show_waiting("compiling")
    clock[0] = 130
    meter.update(10, "0 of 4 runs")  # nothing came of the wait
    assert str(meter).startswith("10 min 20 s left")


def test_expected_pace_gives_time_left_until_work_is_known(clock):
    """The unit is an expected second, but this machine takes two."""
    meter = Meter("run", 100, pace=1.0)
    assert said(meter, clock, 0, 30) == ["1 min 40 s left", "1 min 10 s left"]
    meter.update(0, "compiling")
    assert said(meter, clock, 40) == ["1 min 00 s left  compiling"]
    meter.update(20, "first windows")  # 40 s for 20 units, and 5 expected units at 1 s: 1.8 s a unit
    assert said(meter, clock, 40, 50) == ["2 min 24 s left  first windows", "2 min 14 s left  first windows"]
    clock[0] = 200
    meter.update(100, "all")
    assert str(meter) == "took 3 min 20 s  all"


def test_a_log_gets_a_line_every_ten_seconds_and_one_at_the_end(clock, monkeypatch):
    monkeypatch.setattr(progress.sys, "stderr", io.StringIO())
    with Meter("run", 100) as meter:
        meter.show_waiting("compiling")
        for clock[0] in range(5, 36, 2):
            meter.update(clock[0], f"{clock[0]}/100")
        notices.say("a row")
        meter.update(100, "all")
    assert progress.sys.stderr.getvalue().splitlines() == [
        "run  1 min 29 s left  11/100", "run  1 min 19 s left  21/100", "run  1 min 09 s left  31/100", "a row",
        "run  took 35 s  all",
    ]  # fmt: skip


def test_a_terminal_gets_one_line_that_is_drawn_anew(clock, monkeypatch):
    monkeypatch.setattr(progress.sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    with Meter("my[1]", 2) as meter:
        meter.update(1, "half")
        notices.say("a row [of] text")
        clock[0] = 3
        meter.update(2, "all of it, and more than the line has room for")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", progress.sys.stderr.getvalue())
    assert "a row [of] text\n" in text
    assert text.splitlines()[-1].startswith("my[1] ") and "took 3 s  all of it" in text.splitlines()[-1]


def test_the_usual_start_is_the_last_one_or_the_runs_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "process_seconds", lambda: 4.0)
    run = RunFolder(tmp_path / "sweep" / "new")
    assert run.usual_start() is None
    for name, *seconds in (("a", 10.0), ("b", 50.0), ("c", 30.0, 99.0), ("torn",)):
        path = RunFolder(tmp_path / "sweep" / name).metrics_file
        path.parent.mkdir(parents=True)
        path.write_text("".join(f'{{"step": 1, "start": {{"seconds": {s}}}}}\n{{"step": 2}}\n' for s in seconds) + "{")
    assert run.usual_start() == 26.0
    assert RunFolder(tmp_path / "sweep" / "c").usual_start() == 95.0
    monkeypatch.setattr(folder, "process_seconds", lambda: 40.0)
    assert run.usual_start() is None


def test_durations_and_sizes_are_in_units_a_person_reads():
    seconds = (0, 59.6, 3599, 47.99 * 3600, 50.5 * 3600, 364 * 86400, 220895 * 3600)
    assert [progress.duration(s) for s in seconds] == [
        "0 s", "1 min 00 s", "59 min 59 s", "47 h 59 min", "2 d 02 h", "364 d 00 h", "25.2 years",
    ]  # fmt: skip
    assert [progress.size(count) for count in (1, 18.2e6, 999e6, 2.5e9, 2700597e6)] == [
        "1 kB", "18.2 MB", "999.0 MB", "2.5 GB", "2.7 TB",
    ]  # fmt: skip
