"""Ctrl-C: remembered, and in a save only raised when that is done."""

import os
import signal

import pytest

from posx import interrupts


def press():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def handler():
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.remember_interrupts()
    yield
    interrupts.remember_interrupts()
    signal.signal(signal.SIGINT, before)


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
