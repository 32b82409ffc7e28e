"""A run small enough for tests: its text, its config file, and the real command on it, in a process or in this one.

A `Scene` is a folder in which `python -m tests.faults` provokes a fault, with such runs to stop and to damage.
"""

from __future__ import annotations

import dataclasses
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from posx.lab.data import train_bpe
from posx.lab.files.checksums import with_checksum
from posx.lab.files.locks import lock

#: The repository.
ROOT = Path(__file__).parents[1]

#: The steps of the run that tests share: enough to be killed in the middle.
STEPS, CHECKPOINT_STEPS = 32, 4

#: Settings of a run of two seconds, after compiling.
SIZES = {
    "model.num_layers": 1, "model.model_dim": 32, "model.num_heads": 2, "train.length": 16, "train.batch_size": 4,
    "train.steps": STEPS, "train.warmup_steps": 2, "train.log_steps": 1, "train.checkpoint_steps": CHECKPOINT_STEPS,
    "eval.lengths": (16, 32), "eval.num_targets": 256, "eval.sliding_targets": 64, "sweep.train_lens": (16,),
}  # fmt: skip

CONFIG = """
from posx.lab.config import base_config

def get_config(arg: str = "alibi"):
    config = base_config(arg)
    config.data.source = {source!r}
    config.data.cache_dir = {cache!r}
    config.update_from_flattened_dict({sizes!r})
    config.model.dropout = 0.1
    config.sweep.encodings = ("rope", "alibi")
    return config.lock()
"""


def write_text(folder: Path) -> Path:
    """Write 24 short documents of words with uneven frequencies, 15 kB: enough for windows of a few hundred tokens."""
    folder.mkdir()
    rng = random.Random(0)
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "ne") for b in ("ra", "sto", "vi", "nen", "")]
    for number in range(24):
        text = " ".join(words[int(rng.random() ** 2 * len(words))] for _ in range(120))
        (folder / f"{number:02d}.txt").write_text(text + ".\n")
    return folder


def write_model(folder: Path) -> Path:
    """Write a folder of Hugging Face with a config of Llama and a tokenizer, but hardly any weights."""
    folder.mkdir()
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 300,
        "num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    train_bpe(["some words and other words"], 257).save(folder / "tokenizer.json")
    save_file({"model.norm.weight": np.ones(32, np.float32)}, folder / "model.safetensors")
    return folder


def write_config(folder: Path, steps: int = STEPS, checkpoint_steps: int = CHECKPOINT_STEPS) -> Path:
    """Write the tiny config into `folder`, with its text and cache beside it."""
    source = folder / "text"
    if not source.exists():
        write_text(source)
    path = folder / "tiny.py"
    sizes = SIZES | {"train.steps": steps, "train.checkpoint_steps": checkpoint_steps}
    path.write_text(CONFIG.format(source=str(source), cache=str(folder / "cache"), sizes=sizes))
    machine = folder / "cache" / "machine"
    machine.mkdir(parents=True, exist_ok=True)
    write_ceilings(machine)
    return path


def write_ceilings(folder: Path) -> None:
    """Write a matmul ceiling as if measured before: measuring it takes a second or two a process."""
    from posx.lab.machine import ceiling

    known = ceiling._measure
    ceiling._measure = lambda dtype: 1e11
    try:
        ceiling.machine_ceiling(folder, "float32")
    finally:
        ceiling._measure = known


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Fill `folder` by `make` in the first process that asks; the other processes wait."""
    made = folder.with_suffix(".made")
    with lock(folder.with_suffix(".lock"), lambda holder: None):
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def make_site(folder: Path) -> None:
    """Make the config with its text, its run by the real command in `whole`, and the run's messages in `whole.err`."""
    code, _, err = run("train", f"--config={write_config(folder)}:t5", f"--workdir={folder / 'whole'}")
    assert code == 0, err
    (folder / "whole.err").write_text(err)


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", **extra}


