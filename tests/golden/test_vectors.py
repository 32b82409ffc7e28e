"""The test vectors: made without posx, passed by posx and by a second implementation, and failed by planted faults."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from golden import build, run
from golden.families import FAMILIES
from golden.family import draw
from posx.encodings.frequencies import RULES
from tests.golden import numpy_attention, posx_attention

PAGE = (Path(build.__file__).parent.parent / "docs/guides/golden.md").read_text(encoding="utf-8")
#: Families of the second implementation.
SECOND = [name for name, family in FAMILIES.items() if family.encoding.name in numpy_attention.NAMES]


@functools.cache
def cases(name, with_gradients=False):
    """Return the cases of a family as a reader of its file has them."""
    return run.cases(json.loads(json.dumps(build.build(name, with_gradients), default=build.as_list)))


def failures(attention, names, dtype="float32", with_gradients=False):
    rows = run.check({name: cases(name, with_gradients) for name in names}, attention, dtype)
    assert rows
    return {(family, case): worst for family, case, worst, passed, _ in rows if not passed}


def test_vectors_are_built_and_run_without_posx_or_jax(tmp_path):
    """The runner prints each case, names the fault of a failed one, and exits with 1."""
    (tmp_path / "mine.py").write_text("def attention(case):\n    return case['outputs'] + (case['name'] == 'packed')\n")
    code = (
        "import sys; from golden import build, run; build.write('vectors', ['t5', 'sinusoidal'])\n"
        "failed = run.main('vectors', 'mine:attention')\n"
        "assert not {'jax', 'posx', 'tests'} & set(sys.modules), sys.modules\n"
        "sys.exit(10 + failed)"
    )
    root = Path(build.__file__).parent.parent
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, text=True,
        encoding="utf-8",
    )  # fmt: skip
    assert ended.returncode == 11, ended.stderr
    (failed,) = (line for line in ended.stdout.splitlines() if line.startswith("FAILED"))
    assert "documents that leak" in failed and "1.0e+00" in failed
    assert "19 of 20 cases passed" in ended.stdout


def test_a_second_implementation_passes_all_cases():
    assert not failures(numpy_attention.attention, SECOND)


@pytest.mark.parametrize("fault", numpy_attention.FAULTS)
def test_a_planted_fault_fails_the_case_that_names_it(fault):
    family, case = numpy_attention.FAULTS[fault]
    failed = failures(functools.partial(numpy_attention.attention, fault=fault), [family])
    assert (family, case) in failed
    if case != "whole" and "phases" not in fault:  # a case that others share says less
        assert (family, "whole") not in failed


@pytest.mark.parametrize(
    ("block", "computed"),
    [
        pytest.param(0, 13, marks=pytest.mark.peers, id="torch"),
        pytest.param(1, 13, marks=pytest.mark.slow, id="jax"),
        pytest.param(2, 9, id="offset"),
    ],
)
def test_the_page_shows_what_its_code_gives(block, computed, tmp_path, monkeypatch, capsys):
    """The code for torch and JAX fails beyond 2^24, as the printed lines say, and the code in float64 does not."""
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[block]
    (tmp_path / f"page_{block}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    build.write(tmp_path / "vectors", ["rope"])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        failed = run.main(tmp_path / "vectors", f"page_{block}:families")
    printed, wanted = capsys.readouterr().out, re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)[1]
    assert failed == (computed == 13) and len(printed.splitlines()) == computed + 1
    if failed:
        assert re.sub(r"\d\.\de[+-]\d+", "", printed) == re.sub(r"\d\.\de[+-]\d+", "", wanted)


def test_every_encoding_and_rule_has_vectors_with_a_source():
    encodings = {family.encoding.name for family in FAMILIES.values()}
    rules = {family.encoding.frequencies.name for family in FAMILIES.values() if family.encoding.name == "rope"}
    assert encodings == set(posx.ENCODINGS) and rules == set(RULES)
    for name, family in FAMILIES.items():
        doc = posx.ENCODINGS[family.encoding.name].__doc__
        assert family.source and family.catches
        # The class of `learned_sinks` names another initial value alone, which no vector shows.
        assert family.differs or "Differs:" not in doc or name == "learned_sinks", name


def test_every_array_of_a_family_changes_its_outputs():
    for name, family in FAMILIES.items():
        arrays, case = draw(family, np.random.default_rng(0)), build.inputs(name, "whole")
        right = build.outputs(family, arrays, case)
        for array in arrays:
            wrong = build.outputs(family, arrays | {array: arrays[array] + arrays[array] ** 2}, case)
            assert np.abs(wrong - right).max() > build.TOLERANCE["float32"], (name, array)


def test_the_page_names_every_case_and_family():
    assert not [name for name in (*build.KINDS, *FAMILIES) if f"`{name}`" not in PAGE]


def test_nan_wrong_shapes_and_no_outputs_fail():
    case = cases("rope")[0]
    for wrong in (case["outputs"] * np.nan, case["outputs"][:, :1], {}, {"weights": case["weights"]}):
        assert run.error(case, wrong) == np.inf


def test_unknown_results_and_families_end_the_run():
    case = cases("rope")[2]
    assert "grad_q" not in case and run.error(case, {"outputs": case["outputs"], "grad_q": 0.0}) == 0
    with pytest.raises(SystemExit, match="'output' is unknown"):
        run.error(case, {"output": case["outputs"]})
    with pytest.raises(SystemExit, match="no family 'rope_yarm'"):
        run.check({"rope": [case]}, {"rope_yarm": lambda case: case["outputs"]})


def test_gradients_have_nine_digits():
    """Under softmax the gradient by the logits is known, and the logits of ALiBi are products."""
    case = cases("alibi_4", with_gradients=True)[0]
    q, k, v, g, w = (case[key] for key in ("q", "k", "v", "g", "weights"))
    assert_allclose(np.einsum("hqk,khd->qhd", w, v), case["outputs"], rtol=1e-12)
    by_weights = np.einsum("qhd,khd->hqk", g, v)
    by_logits = w * (by_weights - (w * by_weights).sum(axis=-1, keepdims=True)) / np.sqrt(q.shape[-1])
    assert_allclose(case["grad_q"], np.einsum("hqk,khd->qhd", by_logits, k), rtol=1e-9, atol=1e-10)
    assert_allclose(case["grad_k"], np.einsum("hqk,qhd->khd", by_logits, q), rtol=1e-9, atol=1e-10)


#: A rule with a factor, and learned buckets. The slow test has all.
QUICK = {"rope_yarn": ("whole", "padded_step", "offset_2_24"), "t5": ("packed", "far"), "sinusoidal": ("offset_2_24",),
         "mrope": ("step",)}  # fmt: skip


def test_posx_passes():
    families = {name: [case for case in cases(name) if case["name"] in kinds] for name, kinds in QUICK.items()}
    rows = run.check(families, posx_attention.attention)
    assert len(rows) == 7 and all(row[3] for row in rows), rows


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_posx_passes_all_cases(name):
    assert not failures(posx_attention.attention, [name], with_gradients=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rope_yarn", "t5", "fox"])
def test_posx_passes_in_bfloat16(name):
    assert not failures(functools.partial(posx_attention.attention, dtype=jnp.bfloat16), [name], "bfloat16")
