"""`posx doctor`: its facts of this machine, and that a wrong number is exit 1 with its line."""

import os
import threading

import jax.numpy as jnp
import pytest

from posx import attention
from posx.contract import abstract_params, acting_hooks
from posx.encodings import ENCODINGS, build
from posx.lab import cli
from posx.lab.commands import checks
from posx.machine.platforms import trace_platform
from tests import tiny


def test_doctor_names_the_facts_and_checks_every_encoding(capsys, monkeypatch):
    monkeypatch.setattr(checks, "ENCODINGS", {"t5": None})
    code, out, err = tiny.call(capsys, "doctor")
    assert code == 0, err
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    for fact, text in (("versions", "jaxlib"), ("devices", "cpu"), ("cache", "posx"), ("memory", "free")):
        assert text in lines[fact]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    assert lines["memory"].endswith(f" of {total:.1f} GB free")
    assert out.count("ok  ") == 4 and "FAILED" not in out
    assert out.splitlines()[-1] == "all is well: 4 of 4 checks passed"
    assert "evaluation errs by" in out and "as its operands are rounded" not in out
    assert "1 of the 1 encodings" in lines["self-test"]
    texts = [line for line in out.splitlines() if "  " in line]
    assert all(line[checks.WIDTH - 1] == " " != line[checks.WIDTH] for line in texts), "one column starts there"


def test_the_self_test_uses_every_hook_of_the_catalogue():
    names = checks.subjects()
    hooks = {hook for name in ENCODINGS for hook in acting_hooks(build(name, checks.DIMS))}
    assert hooks == {hook for encoding in names.values() for hook in acting_hooks(encoding)}
    assert max(map(len, ENCODINGS)) + len("attention, ") < checks.WIDTH


@pytest.mark.parametrize("wrong", ["nan", 1e-2])
def test_a_wrong_number_is_exit_1_with_its_line(capsys, monkeypatch, wrong):
    monkeypatch.setattr(checks, "ENCODINGS", {"alibi": None})
    right = attention.EXECUTORS["fused"]
    monkeypatch.setitem(attention.EXECUTORS, "fused", lambda *a, **o: right(*a, **o) + jnp.float32(wrong))
    code, out, err = tiny.call(capsys, "doctor")
    assert code == 1
    assert [line.split()[:3] for line in out.splitlines() if "FAILED" in line] == [["attention,", "alibi", "FAILED"]]
    assert "1 of 4 checks failed: attention, alibi: fused: differs" in err and len(err.splitlines()) == 1
    assert "all is well" not in out


def test_a_check_that_raises_fails_and_others_go_on(capsys, monkeypatch):
    def refused():
        raise RuntimeError("INTERNAL: Input datatypes do not match\nand more lines")

    monkeypatch.setattr(checks, "checks", lambda: [("cuDNN", refused), ("a sum", lambda: (True, "right"))])
    code, out, err = tiny.call(capsys, "doctor")
    assert code == 1 and "FAILED RuntimeError: INTERNAL: Input datatypes do not match\n" in out
    assert "ok     right" in out and "1 of 2 checks failed: cuDNN: RuntimeError" in err


def test_a_slow_machine_names_what_it_left(capsys, monkeypatch):
    monkeypatch.setattr(checks, "LIMIT", -1.0)
    code, out, err = tiny.call(capsys, "doctor")
    assert code == 0 and "not checked" in out and "attention, learned_sinks: no time was left" in out, err
    assert out.splitlines()[-1] == "no check failed: 0 of 16 checks passed"


def test_no_check_begins_that_would_end_late(capsys, monkeypatch):
    """The second check takes 6 of 8 seconds, so that a third one would end after them."""
    now = iter([0.0, 0.0, 1.0, 1.0, 7.0, 7.0])
    monkeypatch.setattr(checks.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(checks, "usable_cores", lambda: (0,))
    monkeypatch.setattr(checks, "machine_facts", list)
    monkeypatch.setattr(checks, "LIMIT", 8.0)
    monkeypatch.setattr(checks, "checks", lambda: [(name, lambda: (True, "right")) for name in ("one", "two", "three")])
    checks.run_doctor({"dry_run": False}, None)
    out = capsys.readouterr().out
    assert "three: no time was left of 8 s" in out and "no check failed: 2 of 3 checks passed" in out


def test_every_core_runs_a_check_and_lines_keep_their_order(capsys, monkeypatch):
    """Each check waits for the other. With one core they would fail."""
    both = threading.Barrier(2, timeout=9)
    monkeypatch.setattr(checks, "usable_cores", lambda: (0, 1))
    monkeypatch.setattr(checks, "machine_facts", list)
    monkeypatch.setattr(checks, "checks", lambda: [(name, lambda: (both.wait() < 2, "met")) for name in ("one", "two")])
    checks.run_doctor({"dry_run": False}, None)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["one", "two", "all"]


def test_a_gpu_is_asked_for_both_kernels():
    served = {"alibi": {"fused", "kernel"}, "deberta": set()}
    with trace_platform("cuda"):
        names = [name for name, _ in checks.checks()]
        assert names[3:5] == ["attention, cuDNN in bfloat16", "attention, kernel in bfloat16"]
        for name, kernels in served.items():
            encoding = build(name, checks.DIMS)
            found = checks.serving_executors(encoding, abstract_params(encoding, checks.DIMS))
            assert found.keys() == {"dense", "blockwise"} | kernels


def test_the_check_of_16_bits_sees_a_wrong_gradient(monkeypatch):
    right, detail = checks._compare_bfloat16("fused", "t5")
    assert right and detail.startswith("t5 dk, t5 dq, t5 dtable, t5 dv, t5 outputs: differs by at most")
    serves = attention.EXECUTORS["fused"]
    monkeypatch.setitem(attention.EXECUTORS, "fused", lambda *a, **o: serves(*a, **o) * 1.25)
    assert not checks._compare_bfloat16("fused", "t5")[0]


def test_it_is_a_command_without_settings(capsys):
    assert cli.main(["doctor", "--dry_run"]) == 0
    assert "would describe" in capsys.readouterr().out
