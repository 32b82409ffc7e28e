"""Token files are written once for a content, verified when opened, and never stale."""

import errno
import os
import re
import shutil
import tempfile
import threading

import numpy as np
import pytest
import tokenizers as hf

from posx.errors import ConfigError, DataError, OutOfMemoryError
from posx.lab.data import ByteTokenizer, DataConfig, corpus, prepare, store, train_bpe
from posx.lab.data.overlap import overlap


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"document number {number}, <|endoftext|> é\n" * 20, encoding="utf-8")
    return folder


@pytest.fixture
def config(tmp_path, texts):
    return DataConfig(source=str(texts), cache_dir=str(tmp_path / "cache"))


def refuse(*_, **__):
    raise AssertionError("this must not be called again")


def token_file(config, split="train"):
    (path,) = store.cache_folder(config).glob(f"tokens/*/{split}.tokens")
    return path


def test_documents_are_separated_by_eos(config, texts):
    found = prepare(config)
    wanted = {path.read_text(encoding="utf-8") for path in texts.iterdir()}
    seen = set()
    for split in (found.train, found.validation):
        assert split.tokens.dtype == np.uint16 and not split.tokens.flags.writeable
        assert split.offsets[-1] == len(split.tokens) and len(split.offsets) == split.num_documents + 1
        for start, end in zip(split.offsets[:-1], split.offsets[1:], strict=True):
            assert split.tokens[end - 1] == found.tokenizer.eos
            assert found.tokenizer.eos not in split.tokens[start : end - 1]
            seen.add(found.tokenizer.decode(split.tokens[start:end]))
    assert found.validation.token_bytes.sum() == found.validation.num_bytes and found.train.token_bytes is None
    assert not found.validation.token_bytes[found.validation.offsets[1:] - 1].any(), "separators are no text"
    assert seen == wanted
    assert found.train.num_documents + found.validation.num_documents == 6
    assert found.digest[:12] in found.summary() and "\n" not in found.summary()


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "file"])
def test_second_start_reads_no_text_and_tokenises_nothing(tmp_path, config, monkeypatch, tokenizer):
    if tokenizer == "file":
        train_bpe(["some text"], 300).save(tmp_path / "mine.json")
        tokenizer = str(tmp_path / "mine.json")
    config = DataConfig(**{**vars(config), "tokenizer": tokenizer, "vocab_size": 300})
    first = prepare(config)
    lines: list[str] = []
    monkeypatch.setattr(corpus, "load_documents", refuse)
    monkeypatch.setattr(store, "_build", refuse)
    second = prepare(config, lines.append)
    assert lines == list(first.warnings)
    assert second.digest == first.digest and second.tokenizer == first.tokenizer
    np.testing.assert_array_equal(second.train.tokens, first.train.tokens)


def test_moved_or_touched_text_is_recognised(tmp_path, config, texts, monkeypatch):
    first = prepare(config)
    moved = texts.rename(tmp_path / "elsewhere")
    os.utime(moved / "0.txt")
    monkeypatch.setattr(corpus, "load_documents", refuse)
    assert prepare(DataConfig(source=str(moved), cache_dir=config.cache_dir)).digest == first.digest


def test_edit_with_same_size_and_date_is_noticed(config, texts):
    first = prepare(config)
    path = texts / "3.txt"
    date = path.stat().st_mtime_ns
    path.write_text(path.read_text(encoding="utf-8").replace("number", "NUMBER"), encoding="utf-8")
    os.utime(path, ns=(date, date))
    second = prepare(config)
    assert second.digest != first.digest
    both = second.tokenizer.decode(second.train.tokens) + second.tokenizer.decode(second.validation.tokens)
    assert "NUMBER 3" in both and "number 3" not in both


def test_settings_that_change_tokens_change_the_digest(config):
    base = vars(config)
    digests = {
        prepare(DataConfig(**{**base, **other})).digest
        for other in ({}, {"layout": "line"}, {"validation_fraction": 0.6}, {"tokenizer": "bpe", "vocab_size": 280})
    }
    assert len(digests) == 4


def damage_flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_cut(path):
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("damage", [damage_flip, damage_cut, os.unlink])
@pytest.mark.parametrize(
    "name", ["train.tokens", "validation.tokens", "train.offsets.npy", "validation.bytes.npy", "header.json"]
)
def test_damaged_files_are_noticed_and_rebuilt(config, damage, name):
    first = prepare(config)
    damage(token_file(config).with_name(name))
    lines: list[str] = []
    second = prepare(config, lines.append)
    assert second.digest == first.digest
    np.testing.assert_array_equal(second.train.tokens, store.prepare(config).train.tokens)
    np.testing.assert_array_equal(second.validation.token_bytes, first.validation.token_bytes)
    assert any(line.startswith("reading ") for line in lines)
    if name == "train.tokens" and damage is not os.unlink:
        assert any("train.tokens' is damaged" in line for line in lines)