def start(*words: object, how: Mapping[str, Any] | None = None, **extra: str) -> subprocess.Popen[str]:
    """Start the command as a process of its own. `how` goes to Popen, `extra` into its environment."""
    told = {"env": environment(**extra), "text": True, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE} | dict(how or {})  # fmt: skip
    return subprocess.Popen([sys.executable, "-P", "-m", "posx.lab.cli", *map(str, words)], **told)


def run(*words: str, **extra: str) -> tuple[int, str, str]:
    """Run the command in a process of its own: exit code, standard output and standard error."""
    process = start(*words, **extra)
    out, err = process.communicate(timeout=1800)
    return process.returncode, out, err


def until(condition: Callable[[], object], process: subprocess.Popen, seconds: float = 1800) -> None:
    """Wait for `condition` while `process` lives; the limit only keeps a broken test from hanging."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"it ended early: {process.communicate()}"
        if time.monotonic() > end:
            process.kill()
            raise AssertionError("waited in vain")
        time.sleep(0.002)


def call(capsys, *words: str) -> tuple[int, str, str]:
    """Run it in this process, under JAX's usual type promotion: Optax does not keep to the strict one."""
    import jax

    import posx.lab.cli

    capsys.readouterr()
    with jax.numpy_dtype_promotion("standard"):
        code = posx.lab.cli.main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_so_far(path: Path) -> list[dict[str, Any]]:
    """Read the whole rows of a file that a process may still write, or has not made yet."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def step(folder: Path) -> int:
    """Return the last step in a run's metrics; 0 before the first."""
    return max((row.get("step") or 0 for row in rows_so_far(folder / "metrics.jsonl")), default=0)


def edit_json(path: Path, change: Callable[[str], str]) -> None:
    """Change the text of a JSON file with a checksum, and give it the checksum of the changed text."""
    path.write_text(json.dumps(with_checksum(json.loads(change(path.read_text())))))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with their checksums, as a run does."""
    path.write_text("".join(json.dumps(with_checksum(row)) + "\n" for row in rows))


def digests(workdir: Path, step: int = STEPS) -> dict[str, str]:
    """Read {array name: digest} of a checkpoint from its manifest."""
    manifest = json.loads((workdir / "checkpoints" / f"{step}.json").read_text())
    return {name: facts["sha256"] for name, facts in manifest["arrays"].items()}


@dataclasses.dataclass
class Ended:
    """A process that has ended: its words, exit code (-9: by that signal), output and errors."""

    words: Sequence[str]
    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line that it printed."""
        return next((line for line in reversed(self.err.splitlines() or self.out.splitlines()) if line.strip()), "")

    def must(self, codes: int | tuple[int, ...], *patterns: str) -> Ended:
        """Check the exit code, and that every pattern (a regular expression) occurs in what was printed.

        A failure must end with one line of posx's own that gives the reason. No traceback may reach the user.
        """
        said, codes = f"{self.out}\n{self.err}", codes if isinstance(codes, tuple) else (codes,)
        words = " ".join(word[:100] for word in self.words if word not in TINY)
        shown = f"`posx {words}` ended with {self.code}: {said.strip()[-1500:]}"
        assert "Traceback (most recent call last)" not in said, f"a traceback: {shown}"
        assert self.code in codes, f"exit code {' or '.join(map(str, codes))} is expected: {shown}"
        explained = self.code <= 0 or self.code == 141 or self.last.startswith("posx: ")
        assert explained, f"the last line does not say why: {shown}"
        for pattern in patterns:
            assert re.search(pattern, said), f"{pattern!r} is not said: {shown}"
        return self


