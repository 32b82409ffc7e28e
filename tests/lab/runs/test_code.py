"""A run belongs to the code of the user's own encodings: edited, it is refused where the run would be mixed."""

import json
import shutil
import sys

import jax
import pytest

import posx.lab.cli
from posx.lab.results.table import read_results
from tests import tiny

MINE = """
import dataclasses
import jax.numpy as jnp
from posx import Encoding

@dataclasses.dataclass(frozen=True)
class SqrtBias(Encoding):
    def bias(self, params, q_pos, k_pos):
        distance = jnp.abs(q_pos[:, None] - k_pos[None, :]).astype(jnp.float32)
        return -jnp.sqrt(distance)[None]
"""
STEPS = ("--config.train.steps=4", "--config.eval.protocols=nonoverlapping")


class Place:
    """A folder with mine.py, its run in `run`, and commands in it."""

    def __init__(self, folder, config, capsys):
        self.folder, self.config, self.capsys = folder, config, capsys

    def write(self, function: str) -> None:
        (self.folder / "mine.py").write_text(MINE.replace("jnp.sqrt", f"jnp.{function}"))
        sys.modules.pop("mine", None)  # as in a new process

    def train(self, workdir="run", *words):
        config = f"--config={self.config}:mine:SqrtBias"
        return tiny.call(self.capsys, "train", config, f"--workdir={self.folder / workdir}", *(words or STEPS))

    def call(self, command, *words, workdir="run"):
        return tiny.call(self.capsys, command, f"--workdir={self.folder / workdir}", *words)


