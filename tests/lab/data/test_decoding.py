"""Text in any encoding: marks are honoured, wrong files are all named, and wrong decodings are not silent."""

import re
import shlex

import numpy as np
import pytest

from posx.errors import DataError
from posx.lab.data import DataConfig, corpus, prepare
from posx.lab.data.decoding import _wide_encoding

FRENCH = "Déjà vu, un café noir.\n"
LANGUAGES = {
    "English": "Plain words of English.\nWith lines.\n", "French": FRENCH,
    "Russian": "Все люди рождаются свободными и равными.\n",  # noqa: RUF001
    "Chinese": "他说：“一二三，人人生而自由。”\n",  # noqa: RUF001
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।\n",
}  # fmt: skip
WIDE = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")


def loaded(tmp_path, files, **settings):
    """The documents of a folder with these files, and the lines about them."""
    folder = tmp_path / "texts"
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    lines: list[str] = []
    config = DataConfig(source=str(folder), **settings)
    train, held_out = corpus.load_documents(corpus.find_source(config), config, lines.append)
    return {*train, *held_out}, lines


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_mark_decides_whatever_the_setting(tmp_path, encoding):
    """UTF-16 and UTF-32 in both byte orders, and UTF-8."""
    texts = {name: "\ufeff" + text for name, text in LANGUAGES.items()}
    names = dict(zip(texts, ("utf-8", *WIDE), strict=True))
    files = {f"{name}.txt": text.encode(names[name]) for name, text in texts.items()}
    found, lines = loaded(tmp_path, files, text_encoding=encoding)
    assert found == set(LANGUAGES.values()) and lines == []


@pytest.mark.parametrize(("written", "read"), [("utf-16-be", "utf-16"), ("utf-16-be", "utf-16-le"), WIDE[:2]])
@pytest.mark.parametrize("language", ["English", "French", "Russian"])
def test_text_in_the_other_byte_order_is_refused(tmp_path, language, written, read):
    """Most of it is valid: letters of Latin become Chinese ones."""
    with pytest.raises(DataError, match=f"looks like {written} without .*Set --config.data.text_encoding={written}"):
        loaded(tmp_path, {"a.txt": (LANGUAGES[language] * 9).encode(written)}, text_encoding=read)


@pytest.mark.parametrize("encoding", WIDE)
@pytest.mark.parametrize("language", LANGUAGES)
def test_wide_text_without_a_mark_is_recognised(tmp_path, language, encoding):
    raw = (LANGUAGES[language] * 9).encode(encoding)
    with pytest.raises(DataError, match=f"looks like {encoding} without .*Set --config.data.text_encoding={encoding}"):
        loaded(tmp_path, {"a.txt": raw})
    found, lines = loaded(tmp_path, {"a.txt": raw}, text_encoding=encoding)
    assert "".join(sorted(found, key=len, reverse=True)) == LANGUAGES[language] * 9 and len(lines) == 1


def test_token_ids_and_stray_zeros_are_no_wide_text():
    """uint16 ids below 55,296 are valid UTF-16, and uint32 ids valid UTF-32."""
    rng = np.random.default_rng(0)
    for size in (256, 1000, 5000, 50257):
        for kind in ("<u2", "<u4"):
            for ids in (rng.integers(0, size, 5000), np.minimum(rng.zipf(1.2, 5000), size) - 1):
                assert _wide_encoding(ids.astype(kind).tobytes()) == "", (size, kind)
    for text in LANGUAGES.values():
        assert _wide_encoding((text * 9).encode() + b"\0x") == ""


def test_all_undecodable_files_are_named_at_once(tmp_path):
    files = {f"{n:02}.txt": FRENCH.encode("latin-1") for n in range(13)} | {"good.txt": b"ASCII"}
    with pytest.raises(DataError) as caught:
        loaded(tmp_path, files)
    said = str(caught.value)
    assert "13 of 14 text files cannot be read: " in said and "; and 3 more. " in said and "\n" not in said
    assert said.count("is not utf-8: byte 0xE9 at offset 1") == 10 and "09.txt" in said and "10.txt" not in said
    assert "iconv -f iso-8859-1" in said and "--config.data.text_encoding=latin-1" in said


