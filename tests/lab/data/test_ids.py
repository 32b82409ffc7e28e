"""Token ids in place of text: the same tokens and name as the text, every wrong id named by its place."""

import json

import numpy as np
import pytest
import tokenizers as hf

from posx.errors import ConfigError, DataError
from posx.lab.data import DataConfig, IdTokenizer, ids, load_tokenizer, overlap, prepare, train_bpe

WORDS = ["the cat", "sat on", "a mat", "and saw", "<|endoftext|>", "été 漢字"]
TEXTS = [" ".join(WORDS[(n * k) % 6] for k in range(2, 40)) + f" {n}" for n in range(40)]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(TEXTS, 300).save(path)
    return path


def prepared(tmp_path, source, **settings):
    return prepare(DataConfig(source=str(source), cache_dir=str(tmp_path / "cache"), **settings))


def rows_of(tokenizer):
    return [tokenizer.encode(text) for text in TEXTS]


def write_npy(folder, name, rows, eos):
    np.save(folder / f"{name}.npy", np.concatenate([[*row, eos] for row in rows]).astype(">u4"))


def write_bin(folder, name, rows, eos):
    np.concatenate([[eos, *row] for row in rows]).astype("<u2").tofile(folder / f"{name}.bin")


def write_llm_c(folder, name, rows, eos):
    tokens, header = np.concatenate([[*row, eos] for row in rows]), np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    (folder / f"{name}.bin").write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def write_jsonl(folder, name, rows, eos):
    lines = [json.dumps({"text": row.tolist()}) for row in rows]
    (folder / f"{name}.jsonl").write_text("\n".join([*lines, '{"text": []}']))


def write_parquet(folder, name, rows, eos):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": [row.tolist() for row in rows]}), folder / f"{name}.parquet", row_group_size=7)


def write_arrow(folder, name, rows, eos):
    import pyarrow as pa

    table = pa.table({"text": pa.array([row.tolist() for row in rows], pa.large_list(pa.uint16()))})
    with pa.ipc.new_stream(str(folder / f"{name}.arrow"), table.schema) as stream:
        stream.write_table(table, 9)


@pytest.fixture(scope="module")
def as_text(tmp_path_factory, bpe):
    folder = tmp_path_factory.mktemp("text") / "rows"
    folder.mkdir()
    for name, part in (("train", TEXTS[:30]), ("validation", TEXTS[30:])):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in part))
    return prepared(folder.parent, folder, tokenizer=str(bpe))


@pytest.mark.parametrize("write", [write_npy, write_bin, write_llm_c, write_jsonl, write_parquet, write_arrow])
def test_ids_have_the_tokens_and_the_name_of_their_text(tmp_path, bpe, as_text, write):
    """As nanoGPT, llm.c and `datasets` write them: the end of a text before or after it, or a row a text."""
    tokenizer, folder = load_tokenizer(bpe), tmp_path / "ids"
    folder.mkdir()
    for name, rows in (("train", rows_of(tokenizer)[:30]), ("val", rows_of(tokenizer)[30:])):
        write(folder, name, rows, tokenizer.eos)
    (folder / "prepare.py").write_text("# how the ids were made")
    found = prepared(tmp_path, folder, tokenizer=str(bpe), dtype="uint16")
    assert (found.digest, found.held_out_digest) == (as_text.digest, as_text.held_out_digest)
    np.testing.assert_array_equal(found.validation.token_bytes, as_text.validation.token_bytes)
    assert (
        found.validation.num_bytes == sum(len(text.encode()) for text in TEXTS[30:]) and found.train.num_bytes is None
    )
    assert "only 837 token ids in 10 documents are held out" in found.warnings[0]


def test_ids_without_a_tokenizer_get_an_end_of_their_own(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(4000, dtype=np.int64).reshape(40, 100) % 500)
    found = prepared(tmp_path, tmp_path / "a.npy", tokenizer="ids", vocab_size=500)
    tokens, ends = found.train.tokens, found.train.offsets[1:] - 1
    assert (found.tokenizer, found.tokenizer.eos, found.tokenizer.vocab_size) == (IdTokenizer(500), 500, 501)
    assert found.train.num_documents + found.validation.num_documents == 40
    assert (np.flatnonzero(tokens == 500) == ends).all() and tokens.dtype == np.uint16
    assert found.validation.token_bytes is None and found.validation.num_bytes is None
    assert "the text of token ids is not known without their tokenizer" in found.warnings[-1]
    assert "501 ids" in found.summary() and "byte" not in found.summary()


