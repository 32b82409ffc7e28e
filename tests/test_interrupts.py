"""Ctrl-C: remembered, and in a save only raised when that is done."""

import os
import signal
import sys
import time

import pytest

from posx import cli, interrupts


def press():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def handler():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
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
        interrupts.check()


def test_a_save_is_finished_first_but_a_second_one_does_not_wait():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        press()
        done.append("saved")
    assert done == ["saved"]
    interrupts.remember_interrupts()
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        press()
        press()
        done.append("not reached")
    assert done == ["saved"]


def test_a_sigterm_is_raised_at_once_but_where_something_is_saved_first():
    with pytest.raises(interrupts.Terminated):
        os.kill(os.getpid(), signal.SIGTERM)
    assert interrupts.terminated()
    with pytest.raises(interrupts.Terminated):
        interrupts.check()
    interrupts.remember_interrupts()
    with interrupts.saved_first():
        os.kill(os.getpid(), signal.SIGTERM)
        interrupts.check()
        assert interrupts.terminated()


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGTERM, 75, "goes on"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_signal_that_a_library_turns_into_an_error_of_its_own_is_still_that_signal(
    monkeypatch, capsys, number, code, said
):
    def load(words):
        try:
            os.kill(os.getpid(), number)
            interrupts.check()
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
