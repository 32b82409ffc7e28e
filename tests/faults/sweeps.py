"""F72 to F85: sweeps whose runs fail or die, and figures of their rows."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.faults.table import fault, not_provoked
from tests.tiny import Ended, Scene, digests, edit_json, rows_so_far, write_rows

PARTLY, HELD = 7, 4
LARGE = shutil.ignore_patterns("checkpoints", "tensorboard", "figures")


def runs(workdir: Path) -> list[Path]:
    return sorted(path.parent for path in workdir.glob("*/config.json"))


def state_and_parent(pid: int) -> tuple[str, int]:
    """Return ("Z", 0) for a process that has gone."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "Z", 0
    return state, int(parent)


def children(pid: int) -> list[int]:
    """Find the processes that a process has started."""
    everyone = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [other for other in everyone if state_and_parent(other)[1] == pid]


def alive(pid: int) -> bool:
    return state_and_parent(pid)[0] != "Z"


@fault(72, "one run of a sweep that fails", "7; the others end; the same command tries that one again")
def one_fails(scene: Scene) -> None:
    rates = "--config.sweep.axes.train.learning_rate=1e-3,1e38"
    words = ("--config.train.clip_norm=1e38", "--config.sweep.encodings=rope", rates)
    scene.sweep(*words).must(PARTLY, "1 of 2 runs failed", "not finite|nan|inf")
    done = {path.name: (path / "DONE").exists() for path in runs(scene.workdir)}
    assert sorted(done.values()) == [False, True], f"finished: {done}"
    scene.sweep(*words).must(PARTLY, "1 of 2 runs are finished already")


def sweeping(scene: Scene) -> subprocess.Popen[str]:
    """Start a sweep, and return once one of its runs is training."""
    process = scene.start(*scene.sweep_words())
    scene.until(lambda: any(scene.step(path) >= 2 for path in runs(scene.workdir)), process)
    return process


