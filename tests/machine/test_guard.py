"""The compiler's fault stays out of posx's numbers: fresh processes, fused as users' are, however they start."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

from posx.machine import guard
from posx.machine.guard import FAULTY, FLAG, SAFE, Guard, barrier
from tests.machine.sums_of_products import WAYS
from tests.tiny import environment

STRUCK = jaxlib.__version__ in FAULTY
#: How the process starts: words for sums_of_products, the user's XLA_FLAGS, whether posx has to say something.
STARTS = {
    "as it comes": ((), "", False),
    "with flags that leave the fusion on": ((), f"{FLAG}=-individual_dot", True),
    "with JAX up before posx": (("jax-first",), "", True),
}


def run(start: str, *names: str) -> list[str]:
    words, flags, is_late = STARTS[start]
    given = {name: value for name, value in environment().items() if name != "XLA_FLAGS"}
    process = subprocess.run(
        [sys.executable, "-m", "tests.machine.sums_of_products", *words, *names],
        text=True, capture_output=True, check=True,
        env=given | ({"XLA_FLAGS": flags} if flags else {}), cwd=os.getcwd(),
    )  # fmt: skip
    notices = [line for line in process.stderr.splitlines() if line.startswith("notice:")]
    assert len(notices) == (STRUCK and is_late), process.stderr
    return process.stdout.splitlines()


@pytest.mark.slow
def test_sums_after_attention_are_right_if_jax_was_up_first():
    lines = run("with JAX up before posx", "t5")
    assert [line for line in lines if line.startswith("wrong")] == []
    assert lines[-1] == "t5: 2 cases"


@pytest.mark.slow
def test_sums_after_attention_are_right_for_all_encodings():
    lines = run("as it comes")
    assert [line for line in lines if line.startswith("wrong")] == []
    assert sum(int(line.split()[1]) for line in lines) > 150


# The two late starts leave the fusion on alike: one of them is enough for all encodings. What is wrong with every
# encoding that nothing guards is enough there: which sums there are is tested above.
@pytest.mark.slow
def test_sums_are_right_where_flags_leave_the_fusion_on():
    lines = run("with flags that leave the fusion on", *WAYS)
    assert lines == [f"{name}: 2 cases" for name in WAYS]


def test_the_flag_is_set_if_it_is_known_and_wanted(tmp_path):
    script = """
import importlib, os, sys
import jaxlib, posx

def flags(given, version=posx.machine.guard.FAULTY[0]):
    os.environ["XLA_FLAGS"], jaxlib.__version__ = given, version
    guard = importlib.reload(posx.machine.guard).guard()
    print(os.environ["XLA_FLAGS"] or "none", "->", guard.open, guard.flag_set)

print("start", file=sys.stderr)
for given in sys.argv[1:]:
    flags(given)
flags("", "99.0")
"""
    safe_file, other_file = tmp_path / "safe", tmp_path / "other"
    safe_file.write_text(f"--xla_cpu_multi_thread_eigen=true\n{SAFE}\n")
    other_file.write_text("--xla_cpu_multi_thread_eigen=true")
    asked = {
        "": (SAFE, "False True"),
        "--xla_dump_max_hlo_modules=1": (f"--xla_dump_max_hlo_modules=1 {SAFE}", "False True"),
        f"{FLAG}=": (f"{FLAG}=", "False True"),
        f"{FLAG}=-eltwise,-reduce": (f"{FLAG}=-eltwise,-reduce", "False True"),
        f"{FLAG}=+reduce {SAFE}": (f"{FLAG}=+reduce {SAFE}", "False True"),
        str(safe_file): (str(safe_file), "False True"),
        f"{FLAG}=-individual_dot": (f"{FLAG}=-individual_dot", "True False"),
        f"{FLAG}=individual_dot,reduce": (f"{FLAG}=individual_dot,reduce", "True False"),
        f"{SAFE} {FLAG}=+reduce": (f"{SAFE} {FLAG}=+reduce", "True False"),
        str(other_file): (str(other_file), "True False"),
    }
    given = {name: value for name, value in environment().items() if name != "XLA_FLAGS"}
    process = subprocess.run(
        [sys.executable, "-c", script, *asked], text=True, capture_output=True, check=True, env=given
    )
    found = [tuple(line.split(" -> ")) for line in process.stdout.splitlines()]
    assert found == [*asked.values(), ("none", "False False")]
    said = process.stderr.splitlines()
    notices = said[said.index("start") + 1 :]
    assert len(notices) == 4 and all(line.startswith("notice: XLA_FLAGS ") for line in notices)


def test_only_flags_that_this_jaxlib_knows_are_added(monkeypatch):
    """XLA would end the process over another one; versions that posx was not tested with are asked."""
    monkeypatch.setattr(jaxlib, "__version__", "99.0")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_max_hlo_modules=1")
    guard.add_flags({"--xla_no_such_flag": 1, "--xla_backend_optimization_level": 0, "--xla_nor_this": "a"})
    assert os.environ["XLA_FLAGS"] == "--xla_dump_max_hlo_modules=1 --xla_backend_optimization_level=0"
    guard.add_flags({"--xla_no_such_flag": 1})
    assert os.environ["XLA_FLAGS"] == "--xla_dump_max_hlo_modules=1 --xla_backend_optimization_level=0"


@pytest.fixture
def without_flag(monkeypatch):
    monkeypatch.setattr(guard, "guard", lambda: Guard(open=True, text="", flag_set=False))


@pytest.mark.parametrize("flag_set", [True, False])
def test_barrier_is_left_out_if_the_flag_is_set(monkeypatch, flag_set):
    monkeypatch.setattr(guard, "guard", lambda: Guard(open=False, text="", flag_set=flag_set))
    traced = str(jax.make_jaxpr(lambda x: barrier(x))(jnp.ones(3)))  # JAX remembers how it traced a function
    assert ("optimization_barrier" not in traced) == flag_set


@pytest.mark.usefixtures("without_flag")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_barrier_returns_its_input_bit_for_bit(dtype):
    info = jnp.finfo(dtype)
    values = [jnp.inf, -jnp.inf, jnp.nan, -0.0, info.smallest_subnormal, info.tiny, info.max, 1 + info.eps, 1 / 3]
    x = jnp.asarray(values, dtype)
    bits = np.uint32 if dtype == "float32" else np.uint16
    for found in (barrier(x), jax.jit(barrier)(x)):
        np.testing.assert_array_equal(np.asarray(found).view(bits), np.asarray(x).view(bits))


@pytest.mark.usefixtures("without_flag")
def test_barrier_has_derivatives_of_every_kind():
    def f(x, pass_through):
        return jnp.sum(jnp.sin(pass_through({"x": x})["x"]) ** 3)

    x = jnp.linspace(0.1, 2.0, 3)
    for twice in (jax.hessian, lambda f: jax.jacrev(jax.jacrev(f)), lambda f: jax.jacfwd(jax.jacfwd(f))):
        found, wanted = (jax.jit(twice(lambda x, p=p: f(x, p)))(x) for p in (barrier, lambda tree: tree))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
