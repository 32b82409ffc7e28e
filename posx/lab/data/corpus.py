"""From a source named in the settings to train and validation documents: lists of strings or of arrays of token ids.

Every text is normalised the same way: a byte-order mark is dropped, and CRLF or a lone CR becomes LF. All else is kept.
Token ids are kept as they are, but for `eos`, which separates documents.
"""

import dataclasses
import hashlib
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posx.errors import DataError, nearest
from posx.lab.config.data import PLACES, TASK, TOKENIZERS, DataConfig
from posx.lab.data.chat import Chat
from posx.lab.data.decoding import TextDecoder
from posx.lab.data.ids import array_pieces, need_tokenizer
from posx.lab.data.readers import FORMATS, IDS, TEXTS, Item
from posx.lab.data.texts import HUB_NAME, Files, find_files, find_splits, load_hub
from posx.lab.data.tokenizers import IdTokenizer, Tokenizer
from posx.lab.progress import quantity
from posx.lab.tasks import TASKS

#: A text, that of a chat, or token ids [n] without separators.
Document = str | np.ndarray

#: The embedded corpus: source code of the running interpreter's standard library, real text without a download. The
#: list is fixed, so the corpus changes only with the Python version. Left out are tests, generated tables (`encodings`,
#: `pydoc_data`), vendored and removed packages.
MODULES = """
    _collections_abc _pydatetime _pydecimal _pyio _strptime abc argparse ast asyncio base64 bdb bisect bz2 calendar
    cmd code codecs codeop collections compileall concurrent configparser contextlib copy copyreg csv ctypes curses
    dataclasses datetime dbm difflib dis doctest email enum filecmp fileinput fnmatch fractions ftplib functools
    getopt getpass gettext glob graphlib gzip hashlib heapq hmac html http imaplib importlib inspect ipaddress json
    linecache locale logging lzma mailbox mimetypes modulefinder multiprocessing netrc ntpath numbers operator
    optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint profile pstats pty
    py_compile pyclbr pydoc queue quopri random re reprlib runpy sched secrets selectors shelve shlex shutil smtplib
    socket socketserver sqlite3 ssl statistics string stringprep subprocess symtable sysconfig tabnanny tarfile
    tempfile textwrap threading timeit tkinter token tokenize tomllib trace traceback tracemalloc turtle types typing
    unittest urllib uuid venv warnings wave weakref webbrowser wsgiref xml xmlrpc zipapp zipfile zipimport zoneinfo
""".split()
_TESTS = {"test", "tests"}

#: A class of the user's own, such as my_task:Mine(symbols=8).
_OWN_CLASS = re.compile(r"[\w.]+:\w+(\(.*\))?")
_HEADING = re.compile(r" ?= [^=\s](?:.*[^=\s])? = ?")


@dataclass(frozen=True)
class Source:
    """The text before it is loaded.

    Attributes:
      digest: identifies the content.
      train: None if all text is held out. Nothing is then trained.
      validation: None if `train` is split by hash.
    """

    digest: str
    train: Files | None
    validation: Files | None

    @property
    def parts(self) -> dict[str, Files]:
        """The files by the setting that names them."""
        named = {"data.source": self.train, "data.validation": self.validation}
        return {key: part for key, part in named.items() if part}

    @property
    def description(self) -> str:
        """The names of the parts."""
        return ", held out ".join(dict.fromkeys(part.description for part in self.parts.values()))


def find_source(config: DataConfig, training: bool = True) -> Source:
    """Find the text and digest its bytes without loading it.

    Args:
      config: the settings.
      training: whether training text is wanted. Without it, `validation` must be named, and `source` is not looked at.

    Raises:
      DataError: there is no text, or a file is both training and validation text.
    """
    held_out = find_files(config, "validation") if config.validation else None
    sources: list[Files | None]
    if not training:
        sources = [None]
    elif config.source == "stdlib":
        sources = [stdlib_files()]
    elif is_path(config.source):
        sources = [*find_splits(config)]
    elif HUB_NAME.fullmatch(config.source) and config.source not in TASKS:
        wanted = [config.train_split, *([] if held_out or not config.validation_split else [config.validation_split])]
        sources = [*load_hub(config, wanted)]
    else:
        tasks = [TASK + config.source] if _OWN_CLASS.fullmatch(config.source) else [TASK + name for name in TASKS]
        raise DataError(
            f"data.source '{config.source}' is neither an existing path nor a hub name such as 'owner/name'. "
            f"{nearest(config.source, tasks)}Correct --config.data.source."
        )
    train, *rest = sources
    source = Source("", train, held_out or next(iter(rest), None))
    if train and held_out and (shared := set(train.paths) & set(held_out.paths)):
        raise DataError(
            f"'{min(shared)}' is both training and validation text. To score all of it with `posx evaluate`, name it "
            "as --config.data.validation alone if the model is imported. If it was trained on this text, name a copy: "
            "the loss is one of training. To train on a part of it, leave data.validation out."
        )
    for key, part in source.parts.items():
        _check_one_kind(key, part)
    digests = [f"{key} {part.digest()}" for key, part in source.parts.items()]
    return dataclasses.replace(source, digest=hashlib.sha256("\n".join(digests).encode()).hexdigest())


