"""A run as one file: what it gives back is what the run's folder gives, and damage is seen."""

import json
import subprocess
import sys

import numpy as np
import pytest

import posx
from posx.errors import WorkdirError
from tests import tiny
from tests.cheap import in_one_program
from tests.lab.commands import refused


@pytest.fixture
def exported(whole, tmp_path, capsys):
    path = tmp_path / "models" / "t5.safetensors"
    code, out, err = tiny.call(capsys, "export", f"--workdir={whole}", f"--to={path}")
    assert code == 0 and f"at step {tiny.STEPS}" in out, err
    return path


def test_exported_file_computes_as_the_run_and_is_readable(whole, exported):
    from safetensors.numpy import load_file

    tokens = np.array([[1, 5, 9, 200, 3]])
    (apply, params, tokenizer), (again, same, words) = posx.load(whole), posx.load(exported)
    np.testing.assert_array_equal(in_one_program(apply, params, tokens), in_one_program(again, same, tokens))
    assert words.digest == tokenizer.digest and words.decode(words.encode("né")) == "né"
    arrays = load_file(exported)
    np.testing.assert_array_equal(arrays["embedding"], params["embedding"])


@pytest.mark.slow
def test_a_run_loads_with_64_bit_types_and_without_a_word(whole, exported):
    """As a program of its own, whose logging nobody has set up."""
    code = "import sys, posx, numpy as np\nfor path in sys.argv[1:]:\n    apply, params, _ = posx.load(path)\n"
    code += "    print(apply(params, np.array([[1, 5, 9]])).dtype)"
    words = [sys.executable, "-c", code, str(whole), str(exported)]
    done = subprocess.run(words, capture_output=True, text=True, env=tiny.environment(JAX_ENABLE_X64="1"))
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["float32", "float32"], "")


def test_evaluate_and_generate_take_an_exported_file(capsys, whole, exported):
    """They print what they print of the run itself, and leave nothing beside the file."""
    words = ["--lengths=16", "--protocol=nonoverlapping", "--json"]
    code, out, err = tiny.call(capsys, "evaluate", f"--workdir={exported}", *words)
    assert code == 0, err
    [row] = map(json.loads, out.splitlines())
    stored = [row for row in tiny.rows(whole / "eval.jsonl") if row["protocol"] == "nonoverlapping"]
    np.testing.assert_allclose(row["ppl"], next(one["ppl"] for one in stored if one["eval_len"] == 16), rtol=1e-6)
    assert row["step"] == tiny.STEPS and row["targets"] == stored[0]["targets"]
    words = ["--prompt=kara", "--num_tokens=3", "--temperature=0"]
    of_file, of_run = (tiny.call(capsys, "generate", f"--workdir={path}", *words) for path in (exported, whole))
    assert of_file[:2] == of_run[:2] and of_file[0] == 0
    assert list(exported.parent.iterdir()) == [exported]


@pytest.mark.parametrize("command", ["plot", "export", "train"])
def test_commands_that_need_a_folder_refuse_an_exported_file(capsys, site, exported, command):
    words = {"export": ["--to=other.safetensors"], "train": [f"--config={site / 'tiny.py'}"]}.get(command, [])
    code, _, err = tiny.call(capsys, command, f"--workdir={exported}", *words)
    assert code == 4 and f"{exported} is a file" in err and len(err.splitlines()) == 1


def test_an_existing_target_is_not_overwritten(capsys, whole, exported):
    held = exported.read_bytes()
    for target in (exported, exported.parent):  # a file, and a folder that holds it
        refused(capsys, 4, ["export", f"--workdir={whole}", f"--to={target}"], f"--to={target} exists")
    assert exported.read_bytes() == held


def test_a_flipped_bit_and_a_file_cut_short_are_seen(exported):
    """In an array, in the settings, in an array's type; the length of the header stays."""
    held = exported.read_bytes()
    settings = held.replace(b"num_buckets", b"num_buckete"), held.replace(b'"F32"', b'"I32"', 1)
    assert held not in settings
    for damaged in (held[:-100] + bytes([held[-100] ^ 1]) + held[-99:], held[:-7], b"", b"{}", *settings):
        exported.write_bytes(damaged)
        with pytest.raises(WorkdirError, match="t5.safetensors is damaged"):
            posx.load(exported)


def test_a_file_of_a_newer_posx_is_called_so(exported):
    exported.write_bytes(exported.read_bytes().replace(b'"posx 1"', b'"posx 2"'))
    with pytest.raises(WorkdirError, match="a newer posx has written it"):
        posx.load(exported)


def test_what_cannot_be_exported_is_one_line(capsys, whole, tmp_path):
    for words, told in (
        ([f"--workdir={whole}"], "--to is missing"),
        ([f"--workdir={whole}", "--to=model.bin"], "must end with .safetensors"),
        ([f"--workdir={tmp_path}", "--to=m.safetensors"], "holds no run"),
    ):
        code, _, err = tiny.call(capsys, "export", *words)
        assert code in (2, 4) and told in err and len(err.splitlines()) == 1


def test_an_array_that_settings_do_not_ask_for_is_refused(exported):
    """A table of every layer's own, where the settings share one."""
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    with safe_open(exported, "numpy") as file:
        header = file.metadata()
    arrays = load_file(exported) | {"layers.layer_00.attention.position.table": np.zeros(3, np.float32)}
    save_file(arrays, exported, header)
    with pytest.raises(WorkdirError, match=r"unknown: layers\.layer_00\.attention\.position\.table\. Export"):
        posx.load(exported)