def test_files_of_both_splits_and_of_all_kinds_are_named(tmp_path):
    files = {
        "train-0.txt": FRENCH.encode(), "train-1.txt": "“x”".encode("cp1252"), "train-2.txt": b"a\0b",
        "validation.txt": FRENCH.encode("utf-16-le"),
    }  # fmt: skip
    with pytest.raises(DataError) as caught:
        loaded(tmp_path, files)
    said = str(caught.value)
    for part in ("3 of 4", "train-1.txt' is not utf-8: byte 0x93 at offset 0", "train-2.txt' is a binary file (NUL at",
                 "validation.txt' looks like utf-16-le", "iconv -f cp1252", "iconv -f utf-16le"):  # fmt: skip
        assert part in said, said
    assert "text_encoding" not in said, "no setting reads all of them"


def test_utf8_that_is_read_as_something_else_is_a_warning(tmp_path):
    files = {
        "a.txt": FRENCH.encode(),
        "b.txt": FRENCH.encode("latin-1"),
        "c.txt": "“x” €".encode("cp1252"),
        "d.txt": b"x",
    }
    _, lines = loaded(tmp_path, files, text_encoding="latin-1")
    assert lines[0].startswith("warning: data.text_encoding=latin-1, but 1 of 4 files are UTF-8: 'a.txt' gives 'DÃ©")
    assert "1 of 4 files have control characters" in lines[1] and "text_encoding=cp1252" in lines[1]
    _, lines = loaded(tmp_path, files, text_encoding="cp1252")
    assert len(lines) == 1 and "UTF-8" in lines[0]


@pytest.mark.parametrize("settings", [{}, {"text_encoding": "cp1252"}])
def test_a_cut_utf8_file_is_no_other_encoding(tmp_path, settings):
    """Its last character is cut off. Read as cp1252, its letters would all be wrong ones."""
    raw = ("“Déjà” " * 99 + "é").encode()[:-1]
    with pytest.raises(DataError) as caught:
        loaded(tmp_path, {"Bob's.txt": raw}, **settings)
    assert f"s.txt' is utf-8 but for 1 byte, the first of them 0xC3 at offset {len(raw) - 1}. " in str(caught.value)
    command = re.search("iconv -c -f UTF-8 -t UTF-8 .* > FILE", str(caught.value))[0]
    assert shlex.split(command)[6] == str(tmp_path / "texts" / "Bob's.txt") and "cp1252" not in str(caught.value)
    assert ("Leave data.text_encoding out. " in str(caught.value)) == bool(settings)
    _, lines = loaded(tmp_path, {"Bob's.txt": (FRENCH * 9 + "é").encode()[:-1]}, text_encoding="latin-1")
    assert "1 of 1 file are UTF-8: 'Bob's.txt' gives 'DÃ©" in lines[0]


def test_the_encoding_that_is_named_can_read_the_file(tmp_path):
    """Byte 0x81 is no character of cp1252."""
    with pytest.raises(DataError, match=r"byte 0xE9 at offset 0. .*iconv -f ENCODING -t UTF-8 .*a.txt > FILE$"):
        loaded(tmp_path, {"a.txt": b"\xe9 \x81 \x93"})
    _, lines = loaded(tmp_path, {"a.txt": b"\xe9 \x81 \x93" * 9}, text_encoding="latin-1")
    assert "cp1252" not in lines[0] and "They are of another encoding" in lines[0]


def test_utf8_that_is_read_as_utf16_is_a_warning(tmp_path):
    (line,) = loaded(tmp_path, {"a.txt": b"even", "b.txt": b"number"}, text_encoding="utf-16-le")[1]
    assert "2 of 2 files are UTF-8" in line and "instead of 'even'" in line
    with pytest.raises(DataError, match="is utf-8, not utf-16-le. Leave data.text_encoding out"):
        loaded(tmp_path, {"a.txt": b"odd"}, text_encoding="utf-16-le")


def test_a_doubtful_decoding_is_said_at_each_start(tmp_path):
    (tmp_path / "a.txt").write_text(FRENCH * 9, encoding="utf-8")
    config = DataConfig(source=str(tmp_path / "a.txt"), text_encoding="latin-1", cache_dir=str(tmp_path / "cache"))
    for _ in range(2):
        lines: list[str] = []
        found = prepare(config, lines.append)
        assert "UTF-8" in found.warnings[0] and lines.count(found.warnings[0]) == 1
