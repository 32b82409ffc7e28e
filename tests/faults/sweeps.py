"""F72 to F85: sweeps whose runs fail or die, and figures of what they left."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from pathlib import Path

from tests.faults.scene import ROOT, Scene, Unmet, digests, rows
from tests.faults.table import fault, not_provoked

PARTLY, HELD = 7, 4
LARGE = shutil.ignore_patterns("checkpoints", "tensorboard", "figures")


def runs(workdir: Path) -> list[Path]:
    return sorted(path.parent for path in workdir.glob("*/config.json"))


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == pid:
            found.append(int(path.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


ONE_DIVERGES = """
import runpy

def get_config(arg="rope"):
    config = runpy.run_path({smoke!r})["get_config"](arg)
    with config.unlocked():
        config.sweep.encodings = ("rope",)
        config.sweep.axes = {{"train.learning_rate": (1e-3, 1e38)}}
    return config
"""


@fault(72, "one run of a sweep that fails", "7; the others end; the same command tries that one again")
def one_fails(scene: Scene) -> None:
    path = scene.folder / "axes.py"
    path.write_text(ONE_DIVERGES.format(smoke=str(ROOT / "configs" / "smoke.py")))
    words = [word for word in scene.sweep("--config.train.clip_norm=1e38") if "smoke.py" not in word]
    words.append(f"--config={path}")
    scene.posx(*words).must(PARTLY, "1 of 2 runs failed", "not finite|nan|inf")
    done = {path.name: (path / "DONE").exists() for path in runs(scene.workdir)}
    if sorted(done.values()) != [False, True]:
        raise Unmet(f"finished: {done}")
    scene.posx(*words).must(PARTLY, "1 of 2 runs are finished already")


@fault(73, "the sweep's own process killed", "no run is left behind; the same command goes on")
def sweep_killed(scene: Scene) -> None:
    process = scene.start(*scene.sweep())
    scene.until(lambda: any(scene.step(path) >= 2 for path in runs(scene.workdir)), process)
    started = children(process.pid)
    scene.kill(process)
    end = time.monotonic() + 20
    while any(map(alive, started)) and time.monotonic() < end:
        time.sleep(0.05)
    if left := [pid for pid in started if alive(pid)]:
        raise Unmet(f"{len(left)} of {len(started)} runs went on without their sweep")
    scene.posx(*scene.sweep(), timeout=600).must(0)
    must_be_whole(scene)


@fault(74, "a run of a sweep killed from outside; one told to stop", "7 and again, 0; started once more")
def run_killed(scene: Scene) -> None:
    process = scene.start(*scene.sweep())
    scene.until(lambda: any(scene.step(path) >= 2 for path in runs(scene.workdir)), process)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    ended = scene.end(process, 600)
    if ended.code not in (0, PARTLY):
        ended.must(PARTLY)
    ended.must(ended.code)
    scene.posx(*scene.sweep(), timeout=600).must(0)
    must_be_whole(scene)


def must_be_whole(scene: Scene) -> None:
    """The sweep's run of rope has the bits of the one that was left alone, trained by itself."""
    (rope,) = [path for path in runs(scene.workdir) if path.name.startswith("rope")]
    here, there = ([row["loss"] for row in rows(path / "metrics.jsonl")][-1:] for path in (rope, scene.site.whole))
    if not here or not math.isclose(here[0], there[0], rel_tol=1e-4):  # on other cores: not the same bits
        raise Unmet(f"loss of rope: {here}, {there} where it was left alone")


@fault(75, "the same sweep started twice", "4; who holds the folder; the first ends as if alone")
def twice(scene: Scene) -> None:
    process = scene.start(*scene.sweep())
    scene.until(lambda: runs(scene.workdir), process)
    process.send_signal(signal.SIGSTOP)
    scene.posx(*scene.sweep()).must(HELD, f"process {process.pid}")
    process.send_signal(signal.SIGCONT)
    scene.end(process, 600).must(0)


@fault(76, "settings that change between two attempts", "4 for a run; a sweep makes the runs that are new")
def changed_settings(scene: Scene) -> None:
    scene.posx(*scene.sweep("--config.sweep.encodings=('rope',)")).must(0)
    again = scene.sweep("--config.sweep.encodings=('rope',)", "--config.train.learning_rate=0.001")
    ended = scene.posx(*again)
    if ended.code not in (0, HELD, PARTLY):
        ended.must(HELD)
    ended.must(ended.code)
    for run in runs(scene.workdir):
        asked = json.loads((run / "config.json").read_text())["train"]["learning_rate"]
        used = max(row["learning_rate"] for row in rows(run / "metrics.jsonl"))
        if not math.isclose(asked, used, rel_tol=0.2):
            raise Unmet(f"{run.name} asks for a learning rate of {asked} and was trained at {used}")


not_provoked(77, "a shared file system that is late or has no locks", "needs one; filelock's own limits hold")


