"""Files become documents as declared, and every unusable input is one clear line."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from posx.errors import ConfigError, DataError
from posx.lab.data import DataConfig, corpus, prepare
from posx.lab.data.chat import Chat
from posx.lab.data.corpus import documents, split_by_hash


def load(tmp_path, source, **settings):
    config = DataConfig(source=str(source), **settings)
    notes: list[str] = []
    train, validation = corpus.load_documents(corpus.find_source(config), config, notes.append)
    return SimpleNamespace(train=train, validation=validation, notes=notes)


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet(path: Path, **columns) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


ROWS = [f"row {number}\nof text" for number in range(8)]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_tables(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        parquet(path, id=list(range(8)), text=ROWS)
    elif suffix == ".json":
        write(path, json.dumps([{"id": "x", "text": row} for row in ROWS]))
    else:
        write(path, "\ufeff" + "\n\n".join(json.dumps({"text": row, "n": 1}) for row in ROWS))
    found = load(tmp_path, path)
    assert sorted(found.train + found.validation) == ROWS


def test_a_categorical_column_is_text(tmp_path):
    import pyarrow as pa

    path = parquet(tmp_path / "rows.parquet", text=pa.array([*ROWS, ROWS[0]]).dictionary_encode())
    found = load(tmp_path, path)
    assert sorted(found.train + found.validation) == sorted([*ROWS, ROWS[0]])


def test_folder_of_mixed_files_with_awkward_names(tmp_path):
    folder = tmp_path / "we[i]rd *folder ü"
    names = ["__init__.py", "it's 100% [a]*.txt", "no suffix", "deep/er/x.md", "train of thought/b.txt"]
    for name in names:
        write(folder / name, name)
    write(folder / "x.jsonl", '{"text": "json", "other": 1}')
    write(folder / "y.jsonl", '{"text": "other json", "other": {"a": 2}}')
    for hidden in (".git/x.txt", "__pycache__/x.py", "picture.png"):
        write(folder / hidden, "not corpus")
    write(folder / "empty.txt", "")
    (folder / "train of thought").rename(folder / "thoughts")
    found = load(tmp_path, folder)
    assert sorted(found.train + found.validation) == sorted([*names, "json", "other json"])
    assert found.validation


def test_files_named_by_split(tmp_path):
    for name in ("train-0.txt", "train-1.txt", "validation.txt", "test.txt", "README.md"):
        write(tmp_path / "texts" / name, name)
    found = load(tmp_path, tmp_path / "texts")
    assert found.train == ["train-0.txt", "train-1.txt"] and found.validation == ["validation.txt"]
    assert any("1 file left out" in note and "left out as of an unused split: test.txt" in note for note in found.notes)


def test_notes_on_rows_are_no_text(tmp_path):
    for name in ("README.md", "LICENSE", "more.txt"):
        write(tmp_path / "texts" / name, name)
    found = load(tmp_path, tmp_path / "texts")
    assert sorted(found.train + found.validation) == ["LICENSE", "README.md", "more.txt"]
    write(tmp_path / "texts" / "rows.jsonl", '{"text": "row"}')
    found = load(tmp_path, tmp_path / "texts")
    assert sorted(found.train + found.validation) == ["more.txt", "row"]
    assert found.notes[0].endswith("': left out as notes on data: LICENSE, README.md"), found.notes


def test_a_validation_file_without_training_file_is_told(tmp_path):
    """It is split by hash like all files, and may be trained on. "training" is no name of a split."""
    for name in ("training.txt", "validation.txt"):
        write(tmp_path / "texts" / name, name)
    found = load(tmp_path, tmp_path / "texts")
    assert sorted(found.train + found.validation) == ["training.txt", "validation.txt"]
    assert found.notes[0].endswith("': not held out, as no file is named train: validation.txt"), found.notes


def test_split_folders_and_names_that_only_look_like_splits(tmp_path):
    write(tmp_path / "a/train/x.txt", "train")
    write(tmp_path / "a/dev/y.txt", "dev")
    write(tmp_path / "a/train/val.txt", "of the folder")
    found = load(tmp_path, tmp_path / "a")
    assert found.train == ["of the folder", "train"] and found.validation == ["dev"]
    names = (
        "devotion.txt",
        "testament.txt",
        "trains.txt",
        "train to Rome.txt",
        "train-spotting.txt",
        "test of time.txt",
    )
    for name in names:
        write(tmp_path / "b" / name, name)
    found = load(tmp_path, tmp_path / "b")
    assert sorted(found.train + found.validation) == sorted(names)


def test_linked_folders_are_read_once(tmp_path):
    for place in ("root/.store/a.txt", "far/b.txt", "root/c.txt"):
        write(tmp_path / place, place)
    links = {"hidden": ".store", "far": "../far", "far/back": "../root", "same": "far", "up": ".."}
    for name, target in links.items():
        (tmp_path / "root" / name).symlink_to(target)
    found = corpus.find_source(DataConfig(source=str(tmp_path / "root")))
    assert found.train.names() == ["c.txt", "far/b.txt", "hidden/a.txt"]


def test_held_out_path_wins(tmp_path):
    write(tmp_path / "a/train.txt", "same")
    write(tmp_path / "a/validation.txt", "other")
    held = write(tmp_path / "held.txt", "same")
    found = load(tmp_path, tmp_path / "a", validation=str(held))
    assert found.validation == ["same"]


def test_normalisation_changes_newlines_and_byte_order_mark(tmp_path):
    text = "\ufeffa\r\nb\rc\u2028d\u00a0e\u0301 \ufeff\x0b\x0c\t\n"
    path = write(tmp_path / "a" / "train.txt", text)
    table = parquet(tmp_path / "a" / "validation.parquet", text=[text])
    wanted = "a\nb\nc\u2028d\u00a0e\u0301 \ufeff\x0b\x0c\t\n"
    found = load(tmp_path, path, validation=str(table))
    assert found.train == found.validation == [wanted]


def test_other_encodings(tmp_path):
    path = write(tmp_path / "a.txt", "café au lait, déjà vu".encode("latin-1"))
    found = load(tmp_path, path, text_encoding="latin-1", validation_fraction=0.5)
    assert found.train[0] + found.validation[0] == "café au lait, déjà vu"


def test_layouts():
    row = "one\ntwo\n\n\nthree\n \nfour\n"
    assert documents([row], "document") == [row]
    assert documents([row], "line") == ["one", "two", "three", "four"]
    assert documents([row], "paragraph") == ["one\ntwo", "three", "four\n"]


WIKITEXT = """
 = First <unk> = \n
 Text of it . \n
 = = Part = = \n
 A formula : \n = 1 + x = \n 2 . \n
 = x = \n and no title above . \n

 = B = \n
 Text .