@fault(73, "the sweep's own process killed", "no run is left behind; the same command goes on")
def sweep_killed(scene: Scene) -> None:
    process = sweeping(scene)
    started = children(process.pid)
    scene.kill(process)
    end = time.monotonic() + 20
    while any(map(alive, started)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [pid for pid in started if alive(pid)]
    assert not left, f"{len(left)} of {len(started)} runs went on without their sweep"
    scene.sweep(timeout=600).must(0)
    must_be_whole(scene)


@fault(74, "a run of a sweep killed from outside; one told to stop", "7 and again, 0; started once more")
def run_killed(scene: Scene) -> None:
    process = sweeping(scene)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    scene.end(process, 600).must((0, PARTLY))
    scene.sweep(timeout=600).must(0)
    must_be_whole(scene)


def must_be_whole(scene: Scene) -> None:
    """Check the sweep's run of rope against the one that was left alone, trained by itself."""
    (rope,) = [path for path in runs(scene.workdir) if path.name.startswith("rope")]
    here, there = (rows_so_far(path / "metrics.jsonl")[-1]["loss"] for path in (rope, scene.site.whole))
    alike = math.isclose(here, there, rel_tol=1e-4)  # on other cores: not the same bits
    assert alike, f"loss of rope: {here}, and {there} if it is left alone"


@fault(75, "the same sweep started twice", "4; who holds the folder; the first ends as if alone")
def twice(scene: Scene) -> None:
    process = scene.start(*scene.sweep_words())
    scene.until(lambda: runs(scene.workdir), process)
    process.send_signal(signal.SIGSTOP)
    scene.sweep().must(HELD, f"process {process.pid}")
    process.send_signal(signal.SIGCONT)
    scene.end(process, 600).must(0)


@fault(76, "settings that change between two attempts", "4 for a run; a sweep makes the runs that are new")
def changed_settings(scene: Scene) -> None:
    scene.sweep("--config.sweep.encodings=('rope',)").must(0)
    again = ("--config.sweep.encodings=('rope',)", "--config.train.learning_rate=0.001")
    scene.sweep(*again).must((0, HELD, PARTLY))
    for run in runs(scene.workdir):
        asked = json.loads((run / "config.json").read_text())["train"]["learning_rate"]
        used = max(row["learning_rate"] for row in rows_so_far(run / "metrics.jsonl"))
        told = f"{run.name} asks for a learning rate of {asked} and was trained at {used}"
        assert math.isclose(asked, used, rel_tol=0.2), told


not_provoked(77, "a shared file system that is late or has no locks", "needs one; filelock's own limits hold")


def many(scene: Scene, number: int) -> Path:
    """Make a sweep's folder of `number` finished runs: copies of one with other seeds."""
    folder = scene.folder / "many"
    folder.mkdir(exist_ok=True)
    for n in range(number):
        copied = folder / f"rope-L16-s{n}"
        shutil.copytree(scene.site.whole, copied, ignore=LARGE)
        path = copied / "eval.jsonl"
        write_rows(path, [row | {"seed": n, "run_id": copied.name} for row in rows_so_far(path)])
        config = json.loads((copied / "config.json").read_text())
        config["train"]["seed"] = n
        edit_json(copied / "config.json", lambda _, config=config: json.dumps(config))
    return folder


def plot(scene: Scene, folder: Path, *words: str, **how: object) -> Ended:
    return scene.posx("plot", f"--workdir={folder}", *words, **how)


@fault(78, "figures of no run, of one, of runs not finished", "4; 0; 0 with what is there")
def figures_of_parts(scene: Scene) -> None:
    (scene.folder / "none").mkdir()
    plot(scene, scene.folder / "none").must(HELD, "holds no|no run")
    plot(scene, scene.folder / "nowhere").must(HELD, "does not exist")
    plot(scene, scene.finished()).must(0)
    half = scene.folder / "half"
    shutil.copytree(scene.site.halfway, half)
    plot(scene, half).must((0, HELD))


@fault(79, "rows torn, twice, out of order", "0; the last of each is drawn; how many broken ones were left out")
def torn_rows(scene: Scene) -> None:
    workdir = scene.finished()
    for name in ("eval.jsonl", "metrics.jsonl"):
        path = workdir / name
        whole = path.read_text().splitlines()
        scene.random.shuffle(whole)
        path.write_text("\n".join([*whole, whole[0], '{"torn": ', whole[1], '{"last": 1']) + "")
    plot(scene, workdir).must(0, "it is cut, or no object of JSON")


@fault(80, "run names with quotes, $, markup, line ends, right-to-left marks, 200 characters", "0; drawn as they are")
def odd_names(scene: Scene) -> None:
    folder = scene.folder / "odd"
    folder.mkdir()
    plain = ("_lead", "\u202eback", "two\nlines", "n" * 200)
    for name in ("a $x^2_{y}$ \\frac", "<script>alert(1)<_script>", "'\"`$HOME`", "%s{0}", *plain):
        shutil.copytree(scene.site.whole, folder / name, ignore=LARGE)
    plot(scene, folder).must(0)


@fault(81, "NaN, infinite, huge values and 0 in rows", "0; gaps and marks, axes from what is finite")
def odd_values(scene: Scene) -> None:
    workdir = scene.finished()
    values = ("nan", "inf", 1e300, 0.0, -1.0, 1e-300, None, "text", [1], 10**400)
    for name, keys, words in (("eval", ("ppl", "nll"), ()), ("metrics", ("loss",), ("--what=training",))):
        path = workdir / f"{name}.jsonl"
        first, *others = rows_so_far(path)
        for value in values:
            write_rows(path, [first, *(row | dict.fromkeys(keys, value) for row in others)])
            plot(scene, workdir, *words).must(0)


@fault(82, "seeds that some encodings lack", "0; means of those there are, their number said")
def missing_seeds(scene: Scene) -> None:
    folder = many(scene, 3)
    shutil.rmtree(folder / "rope-L16-s1")
    plot(scene, folder).must(0)
    assert "2" in (folder / "table.md").read_text(), "the table does not say of how many seeds"


@fault(83, "a run stopped and started within a second", "0; what each attempt logged is kept apart")
def boards(scene: Scene) -> str:
    scene.kill(scene.started(step=3))
    scene.train().must(0)
    events = [path.name for path in (scene.workdir / "tensorboard").iterdir()]
    assert len(events) == 2, f"event files: {events}"
    return "0; 2 event files"


@fault(84, "figures drawn while a sweep runs", "0 or 4, and the sweep ends with 0")
def drawn_meanwhile(scene: Scene) -> None:
    process = sweeping(scene)
    while process.poll() is None:
        plot(scene, scene.workdir).must((0, HELD))
    scene.end(process).must(0)


@fault(84, "figures of 300 runs", "0", slow=True)
def drawn_of_many(scene: Scene) -> str:
    folder, began = many(scene, 300), time.monotonic()
    plot(scene, folder, timeout=600).must(0)
    return f"0 after {time.monotonic() - began:.0f} s"


@fault(85, "no display, no home, no folder for fonts", "0")
def headless(scene: Scene) -> None:
    bare = {"DISPLAY": "", "XDG_CONFIG_HOME": "", "MPLBACKEND": "TkAgg"}
    bare |= dict.fromkeys(("HOME", "MPLCONFIGDIR"), "/proc/none")
    plot(scene, scene.finished(), env=bare).must(0)


@fault(85, "results that nobody reads, or onto a full device", "141 for results, runs go on; 6")
def unread(scene: Scene) -> None:
    scene.finished()
    read, write = os.pipe()
    os.close(read)
    scene.posx("encodings", stdout=write).must(141)
    os.close(write)
    with open("/dev/full", "wb") as full:
        scene.posx("encodings", stdout=full).must(6)
        scene.train(f"--workdir={scene.folder / 'other'}", stderr=full)
    assert digests(scene.folder / "other") == digests(scene.site.whole), "a run whose words nobody hears did not end"
