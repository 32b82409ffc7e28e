"""`posx doctor`: what it says of this machine, and that a wrong number is exit 1 with its line."""

import jax.numpy as jnp
import pytest

from posx import attention, cli
from posx.commands import doctor
from tests import tiny


def test_it_names_what_numbers_depend_on_and_checks_every_encoding(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "ENCODINGS", {"t5": None})
    code, out, err = tiny.call(capsys, "doctor")
    assert code == 0, err
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    for fact, text in (("versions", "jaxlib"), ("devices", "cpu"), ("cache", "posx"), ("memory", "free")):
        assert text in lines[fact]
    assert out.count("ok  ") == 3 and "FAILED" not in out


@pytest.mark.parametrize("wrong", ["nan", 1e-2])
def test_a_wrong_number_is_exit_1_with_its_line(capsys, monkeypatch, wrong):
    monkeypatch.setattr(doctor, "ENCODINGS", {"alibi": None})
    right = attention.EXECUTORS["fused"]
    monkeypatch.setitem(attention.EXECUTORS, "fused", lambda *a, **o: right(*a, **o) + jnp.float32(wrong))
    code, out, err = tiny.call(capsys, "doctor")
    assert code == 1
    assert [line.split()[:3] for line in out.splitlines() if "FAILED" in line] == [["attention,", "alibi", "FAILED"]]
    assert "attention, alibi: fused: differs" in err and len(err.splitlines()) == 1


def test_it_is_a_command_without_settings(capsys):
    assert cli.main(["doctor", "--dry_run"]) == 0
    assert "would describe" in capsys.readouterr().out