class Site:
    """The folder and seed that the scenes of one campaign share, and its runs that were left alone."""

    def __init__(self, folder: Path, seed: int, kills: int):
        self.folder, self.seed, self.kills = folder, seed, kills
        self._lock = threading.Lock()

    @functools.cached_property
    def whole(self) -> Path:
        """A finished run, not to be written into."""
        return self._made("whole", lambda scene: scene.train(timeout=900).must(0))

    @functools.cached_property
    def halfway(self) -> Path:
        """The same run, stopped by SIGTERM between two checkpoints, not to be written into."""

        def make(scene: Scene) -> None:
            process = scene.started(step=STEPS // 2)
            process.send_signal(signal.SIGTERM)
            scene.end(process).must(75)

        return self._made("halfway", make)

    def _made(self, name: str, make: Callable[[Scene], Any]) -> Path:
        with self._lock:  # cached_property has none
            scene = Scene(self, name)
            if not scene.workdir.exists():
                make(scene)
            return scene.workdir


SMOKE = f"{ROOT}/configs/smoke.py"
TINY = [f"--config.{name}={value}".replace(" ", "") for name, value in SIZES.items()]
SECONDS = 300  # after which a process that should have ended hangs

#: The values of a row that two runs of the same settings share, bit for bit.
ROW = (
    "step", "loss", "grad_norm", "learning_rate", "train_len", "eval_len", "protocol", "nll", "ppl", "num_targets",
    "targets", "status", "seed", "digest", "data_digest", "encoding",
)  # fmt: skip


class Scene:
    """The folder and the processes of one fault."""

    def __init__(self, site: Site, name: str):
        self.site = site
        self.folder = site.folder / re.sub(r"\W+", "_", name)
        self.folder.mkdir(exist_ok=True)
        self.workdir = self.folder / "run"  # of `train` and `sweep`
        self.random = random.Random(f"{site.seed} {name}")
        self.codes: list[int] = []
        self.line = ""  # the last that said why something failed, or the last of all

    @property
    def got(self) -> str:
        """The exit codes of its processes, in their order, and the last line that gives a reason."""
        counted = [(code, len(list(same))) for code, same in itertools.groupby(self.codes)]
        codes = ", ".join(f"{code}" if times == 1 else f"{code} ({times} times)" for code, times in counted)
        return f"{codes}; {self.line}" if self.line else codes

    def plain(self, text: str) -> str:
        """Cut the folders of this campaign out of `text`."""
        for folder in (self.folder, self.site.folder, ROOT):
            text = text.replace(f"{folder}/", "").replace(str(folder), ".")
        return text

    # Processes

    def words(self, *words: str, encoding: str = "rope") -> list[str]:
        """Return the words of a run of two seconds into `workdir`; `words` replace its settings or add to them."""
        return self._words("train", f"{SMOKE}:{encoding}", [word for word in TINY if "sweep" not in word], words)

    def sweep_words(self, *words: str) -> list[str]:
        """Return the words of a sweep of such runs: sinusoidal, rope and alibi."""
        return self._words("sweep", SMOKE, TINY, words)

    def _words(self, command: str, config: str, sizes: Sequence[str], words: Sequence[str]) -> list[str]:
        given = {word.partition("=")[0] for word in words}
        own = (f"--config={config}", f"--workdir={self.workdir}", *sizes)
        return [command, *(word for word in own if word.partition("=")[0] not in given), *words]

    def train(self, *words: str, encoding: str = "rope", **how: Any) -> Ended:
        return self.posx(*self.words(*words, encoding=encoding), **how)

    def sweep(self, *words: str, **how: Any) -> Ended:
        return self.posx(*self.sweep_words(*words), **how)

    def posx(self, *words: object, timeout: float = SECONDS, **how: Any) -> Ended:
        """Run the command from start to end. `how` as in `start`."""
        return self.end(self.start(*words, **how), timeout)

    def started(self, *words: str, step: int = 0, **how: Any) -> subprocess.Popen[str]:
        """Start the training, and return once it has logged `step`."""
        process = self.start(*self.words(*words), **how)
        self.until(lambda: self.step() >= step, process)
        return process

    def start(
        self, *words: object, env: Mapping[str, str] | None = None, before: Callable[[], object] | None = None,
        **how: Any,
    ) -> subprocess.Popen[str]:  # fmt: skip
        """Start the command. `before` runs in its process first (limits), `how` goes to Popen."""

        def prepared() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background job it is ignored
            if before:
                before()

        own = {"cwd": self.folder, "preexec_fn": prepared, "errors": "replace", "env": self.env(env or {})}
        return start(*words, how=own | how)

    def env(self, more: Mapping[str, str]) -> dict[str, str]:
        """Return a user's environment with the campaign's own cache; "" takes a variable out."""
        own = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(self.site.folder / "cache")}
        return {name: value for name, value in environment(**own | dict(more)).items() if value}

    def end(self, process: subprocess.Popen[str], timeout: float = SECONDS) -> Ended:
        """Wait for the end of a process."""
        words = [str(word) for word in process.args[4:]]  # type: ignore[union-attr, index]
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            hangs = f"`posx {' '.join(words)}` hangs: no end after {timeout:.0f} s; {(err or '')[-500:]}"
            raise AssertionError(hangs) from None
        ended = Ended(words, process.returncode, out or "", err or "")
        self.codes.append(ended.code)
        if ended.last.startswith("posx: ") or not self.line.startswith("posx: "):
            self.line = ended.last[:300]
        return ended

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Send kill -9, and leave no process."""
        process.kill()
        process.communicate()

    def until(self, condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
        until(condition, process, SECONDS)

    # Files

    def finished(self) -> Path:
        """Copy a finished run into `workdir`, to damage it."""
        return self._copied(self.site.whole)

    def halfway(self) -> Path:
        """Copy a run that was stopped in the middle into `workdir`."""
        return self._copied(self.site.halfway)

    def _copied(self, run: Path) -> Path:
        shutil.rmtree(self.workdir, ignore_errors=True)
        return Path(shutil.copytree(run, self.workdir))

    def step(self, workdir: Path | None = None) -> int:
        return step(workdir or self.workdir)

    def must_resume(self, *patterns: str, **how: Any) -> Ended:
        """Check that the training goes on to the end of the run that was left alone."""
        ended = self.train(**how).must(0, *patterns)
        self.must_end_like_whole()
        return ended

    def must_end_like_whole(self, workdir: Path | None = None) -> None:
        """Check that a run has the bits and the rows of the one that was left alone."""
        runs = workdir or self.workdir, self.site.whole
        assert (runs[0] / "DONE").exists(), f"there is no DONE: {sorted(path.name for path in runs[0].iterdir())}"
        assert digests(runs[0]) == digests(runs[1]), "its last checkpoint has other bits than that of a run left alone"
        for name in ("metrics.jsonl", "eval.jsonl"):
            mine, whole = ([self._lasting(row) for row in rows_so_far(run / name)] for run in runs)
            if name == "metrics.jsonl":  # steps that were done again after a kill are there twice: the last counts
                mine, whole = ([*{row["step"]: row for row in found}.values()] for found in (mine, whole))
                mine.sort(key=lambda row: row["step"])
            assert mine == whole, f"{name} differs from that of a run left alone: {len(mine)} rows, {len(whole)} there"

    @staticmethod
    def _lasting(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name in ROW}

    def must_leave(self, *patterns: str) -> None:
        """Check that no file in the scene's folder matches a glob pattern: nothing half-done was left behind."""
        left = [str(path.relative_to(self.folder)) for pattern in patterns for path in self.folder.rglob(pattern)]
        assert not left, f"left behind: {', '.join(sorted(left))}"

    def damage(self, path: Path, how: str) -> None:
        """Flip one bit of a file at a random place, cut its second half off, or delete it."""
        content = bytearray(path.read_bytes())
        if how == "cut":
            os.truncate(path, len(content) // 2)
        elif how == "flip" and content:
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
            path.write_bytes(content)
        else:
            path.unlink()