def _check_one_kind(key: str, part: Files) -> None:
    """Raise DataError if there are text files and files of token ids: a note beside ids is no text to train on."""
    first = [next((p for p in part.paths if p.suffix.lower() in kinds), None) for kinds in (TEXTS, IDS)]
    if all(first):
        text, ids = (path.name for path in first if path)
        raise DataError(
            f"{key} '{part.description}' holds text ('{text}') and token ids ('{ids}'). Name the files of one kind."
        )


def load_documents(
    source: Source, config: DataConfig, log: Callable[[str], object], tokenizer: Tokenizer | None = None
) -> tuple[list[Document], list[Document]]:
    """Return the normalised documents to train on, and those that are held out.

    With a tuning fraction, the tuning documents are the validation text. The validation text of the source is then not
    read or, if it is split off by hash, not used.

    Args:
      source: the text.
      config: the settings.
      log: called with notices and warnings about the text.
      tokenizer: against whose vocabulary token ids are checked; None for one that is still to be trained.

    Raises:
      DataError: with all files that cannot be decoded; or a split has no document that holds more than white space.
    """
    for part in source.parts.values():
        if part.left_out:
            log(f"'{part.description}': {part.left_out}")
    decoder, items = TextDecoder(config.text_encoding), dict[str, list[Item]]()
    for key, part in list(source.parts.items())[: 1 if config.tuning_fraction else 2]:
        items[key] = list(part.rows(config, decoder))
    decoder.check()
    for warning in decoder.warnings():
        log(warning)
    if config.template and not any(isinstance(item, Chat) for read_items in items.values() for item in read_items):
        log(f"notice: data.template={config.template} is not used: data.text_column={config.text_column} has no chats")
    sides: list[list[Document]] = []
    for key, read_items in items.items():
        whole = documents(_match_tokenizer(read_items, config, tokenizer), config.layout)
        kept = [document for document in whole if not _is_blank(document)]
        name = f"'{source.parts[key].description}'"
        if not kept:
            raise DataError(f"{key} {name} holds {quantity(len(whole), 'document')}, all of them blank. Give it text.")
        if len(kept) < len(whole) and config.layout == "document":
            log(f"{quantity(len(whole) - len(kept), 'blank document')} skipped in {name}")
        sides.append(kept)
    note = ""
    if source.train is None:
        return [], sides[0]
    if source.validation is None:
        *sides, note = split_by_hash(sides[0], config.validation_fraction)
    if config.tuning_fraction:
        *sides, note = split_by_hash(sides[0], config.tuning_fraction, "tuning")
    if note:
        log(note)
    train, validation = sides
    return train, validation


def _is_blank(document: Document) -> bool:
    return not (document.strip() if isinstance(document, str) else len(document))


def _match_tokenizer(items: Iterable[Item], config: DataConfig, tokenizer: Tokenizer | None) -> Iterator[Document]:
    """Yield texts, and the documents of token ids. Raises DataError if one of them does not go with the tokenizer."""
    for item in items:
        if isinstance(item, str):
            if isinstance(tokenizer, IdTokenizer):
                raise DataError(
                    f"the text {item[:20]!r} cannot be read, because the tokenizer is of ids alone. Name token ids, or "
                    "a tokenizer.json with --config.data.tokenizer=path/to/tokenizer.json"
                )
            yield item
        elif tokenizer is None or config.tokenizer in ("bytes", "bpe"):
            raise need_tokenizer(f"{item.place(0)}: token ids", config)
        else:
            yield from item.documents(tokenizer)


