"""Where a fault is provoked: a folder of its own, the real command in it, and runs to damage."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 300  # after which a process that should have ended hangs

#: What makes the smoke config a run of two seconds, after compiling: enough steps to be stopped between checkpoints.
TINY = (
    "--config.model.num_layers=1", "--config.model.model_dim=32", "--config.model.num_heads=2",
    "--config.train.length=16", "--config.train.batch_size=4", "--config.train.steps=32",
    "--config.train.warmup_steps=2", "--config.train.log_steps=1", "--config.train.checkpoint_steps=4",
    "--config.eval.lengths=(16,32)", "--config.eval.num_targets=256", "--config.eval.sliding_targets=64",
)  # fmt: skip
STEPS = 32


class Unmet(Exception):
    """posx did not answer a fault as owed."""


class Ended:
    """A process that has ended: exit code (-9: by that signal), output and errors."""

    def __init__(self, words: Sequence[str], code: int, out: str, err: str):
        self.words, self.code, self.out, self.err = words, code, out, err

    @property
    def last(self) -> str:
        """The last line that it said."""
        return next((line for line in reversed(self.err.splitlines() or self.out.splitlines()) if line.strip()), "")

    def must(self, code: int, *patterns: str) -> Ended:
        """Checks the exit code and that every pattern (a regular expression) occurs in what was said; where it failed,
        that one line of posx's own says why. Raises Unmet."""
        said = f"{self.out}\n{self.err}"
        words = " ".join(word[:100] for word in self.words if word not in TINY)
        shown = f"`posx {words}` ended with {self.code}: {said.strip()[-1500:]}"
        if "Traceback (most recent call last)" in said:
            raise Unmet(f"a traceback: {shown}")
        if self.code != code:
            raise Unmet(f"exit code {code} is owed: {shown}")
        if code > 0 and code != 141 and not re.search(r"^posx: .+", self.last):
            raise Unmet(f"the last line does not say why: {shown}")
        for pattern in patterns:
            if not re.search(pattern, said):
                raise Unmet(f"{pattern!r} is not said: {shown}")
        return self


