"""F21 to F39: text and tokenizers that are missing, damaged, changed, or in odd places."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.faults.table import fault, not_provoked
from tests.tiny import Ended, Scene, digests, rows

DATA = 3
WORDS = "the quick brown fox jumps over the lazy dog and back again. "


def folder_of(scene: Scene, name: str, files: Mapping[str, bytes]) -> Path:
    """Make a folder of the scene with these files in it."""
    folder = scene.folder / name
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return folder


def documents(number: int = 24) -> dict[str, bytes]:
    """Make texts to train and to evaluate on, by file name."""
    return {f"{n:02d}.txt": f"{n} {WORDS * 20}".encode() for n in range(number)}


def train(scene: Scene, source: object, *words: str, **how: object) -> Ended:
    """Train on the text at `source`."""
    return scene.train(f"--config.data.source={source}", *words, **how)


@fault(21, "a path that is not there, a name that matches nothing", "3; the path, the nearest folder there is")
def missing(scene: Scene) -> None:
    train(scene, scene.folder / "none" / "deep.txt").must(DATA, "does not exist", "nearest existing")
    train(scene, "no*such*.txt").must(DATA, r"no\*such")


@fault(22, "an empty file, an empty folder, blank documents only", "3")
def empty(scene: Scene) -> None:
    train(scene, folder_of(scene, "a", {"a.txt": b""})).must(DATA, "empty")
    train(scene, folder_of(scene, "b", {})).must(DATA, "without files")
    train(scene, folder_of(scene, "c", {"a.txt": b" \n\n "})).must(DATA, "blank")


@fault(22, "an empty file and one of another format among many", "0; said")
def some_left_out(scene: Scene) -> None:
    files = documents() | {"zero.txt": b"", "packed.txt.gz": gzip.compress(b"words"), "notes.pdf": b"%PDF"}
    train(scene, folder_of(scene, "text", files)).must(0, r"zero\.txt", r"packed\.txt\.gz")


@fault(23, "binary files, another encoding than was said", "3; the byte, its place, data.text_encoding")
def not_text(scene: Scene) -> None:
    latin = "caf\xe9 and more ".encode("latin-1") * 99
    train(scene, folder_of(scene, "a", {"a.txt": bytes(range(256)) * 9})).must(DATA, r"a\.txt", "byte")
    train(scene, folder_of(scene, "b", {"a.txt": latin})).must(DATA, "offset 3", "text_encoding")
    for name in ("rot13", "no-such", "hex"):
        scene.train(f"--config.data.text_encoding={name}").must(2, "text_encoding", name)


@fault(24, "CRLF, byte-order marks", "0; the same tokens as without them")
def line_ends(scene: Scene) -> str:
    plain = {name: text.replace(b". ", b".\n") for name, text in documents().items()}
    other = {name: b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n") for name, text in plain.items()}
    tokens = []
    for name, files in (("plain", plain), ("other", other)):
        workdir = scene.folder / f"run {name}"
        train(scene, folder_of(scene, name, files), f"--workdir={workdir}").must(0)
        tokens.append(digests(workdir))
    assert tokens[0] == tokens[1], "CRLF or a byte-order mark changed what was trained"
    return "0; the same weights"


@fault(24, "NUL bytes, lone surrogates, U+2028", "3, 3 and 0")
def odd_characters(scene: Scene) -> None:
    nul = {name: text.replace(b"fox", b"f\0x") for name, text in documents().items()}
    train(scene, folder_of(scene, "nul", nul)).must(DATA, "NUL")
    lone = {"a.jsonl": b'{"text": "one \\ud800 alone"}\n' * 40}
    train(scene, folder_of(scene, "lone", lone)).must(DATA, "surrogate")
    separators = {name: text.replace(b". ", " \u2028".encode()) for name, text in documents().items()}
    train(scene, folder_of(scene, "separators", separators)).must(0)


@fault(25, "less text than one window, or than an evaluation length", "3; tokens there, tokens needed")
def too_short(scene: Scene) -> None:
    few = folder_of(scene, "few", {"a.txt": b"a few words only"})
    train(scene, few, "--config.train.length=64").must(DATA, "too few|too short|tokens")
    some = folder_of(scene, "some", documents(3))
    long = ("--config.eval.lengths=(16,100000)", "--config.eval.num_targets=0")
    train(scene, some, *long).must(DATA, "100000", "largest usable length")


@fault(26, "a broken JSON line, a missing column, null, numbers, depth", "3; the line, the columns seen")
def bad_json(scene: Scene) -> None:
    good = b'{"text": "some words"}\n'
    cases = {
        "torn": (good + b'{"text": "some', "line 2"),
        "column": (good + b'{"body": "x"}\n', "'body'"),
        "null": (good + b'{"text": null}\n', "NoneType"),
        "number": (good + b'{"text": 7}\n', "int"),
        "list": (b"[1, 2]", "object"),
        "deep": (b"[" * 100_000, "nested"),
        "digits": (good + b'{"text": ' + b"9" * 5000 + b"}\n", "line 2"),
    }
    for name, (content, pattern) in cases.items():
        train(scene, folder_of(scene, name, {"a.jsonl": content})).must(DATA, r"a\.jsonl", pattern)


def parquet(scene: Scene, columns: Mapping[str, Sequence[str]]) -> Path:
    """Write a file of the format, with checksums of its pages."""
    import pyarrow.parquet

    path = folder_of(scene, "text", {}) / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path, write_page_checksum=True)
    return path


@fault(27, "a damaged parquet file: cut, not parquet, a flipped bit in a page that has a checksum", "3; the file")
def bad_parquet(scene: Scene) -> None:
    path = parquet(scene, {"text": [f"{n} {WORDS * 9}" for n in range(60)]})
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 4
    for damaged in (whole[: len(whole) // 2], b"PAR1" + b"\0" * 99 + b"PAR1", b"no parquet", flipped):
        path.write_bytes(damaged)
        train(scene, path).must(DATA, r"a\.parquet")


@fault(28, "a column that is not there, of parquet", "3; those that are")
def no_column(scene: Scene) -> None:
    train(scene, parquet(scene, {"body": ["words"] * 9})).must(DATA, "'body'", "text_column")


not_provoked(28, "a split that a hub data set does not have", "needs the hub; the suite tests it on a made-up data set")


@fault(29, "a hub name without a network", "3 within seconds; how to use a copy")
def no_network(scene: Scene) -> None:
    began = time.monotonic()
    ended = train(scene, "no-such-owner/nothing", env={"HF_HUB_OFFLINE": "1"})
    ended.must(DATA, "no-such-owner/nothing", "HF_HOME|local")
    assert (seconds := time.monotonic() - began) <= 60, f"it took {seconds:.0f} s"


@fault(30, "pickles, .npy of objects, scripts as data", "3; refused unread")
def dangerous(scene: Scene) -> None:
    mark = scene.folder / "executed"
    attack = b"cos\nsystem\n(S'touch " + os.fsencode(mark) + b"'\ntR."
    for name in ("a.pkl", "a.npy", "a.pt"):
        source = folder_of(scene, name.replace(".", "_"), {name: attack})
        train(scene, source / name).must(DATA, "format")
    script = folder_of(scene, "script", {"a.py": b"import os\n" + b"os.abort()\n" * 200, "b.py": b"x = 1\n" * 200})
    train(scene, script).must(0)  # text as any other
    assert not mark.exists(), "code inside the data was run"


@fault(31, "text changed since its tokens were made, its date kept", "4 for the run that it was of; else made anew")
def changed_text(scene: Scene) -> None:
    source = folder_of(scene, "text", documents())
    train(scene, source).must(0)
    (scene.workdir / "DONE").unlink()
    path = source / "03.txt"
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"quick", b"QUICK"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    train(scene, source).must(4, "other text")
    train(scene, source, f"--workdir={scene.folder / 'anew'}").must(0)


@fault(31, "text that changes while it is read", "3; what changed")
def changing_text(scene: Scene) -> None:
    source = folder_of(scene, "text", {f"{n}.txt": f"{n} {WORDS * 50_000}".encode() for n in range(9)})
    words = scene.words(f"--config.data.source={source}")
    process = scene.start(*words, stderr=open(scene.folder / "said", "wb"))
    scene.until(lambda: b"reading" in (scene.folder / "said").read_bytes(), process)
    (source / "8.txt").write_bytes(b"other words " * 99)
    ended = scene.end(process)
    ended.err = (scene.folder / "said").read_text()
    ended.must(DATA, "was changed while posx read it. Run the same command again")


@fault(32, "two processes that prepare the same text; one killed half-way", "0 and 0, the same bits; 0 afterwards")
def prepared_twice(scene: Scene) -> str:
    source, cache = folder_of(scene, "text", documents(200)), scene.folder / "cache"
    folders = [scene.folder / name for name in "abc"]
    first, second, third = (
        scene.words(f"--config.data.source={source}", f"--config.data.cache_dir={cache}", f"--workdir={folder}")
        for folder in folders
    )
    for process in [scene.start(*first), scene.start(*second)]:
        scene.end(process).must(0)
    assert digests(folders[0]) == digests(folders[1]), "two runs of the same settings differ"
    for _ in range(3):
        shutil.rmtree(cache)
        process = scene.start(*third)
        scene.until(cache.exists, process)
        time.sleep(scene.random.random())
        scene.kill(process)
    scene.posx(*third).must(0)
    assert digests(folders[2]) == digests(folders[0]), "after kills it trained on something else"
    scene.must_leave("cache/**/*.tokens.*", "cache/**/.*.tokens.*")
    return "0 and 0; after three kills 0, the same bits"


@fault(33, "token files with a flipped bit, cut short, gone; their header too", "0; made again, said", slow=True)
def damaged_tokens(scene: Scene) -> None:
    source, cache = folder_of(scene, "text", documents()), scene.folder / "cache"
    words = scene.words(f"--config.data.source={source}", f"--config.data.cache_dir={cache}")
    scene.posx(*words).must(0)
    whole = digests(scene.workdir)
    (header,) = cache.rglob("header.json")
    names = ("train.tokens", "validation.tokens", "train.offsets.npy", "header.json")
    for name, damage in itertools.product(names, ("flip", "cut", "delete")):
        scene.damage(header.parent / name, damage)
        shutil.rmtree(scene.workdir)
        scene.posx(*words).must(0)  # a bit in the name of the header's digest harms nothing, and says nothing
        assert digests(scene.workdir) == whole, f"{name}, {damage}: it trained on something else"


def must_outlive(scene: Scene, damage: Callable[[Path], object]) -> None:
    """Check that damage to the token files while a run reads them does not change how the run ends."""
    cache = scene.folder / "cache"
    process = scene.started(f"--config.data.cache_dir={cache}", step=2)
    for path in cache.rglob("*.tokens"):
        damage(path)
    scene.end(process).must(0)
    scene.must_end_like_whole()


@fault(33, "a token file cut short under a running process", "the run ends as if it had not been")
def cut_tokens(scene: Scene) -> None:
    must_outlive(scene, lambda path: os.truncate(path, 10))


def tokenizer(vocab: Mapping[str, int], **more: object) -> str:
    model = {"type": "WordLevel", "vocab": dict(vocab), **more}
    return json.dumps({"version": "1.0", "model": model, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}})


@fault(34, "a tokenizer.json that is missing, torn, of another version, deep, sparse, without UNK", "3; the file, why")
def bad_tokenizers(scene: Scene) -> None:
    words = {word: n for n, word in enumerate(["[UNK]", *dict.fromkeys(WORDS.split())])}
    sparse = {word: n * 10**7 for word, n in words.items()}
    cases = {
        "torn": ('{"version"', "JSON"),
        "version": ('{"version": "99.0", "model": {}}', "tokenizer.json"),
        "deep": ("[" * 100_000, "nested|deep"),
        "digits": ("9" * 5000, "digits|tokenizer.json"),
        "list": ("[]", "tokenizer.json"),
        "sparse": (tokenizer(sparse, unk_token="[UNK]"), "id"),
        "unknown": (tokenizer({"no": 0, "word": 1}, unk_token="[UNK]"), "UNK"),
    }
    source = folder_of(scene, "text", documents())
    none = f"--config.data.tokenizer={scene.folder / 'none.json'}"
    train(scene, source, none).must(DATA, "none.json")
    for name, (text, pattern) in cases.items():
        path = scene.folder / f"{name}.json"
        path.write_text(text)
        train(scene, source, f"--config.data.tokenizer={path}").must(DATA, "tokenizer", pattern)


@fault(35, "another tokenizer than a checkpoint was trained with", "3 or 4; nothing is clamped")
def other_tokenizer(scene: Scene) -> None:
    workdir, words = scene.finished(), ("generate", f"--workdir={scene.workdir}", "--prompt=def", "--num_tokens=3")
    path = workdir / "tokenizer.json"
    path.write_text(tokenizer({"[UNK]": 0, "def": 1}, unk_token="[UNK]"))
    scene.posx(*words).must((3, 4), "tokenizer")
    path.unlink()
    scene.posx(*words).must((3, 4), "tokenizer")


@fault(36, "the text of special tokens inside documents", "it stays text: as many ends as documents")
def special_text(scene: Scene) -> str:
    import numpy as np

    from posx.lab.data import DataConfig, prepare

    files = {name: text.replace(b"fox", b"<|endoftext|>") for name, text in documents().items()}
    source = folder_of(scene, "text", files)
    counts = []
    for kind in ("bytes", "bpe"):
        config = DataConfig(source=str(source), tokenizer=kind, vocab_size=300, cache_dir=str(scene.folder / "cache"))
        data = prepare(config)
        ends = sum(int(np.sum(split.tokens == data.tokenizer.eos)) for split in (data.train, data.validation))
        assert ends == len(files), f"{kind}: {ends} ends of text in {len(files)} documents"
        counts.append(ends)
    return f"{counts[0]} ends of {len(files)} documents, bytes and BPE"


@fault(37, "validation text that is training text", "3 for the same file, a warning for the same documents")
def overlap(scene: Scene) -> None:
    source = folder_of(scene, "text", documents())
    train(scene, source, f"--config.data.validation={source / '03.txt'}").must(DATA, "both")
    copy = folder_of(scene, "copy", documents(2))
    train(scene, source, f"--config.data.validation={copy}").must(0, r"warning: \d+% of the held-out text is")


@fault(38, "spaces, %, non-ASCII, quotes, very long names, links, ~, relative paths", "0, as anywhere else")
def odd_places(scene: Scene) -> None:
    odd = scene.folder / "a b %s {x} d\u00e9j\u00e0 'q' \u202e$HOME"
    odd.mkdir()
    source = folder_of(scene, f"{odd.name}/text", documents())
    (scene.folder / "link").symlink_to(source)
    long = odd / ("n" * 200)
    short = ("--config.train.steps=4",)
    train(scene, source, f"--workdir={odd / 'run'}", *short, env={"LC_ALL": "C"}).must(0)
    scene.posx("plot", f"--workdir={odd / 'run'}", env={"LC_ALL": "C"}).must(0)
    train(scene, scene.folder / "link", f"--workdir={long}", *short).must(0)
    home = {"HOME": str(scene.folder)}
    train(scene, "~/link", "--workdir=~/at_home", *short, env=home).must(0)
    train(scene, "./link", "--workdir=here/below", *short).must(0)
    train(scene, "~nosuch/x", *short).must(2, "~nosuch")
    train(scene, "/" + "n" * 5000, *short).must(2, "data.source")
    scene.train(f"--workdir=/tmp/{'n' * 5000}", *short).must(4, "work folder")


@fault(38, "a folder to work in whose files are named like standard modules", "0")
def shadows(scene: Scene) -> None:
    for name in ("random", "json", "types", "jax", "posx"):
        (scene.folder / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    scene.train("--config.train.steps=4").must(0)


@fault(39, "text and token files that vanish while a run reads them", "the run ends as if they were there")
def vanished(scene: Scene) -> None:
    must_outlive(scene, Path.unlink)
    assert rows(scene.workdir / "eval.jsonl"), "it was not evaluated"


not_provoked(39, "a network file system that hangs", "needs one; small token files are read once, large ones mapped")
