"""From a source named in the settings to train and validation documents, held as lists of strings in memory.

Every text is normalised the same way: a byte-order mark is dropped, and CRLF or a lone CR becomes LF. All else is kept.
"""

import dataclasses
import hashlib
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from posx.config.sections import PLACES, DataConfig
from posx.data.texts import FORMATS, HUB_NAME, Files, find_files, find_splits, load_hub
from posx.errors import DataError
from posx.progress import counted

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

_HEADING = re.compile(r" ?= [^=\s](?:.*[^=\s])? = ?")


@dataclass(frozen=True)
class Source:
    """The text before it is loaded; `digest` identifies its content. Without `validation`, `train` is split by hash."""

    digest: str
    train: Files
    validation: Files | None


def find(config: DataConfig) -> Source:
    """Find the text and digest its bytes without loading it. Raises DataError if there is none."""
    held_out = find_files(config.validation, "data.validation") if config.validation else None
    if config.source == "stdlib":
        found = [stdlib_files()]
    elif is_path(config.source):
        found = find_splits(config.source)
    elif HUB_NAME.fullmatch(config.source):
        wanted = [config.train_split, *([] if held_out or not config.validation_split else [config.validation_split])]
        found = load_hub(config, wanted)
    else:
        raise DataError(
            f"data.source '{config.source}' is neither an existing path nor a hub name such as 'owner/name'. "
            "Correct --config.data.source."
        )
    train, *rest = found
    validation = held_out or next(iter(rest), None)
    if held_out and (shared := set(train.paths) & set(held_out.paths)):
        raise DataError(f"'{min(shared)}' is both training and validation text. Name different files.")
    digests = [part.digest() for part in (train, validation) if part]
    return Source(hashlib.sha256("\n".join(digests).encode()).hexdigest(), train, validation)


def load(source: Source, config: DataConfig, log: Callable[[str], object]) -> tuple[list[str], list[str]]:
    """Return the normalised documents to train on, and those that are held out. `log` gets notices about them.

    With a tuning fraction, the tuning documents are the validation text. The source's own is then not read or, if it is
    split off by hash, not used. Raises DataError if a split ends up without a document that holds more than white
    space.
    """
    parts = {"data.source": source.train} | ({"data.validation": source.validation} if source.validation else {})
    for part in parts.values():
        if part.left_out:
            log(f"'{part.description}': {part.left_out}")
    sides: list[list[str]] = []
    for key, part in list(parts.items())[: 1 if config.tuning_fraction else 2]:
        found = documents(part.rows(config), config.layout)
        kept = [text for text in found if text.strip()]
        if not kept:
            held = counted(len(found), "document")
            raise DataError(f"{key} '{part.description}' holds {held}, all of them blank. Give it text.")
        if len(kept) < len(found) and config.layout == "document":
            log(f"{counted(len(found) - len(kept), 'blank document')} skipped in '{part.description}'")
        sides.append(kept)
    note = ""
    if source.validation is None:
        *sides, note = split_by_hash(sides[0], config.validation_fraction)
    if config.tuning_fraction:
        *sides, note = split_by_hash(sides[0], config.tuning_fraction, "tuning")
    if note:
        log(note)
    train, validation = sides
    return train, validation


def documents(rows: Iterable[str], layout: str) -> list[str]:
    """Cut `rows` (files, or rows of a table) into normalised documents, never blank for "line" and "paragraph"."""
    texts = [row.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n") for row in rows]
    if layout == "document":
        return texts
    if layout == "wikitext":
        return _articles("\n".join(text.removesuffix("\n") for text in texts).split("\n"))
    separator = re.compile(r"\n" if layout == "line" else r"\n(?:[ \t]*\n)+")
    return [piece for text in texts for piece in separator.split(text) if piece.strip()]


def split_by_hash(texts: list[str], fraction: float, salt: str = "") -> tuple[list[str], list[str], str]:
    """Split documents into train and validation, with a notice ("" if there is none). Each `salt` splits otherwise.

    The side of a document depends on its text alone, so equal documents stay together and adding one moves no other.
    If one side would be empty, it gets the documents nearest to it. A single document gives its end, a `fraction` of
    its characters, as validation.
    """
    ranks = {text: hashlib.sha256((salt + text).encode("utf-8", "surrogatepass")).hexdigest() for text in texts}
    distinct = sorted(ranks, key=ranks.__getitem__)
    if len(distinct) == 1:
        (text,) = distinct
        cut = min(len(text) - 1, max(1, round(len(text) * (1 - fraction))))
        if cut < 1 or not text[:cut].strip() or not text[cut:].strip():
            raise DataError("the text is too short to be split into training and validation text. Give more text.")
        note = (
            f"there is only one document, so its last {len(text) - cut} of {len(text)} characters are the "
            "validation text"
        )
        return [text[:cut]], [text[cut:]], note
    below = sum(int(ranks[text][:16], 16) < fraction * 2**64 for text in distinct)
    held = set(distinct[: min(max(below, 1), len(distinct) - 1)])
    return [text for text in texts if text not in held], [text for text in texts if text in held], ""


def is_path(source: str) -> bool:
    """Tell whether `source` names a file or folder, existing or not, and no hub data set."""
    known = Path(source).suffix.lower() in FORMATS.split()
    return known or source.startswith((".", "~", "/")) or Path(source).exists()


def absolute(config: DataConfig) -> DataConfig:
    """Return `config` with every path absolute."""
    named = {
        "source": config.source != "stdlib" and is_path(config.source), "validation": config.validation,
        "tokenizer": config.tokenizer not in ("bytes", "bpe"), "cache_dir": config.cache_dir,
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
    found = [path for name in MODULES for form in (f"{name}.py", f"{name}/**/*.py") for path in root.glob(form)]
    paths = [path for path in found if path.stat().st_size and not _TESTS.intersection(path.relative_to(root).parts)]
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
