"""The compiler's fault stays out of posx's numbers: fresh processes, compiled as users' are, however they start."""

import os
import subprocess
import sys

import jaxlib
import pytest

from posx.machine.compiler import FAULTY, FLAG
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


@pytest.mark.parametrize("start", STARTS)
def test_sums_after_attention_are_right(start):
    lines = run(start, "t5")
    assert [line for line in lines if line.startswith("wrong")] == []
    assert lines[-1] == "t5: 2 cases"


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_sums_after_attention_are_right_for_all_encodings(start):
    lines = run(start)
    assert [line for line in lines if line.startswith("wrong")] == []
    assert sum(int(line.split()[1]) for line in lines) > 150
