"""A run small enough for tests: its text, its config file, and the real command on it, in a process or in this one."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax

import posx.cli
from posx.files.locks import lock

#: Of the repository.
ROOT = Path(__file__).parents[1]

CONFIG = """
from posx.config import base_config

def get_config(arg: str = "alibi"):
    config = base_config(arg)
    config.data.source = {source!r}
    config.data.cache_dir = {cache!r}
    config.model.num_layers = 1
    config.model.model_dim = 32
    config.model.num_heads = 2
    config.model.dropout = 0.1
    config.train.length = 16
    config.train.batch_size = 4
    config.train.steps = {steps}
    config.train.warmup_steps = 2
    config.train.log_steps = 1
    config.train.checkpoint_steps = {checkpoint_steps}
    config.eval.lengths = (16, 32)
    config.eval.num_targets = 256
    config.eval.sliding_targets = 64
    config.sweep.encodings = ("rope", "alibi")
    config.sweep.train_lens = (16,)
    return config.lock()
"""


def write_text(folder: Path) -> Path:
    """24 short documents of words with uneven frequencies, 15 kB: enough for windows of a few hundred tokens."""
    folder.mkdir()
    rng = random.Random(0)
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "ne") for b in ("ra", "sto", "vi", "nen", "")]
    for number in range(24):
        text = " ".join(words[int(rng.random() ** 2 * len(words))] for _ in range(120))
        (folder / f"{number:02d}.txt").write_text(text + ".\n")
    return folder


#: Of the run that tests share: enough to be killed in the middle.
STEPS, CHECKPOINT_STEPS = 32, 4


def write_config(folder: Path, steps: int = STEPS, checkpoint_steps: int = CHECKPOINT_STEPS) -> Path:
    """The tiny config in `folder`, with its text and cache beside it."""
    source = folder / "text"
    if not source.exists():
        write_text(source)
    path = folder / "tiny.py"
    values = {
        "source": str(source),
        "cache": str(folder / "cache"),
        "steps": steps,
        "checkpoint_steps": checkpoint_steps,
    }
    path.write_text(CONFIG.format(**values))
    machine = folder / "cache" / "machine"
    machine.mkdir(parents=True, exist_ok=True)
    write_ceilings(machine)
    return path


def write_ceilings(folder: Path) -> None:
    """The matmul ceiling as if measured before: measuring it takes a second or two a process."""
    from posx.machine import ceiling

    known = ceiling._measure
    ceiling._measure = lambda dtype: 1e11
    try:
        ceiling.matmul_ceiling(folder, "float32")
    finally:
        ceiling._measure = known


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder` as `make` fills it: by the first process that asks, while the others wait."""
    made = folder.with_suffix(".made")
    with lock(folder.with_suffix(".lock"), lambda holder: None):
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def make_site(folder: Path) -> None:
    """The config with its text, its run by the real command in `whole`, and what that said in `whole.err`."""
    code, _, err = run("train", f"--config={write_config(folder)}:t5", f"--workdir={folder / 'whole'}")
    assert code == 0, err
    (folder / "whole.err").write_text(err)


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", **extra}


def start(*words: str, **extra: str) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "posx.cli", *map(str, words)], env=environment(**extra), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(*words: str, **extra: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command in a process of its own."""
    process = start(*words, **extra)
    out, err = process.communicate(timeout=1800)
    return process.returncode, out, err


def until(condition: Callable[[], object], process: subprocess.Popen, seconds: float = 1800) -> None:
    """Waits for `condition` while `process` lives; the limit only keeps a broken test from hanging."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"it ended early: {process.communicate()}"
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def call(capsys, *words: str) -> tuple[int, str, str]:
    """The same in this process, under JAX's usual type promotion: Optax does not hold to the strict one."""
    capsys.readouterr()
    with jax.numpy_dtype_promotion("standard"):
        code = posx.cli.main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def digests(workdir: Path, step: int) -> dict[str, str]:
    """{array name: digest} of a checkpoint, from its manifest."""
    manifest = json.loads((workdir / "checkpoints" / f"{step}.json").read_text())
    return {name: facts["sha256"] for name, facts in manifest["arrays"].items()}