def test_token_files_of_another_text_are_not_used(config, texts):
    """Both folders are whole: only their names tell."""
    first = prepare(config)
    folder = token_file(config).parent
    shutil.move(folder, folder.with_name("first"))
    (texts / "1.txt").write_text("another text\n" * 40, encoding="utf-8")
    second = prepare(config)
    (other,) = {path.parent for path in store.cache_folder(config).glob("tokens/*/train.tokens")} - {
        folder.with_name("first")
    }
    shutil.rmtree(other)
    shutil.move(folder.with_name("first"), other)
    lines: list[str] = []
    assert prepare(config, lines.append).digest == second.digest != first.digest
    assert any("is of other text or settings" in line for line in lines)


def test_a_header_with_another_number_is_noticed(config):
    """A wrong number of bytes would make every bits-per-byte wrong, and nothing else."""
    first = prepare(config)
    path = token_file(config).with_name("header.json")
    path.write_text(path.read_text().replace(f'"train": {first.train.num_bytes}', '"train": 7'))
    lines: list[str] = []
    assert prepare(config, lines.append).train.num_bytes == first.train.num_bytes
    assert any("header.json is damaged" in line for line in lines)


def test_a_token_file_cut_short_under_a_reader_costs_it_nothing(config):
    tokens = prepare(config).train.tokens
    wanted = tokens.copy()
    os.truncate(token_file(config), 0)
    np.testing.assert_array_equal(tokens, wanted)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_damaged_trained_tokenizer_is_rebuilt(config):
    config = DataConfig(**{**vars(config), "tokenizer": "bpe", "vocab_size": 300})
    first = prepare(config)
    path = token_file(config).with_name("tokenizer.json")
    path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")
    assert prepare(config).tokenizer == first.tokenizer


