"""The ends of a command: one line, an exit code, and output that nobody reads or can show."""

import io
import signal
import subprocess
import sys
import warnings

import jax
import pytest

import posx.lab.cli
from posx.lab.data import TextDataset
from tests import tiny
from tests.lab.commands import one_line


@pytest.mark.parametrize(("encoding", "dot"), [("ascii", rb"\xb7"), ("latin-1", b"\xb7")])
def test_results_reach_an_output_that_is_not_utf_8(workdir, monkeypatch, encoding, dot):
    """Signs that it does not have are escaped: a middle dot in ASCII, an ellipsis in Latin-1 too."""
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", out)
    with jax.numpy_dtype_promotion("standard"):
        assert posx.lab.cli.main(["evaluate", f"--workdir={workdir}", "--lengths=16"]) == 0
    print("\u2026", file=out, flush=True)
    printed = out.buffer.getvalue()
    assert b"windows " + dot + b" 256 targets" in printed and rb"\u2026" in printed


def test_the_real_command_prints_one_line(site):
    code, _, err = tiny.run("train", f"--config={site / 'tiny.py'}", "--config.model.model_dmi=3")
    assert code == 2 and "model.model_dim" in one_line(err) and len(err.splitlines()) == 1


def piped(words: str) -> int:
    """The exit code of a command whose reader has gone away."""
    shell = f"{sys.executable} -m posx.lab.cli {words} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], env=tiny.environment(), capture_output=True, text=True, timeout=600)
    assert "Traceback" not in done.stderr and "rror" not in done.stderr, done.stderr
    return done.returncode


@pytest.mark.slow
def test_a_run_continues_if_nobody_reads_its_output(site, tmp_path):
    assert piped(f"train --config={site / 'tiny.py'}:t5 --workdir={tmp_path / 'run'} 2>&1") == 0
    assert (tmp_path / "run" / "DONE").exists()


@pytest.mark.slow
def test_results_that_nobody_reads_are_no_success():
    """`posx encodings | head -0` ends as a closed pipe does."""
    assert piped("encodings") == piped("--help") == 141
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "posx.lab.cli", "encodings"], env=tiny.environment(), stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=600,
        )  # fmt: skip
    assert done.returncode == 6 and "no space is left" in one_line(done.stderr)


@pytest.mark.slow
def test_an_interrupt_leaves_no_traceback(site, tmp_path, ctrl_c):
    """Stopped with Ctrl-C while it trains."""
    process = tiny.start(
        "train", f"--config={site / 'tiny.py'}:t5", f"--workdir={tmp_path / 'run'}",
        "--config.train.checkpoint_steps=1",
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    tiny.until(lambda: metrics.exists() and metrics.stat().st_size, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=1800)
    assert process.returncode == 130 and "stopped and saved at step" in one_line(err)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the very thing on test
def test_an_interrupt_that_lands_in_a_destructor_is_not_lost(site, tmp_path, monkeypatch, ctrl_c):
    class Unlucky:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    batch = TextDataset.batch

    def batch_with_garbage(*args, **options):
        Unlucky()
        return batch(*args, **options)

    monkeypatch.setattr(TextDataset, "batch", batch_with_garbage)
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):  # Optax promotes types
        warnings.simplefilter("ignore", pytest.PytestUnraisableExceptionWarning)
        code = posx.lab.cli.main(["train", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path / 'run'}"])
    assert code == 130
