"""Ctrl-C: remembered, and in a save only raised when that is done."""

import os
import signal
import subprocess
import sys
import time

import pytest

from posx.lab import cli, interrupts
from posx.lab.files import lines
from tests import tiny


def press():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def handler():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.remember_interrupts()
    yield
    interrupts.remember_interrupts()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_it_is_raised_at_once_and_again_where_a_loop_asks():
    with pytest.raises(KeyboardInterrupt):
        press()
    with pytest.raises(KeyboardInterrupt):
        interrupts.raise_pending()


def test_a_save_is_finished_first_but_a_second_one_does_not_wait():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.defer_signals():
        press()
        done.append("saved")
    assert done == ["saved"]
    interrupts.remember_interrupts()
    with pytest.raises(KeyboardInterrupt), interrupts.defer_signals():
        press()
        press()
        done.append("not reached")
    assert done == ["saved"]


def test_a_sigterm_is_raised_at_once_unless_a_save_comes_first():
    with pytest.raises(interrupts.Terminated):
        os.kill(os.getpid(), signal.SIGTERM)
    assert interrupts.was_terminated()
    with pytest.raises(interrupts.Terminated):
        interrupts.raise_pending()
    interrupts.remember_interrupts()
    with interrupts.save_first():
        os.kill(os.getpid(), signal.SIGTERM)
        interrupts.raise_pending()
        assert interrupts.was_terminated()


def test_a_first_ctrl_c_lets_a_loop_save_and_a_second_ends_it(capfd):
    saved = []
    with pytest.raises(KeyboardInterrupt), interrupts.save_first():
        press()
        interrupts.raise_pending()
        saved.append(interrupts.was_interrupted())
        press()
        saved.append("not reached")
    assert saved == [True] and "Ctrl-C again ends at once" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 75)])
def test_a_signalled_run_saves_its_last_step(site, tmp_path, number, code):
    workdir = tmp_path / "run"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background jobs it is ignored
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process = tiny.start("train", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}")
    signal.signal(signal.SIGHUP, before)
    tiny.until(lambda: last_step(workdir) > tiny.CHECKPOINT_STEPS, process)
    process.send_signal(number)
    err = process.communicate()[1]
    saved = max(int(path.stem) for path in (workdir / "checkpoints").glob("*.json"))
    assert process.returncode == code and saved == last_step(workdir) < tiny.STEPS, err
    line = f"posx: run: stopped and saved at step {saved}; the same command resumes (docs/guides/resuming.md)\n"
    assert err.endswith(line), err
    assert not (workdir / "status.json").exists()


@pytest.mark.slow
def test_ctrl_c_to_a_sweep_lets_its_runs_save(site, tmp_path):
    """A terminal sends it to all processes of the command."""
    words = ["sweep", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path}", "--config.sweep.encodings=t5"]
    words += ["--config.train.steps=9000", "--config.train.checkpoint_steps=9000"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "posx.lab.cli", *words], env=tiny.environment(), text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    run = tmp_path / "t5-L16-s0"
    tiny.until(lambda: last_step(run), process)
    os.killpg(process.pid, signal.SIGINT)
    err = process.communicate()[1]
    assert process.returncode == 130 and "Traceback" not in err, err
    saved = [int(path.stem) for path in (run / "checkpoints").glob("*.json")]
    assert saved == [last_step(run)] and f"stopped and saved at step {saved[0]}" in (run / "log.txt").read_text()


def last_step(workdir) -> int:
    """The newest step of a run's metrics; 0 before its first."""
    return max((row["step"] for row in lines.read_lines(workdir / "metrics.jsonl")), default=0)


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGTERM, 75, "resumes"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_signal_turned_into_a_librarys_error_is_that_signal(monkeypatch, capsys, number, code, said):
    def load(words):
        try:
            os.kill(os.getpid(), number)
            interrupts.raise_pending()
        except BaseException:
            raise ImportError("Encountered an error while initializing the extension.") from None

    monkeypatch.setattr(cli, "_run", load)
    assert cli.main([]) == code
    err = capsys.readouterr().err
    assert said in err and "extension" not in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, interrupts.Terminated), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_library_is_loaded_to_its_end_first(tmp_path, monkeypatch, number, error):
    (tmp_path / "slow_to_load.py").write_text(
        f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(0.1)\nloaded = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("slow_to_load", None)
    with pytest.raises(error):
        import slow_to_load

        time.sleep(5)
    assert slow_to_load.loaded


def test_what_a_destructor_would_drop_is_raised_a_moment_later(capfd):
    class Held:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0)

    held = Held()
    with pytest.raises(interrupts.Terminated):
        del held
        time.sleep(5)
    assert "ignored" not in capfd.readouterr().err