def test_numbers_are_the_text_of_ids(tmp_path):
    tokenizer = IdTokenizer(500)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json") == tokenizer
    assert tokenizer.decode([17, 4, 500, 256]) == "17 4 256"
    assert tokenizer.encode("17 4\n256").tolist() == [17, 4, 256]
    for text in ("Once upon", "500", "-1", "²", "1.5"):
        with pytest.raises(DataError, match="is no id below 500.*such as '17 4 256'"):
            tokenizer.encode(text)


def test_other_ids_have_no_bits_per_byte(tmp_path, bpe):
    """Ids that no text gives: of another tokenizer, or with special tokens inside."""
    np.save(tmp_path / "a.npy", np.full((40, 50), 116, np.uint8))
    found = prepared(tmp_path, tmp_path / "a.npy", tokenizer=str(bpe))
    assert found.validation.token_bytes is None and "are not those of their decoded text" in found.warnings[-1]


def test_long_ids_are_cut_and_written_in_pieces(tmp_path, monkeypatch):
    """No more than a piece of a mapped file is in memory at a time, and its borders change nothing."""
    stream = np.random.default_rng(0).integers(0, 90, 5000).astype(np.uint16)
    np.save(tmp_path / "a.npy", stream)
    whole = prepared(tmp_path, tmp_path / "a.npy", tokenizer="ids", vocab_size=90)
    monkeypatch.setattr(ids, "PIECE", 64)
    monkeypatch.setattr(ids, "MAPPED", 0)
    mapped = prepared(tmp_path / "new", tmp_path / "a.npy", tokenizer="ids", vocab_size=90)
    assert mapped.digest == whole.digest and len(mapped.train.tokens) == 4751
    np.testing.assert_array_equal(mapped.train.tokens[:-1], stream[:4750])
    found = ids.read_npy(tmp_path / "a.npy")
    assert isinstance(found.values, np.memmap) and np.shares_memory(found.documents(IdTokenizer(90))[0], found.values)


def test_ids_that_stand_in_both_texts_are_counted():
    rng = np.random.default_rng(1)
    parts = [rng.integers(0, 50000, 4000) for _ in range(3)]
    assert overlap.overlap([parts[0], parts[1]], [parts[1].astype(np.uint16)]) == 1
    assert overlap.overlap([parts[0]], [parts[2]]) == 0
    half = overlap.overlap([parts[0]], [np.concatenate([parts[0], parts[2]])])
    assert abs(half - 0.5) < 0.1


IDS = {"tokenizer": "ids", "vocab_size": 500}
SOME = np.arange(100)


def row(**columns):
    return json.dumps(columns).encode()


