"""Whatever bytes stand in a file that posx reads: they are understood, or refused in one line. Hypothesis makes them.

Another search than CI's: `FUZZ_SEED=7 pytest tests/test_fuzz.py -m slow`.
"""

import contextlib
import json
import os
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from posx.errors import PosxError
from posx.lab.argv.files import earlier_run
from posx.lab.data import DataConfig, load_tokenizer, prepare, train_bpe
from posx.lab.files.rows import result_text
from posx.lab.plots.tables import table
from posx.lab.results.table import read_results
from posx.lab.runs.checks import check_run
from posx.lab.runs.folder import RunFolder

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("FUZZ_SEED", "0"))
CHECKS = (hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture)


def fuzz(number, *strategies):
    """Calls the function that it stands before with so many inputs."""

    def run(check):
        rules = hypothesis.settings(max_examples=number, deadline=None, suppress_health_check=CHECKS, database=None)
        hypothesis.seed(SEED)(rules(hypothesis.given(*strategies)(check)))()

    return run


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["nan", 10**400, -1]),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=8), inside, max_size=3),
    max_leaves=6,
)


@st.composite
def altered(draw, content: str) -> bytes:
    """JSON text with some of its values replaced or taken out, or with some of its bytes changed."""
    if draw(st.booleans()):
        raw = bytearray(content.encode())
        for _ in range(draw(st.integers(1, 4))):
            place, length = draw(st.integers(0, len(raw))), draw(st.integers(0, 6))
            raw[place : place + length] = draw(st.binary(max_size=6))
        return bytes(raw)
    tree = json.loads(content)
    for _ in range(draw(st.integers(1, 3))):
        node, key, parent = tree, None, None
        while isinstance(node, dict | list) and node and (parent is None or draw(st.integers(0, 3))):
            keys = sorted(node) if isinstance(node, dict) else range(len(node))
            parent, key = node, draw(st.sampled_from(keys))
            node = parent[key]
        if parent is not None and draw(st.integers(0, 3)):
            parent[key] = draw(values)
        elif parent is not None:
            del parent[key]
    return json.dumps(tree).encode()


def refused_in_a_line():
    return contextlib.suppress(PosxError)


def test_config_json(whole, tmp_path):
    content = (whole / "config.json").read_text()
    path = tmp_path / "config.json"

    @fuzz(1500, altered(content))
    def one(raw):
        path.write_bytes(raw)
        with refused_in_a_line():
            run = earlier_run(str(path))
            check_run(run)
            run.as_given()
        with refused_in_a_line():
            RunFolder(tmp_path).read_config()


def test_rows(whole, tmp_path):
    rows = (whole / "eval.jsonl").read_text().splitlines()[:6]
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    folder = RunFolder(tmp_path)

    @fuzz(200, st.integers(0, len(rows) - 1).flatmap(lambda n: st.tuples(st.just(n), altered(rows[n]))))
    def one(case):
        n, raw = case
        folder.eval_file.write_bytes("\n".join(rows[:n]).encode() + b"\n" + raw + b"\n" + rows[-1].encode())
        with refused_in_a_line():
            table(read_results(tmp_path))
        for row in folder.measured_rows():
            assert isinstance(result_text(row), str)


def test_metrics(whole, tmp_path):
    rows = (whole / "metrics.jsonl").read_text().splitlines()[:3]
    folder = RunFolder(tmp_path)

    @fuzz(500, altered(rows[0]))
    def one(raw):
        folder.metrics_file.write_bytes(raw + b"\n" + rows[1].encode())
        assert folder.logged_rows()[-1]["step"] == 2
        folder.usual_start()


def test_tokenizer_json(tmp_path):
    content = train_bpe(["some words and some more words, of which some come again"] * 9, 270).text
    path = tmp_path / "tokenizer.json"

    @fuzz(400, altered(content), st.text(max_size=12))
    def one(raw, text):
        path.write_bytes(raw)
        with refused_in_a_line():
            tokenizer = load_tokenizer(path)
            ids = tokenizer.encode(text)
            assert ids.size == 0 or int(ids.max()) < tokenizer.vocab_size
            (sizes,) = tokenizer.token_bytes([text])
            assert sizes is None or (len(sizes) == len(ids) and 0 <= sizes.sum() <= len(text.encode()))
            tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_text_files(tmp_path, name):
    lines = "\n".join(json.dumps({"text": f"{n} some words, and others"}) for n in range(6))
    content = {"a.txt": "words of a text\n" * 6, "a.jsonl": lines, "a.json": f"[{lines.replace(chr(10), ',')}]"}[name]
    source = tmp_path / "text"
    source.mkdir()

    @fuzz(60, st.binary(max_size=40) | (altered(content) if name == "a.json" else changed(content)))
    def one(raw):
        (source / name).write_bytes(raw)
        with refused_in_a_line():
            data = prepare(DataConfig(source=str(source), cache_dir=str(tmp_path / "cache")), log=lambda words: None)
            assert int(np.max(data.train.tokens)) < data.tokenizer.vocab_size


@st.composite
def changed(draw, content: str) -> bytes:
    """The text with some bytes changed, once or a few times."""
    raw = bytearray(content.encode())
    for _ in range(draw(st.integers(1, 3))):
        place, length = draw(st.integers(0, len(raw))), draw(st.integers(0, 9))
        raw[place : place + length] = draw(st.binary(max_size=9) | st.sampled_from([b"\xff", b"\0", b"[" * 3000, b'"']))
    return bytes(raw)


def test_a_run_folder_of_junk_is_no_run(tmp_path):
    path = Path(tmp_path / "config.json")

    @fuzz(100, st.binary(max_size=60))
    def one(raw):
        path.write_bytes(raw)
        with pytest.raises(PosxError):
            RunFolder(tmp_path).read_config()
