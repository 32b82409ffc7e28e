"""F40 to F55: work folders and checkpoints that are full, damaged, held, of another run, or from outside."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.faults.table import fault, limited, not_provoked
from tests.tiny import ROOT, Ended, Scene, rows_so_far

WORKDIR, FULL = 4, 6


@fault(40, "a work folder that is a file, lies in a file, or cannot be made", "4, before anything is compiled")
def not_writable(scene: Scene) -> None:
    (scene.folder / "file").write_text("mine")
    for workdir in (scene.folder / "file", scene.folder / "file" / "run", "/proc/run"):
        scene.train(f"--workdir={workdir}").must(WORKDIR, "work folder")
        scene.sweep(f"--workdir={workdir}").must(WORKDIR, "work folder")
    assert (scene.folder / "file").read_text() == "mine", "a file of the user's was written"


@fault(
    41, "a limit on the size of files in a save (`ulimit -f`)", "6; no temporary files; then the same command goes on"
)
def file_limit(scene: Scene) -> None:
    limit = limited(resource.RLIMIT_FSIZE, 30_000)
    scene.train(f"--config.data.cache_dir={scene.folder / 'cache'}", before=limit).must(FULL, "no space")
    scene.site.whole  # noqa: B018  from here on there are token files
    scene.train(before=limit).must(FULL)
    scene.must_leave("run/**/*.orbax-checkpoint-tmp*", "run/**/.*.part")
    scene.must_resume()


#: In a user namespace, where a small disk can be mounted: fill it in mid-run, free it, resume, keep the results.
SMALL_DISK = """
set -u
mount -t tmpfs -o size="$SIZE" tmpfs "$DISK" || exit 99
"$@" > "$OUT/first" 2>&1; echo $? > "$OUT/code"
rm -f "$DISK/filler"
mount -o remount,size=64m "$DISK"
"$@" > "$OUT/second" 2>&1; echo $? >> "$OUT/code"
cp -r "$DISK/run" "$OUT/run"
"""


@fault(41, "a disk (tmpfs) that is full in a save", "6, and 0 once there is room, the same bits")
def full_disk(scene: Scene) -> str:
    disk = scene.folder / "disk"
    disk.mkdir()
    found = []
    for size in ("1200k", "900k", "600k"):
        out = scene.folder / size
        out.mkdir()
        words = [sys.executable, "-P", "-m", "posx.lab.cli", *scene.words(f"--workdir={disk / 'run'}")]
        asked = ["unshare", "--map-root-user", "--mount", "bash", "-c", SMALL_DISK, "bash", *words]
        env = scene.env({"SIZE": size, "DISK": str(disk), "OUT": str(out)})
        done = subprocess.run(asked, env=env, capture_output=True, text=True, cwd=scene.folder, timeout=300)
        if not (out / "code").exists():
            return f"not provoked: no file systems can be mounted here ({done.stderr.strip()[-80:]})"
        first, second = map(int, (out / "code").read_text().split())
        found.append(first)
        if first != 0:
            Ended(words[4:], first, "", (out / "first").read_text()).must(FULL)
        Ended(words[4:], second, "", (out / "second").read_text()).must(0)
        scene.must_end_like_whole(out / "run")
    assert FULL in found, f"the disk was never full: {found}"
    return f"{', '.join(map(str, found))} with disks of 1.2, 0.9 and 0.6 MB; then 0, the same bits"


@fault(42, "a disk too small for the checkpoints, seen at the start", "6 before training; MB needed, MB free")
def nearly_full(scene: Scene) -> None:
    scene.train("--config.train.keep_checkpoints=10000000").must(FULL, "[MGT]B free", r"B\. Free space")


@fault(43, "a work folder of another config", "4; every field that differs; nothing written")
def other_config(scene: Scene) -> None:
    def contents() -> dict[Path, bytes]:
        files = (path for path in scene.workdir.rglob("*") if path.is_file() and "lock" not in path.name)
        return {path: path.read_bytes() for path in files}

    scene.finished()
    before = contents()
    changed = ("--config.model.model_dim=64", "--config.train.learning_rate=0.001")
    scene.train(*changed).must(WORKDIR, r"model\.model_dim: 32 -> 64", r"train\.learning_rate")
    assert contents() == before, "it wrote into the folder"


@fault(44, "a work folder that a live process holds; one that died", "4; who, since when; free at once")
def held(scene: Scene) -> None:
    process = scene.started(step=1)
    process.send_signal(signal.SIGSTOP)
    scene.train().must(WORKDIR, f"process {process.pid}", "since")
    scene.kill(process)
    scene.must_resume()


@fault(
    45, "kill -9 at random moments: starts, steps, saves, evaluation", "none lost: the same bits and rows", slow=True
)
def kills(scene: Scene) -> str:
    number, runs = 0, 0
    while number < scene.site.kills:
        runs += 1
        number += killed_until_done(scene, scene.folder / f"run{runs}", scene.site.kills - number)
    return f"{number} kills over {runs} runs, 0 lost"


def killed_until_done(scene: Scene, workdir: Path, most: int) -> int:
    """Kill a run again and again until it ends, at most `most` times; return how often.

    The moment may be in the start, a step, a save or the evaluation. The run must end in the bits and with the rows of
    one that was left alone, and lose no row on the way.
    """
    words, number = scene.words(f"--workdir={workdir}"), 0
    before: list[str] = []
    while number < most:
        process = scene.start(*words)
        moment = time.monotonic() + scene.random.uniform(0, 12.0)
        while process.poll() is None and time.monotonic() < moment:
            time.sleep(0.002)
        if process.poll() is not None:
            scene.end(process).must(0)
            break
        scene.kill(process)
        number += 1
        now = [str(row) for name in ("metrics", "eval") for row in rows_so_far(workdir / f"{name}.jsonl")]
        lost = [row for row in before if row not in now]
        assert not lost, f"after kill {number} a row is gone: {lost[0][:200]}"
        before = now
    scene.posx(*words).must(0)
    measured = [(row["protocol"], row["eval_len"], row["targets"]) for row in rows_so_far(workdir / "eval.jsonl")]
    assert len(set(measured)) == len(measured), f"a row is there twice: {measured}"
    scene.must_end_like_whole(workdir)
    return number


def newest(workdir: Path) -> Path:
    """Return the folder of the newest checkpoint."""
    steps = [path for path in (workdir / "checkpoints").iterdir() if path.is_dir() and path.name.isdigit()]
    return max(steps, key=lambda path: int(path.name))


@fault(
    46,
    "every file of a checkpoint flipped, cut, deleted",
    "the one before it, said; the same bits in the end",
    slow=True,
)
def damaged_checkpoints(scene: Scene) -> str:
    stopped = scene.site.halfway
    files = [path for path in newest(stopped).rglob("*") if path.is_file()]
    names = sorted(path.relative_to(stopped) for path in [*files, newest(stopped).with_suffix(".json")])
    passed = 0
    for name, damage in itertools.product(names, ("flip", "cut", "delete")):
        scene.damage(scene.halfway() / name, damage)
        passed += "skipped" in scene.must_resume().err
    return f"{len(names)} files, {3 * len(names)} damages; {passed} skipped, the others harmless; the same bits"


@fault(46, "all checkpoints damaged", "4; nothing is trained anew over them")
def all_damaged(scene: Scene) -> None:
    for path in (scene.halfway() / "checkpoints").glob("*.json"):
        path.write_text("{}")
    scene.train().must(WORKDIR, "No good checkpoint")


@fault(47, "checkpoints of other shapes or types", "4; the arrays; no cast")
def other_shapes(scene: Scene) -> None:
    wide = scene.folder / "wide"
    scene.train(f"--workdir={wide}", "--config.model.model_dim=64").must(0)
    checkpoints = scene.halfway() / "checkpoints"
    shutil.rmtree(checkpoints)
    shutil.copytree(wide / "checkpoints", checkpoints)
    scene.train().must(WORKDIR, "another model", "64")


@fault(48, "config.json and checkpoints of a version to come, or of no sense", "4; refused")
def from_the_future(scene: Scene) -> None:
    for name, key in (("config.json", "schema_version"), ("checkpoints/*.json", "format_version")):
        for value in (99, "new", None, [1]):
            for path in scene.halfway().glob(name):
                path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
            scene.train().must(WORKDIR, r"config\.json|checkpoint|format")


not_provoked(
    48, "folders of versions before", "refused in one line, as there are no migrations: tests/lab/config/test_run.py"
)
not_provoked(49, "a step that was not saved", "no command asks for one: the newest that verifies is taken")


@fault(50, "a run resumed on fewer cores", "0; said that bits may differ")
def fewer_cores(scene: Scene) -> str | None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return "not provoked: one core only"
    scene.halfway()
    one = lambda: os.sched_setaffinity(0, cores[:1])  # noqa: E731
    scene.train(before=one).must(0, "another layout, not bit for bit")
    return None


@fault(51, "a work folder that is removed during a run", "4 or 6 at the next line or save, no traceback")
def removed(scene: Scene) -> None:
    process = scene.started("--config.train.steps=400", "--config.train.warmup_steps=2", step=6)
    scene.workdir.rename(scene.folder / "aside")  # at once: files that it makes meanwhile would keep a folder there
    scene.end(process).must(WORKDIR)


@fault(52, "an empty folder of a step, a step without a manifest, a half-deleted one", "0, the same bits; swept away")
def half_steps(scene: Scene) -> None:
    checkpoints = scene.halfway() / "checkpoints"
    last = newest(scene.workdir)
    (checkpoints / "28").mkdir()
    shutil.copytree(last, checkpoints / "24")
    (checkpoints / "20.orbax-checkpoint-tmp-7").mkdir()
    (checkpoints / f".{last.name}.json.4999999.part").write_text("{")
    scene.must_resume()
    scene.must_leave("run/checkpoints/*tmp*", "run/**/.*.part")


@fault(53, "a clock that goes back, by a year and then by a second a look", "0, the same bits; no time is negative")
def clock(scene: Scene) -> None:
    (scene.folder / "sitecustomize.py").write_text(
        "import time\n_now, _looks = time.time(), [0]\n"
        "def back():\n  _looks[0] += 1\n  return _now - 3e7 - _looks[0]\n"
        "time.time = back\n"
    )
    scene.halfway()
    scene.must_resume(env={"PYTHONPATH": f"{scene.folder}{os.pathsep}{ROOT}"})
    logged = rows_so_far(scene.workdir / "metrics.jsonl")
    slow = [row for row in logged if (row.get("tokens_per_second") or 1) <= 0]
    assert not slow, f"speeds below zero: {slow[:2]}"


@fault(54, "files in the work folder that are not posx's", "0; left alone")
def unknown_files(scene: Scene) -> None:
    workdir = scene.halfway()
    mine = {workdir / "notes.txt": "mine", workdir / "checkpoints" / "keep.txt": "mine", workdir / "4.json.bak": "{"}
    for path, text in mine.items():
        path.write_text(text)
    scene.must_resume()
    changed = [path.name for path, text in mine.items() if not path.exists() or path.read_text() != text]
    assert not changed, f"files of the user's were changed: {changed}"


@fault(55, "a run folder from outside: pickles in it, paths that lead out of it", "3 or 4, nothing outside touched")
def hostile(scene: Scene) -> None:
    mark, outside = scene.folder / "executed", scene.folder / "outside"
    outside.mkdir()
    attack = b"cos\nsystem\n(S'touch " + os.fsencode(mark) + b"'\ntR."
    workdir = scene.finished()
    for path in [p for p in newest(workdir).rglob("*") if p.is_file()]:
        path.write_bytes(attack)
    manifest = newest(workdir).with_suffix(".json")
    facts = json.loads(manifest.read_text())
    facts["arrays"] = {f"../../../outside/{name}": fact for name, fact in facts["arrays"].items()}
    manifest.write_text(json.dumps(facts))
    for other in (workdir / "checkpoints").glob("*.json"):
        if other != manifest:
            other.unlink()
    scene.posx("generate", f"--workdir={workdir}", "--prompt=a").must(WORKDIR)
    assert not mark.exists() and not any(outside.iterdir()), "something in the folder reached outside it"


@fault(55, "empty files, junk and odd values in a run's folder", "0, 3 or 4; no traceback", slow=True)
def junk(scene: Scene) -> str:
    odd_rows = '{"protocol": "sliding"}\n{"step": null, "attempt": null}\n[]\n{"eval_len": "x", "status": 7}\nnull\n'
    names = ("env.json", "status.json", "DONE", "eval.jsonl", "metrics.jsonl", "tokenizer.json", "config.json")
    contents = ("", "junk\0", "[]", "{}", "null", odd_rows, "[" * 100_000)
    codes = set()
    for name, content in itertools.product(names, contents):
        workdir = scene.finished()
        (workdir / "DONE").unlink()
        (workdir / name).write_text(content)
        for words in (scene.words(), ["plot", f"--workdir={workdir}"]):
            codes.add(scene.posx(*words).must((0, 2, 3, 4)).code)
    return f"49 damages, training and plots: exit codes {', '.join(map(str, sorted(codes)))}"