@pytest.fixture(scope="module")
def trained(site, tmp_path_factory):
    """A folder with mine.py and its run."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "mine.py").write_text(MINE)
    words = ("train", f"--config={site / 'tiny.py'}:mine:SqrtBias", f"--workdir={folder / 'run'}", *STEPS)
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):  # Optax mixes types
        patch.syspath_prepend(folder)
        assert posx.lab.cli.main(list(words)) == 0
    sys.modules.pop("mine", None)
    return folder


@pytest.fixture
def place(site, trained, tmp_path, monkeypatch, capsys):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = Place(tmp_path, site / "tiny.py", capsys)
    found.write("sqrt")
    yield found
    sys.modules.pop("mine", None)


def used(folder):
    """The rows that figures use."""
    table = read_results(folder)
    return table[table.left_out == ""]


def ratio(folder) -> float:
    """R_2 of the figures and tables of a folder."""
    ppl = used(folder).set_index("eval_len").ppl
    return ppl[32] / ppl[16]


@pytest.mark.slow
def test_edited_code_of_an_encoding_is_measured_apart(place):
    before = ratio(place.folder / "run")
    stored = tiny.rows(place.folder / "run" / "eval.jsonl")
    place.write("cbrt")
    code, _, err = place.call("evaluate", "--lengths=16,32,64")
    assert code == 0 and err.count("notice") == 1, err
    assert "the code of mine:SqrtBias (digest" in err and "kept apart" in err
    rows = tiny.rows(place.folder / "run" / "eval.jsonl")
    assert rows[:2] == stored and len(rows) == 5
    own, other = rows[0]["code"]["mine:SqrtBias"], rows[-1]["code"]["mine:SqrtBias"]
    assert own != other and [row["code"]["mine:SqrtBias"] for row in rows] == [own] * 2 + [other] * 3
    assert rows[0]["nll"] != rows[2]["nll"]
    assert ratio(place.folder / "run") == before
    table = read_results(place.folder / "run")
    assert sum(table.left_out == "measured with other code of the encoding (not comparable)") == 3
    place.write("sqrt")
    code, _, err = place.call("evaluate", "--lengths=16,64")
    assert code == 0 and "notice" not in err
    assert len(tiny.rows(place.folder / "run" / "eval.jsonl")) == 6 and ratio(place.folder / "run") == before


def test_edited_code_of_an_encoding_is_refused_on_resuming(place):
    place.write("cbrt")
    before = sorted((path, path.stat().st_mtime) for path in (place.folder / "run").rglob("*") if path.is_file())
    code, _, err = place.train("run", "--config.train.steps=6", STEPS[1])
    assert code == 4 and "train.steps: 4 -> 6" in err and "code.mine:SqrtBias: '" in err
    code, _, err = place.train()
    assert code == 4 and len(err.splitlines()) == 1, err
    assert "the code of mine:SqrtBias (digest" in err and "Restore the code to resume, or use another --workdir" in err
    assert before == sorted((p, p.stat().st_mtime) for p in (place.folder / "run").rglob("*") if p.is_file())
    place.write("sqrt")
    assert place.train()[0] == 0


def test_code_of_a_run_is_in_its_settings(place):
    code = json.loads((place.folder / "run" / "config.json").read_text())["code"]
    assert set(code) == {"mine:SqrtBias"} and len(code["mine:SqrtBias"]) == 12
    repeat = ("train", f"--config_json={place.folder / 'run' / 'config.json'}", f"--workdir={place.folder / 'again'}")
    place.write("cbrt")
    code, _, err = tiny.call(place.capsys, *repeat)
    assert code == 2 and "the code of mine:SqrtBias" in err and "Restore the code" in err
    assert not (place.folder / "again").exists()
    code, _, err = place.call("generate", "--prompt=a", "--num_tokens=1")
    assert code == 0 and "the code of mine:SqrtBias" in err


@pytest.mark.slow
def test_figure_names_code_if_runs_differ_in_nothing_else(place):
    place.write("cbrt")
    assert place.train("other")[0] == 0
    code, _, err = place.call("plot", workdir=".")
    assert code == 0, err
    table = (place.folder / "table.md").read_text()
    for run in ("run", "other"):
        (digest,) = json.loads((place.folder / run / "config.json").read_text())["code"].values()
        assert f"| mine:SqrtBias, code={digest} | 1 |" in table


@pytest.mark.slow
def test_a_sweep_puts_a_run_of_edited_code_beside_the_old(site, trained, tmp_path):
    """The workers are processes of their own, which read the settings that the sweep has left them."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "run").rename(tmp_path / "sweep" / "mine.SqrtBias-L16-s0")
    words = ("sweep", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path / 'sweep'}", *STEPS)
    words += ("--config.sweep.encodings=mine:SqrtBias",)
    (tmp_path / "mine.py").write_text(MINE.replace("jnp.sqrt", "jnp.cbrt"))
    code, out, err = tiny.run(*words, PYTHONPATH=str(tmp_path))
    assert code == 0, err
    runs = sorted(path.parent.name for path in (tmp_path / "sweep").glob("*/DONE"))
    assert len(runs) == 2 and "1 folder name is taken" in err and "code.mine:SqrtBias: '" in err
    codes = {json.loads((tmp_path / "sweep" / run / "config.json").read_text())["code"].popitem() for run in runs}
    assert len(codes) == 2
    assert all(f"| mine:SqrtBias, code={code} | 1 |" in out for _, code in codes)


LEAKS = """
    def embed(self, params, x, pos):
        return x + jnp.roll(x, -1, axis=0)
"""


@pytest.mark.parametrize(
    ("share", "words"), [(1, ()), (0.1, ()), (1, ("--config.data.source=task:parity", "--config.train.steps=4"))]
)
def test_a_model_that_reads_the_next_token_has_no_numbers(place, share, words):
    """A tenth of it changes less than bfloat16 rounds, but this model is float32."""
    (place.folder / "mine.py").write_text(MINE + LEAKS.replace("jnp.roll", f"{share} * jnp.roll"))
    sys.modules.pop("mine", None)
    code, _, err = place.train("leaks", *words)
    assert code == 2 and "mine:SqrtBias, and it sees later tokens" in err, err
    assert not (place.folder / "leaks" / "eval.jsonl").exists()