def documents(rows: Iterable[Document], layout: str) -> list[Document]:
    """Cut `rows` (files, or rows of a table) into normalised documents, never blank for "line" and "paragraph".

    Raises DataError for chats and token ids in another layout than "document".
    """
    texts: list[str] = []
    texts_so_far: list[Document] = []
    for row in rows:
        if isinstance(row, str) and not isinstance(row, Chat):
            texts.append(row.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n"))
            texts_so_far.append(texts[-1])
        elif layout == "document":
            texts_so_far.append(row)
        else:
            kind = "a chat" if isinstance(row, str) else "a row of token ids"
            raise DataError(f"data.layout={layout} cuts text, but {kind} is one document. Leave data.layout out.")
    if layout == "document":
        return texts_so_far
    if layout == "wikitext":
        return [*_articles("\n".join(text.removesuffix("\n") for text in texts).split("\n"))]
    separator = re.compile(r"\n" if layout == "line" else r"\n(?:[ \t]*\n)+")
    return [piece for text in texts for piece in separator.split(text) if piece.strip()]


def split_by_hash(
    texts: Sequence[Document], fraction: float, salt: str = ""
) -> tuple[list[Document], list[Document], str]:
    """Split documents into train and validation, with a notice ("" if there is none). Each `salt` splits otherwise.

    The side of a document depends on its text alone, so equal documents stay together and adding one moves no other.
    If one side would be empty, it gets the documents nearest to it. A single document gives its end, a `fraction` of
    its characters or ids, as validation. Raises DataError if that leaves a side blank, and for a single chat.
    """
    ranks = [_rank(text, salt) for text in texts] if len(texts) > 1 else [""]
    distinct = sorted(set(ranks))
    if len(distinct) == 1:
        text, unit = texts[0], "characters" if isinstance(texts[0], str) else "ids"
        if isinstance(text, Chat):
            raise DataError(
                "a single chat cannot be split into training and validation text: its halves are no chats. Give "
                "several chats that differ."
            )
        cut = min(len(text) - 1, max(1, round(len(text) * (1 - fraction))))
        if cut < 1:
            raise DataError("the text is too short to be split into training and validation text. Give more text.")
        for side, part in (("training", text[:cut]), ("validation", text[cut:])):
            if _is_blank(part):
                raise DataError(
                    f"a single document is split at character {cut:,} of {len(text):,}, but the {side} text is then "
                    "blank. Remove the blank lines at its start and end, or give more text."
                )
        copies = f"all {len(texts)} documents are equal and the copies are left out: " if len(texts) > 1 else ""
        note = (
            f"{copies}there is only one document, so its last {len(text) - cut} of {len(text)} {unit} are the "
            "validation text"
        )
        return [text[:cut]], [text[cut:]], note
    below = sum(int(rank[:16], 16) < fraction * 2**64 for rank in distinct)
    held = set(distinct[: min(max(below, 1), len(distinct) - 1)])
    sides = [
        [text for text, rank in zip(texts, ranks, strict=True) if (rank in held) == side] for side in (False, True)
    ]
    return sides[0], sides[1], ""


def _rank(document: Document, salt: str) -> str:
    """Return the hash of a document, in hex: of its text, or of its ids whatever their type."""
    total = hashlib.sha256(salt.encode())
    if isinstance(document, str):
        total.update(document.encode("utf-8", "surrogatepass"))
    else:
        for _, piece in array_pieces(document):
            total.update(piece.astype("<u4").tobytes())
    return total.hexdigest()


def is_path(source: str) -> bool:
    """Tell whether `source` names a file or folder, existing or not, and no hub data set."""
    known = Path(source).suffix.lower() in FORMATS.split()
    return known or source.startswith((".", "~", "/")) or Path(source).exists()


def absolute(config: DataConfig) -> DataConfig:
    """Return `config` with every path absolute."""
    named = {
        "source": config.source != "stdlib" and is_path(config.source), "validation": config.validation,
        "tokenizer": config.tokenizer not in TOKENIZERS, "cache_dir": config.cache_dir,
    }  # fmt: skip
    paths = {name: str(Path(getattr(config, name)).expanduser().absolute()) for name in PLACES if named[name]}
    return dataclasses.replace(config, **paths)  # type: ignore[arg-type]


def is_gone(place: str) -> bool:
    """Tell whether `place` is an absolute path at which there is no file and no folder."""
    return Path(place).is_absolute() and not Path(place).exists()


def check_there(config: DataConfig, whose: str) -> None:
    """Raise DataError, with the flag to give, if the text of a run, named `whose`, is gone from its place."""
    for name in ("source", "validation"):
        if is_gone(place := getattr(config, name)):
            raise DataError(
                f"the text of {whose} is no longer at '{place}'. Give its new place with --config.data.{name}=PATH "
                "(docs/guides/resuming.md)."
            )


def stdlib_files() -> Files:
    """Find the files of the embedded corpus. Raises DataError if no source code is installed."""
    root = Path(sysconfig.get_paths()["stdlib"])
    candidates = [path for name in MODULES for form in (f"{name}.py", f"{name}/**/*.py") for path in root.glob(form)]
    paths = [
        path for path in candidates if path.stat().st_size and not _TESTS.intersection(path.relative_to(root).parts)
    ]
    if not paths:
        raise DataError(
            f"data.source 'stdlib': no source code of the standard library is under '{root}'. Name a text file "
            "or folder as data.source."
        )
    return Files(root, tuple(sorted(paths)), f"stdlib (Python {platform.python_version()})")


def _articles(lines: list[str]) -> list[str]:
    """Join lines into articles. A title ` = Title = ` has one `=` a side and blank lines around it.

    The blank lines matter: WikiText also holds formulas broken into lines of the same form. Text before the first
    title is an article of its own.
    """
    blank = [True, *(not line.strip() for line in lines), True]  # line n is at n + 1
    starts = [n for n, line in enumerate(lines) if n and blank[n] and blank[n + 2] and _HEADING.fullmatch(line)]
    pieces = ["\n".join(lines[a:b]) for a, b in zip([0, *starts], [*starts, len(lines)], strict=True)]
    return [piece.strip("\n") + "\n" for piece in pieces if piece.strip()]
