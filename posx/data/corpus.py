"""From a source named in the config to train and validation documents, held as lists of strings in memory.

Every text is normalised the same way: a byte-order mark is dropped and CRLF or a lone CR become LF; all else is kept.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from posx.config.data import DataConfig
from posx.data import hub, text_files
from posx.data.hub import HubSplit
from posx.data.stdlib import stdlib_files
from posx.data.text_files import Files
from posx.errors import DataError
from posx.progress import counted

_HEADING = re.compile(r" ?= [^=\s](?:.*[^=\s])? = ?")


@dataclass(frozen=True)
class Source:
    """Where the text lies; `digest` identifies its content. Without `validation`, `train` is split by hash."""

    description: str
    digest: str
    train: Files | HubSplit
    validation: Files | HubSplit | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Corpus:
    """Documents of both splits; `notes` say what the user should know about how they came about."""

    train: list[str]
    validation: list[str]
    notes: tuple[str, ...] = ()


def find(config: DataConfig) -> Source:
    """Find the text and digest its bytes, without loading it; raises `DataError` if there is none."""
    held_out = text_files.find_files(config.validation, "data.validation") if config.validation else None
    train, validation, notes = _find_splits(config, held_out)
    notes += (f"'{config.validation}': {held_out.left_out}",) if held_out and held_out.left_out else ()
    if isinstance(train, Files) and isinstance(validation, Files):
        shared = set(train.paths) & set(validation.paths)
        if shared:
            raise DataError(f"'{min(shared)}' is both training and validation text; name different files")
    parts = [train] if validation is None else [train, validation]
    digest = hashlib.sha256("\n".join(part.digest() for part in parts).encode()).hexdigest()
    return Source(train.description, digest, train, validation, notes)


def load(source: Source, config: DataConfig, work_dir: Path) -> Corpus:
    """Load, normalise and split the documents; `work_dir` is an empty folder for files of a moment.

    Where some of the training documents are for tuning, they are the validation text, and the source's own stays unread
    or, where it is split off by hash, unused.

    Raises `DataError` if a split ends up without a document that holds more than white space.
    """
    notes = list(source.notes)
    sides: list[list[str]] = []
    for key, part in (("data.source", source.train), ("data.validation", source.validation)):
        if part is None or (config.tuning_fraction and sides):
            continue
        rows = part.rows() if isinstance(part, HubSplit) else _read(part, config, work_dir)
        found = documents(rows, config.layout)
        kept = [text for text in found if text.strip()]
        if not kept:
            held = counted(len(found), "document")
            raise DataError(f"{key} '{part.description}' holds {held}, all of them blank; give it text")
        if len(kept) < len(found) and config.layout == "document":
            notes.append(f"{counted(len(found) - len(kept), 'blank document')} skipped in '{part.description}'")
        sides.append(kept)
    if source.validation is None:
        train, validation, note = split_by_hash(sides[0], config.validation_fraction)
        notes += [note] if note and not config.tuning_fraction else []
        sides = [train, validation]
    if config.tuning_fraction:
        train, tuning, note = split_by_hash(sides[0], config.tuning_fraction, "tuning")
        notes += [note] if note else []
        sides = [train, tuning]
    train, validation = sides
    return Corpus(train, validation, tuple(notes))


def documents(rows: Iterable[str], layout: str) -> list[str]:
    """Documents in `rows` (files, or rows of a table), normalised; those of "line" and "paragraph" are never blank."""
    texts = [_normalise(row) for row in rows]
    if layout == "document":
        return texts
    if layout == "wikitext":
        return _articles("\n".join(text.removesuffix("\n") for text in texts).split("\n"))
    separator = re.compile(r"\n" if layout == "line" else r"\n(?:[ \t]*\n)+")
    return [piece for text in texts for piece in separator.split(text) if piece.strip()]


def split_by_hash(texts: list[str], fraction: float, salt: str = "") -> tuple[list[str], list[str], str]:
    """Train and validation documents, and a note ("" if there is nothing to say). Each `salt` cuts otherwise.

    Which side a document falls on depends on its text alone, so equal documents stay together and adding one moves no
    other. If one side would be empty, it gets the documents nearest to it. A single document gives its end, a
    `fraction` of its characters, as validation.
    """
    ranks = {text: hashlib.sha256((salt + text).encode("utf-8", "surrogatepass")).hexdigest() for text in texts}
    distinct = sorted(ranks, key=ranks.__getitem__)
    if len(distinct) == 1:
        (text,) = distinct
        cut = min(len(text) - 1, max(1, round(len(text) * (1 - fraction))))
        if cut < 1 or not text[:cut].strip() or not text[cut:].strip():
            raise DataError("the text is too short to be cut into training and validation text; give more of it")
        note = f"one document only: its last {len(text) - cut} of {len(text)} characters are the validation text"
        return [text[:cut]], [text[cut:]], note
    held = {text for text in distinct if int(ranks[text][:16], 16) < fraction * 2**64}
    if not held:
        held = {distinct[0]}
    elif len(held) == len(distinct):
        held = set(distinct[:-1])
    return [text for text in texts if text not in held], [text for text in texts if text in held], ""


def _find_splits(
    config: DataConfig, held_out: Files | None
) -> tuple[Files | HubSplit, Files | HubSplit | None, tuple[str, ...]]:
    if config.source == "stdlib":
        train, notes = stdlib_files()
        return train, held_out, notes
    if is_path(config.source):
        found = text_files.find_files(config.source, "data.source")
        splits = text_files.by_split(found) if Path(config.source).expanduser().is_dir() else {}
        unused = len(found.paths) - sum(len(split.paths) for split in splits.values()) if splits else 0
        left = f"{counted(unused, 'file')} of '{config.source}' left out: others are named train, and these by no split"
        notes = (left,) if unused else ()
        notes += (f"'{config.source}': {found.left_out}",) if found.left_out else ()
        return splits.get("train", found), held_out or splits.get("validation"), notes
    if not hub.is_hub_name(config.source):
        raise DataError(f"data.source '{config.source}' is neither an existing path nor a hub name ('owner/name')")
    wanted = [config.train_split] + ([config.validation_split] if config.validation_split and not held_out else [])
    parts = hub.load_hub(config.source, config.subset, wanted, config.text_column)
    return parts[0], held_out or (parts[1] if len(parts) > 1 else None), ()


def is_path(source: str) -> bool:
    """Whether `source` names a file or folder, there or not, and no hub data set."""
    known = Path(source).suffix.lower() in text_files.BUILDERS and Path(source).suffix != ""
    return source.startswith((".", "~", "/")) or known or Path(source).exists()


def _read(part: Files, config: DataConfig, work_dir: Path) -> list[str]:
    return text_files.read_texts(part, config.text_column, config.text_encoding, work_dir)


def _normalise(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _articles(lines: list[str]) -> list[str]:
    """Lines put back together into articles. A title ` = Title = ` has one `=` a side and blank lines around it.

    The blank lines matter: WikiText also holds formulas broken into lines of the same form. Text before the first
    title is an article of its own.
    """
    starts = [0]
    for number, line in enumerate(lines):
        before = number == 0 or not lines[number - 1].strip()
        after = number + 1 == len(lines) or not lines[number + 1].strip()
        if number and before and after and _HEADING.fullmatch(line):
            starts.append(number)
    pieces = ["\n".join(lines[a:b]) for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
    return [piece.strip("\n") + "\n" for piece in pieces if piece.strip()]