def test_killed_half_way_leaves_nothing_that_counts(config, monkeypatch):
    write = store._write

    def killed(folder, split, *rest):
        if split == "validation":
            raise KeyboardInterrupt
        return write(folder, split, *rest)

    monkeypatch.setattr(store, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(config)
    monkeypatch.undo()
    folder = token_file(config).parent
    (folder / "validation.tokens.new").write_bytes(b"torn")
    (folder / "tmpleft").mkdir()
    prepare(config)
    files = {path.name for path in folder.iterdir()}
    tables = {f"{split}.{kind}" for split in store.SPLITS for kind in ("tokens", "offsets.npy")}
    assert files == {"lock", "lock.holder", "header.json", "validation.bytes.npy"} | tables


def test_two_at_once_build_once(config, monkeypatch):
    build, calls, found = store._build, [], []
    monkeypatch.setattr(store, "_build", lambda *rest: (calls.append(1), build(*rest)))
    threads = [threading.Thread(target=lambda: found.append(prepare(config))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len({dataset.digest for dataset in found}) == 1 and len(found) == 3


def test_text_changed_while_read(config, texts, monkeypatch):
    load = corpus.load_documents

    def meddle(*rest):
        found = load(*rest)
        (texts / "0.txt").write_text("changed")
        return found

    monkeypatch.setattr(corpus, "load_documents", meddle)
    with pytest.raises(DataError, match="was changed while posx read it. Run the same command again"):
        prepare(config)


def test_ids_outside_the_vocabulary_are_refused(config, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode_batch", lambda self, texts: [np.array([257], np.uint16) for _ in texts])
    with pytest.raises(DataError, match="gave id 257, outside its 257 ids"):
        prepare(config)


def test_warnings_are_repeated_at_each_start(tmp_path, config, texts):
    held = tmp_path / "held.txt"
    held.write_bytes((texts / "0.txt").read_bytes())
    config = DataConfig(**{**vars(config), "validation": str(held)})
    for _ in range(2):
        lines: list[str] = []
        warnings = prepare(config, lines.append).warnings
        assert lines[-2:] == list(warnings)
        assert "100% of the held-out text is in the training text too," in warnings[1]


def stored_tokenizer(path, model, *, lower=False):
    made = hf.Tokenizer(model)
    made.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    if lower:
        made.normalizer = hf.normalizers.Lowercase()
    made.save(str(path))
    return str(path)


def test_lossy_tokenizer_is_reported_and_its_bytes_counted(tmp_path, config):
    model = hf.models.WordLevel({"[UNK]": 0, "document": 1}, unk_token="[UNK]")
    path = stored_tokenizer(tmp_path / "words.json", model, lower=True)
    found = prepare(DataConfig(**{**vars(config), "tokenizer": path}))
    assert found.tokenizer.name == "wordlevel" and "does not give the text back" in found.warnings[-1]
    sizes, held_out = found.validation.token_bytes, found.validation
    assert sizes.sum() == held_out.num_bytes
    # "document number 0, <|endoftext|> \u00e9" and a line feed, which counts with the next line.
    assert sizes[:10].tolist() == [8, 7, 3, 14, 3, 9, 7, 3, 14, 3] and sizes[held_out.offsets[1] - 1] == 1


def test_bytes_that_a_tokenizer_cannot_tell_are_none(tmp_path, config):
    path = stored_tokenizer(tmp_path / "few.json", hf.models.BPE({"d": 0, "o": 1}, []))
    for _ in range(2):
        found = prepare(DataConfig(**{**vars(config), "tokenizer": path}))
        assert found.validation.token_bytes is None and "there are no bits per byte" in found.warnings[-1]


def halves(lines, end):
    """Training and held-out text, 80 % of which stands in the training text too."""
    return end.join(lines[500:]), end.join(lines[:2500])


LINES = [f"line {number}: " + " ".join(f"w{number * k % 997}" for k in range(2, 16)) for number in range(3000)]
SHARED = {
    "line": ("line", *halves(LINES, "\n"), 80),
    "paragraph": ("paragraph", *halves(LINES, "\n\n"), 80),
    "document": ("document", *halves(LINES, "\n"), 80),
    "a trailing line feed": ("document", "\n".join(LINES), "\n".join(LINES) + "\n", 100),
    "case and indentation": ("document", "\n".join(LINES), "\n  ".join(LINES).upper(), 100),
    "the very same": ("document", "\n".join(LINES), "\n".join(LINES), 100),
}


@pytest.mark.parametrize("case", SHARED)
def test_overlap_is_measured_in_every_layout(tmp_path, case):
    layout, train, held_out, percent = SHARED[case]
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "train.txt").write_text(train, encoding="utf-8")
    (folder / "validation.txt").write_text(held_out, encoding="utf-8")
    (warning,) = prepare(DataConfig(source=str(folder), layout=layout, cache_dir=str(tmp_path / "cache"))).warnings
    share = int(re.search(r"(\d+)% of the held-out text is in the training text too,", warning)[1])
    assert abs(share - percent) <= 2


def test_overlap_of_common_short_passages_is_none():
    """Lines that any two programs share are none of the text that a model could have kept."""
    common = ["}", "return None", "if __name__ == '__main__':", "    def __init__(self, *args, **kwargs) -> None:"]
    texts = ["\n".join(f"{common[n % 4]}\n{LINES[n]}" for n in range(start, start + 500)) for start in (0, 1000)]
    assert overlap(texts[:1], texts[1:]) == 0
    assert overlap(common, common) == pytest.approx(39 / 73), "whole documents of 32 bytes or more"
    assert overlap(common[:3], common[:3]) == 0


def test_overlap_counts_short_lines_as_held_out_text():
    line = "x" * 60
    assert overlap([line], [line, *["words of 20 letters."] * 1000]) == pytest.approx(60 / (60 + 17_000))


@pytest.mark.parametrize("size", [40, 127, 128, 129, 140, 160, 200, 300, 500, 3000])
def test_overlap_of_documents_of_any_size_is_their_share(size):
    """Half of the held-out text is in the training text too."""
    letters = np.random.default_rng(size).integers(97, 123, 400_000, dtype=np.uint8).tobytes().decode()
    documents = [letters[n : n + size] for n in range(0, 200_000, size)]
    assert overlap(documents, [*documents, letters[200_000:]]) == pytest.approx(0.5, abs=0.05)


def test_little_held_out_text_is_a_warning(tmp_path, config, texts):
    (warning,) = prepare(config).warnings
    assert re.match(r"warning: only [\d,]+ bytes of text in \d documents? are held out", warning)
    assert "bytes of text in 1 document are held out" in warnings_of(tmp_path, texts, LINES, 1)
    assert not warnings_of(tmp_path, texts, LINES, 2)


def warnings_of(tmp_path, texts, lines, files):
    """The warnings on a folder with 100 kB of text in each of three training files, and in `files` held-out ones."""
    for path in texts.iterdir():
        path.unlink()
    for n in range(3 + files):
        name = f"train-{n}.txt" if n < 3 else f"validation-{n}.txt"
        (texts / name).write_text("\n".join(f"{n}{line[::-1]}{n}" for line in lines), encoding="utf-8")
    return " ".join(prepare(DataConfig(source=str(texts), cache_dir=str(tmp_path / "cache"))).warnings)


def test_unusable_cache_folder(tmp_path, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="token files cannot be kept in .*data.cache_dir"):
        prepare(DataConfig(**{**vars(config), "cache_dir": str(tmp_path / "file")}))


def test_cache_folder_that_cannot_be_written_is_a_temporary_one(tmp_path, monkeypatch, capsys, texts):
    """With a notice, said once; the folder serves the next process too."""
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    found = prepare(DataConfig(source=str(texts)))
    (folder,) = (tmp_path / "tmp").glob("posx-*")
    assert folder.stat().st_mode & 0o077 == 0 and list(folder.glob("tokens/*/header.json"))
    store._usable.cache_clear()
    lines: list[str] = []
    assert prepare(DataConfig(source=str(texts)), lines.append).digest == found.digest and lines == list(found.warnings)
    said = capsys.readouterr().err
    assert said.count(f"caches are kept in {folder}. Set XDG_CACHE_HOME=FOLDER") == 2


def test_full_disk(config, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfMemoryError, match="no space is left for token files"):
        prepare(config)


def test_settings_are_checked_first(config):
    with pytest.raises(ConfigError, match="data.layout"):
        prepare(DataConfig(**{**vars(config), "layout": "page"}))


def test_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.cache_folder(DataConfig()) == tmp_path / "posx"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store.cache_folder(DataConfig()) == tmp_path / "home/.cache/posx"
