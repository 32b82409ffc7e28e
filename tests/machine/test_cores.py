"""Which cores count, and how much memory: affinity, hardware threads, limits of control groups."""

import os
import subprocess
import sys

import pytest

from posx.machine import cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A made-up Linux machine: eight hardware threads, thread n and n + 4 on one core; nothing limited."""
    monkeypatch.setattr(cores, "_SYSTEM", tmp_path / "sys")
    monkeypatch.setattr(cores, "_PROCESS", tmp_path / "proc")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for thread in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{thread}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{thread % 4},{thread % 4 + 4}\n")
    (tmp_path / "proc").mkdir()
    cores.usable_cores.cache_clear()
    yield tmp_path
    cores.usable_cores.cache_clear()


def test_one_hardware_thread_of_each_core_of_the_affinity(machine, monkeypatch):
    assert cores.usable_cores() == (0, 1, 2, 3)
    cores.usable_cores.cache_clear()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6})
    assert cores.usable_cores() == (1, 6)


@pytest.mark.parametrize(
    ("where", "files", "count"),
    [
        ("0::/user/job", {"user/job/cpu.max": "250000 100000"}, 3),  # part of a core is worth a core
        ("0::/user/job", {"user/job/cpu.max": "max 100000", "user/cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/../../elsewhere", {"cpu.max": "200000 100000"}, 2),
        ("4:cpu,cpuacct:/job\n3:memory:/other",
         {"cpu,cpuacct/job/cpu.cfs_quota_us": "200000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu,cpuacct:/job", {"cpu,cpuacct/job/cpu.cfs_quota_us": "-1",
                                "cpu,cpuacct/job/cpu.cfs_period_us": "100000"}, 4),
    ],
)  # fmt: skip
def test_no_more_cores_than_a_control_group_pays_for(machine, where, files, count):
    write_groups(machine, where, files)
    assert len(cores.usable_cores()) == count


def write_groups(machine, where, files):
    (machine / "proc/cgroup").write_text(where + "\n")
    for name, text in files.items():
        path = machine / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("where", "files", "memory"),
    [
        ("0::/user/job", {"user/job/memory.max": "max", "user/memory.max": "2000000"}, 2e6),
        ("0::/user/job", {"user/job/memory.max": "max"}, 4e6),
        ("4:memory:/job\n3:cpu:/other", {"memory/job/memory.limit_in_bytes": "3000000"}, 3e6),
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": "9223372036854771712"}, 4e6),  # no limit
        ("3:cpu:/job", {"cpu/job/memory.limit_in_bytes": "3000000"}, 4e6),
    ],
)
def test_no_more_memory_than_a_control_group_allows(machine, monkeypatch, where, files, memory):
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4000}.__getitem__)
    write_groups(machine, where, files)
    assert cores.usable_memory() == memory


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")
def test_a_process_runs_on_the_cores_it_was_started_on():
    own, first = os.sched_getaffinity(0), cores.usable_cores()[0]
    with cores.bind_cores([first]):
        asked = [sys.executable, "-c", "from posx.machine.cores import usable_cores; print(usable_cores())"]
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == f"({first},)"
    assert os.sched_getaffinity(0) == own


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")
def test_let_go_spreads_all_threads_but_adds_no_core():
    code = (
        "import sys, threading; from posx.machine.cores import usable_cores; usable_cores()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start(); print('ready', flush=True)\n"
        "sys.stdin.readline(); print(len(usable_cores()))"
    )
    with cores.bind_cores(cores.usable_cores()[:1]):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    while "ready" not in process.stdout.readline():
        pass
    threads = [int(thread) for thread in os.listdir(f"/proc/{process.pid}/task")]
    cores.release_process(process.pid, cores.usable_cores())
    assert len(threads) == 2 and all(os.sched_getaffinity(t) == os.sched_getaffinity(0) for t in threads)
    assert process.communicate("\n")[0].split() == ["1"]
    cores.release_process(process.pid, cores.usable_cores())  # it has ended: nothing happens