BAD = {
    "no tokenizer": ("a.npy", SOME, {}, "token ids, but data.tokenizer=bytes.*tokenizer=ids --config.data.vocab_size="),
    "a BPE": ("a.bin", SOME, {"tokenizer": "bpe"}, "format of token ids, but data.tokenizer=bpe reads text"),
    "a folder": ("d/a.npy", SOME, {}, "holds token ids, 'a.npy', but data.tokenizer=bytes"),
    "a column": ("a.jsonl", row(text=[1, 2]), {}, "line 1, position 0: token ids, but data.tokenizer=bytes"),
    "text": ("a.jsonl", row(text="words"), IDS, "the text 'words' cannot be read, because the tokenizer is of ids"),
    "too large": ("a.npy", SOME + 401, IDS, "position 99: the id 500 is not below data.vocab_size=500. Raise"),
    "negative": ("a.npy", SOME - 3, IDS, "position 0: the id -3 is negative. Labels and padding are no tokens"),
    "in a row": ("a.npy", SOME.reshape(4, 25) * 9, IDS, "row 2, position 6: the id 504 is not below"),
    "in a column": ("a.jsonl", row(text=[1]) + b"\n\n" + row(text=[1, 777]), IDS, "line 3, position 1: the id 777"),
    "floats": ("a.npy", SOME * 1.0, IDS, "holds float64, but token ids are whole numbers"),
    "booleans": ("a.npy", SOME > 3, IDS, "holds bool, but token ids are whole numbers"),
    "no array": ("a.npy", b"cos\nsystem\n.", IDS, "does not have NumPy's format"),
    "empty": ("a.npy", SOME[:0], IDS, "holds no token ids"),
    "three axes": ("a.npy", SOME.reshape(2, 5, 10), IDS, r"shape \(2, 5, 10\). Token ids are \[tokens\], or"),
    "archive": ("a.npz", b"PK", IDS, "holds several arrays. Write the token ids as one"),
    "no type": ("a.bin", b"\1\2", IDS, "numbers without a type. Name it, for example --config.data.dtype=uint16"),
    "no type, folder": ("d/a.bin", b"\1\2", {"tokenizer": "BPE"}, "'a.bin', numbers without a type"),
    "odd size": ("a.bin", b"\1\2\3", IDS | {"dtype": "uint16"}, "3 bytes, no multiple of the 2 of data.dtype=uint16"),
    "narrow type": ("a.bin", (SOME + 4).astype("<u4"), IDS | {"dtype": "uint16"}, "second number.*data.dtype=uint32"),
    "cut header": ("a.bin", np.array([20240520, 1, 9] + [0] * 254, "<i4"), IDS, "header of 9 ids, but 4 bytes after"),
    "floats in a column": ("a.jsonl", row(text=[1, 0.5]), IDS, "line 1, column 'text': a list with float instead of"),
    "booleans in a column": ("a.jsonl", row(text=[1, True]), IDS, "a list with bool instead of token ids"),
    "huge": ("a.jsonl", row(text=[2**70]), IDS, "an id has more than 64 bits"),
    "mixed": ("a.jsonl", row(text=[1]) + b"\n" + row(text="x"), IDS, "line 2, column 'text': text, but token ids"),
    "null": ("a.parquet", [[1], None], IDS, "row 1, column 'text': NoneType instead of"),
    "null in a list": ("a.parquet", [[1], [2, None]], IDS, "row 1, position 1, column 'text': NoneType instead of"),
    "layout": ("a.npy", SOME, IDS | {"layout": "line"}, "data.layout=line cuts text, but a row of token ids is one"),
    "a name": ("a.jsonl", row(input_ids=[1]), IDS | {"text_column": "input_id"}, "Did you mean 'input_ids'?"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_unusable_ids_are_one_line_naming_their_place(tmp_path, bpe, case):
    name, content, settings, message = BAD[case]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, list):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": content}), path)
    elif isinstance(content, np.ndarray) and path.suffix == ".npy":
        np.save(path, content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.tobytes())
    if settings.get("tokenizer") == "BPE":
        settings = {"tokenizer": str(bpe)}
    with pytest.raises(DataError, match=message) as caught:
        prepared(tmp_path, path.parent if "/" in name else path, **settings)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_settings_of_ids_are_checked(tmp_path):
    for settings, message in (
        ({"tokenizer": "ids"}, "data.tokenizer=ids needs the number of ids"),
        (IDS | {"dtype": "float32"}, "data.dtype=float32: .bin files hold whole numbers"),
        (IDS | {"dtype": "words"}, "data.dtype=words"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepared(tmp_path, tmp_path / "a.npy", **settings)


def test_text_beside_ids_is_refused(tmp_path, bpe):
    folder = tmp_path / "d"
    folder.mkdir()
    np.save(folder / "a.npy", SOME)
    (folder / "notes.md").write_text("how the ids were made")
    with pytest.raises(DataError, match=r"holds text \('notes.md'\) and token ids \('a.npy'\)"):
        prepared(tmp_path, folder, tokenizer=str(bpe))
    lines: list[str] = []
    found = prepare(DataConfig(source=str(folder), cache_dir=str(tmp_path / "cache"), **IDS), lines.append)
    assert found.train.num_documents == 1 and any("left out as not of" in line and "notes.md" in line for line in lines)


def test_a_tokenizer_without_an_end_cannot_cut_ids(tmp_path):
    """Its end of a text is an id of posx, which no file holds."""
    made = hf.Tokenizer(hf.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.save(str(tmp_path / "t.json"))
    np.save(tmp_path / "a.npy", np.array([0, 1] * 50 + [2]))
    with pytest.raises(DataError, match="position 100: the id 2 is not below the 2 ids of the tokenizer"):
        prepared(tmp_path, tmp_path / "a.npy", tokenizer=str(tmp_path / "t.json"))