class Site:
    """What the scenes of one campaign share: its folder, its seed and runs that were left alone."""

    def __init__(self, folder: Path, seed: int, kills: int):
        self.folder, self.seed, self.kills = folder, seed, kills
        self._lock = threading.Lock()

    @functools.cached_property
    def whole(self) -> Path:
        """A finished run; not to be written into."""
        return self._made("whole", lambda scene: scene.posx(*scene.train(), timeout=900).must(0))

    @functools.cached_property
    def halfway(self) -> Path:
        """The same run, stopped by SIGTERM between two checkpoints; not to be written into."""

        def make(scene: Scene) -> None:
            process = scene.start(*scene.train())
            scene.until(lambda: scene.step() >= STEPS // 2, process)
            process.send_signal(signal.SIGTERM)
            scene.end(process).must(75)

        return self._made("halfway", make)

    def _made(self, name: str, make: Callable[[Scene], Any]) -> Path:
        with self._lock:  # cached_property has none
            scene = Scene(self, name)
            if not scene.workdir.exists():
                make(scene)
            return scene.workdir


class Scene:
    """One fault's folder and processes."""

    def __init__(self, site: Site, name: str):
        self.site = site
        self.folder = site.folder / re.sub(r"\W+", "_", name)
        self.folder.mkdir(exist_ok=True)
        self.random = random.Random(f"{site.seed} {name}")
        self.codes: list[int] = []
        self.line = ""  # the last that said why something failed, or the last of all

    @property
    def workdir(self) -> Path:
        """Of the words of `train`."""
        return self.folder / "run"

    def train(self, *words: str, encoding: str = "rope") -> list[str]:
        """The words of a run of two seconds into `workdir`, but what `words` set."""
        return ["train", f"--config={ROOT}/configs/smoke.py:{encoding}", *self._small(words)]

    def sweep(self, *words: str) -> list[str]:
        """The words of a sweep of such runs: sinusoidal, rope and alibi."""
        return ["sweep", f"--config={ROOT}/configs/smoke.py", *self._small(words, "--config.sweep.train_lens=(16,)")]

    def _small(self, words: Sequence[str], *more: str) -> list[str]:
        given = {word.partition("=")[0] for word in words}
        own = (f"--workdir={self.workdir}", *TINY, *more)
        return [*(word for word in own if word.partition("=")[0] not in given), *words]

    def finished(self) -> Path:
        """A copy of a finished run, to damage, in `workdir`."""
        shutil.copytree(self.site.whole, self.workdir)
        return self.workdir

    def halfway(self) -> Path:
        """A copy of a run that was stopped in the middle, in `workdir`."""
        shutil.copytree(self.site.halfway, self.workdir)
        return self.workdir

    @property
    def got(self) -> str:
        """How its processes ended, one after another, and the last line that says why."""
        counted = [(code, len(list(same))) for code, same in itertools.groupby(self.codes)]
        codes = ", ".join(f"{code}" if times == 1 else f"{code} ({times} times)" for code, times in counted)
        return f"{codes}; {self.line}" if self.line else codes

    def plain(self, text: str) -> str:
        """`text` without where this campaign happens to run."""
        for folder in (self.folder, self.site.folder, ROOT):
            text = text.replace(f"{folder}/", "").replace(str(folder), ".")
        return text

    # Processes

    def posx(self, *words: object, timeout: float = SECONDS, **how: Any) -> Ended:
        """The command, from start to end. `how` as in `start`."""
        return self.end(self.start(*words, **how), timeout)

    def start(
        self, *words: object, env: dict[str, str] | None = None, before: Callable[[], object] | None = None, **how: Any
    ) -> subprocess.Popen[str]:
        """The command as a process; `before` runs in it before the command does (limits), `how` goes to Popen."""

        def prepared() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background job it is ignored
            if before:
                before()

        told = {"text": True, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
                "cwd": self.folder, "preexec_fn": prepared, "errors": "replace"}  # fmt: skip
        command = [sys.executable, "-P", "-m", "posx.cli", *map(str, words)]
        return subprocess.Popen(command, env=self.env(env or {}), **told | how)

    def env(self, more: dict[str, str]) -> dict[str, str]:
        """A user's environment with the campaign's own cache; "" takes a variable out."""
        own = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(self.site.folder / "cache"), "JAX_PLATFORMS": "cpu"}
        return {name: value for name, value in {**os.environ, **own, **more}.items() if value}

    def end(self, process: subprocess.Popen[str], timeout: float = SECONDS) -> Ended:
        """The end of a process. Raises Unmet where it does not come."""
        words = [str(word) for word in process.args[4:]]  # type: ignore[union-attr, index]
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise Unmet(f"`posx {' '.join(words)}` hangs: no end after {timeout:.0f} s; {err[-500:]}") from None
        ended = Ended(words, process.returncode, out or "", err or "")
        self.codes.append(ended.code)
        if ended.last.startswith("posx: ") or not self.line.startswith("posx: "):
            self.line = ended.last[:300]
        return ended

    def kill(self, process: subprocess.Popen[str]) -> None:
        """kill -9, and no process left."""
        process.kill()
        process.communicate()

    def until(self, condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
        """Waits for `condition` while `process` lives. Raises Unmet where it ends before, or it takes too long."""
        end = time.monotonic() + SECONDS
        while not condition():
            if process.poll() is not None:
                raise Unmet(f"it ended before it could be provoked: {self.end(process).err[-500:]}")
            if time.monotonic() > end:
                process.kill()
                raise Unmet("waited in vain")
            time.sleep(0.002)

    # What is left on disk

    def step(self, workdir: Path | None = None) -> int:
        """The last step in a run's metrics; 0 before the first."""
        return max((row.get("step") or 0 for row in rows((workdir or self.workdir) / "metrics.jsonl")), default=0)

    def must_end_like_whole(self, workdir: Path | None = None) -> None:
        """Checks that a run has ended in the same bits, with the same rows, as the one that was left alone."""
        mine, whole = workdir or self.workdir, self.site.whole
        if not (mine / "DONE").exists():
            raise Unmet(f"there is no DONE: {sorted(path.name for path in mine.iterdir())}")
        if digests(mine) != digests(whole):
            raise Unmet("its last checkpoint has other bits than that of a run left alone")
        # Steps that were done again after a kill stand there twice: the same, if the last of each are.
        logged, alone = ({row["step"]: lasting(row) for row in rows(run / "metrics.jsonl")} for run in (mine, whole))
        if logged != alone:
            raise Unmet(f"metrics.jsonl differs from that of a run left alone: {len(logged)} steps, {len(alone)} there")
        here, there = (list(map(lasting, rows(run / "eval.jsonl"))) for run in (mine, whole))
        if here != there:
            raise Unmet(f"eval.jsonl differs from that of a run left alone: {len(here)} rows, {len(there)} there")

    def must_leave(self, *patterns: str) -> None:
        """Checks that no file in the scene's folder matches a glob pattern: nothing half-done was left behind."""
        left = [str(path.relative_to(self.folder)) for pattern in patterns for path in self.folder.rglob(pattern)]
        if left:
            raise Unmet(f"left behind: {', '.join(sorted(left))}")

    def flip(self, path: Path) -> None:
        """Flips one bit of a file at a random place."""
        content = bytearray(path.read_bytes())
        content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        path.write_bytes(content)


def rows(path: Path) -> list[dict[str, Any]]:
    """Whole rows of a file that may still be written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]


def lasting(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what differs from one process to the next: seconds, speeds, memory, where and when."""
    return {name: value for name, value in row.items() if name in ROW}


#: What two runs of the same settings agree in, bit for bit.
ROW = (
    "step", "loss", "grad_norm", "learning_rate", "train_len", "eval_len", "protocol", "nll", "ppl", "num_targets",
    "targets", "status", "seed", "digest", "data_digest", "encoding",
)  # fmt: skip


def digests(workdir: Path) -> dict[str, str]:
    """{array: digest} of the last step's checkpoint, from its manifest."""
    manifest = json.loads((workdir / "checkpoints" / f"{STEPS}.json").read_text())
    return {name: facts["sha256"] for name, facts in manifest["arrays"].items()}