def many(scene: Scene, number: int) -> Path:
    """A sweep's folder of so many finished runs, made by copying one and naming it another encoding and seed."""
    folder = scene.folder / "many"
    folder.mkdir(exist_ok=True)
    for n in range(number):
        copied = folder / f"rope-L16-s{n}"
        shutil.copytree(scene.site.whole, copied, ignore=LARGE)
        found = [row | {"seed": n, "run_id": copied.name} for row in rows(copied / "eval.jsonl")]
        (copied / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
        config = json.loads((copied / "config.json").read_text())
        config["train"]["seed"] = n
        (copied / "config.json").write_text(json.dumps(config))
    return folder


@fault(78, "figures of no run, of one, of runs not finished", "4; 0; 0 with what is there")
def figures_of_parts(scene: Scene) -> None:
    (scene.folder / "none").mkdir()
    scene.posx("plot", f"--workdir={scene.folder / 'none'}").must(HELD, "holds no|no run")
    scene.posx("plot", f"--workdir={scene.folder / 'nowhere'}").must(HELD, "does not exist")
    scene.finished()
    scene.posx("plot", f"--workdir={scene.workdir}").must(0)
    half = scene.folder / "half"
    shutil.copytree(scene.site.halfway, half)
    ended = scene.posx("plot", f"--workdir={half}")
    if ended.code not in (0, HELD):
        ended.must(0)
    ended.must(ended.code)


@fault(79, "rows torn, twice, out of order", "0; the last of each is drawn; how many broken ones were left out")
def torn_rows(scene: Scene) -> None:
    workdir = scene.finished()
    for name in ("eval.jsonl", "metrics.jsonl"):
        path = workdir / name
        whole = path.read_text().splitlines()
        scene.random.shuffle(whole)
        path.write_text("\n".join([*whole, whole[0], '{"torn": ', whole[1], '{"last": 1']) + "")
    scene.posx("plot", f"--workdir={workdir}").must(0, "1 broken line left out")


@fault(80, "run names with quotes, $, markup, line ends, right-to-left marks, 200 characters", "0; drawn as they are")
def odd_names(scene: Scene) -> None:
    folder = scene.folder / "odd"
    folder.mkdir()
    names = (
        "a $x^2_{y}$ \\frac",
        "<script>alert(1)<_script>",
        "'\"`$HOME`",
        "_lead",
        "\u202eback",
        "two\nlines",
        "%s{0}",
    )
    for name in (*names, "n" * 200):
        shutil.copytree(scene.site.whole, folder / name, ignore=LARGE)
    scene.posx("plot", f"--workdir={folder}").must(0)


@fault(81, "NaN, infinite, huge values and 0 in rows", "0; gaps and marks, axes from what is finite")
def odd_values(scene: Scene) -> None:
    workdir = scene.finished()
    path = workdir / "eval.jsonl"
    values = ("nan", "inf", 1e300, 0.0, -1.0, 1e-300, None, "text", [1], 10**400)
    found = rows(path)
    for value in values:
        changed = [row | ({"ppl": value, "nll": value} if n else {}) for n, row in enumerate(found)]
        path.write_text("".join(json.dumps(row) + "\n" for row in changed))
        scene.posx("plot", f"--workdir={workdir}").must(0)
    for value in values:
        lines = rows(workdir / "metrics.jsonl")
        changed = [row | ({"loss": value} if n else {}) for n, row in enumerate(lines)]
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
        scene.posx("plot", f"--workdir={workdir}", "--what=training").must(0)


@fault(82, "seeds that some encodings lack", "0; means of those there are, their number said")
def missing_seeds(scene: Scene) -> None:
    folder = many(scene, 3)
    shutil.rmtree(folder / "rope-L16-s1")
    scene.posx("plot", f"--workdir={folder}").must(0)
    if "2" not in (folder / "table.md").read_text():
        raise Unmet("the table does not say of how many seeds")


@fault(83, "a run stopped and started within a second", "0; what each attempt logged is kept apart")
def boards(scene: Scene) -> str:
    process = scene.start(*scene.train())
    scene.until(lambda: scene.step() >= 3, process)
    scene.kill(process)
    scene.posx(*scene.train()).must(0)
    events = list((scene.workdir / "tensorboard").iterdir())
    if len(events) != 2:
        raise Unmet(f"event files: {[path.name for path in events]}")
    return "0; 2 event files"


@fault(84, "figures drawn while a sweep runs", "0 or 4, and the sweep ends with 0")
def drawn_meanwhile(scene: Scene) -> None:
    process = scene.start(*scene.sweep())
    scene.until(lambda: any(scene.step(path) >= 2 for path in runs(scene.workdir)), process)
    while process.poll() is None:
        ended = scene.posx("plot", f"--workdir={scene.workdir}")
        if ended.code not in (0, HELD):
            ended.must(0)
        ended.must(ended.code)
    scene.end(process).must(0)


@fault(84, "figures of 300 runs", "0", slow=True)
def drawn_of_many(scene: Scene) -> str:
    folder, began = many(scene, 300), time.monotonic()
    scene.posx("plot", f"--workdir={folder}", timeout=600).must(0)
    return f"0 after {time.monotonic() - began:.0f} s"


@fault(85, "no display, no home, no folder for fonts", "0")
def headless(scene: Scene) -> None:
    scene.finished()
    bare = {
        "DISPLAY": "",
        "HOME": "/proc/none",
        "MPLCONFIGDIR": "/proc/none",
        "XDG_CONFIG_HOME": "",
        "MPLBACKEND": "TkAgg",
    }
    scene.posx("plot", f"--workdir={scene.workdir}", env=bare).must(0)


@fault(85, "results that nobody reads, or onto a full device", "141 for results, runs go on; 6")
def unread(scene: Scene) -> None:
    scene.finished()
    read, write = os.pipe()
    os.close(read)
    scene.posx("encodings", stdout=write).must(141)
    os.close(write)
    with open("/dev/full", "wb") as full:
        scene.posx("encodings", stdout=full).must(6)
        other = [f"--workdir={scene.folder / 'other'}"]
        scene.posx(*scene.train(*other), stderr=full)
    if digests(scene.folder / "other") != digests(scene.site.whole):
        raise Unmet("a run whose words nobody hears did not end")
