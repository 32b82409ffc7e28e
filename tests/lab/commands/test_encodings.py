"""`posx encodings`: the catalogue, the page of one encoding, and its picture."""

import re
from pathlib import Path

import pytest

import posx
from tests import tiny
from tests.lab.commands import refused
from tests.made_rows import words as words_of


def test_a_work_folder_of_another_config_names_the_fields(capsys, site, workdir):
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    line = refused(
        capsys, 4,
        ["train", f"--config={site / 'tiny.py'}:alibi", f"--workdir={workdir}", "--config.model.model_dim=64"],
        "another config", "encoding.name: 't5' -> 'alibi'", "model.model_dim: 32 -> 64",
    )  # fmt: skip
    assert "train.steps" not in line
    words = ["train", f"--config={site / 'tiny.py'}:alibi", f"--workdir={workdir}", "--config.model.model_dim=64"]
    assert refused(capsys, 4, [*words, "--dry_run"]) == line
    assert before == {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}


def test_the_catalogue_lists_every_encoding(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    code, out, _ = tiny.call(capsys, "encodings")
    assert code == 0
    header, *lines = out.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == list(posx.ENCODINGS) and len(lines) >= 10
    assert all(word in header for word in ("name", "acts on", "learned", "shift-invariant", "kernels", "paper"))
    of = {line.split()[0]: line for line in lines}
    assert "8 x 64" not in of["t5"] and " 4,096 " in of["learned"] and "position 63" in of["learned"]
    assert " 128 + 4,096 a layer " in of["transformer_xl"] and " any " in of["rope"] and " tiles " in of["shaw"]


@pytest.mark.slow
def test_one_encoding_of_the_catalogue_with_its_picture(capsys, tmp_path):
    words = ["rope(base=500)+alibi", "--num_heads=8", "--model_dim=96", f"--workdir={tmp_path}"]
    code, out, err = tiny.call(capsys, "encodings", *words)
    assert code == 0, err
    assert out.startswith("rope(base=500)+alibi\n")
    assert re.search(r"^0\.base +500 \(default: 10000\)$", out, re.M) and "num_heads=8" in out and "acts on" in out
    assert out.index("Su et al. 2021") < out.index("bias_h(r) = -slope_h * |r|"), "each part is said"
    drawn = [Path(line) for line in out.splitlines() if line.endswith((".png", ".svg"))]
    assert len(drawn) == 2 and all(path.read_bytes() for path in drawn)
    code, out, _ = tiny.call(capsys, "encodings", "alibi", "--dry_run")
    assert code == 0 and "bias_h(r) = -slope_h * |r|" in out and "Press, Smith and Lewis 2022" in out
    code, _, err = tiny.call(capsys, "encodings", "albi")
    assert code == 2 and "Did you mean 'alibi'" in err and "Traceback" not in err


def test_an_encoding_of_a_run_is_shown_as_trained(capsys, workdir, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "posx.lab.plots.look.save_figure", lambda made, figures, name: drawn.append((made, figures)) or []
    )
    code, out, err = tiny.call(capsys, "encodings", "t5", f"--workdir={workdir}")
    assert code == 0, err
    assert "model_dim=32, num_heads=2, head_dim=16, num_layers=1, train_len=16" in out
    ((figure, figures),) = drawn
    assert any(f"2 heads of 16, L = 16 · trained in {workdir.name}, step 32" in text for text in words_of(figure))
    assert figures == workdir / "figures"


def test_an_encoding_that_a_run_does_not_have_is_refused(capsys, workdir):
    line = refused(
        capsys, 2, ["encodings", "alibi", f"--workdir={workdir}"], "was trained with t5", "posx encodings t5"
    )
    assert f"--workdir {workdir}" in line
    refused(capsys, 2, ["encodings", "t5", f"--workdir={workdir}", "--num_heads=8"], "sizes of its own")
    refused(capsys, 2, ["encodings", "t5", f"--workdir={workdir.parent}"], "Name one of them", str(workdir.parent))


def test_a_picture_is_written_only_if_asked_for(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = tiny.call(capsys, "encodings", "alibi")
    assert code == 0 and out.startswith("alibi\n") and "add --workdir FOLDER" in out and not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    code, out, err = tiny.call(capsys, "encodings", "alibi", f"--workdir={tmp_path / 'file'}")
    assert code == 4 and out.startswith("alibi\n") and len(err.splitlines()) == 1 and "could not be written" in err


@pytest.mark.parametrize("columns", [70, 100, 160])
def test_the_catalogue_fits_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = tiny.call(capsys, "encodings")
    assert max(map(len, out.splitlines())) <= columns
    assert [name for name in re.findall(r"^(\w+)  ", out, flags=re.M) if name != "name"] == list(posx.ENCODINGS)
    assert "kernels: tiles; paper: arXiv 1803.02155;" in re.sub(r"\s+", " ", out)


def page(capsys, *words: str) -> dict[str, str]:
    """What the page of one encoding says beside each name, without its picture."""
    code, out, err = tiny.call(capsys, "encodings", *words, "--dry_run")
    assert code == 0, err
    return dict(re.findall(r"^(\S+) {2,}(\S.*)$", out, flags=re.M))


def test_fields_are_shown_with_the_units_that_their_types_state(capsys):
    t5 = page(capsys, "t5(max_distance=20)")
    assert t5["max_distance"] == "20 tokens (default: set from the sizes)"
    assert t5["num_buckets"].endswith(" buckets (set from the sizes)")
    assert t5["scaled"] == "True"
    assert page(capsys, "fox(shortest=3)")["shortest"] == "3 tokens (default: 2)"
    assert page(capsys, "tupe(untied=(0, 3))")["untied"] == "(0, 3) tokens (default: ())"
    assert page(capsys, "bam")["initial_scale"] == "0.0 nats a token^shape"


def test_arrays_are_shown_with_their_learning_rates(capsys):
    dape = page(capsys, "dape")
    assert dape["rate"] == "by array"
    assert dape["base.a"] == "[4] in each layer, 3 x the model's learning rate"
    assert dape["b_1"] == "[32] in each layer, 1 x the model's learning rate"
    assert page(capsys, "fox")["b"] == "[4] in each layer, 0.1 x the model's learning rate"


def test_fields_of_inner_encodings_are_shown_below_their_name(capsys):
    dape = page(capsys, "dape(base=rope(base=500))")
    assert dape["base"] == "rope(base=500) (default: kerple(per_layer=True))"
    assert dape["base.base"] == "500 (default: 10000)" and dape["width"] == "32 hidden units"
    assert dape["base.rotary_dim"] == "16 channels (set from the sizes)"
    nested = page(capsys, "xpos+dape(base=rope+alibi)")
    assert nested["0"] == "xpos" and nested["0.rope.base"] == "10000" and nested["1.base.1"] == "alibi"
    assert nested["1.base.1.num_heads"] == "4 heads (set from the sizes)"


def test_the_catalogue_says_which_encodings_do_not_fit(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    code, out, err = tiny.call(capsys, "encodings", "--model_dim=12", "--num_heads=4")
    assert code == 0, err
    of = {line.split()[0]: line for line in out.split("\n\n")[0].splitlines()[1:]}
    assert list(of) == list(posx.ENCODINGS) and " 120 " in of["t5"]
    assert of["rope"].endswith("  not at these sizes: rotary_dim=3 must be even and at least 2")
    assert of["alibi"].index("arXiv") == of["nope"].index("arXiv"), "a reason widens no column"


def test_sizes_that_no_model_could_have_are_refused(capsys):
    for words in (["encodings"], ["encodings", "rope"]):
        refused(capsys, 2, [*words, "--model_dim=10"], "--model_dim=10 is not divisible by num_heads=4. Nearest: 5")
    refused(capsys, 2, ["encodings", "--num_kv_heads=3"], "--num_kv_heads=3 does not divide num_heads=4")
    refused(capsys, 2, ["encodings", "--num_heads=0"], "--num_heads=0 must be at least 1")
    refused(capsys, 2, ["encodings", "--train_len=0"], "train_len=0")