"""


@pytest.mark.parametrize("rows", [[WIKITEXT], WIKITEXT.split("\n"), [line + "\n" for line in WIKITEXT.split("\n")]])
def test_wikitext_lines_become_articles(rows):
    articles = documents(rows, "wikitext")
    assert [article.split("\n")[0] for article in articles] == [" = First <unk> = ", " = B = "]
    assert " = = Part = = \n" in articles[0] and " = x = \n and no" in articles[0]
    assert "".join(articles).replace("\n", "") == WIKITEXT.replace("\n", "")


def test_wikitext_keeps_text_before_the_first_title():
    assert documents(["lead\n\n = T = \n\nbody"], "wikitext") == ["lead\n", " = T = \n\nbody\n"]


def test_split_by_hash_is_disjoint_and_depends_on_the_text_alone():
    texts = [f"text {number % 300}" for number in range(400)]
    train, validation, _ = split_by_hash(texts, 0.2)
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(texts)
    assert 30 < len(set(validation)) < 90
    again = split_by_hash([*reversed(texts), "one more"], 0.2)
    assert set(validation) <= set(again[1]) <= {*validation, "one more"}


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_no_side_is_left_empty(fraction):
    train, validation, _ = split_by_hash(["a", "b", "b"], fraction)
    assert train and validation and not set(train) & set(validation)


def test_one_document_gives_its_end():
    text = "".join(map(str, range(1000)))
    train, validation, note = split_by_hash([text], 0.1)
    assert train[0] + validation[0] == text and len(validation[0]) == round(len(text) * 0.1)
    assert "one document, so" in note
    assert split_by_hash([text] * 3, 0.1)[2] == f"all 3 documents are equal and the copies are left out: {note}"
    with pytest.raises(DataError, match="too short"):
        split_by_hash(["x"], 0.1)
    with pytest.raises(DataError, match="split at character 2,601 of 2,890, but the validation text is then blank"):
        split_by_hash([text[:2500] + "\n" * 390], 0.1)
    with pytest.raises(DataError, match="Give several chats that differ"):
        split_by_hash([Chat(["", "<|im_start|>", "user"])], 0.1)


def test_stdlib_is_the_fixed_list_without_tests():
    source = corpus.find_source(DataConfig())
    names = source.train.names()
    assert names == sorted(names) and "argparse.py" in names and "asyncio/events.py" in names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert 4e6 < sum(path.stat().st_size for path in source.train.paths) < 12e6
    assert source.train.description.startswith("stdlib (Python 3.")


def bad(name, content, message, **settings):
    return pytest.param(name, content, message, settings, id=f"{name or 'folder'}: {message[:30]}")


BAD = [
    bad("a.txt", b"", r"a.txt' is empty \(0 bytes\)"),
    bad("a.txt", b" \n\t\n", "1 document, all of them blank"),
    bad("a.txt", b"text \0 here", r"binary file \(NUL at byte 5\)"),
    bad("a.txt", b"\xff\0\0", r"binary file \(NUL at byte 1\)"),
    bad("a.txt", "caf\xe9 x".encode("latin-1"), "not utf-8: byte 0xE9 at offset 3.*data.text_encoding"),
    bad("a.npy", b"\x93NUMPY", "format of token ids, but data.tokenizer=bytes reads text"),
    bad("a.npy", b"cos\nsystem\n.", "does not have NumPy's format", tokenizer="ids", vocab_size=9),
    bad("a.gz", b"\x1f\x8b", "is compressed. Unpack it: gunzip --keep"),
    bad("Bob's.gz", b"\x1f\x8b", """gunzip --keep '.*/Bob'"'"'s.gz'$"""),
    bad("a.png", b"\x89PNG", "format that posx does not read. It reads .txt"),
    bad("a.jsonl", b'{"text": "x"}\n{"text": }\n', "line 2 is not JSON"),
    bad("a.jsonl", b'{"text": "x"}\n\n{"body": "x", "id": 1}\n', "line 3 has no column 'text' .*'body', 'id'"),
    bad("a.jsonl", b'{"text": "x"}\n{"text": null}\n', "line 2, column 'text': NoneType instead of text"),
    bad("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', "line 2, column 'text': int instead of text"),
    bad("a.jsonl", b'{"text": "x\\ud800"}\n', "line 1, column 'text': a lone surrogate"),
    bad("a.jsonl", b'{"text": "\xff"}\n', "not utf-8: byte 0xFF at offset 10"),
    bad("a.json", b"[1, 2]", "record 0 is a JSON int"),
    bad("a.json", b'[{"text": "x"}', "is not JSON"),
    bad("a.parquet", b"PAR1 not really", "cannot be read as parquet"),
    bad("a.parquet", {"body": ["x"], "id": [1]}, "no column 'text' .*'body', 'id'.*data.text_column"),
    bad("a.parquet", {"text": [1, 2]}, "int64 instead of strings"),
    bad("a.parquet", {"text": ["x", None]}, "row 1, column 'text': NoneType instead of text"),
    bad("d/only.png", b"x", "folder without files that posx reads"),
    bad("d/a.txt", b"", "all files are empty"),
]


@pytest.mark.parametrize(("name", "content", "message", "settings"), BAD)
def test_bad_input_is_one_line_naming_the_path(tmp_path, name, content, message, settings):
    path = tmp_path / name
    parquet(path, **content) if isinstance(content, dict) else write(path, content)
    source = path.parent if "/" in name else path
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, source, **settings)
    assert str(source) in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_parquet_page_names_file_and_cause(tmp_path):
    path = parquet(tmp_path / "a.parquet", text=[f"{number} text" for number in range(5000)])
    content = bytearray(path.read_bytes())
    content[4:2000] = b"\xff" * 1996
    path.write_bytes(content)
    with pytest.raises(DataError, match="a.parquet' cannot be read as parquet: .") as caught:
        load(tmp_path, path)
    assert "An error occurred" not in str(caught.value)


def test_a_flipped_bit_is_found_where_pages_have_checksums(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path, rows = tmp_path / "a.parquet", [f"{number} text" for number in range(5000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path, write_page_checksum=True, compression="none")
    content = bytearray(path.read_bytes())
    content[content.index(b"4000 text")] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="a.parquet' cannot be read as parquet: .*CRC"):
        load(tmp_path, path)


def test_files_of_a_folder_that_are_left_out_are_named(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("some words of a text\n" * 9)
    for name in ("none.txt", "packed.txt.gz", "picture.png", ".hidden.gz"):
        (folder / name).write_bytes(b"" if name == "none.txt" else b"x")
    (folder / "lost.txt").symlink_to(tmp_path / "moved.txt")
    notes = " ".join(load(tmp_path, folder).notes)
    assert "left out as broken links: lost.txt; left out as empty: none.txt;" in notes
    assert "packed.txt.gz, picture.png" in notes and "hidden" not in notes
    for name in ("a.txt", "b.txt"):
        (folder / name).unlink()
    with pytest.raises(DataError, match="'lost.txt' is a broken link"):
        load(tmp_path, folder)


def test_missing_path_names_the_nearest_folder(tmp_path):
    for source in (tmp_path / "no/such/file.txt", tmp_path / "nothing"):
        with pytest.raises(DataError, match=f"does not exist. The nearest existing folder is '{tmp_path}'"):
            load(tmp_path, source)
    with pytest.raises(DataError, match="data.validation '.*' does not exist"):
        load(tmp_path, "stdlib", validation=str(tmp_path / "held"))


def test_a_name_with_a_text_suffix_is_a_path():
    with pytest.raises(DataError, match="does not exist"):
        corpus.find_source(DataConfig(source="missing.txt"))
    with pytest.raises(DataError, match="neither an existing path nor a hub name"):
        corpus.find_source(DataConfig(source="what is this?"))
    for source, task in (("flip_flop", "task:flip_flop"), ("my_task:Mine", "task:my_task:Mine")):
        with pytest.raises(DataError, match=f"Did you mean '{task}'"):
            corpus.find_source(DataConfig(source=source))
    with pytest.raises(DataError) as caught:
        corpus.find_source(DataConfig(source="https://example.com/a text"))
    assert "Did you mean" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path):
    path = write(tmp_path / "a.txt", "text")
    path.chmod(0)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        load(tmp_path, path)


def test_folder_with_held_out_splits_only(tmp_path):
    write(tmp_path / "d/validation.txt", "v")
    write(tmp_path / "d/test.txt", "t")
    with pytest.raises(DataError, match="only files of the splits test, validation"):
        load(tmp_path, tmp_path / "d")


def test_same_file_for_both_splits(tmp_path):
    path = write(tmp_path / "a.txt", "text")
    with pytest.raises(DataError, match="both training and validation"):
        load(tmp_path, path, validation=str(path))


def test_unknown_encoding_is_a_config_error():
    with pytest.raises(ConfigError, match="text_encoding 'klingon' is unknown"):
        prepare(DataConfig(text_encoding="klingon"))


def test_senseless_settings_are_all_named():
    assert DataConfig().problems() == []
    with pytest.raises(ConfigError) as caught:
        prepare(DataConfig(source="", layout="page", validation_fraction=1.0, tokenizer="bpe", vocab_size=9))
    for name in ("data.source", "data.layout='page'", "data.validation_fraction=1.0", "data.vocab_size=9"):
        assert name in str(caught.value)


@pytest.mark.parametrize("held_out", [True, False], ids=["a validation file", "split by hash"])
def test_tuning_documents_leave_training_and_become_validation(tmp_path, held_out):
    jsonl = "\n".join(json.dumps({"text": f"document {n}"}) for n in range(40))
    folder = tmp_path / "text"
    write(folder / ("train.jsonl" if held_out else "all.jsonl"), jsonl)
    if held_out:
        write(folder / "validation.jsonl", '{"text": "never to be seen"}')
    plain, tuned = (load(tmp_path, folder, validation_fraction=0.2, tuning_fraction=f) for f in (0.0, 0.25))
    assert sorted(tuned.train + tuned.validation) == sorted(plain.train) and 4 < len(tuned.validation) < 16
    assert tuned.train == [text for text in plain.train if text not in tuned.validation]
    half = load(tmp_path, folder, validation_fraction=0.2, tuning_fraction=0.5)
    assert set(tuned.validation) < set(half.validation), "more of them holds on to those chosen"


def test_a_fraction_for_tuning_that_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match=r"data.tuning_fraction=1.0 must be below 1"):
        prepare(DataConfig(tuning_fraction=1.0))
