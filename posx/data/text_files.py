"""Local text, parquet and JSON files: finding, digesting and reading them, with the place of every fault."""

import hashlib
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from posx.config.sections import DataConfig
from posx.errors import DataError
from posx.files.parse import parsed
from posx.progress import counted

_SPLIT = re.compile(r"(?:^|\.)(train|validation|valid|val|dev|test)(?=$|[./]|[-_]?\d)")
_OTHER_NAMES = {"valid": "validation", "val": "validation", "dev": "validation"}


@dataclass(frozen=True)
class Files:
    """Files of one split: `paths` below `root`, their name in messages, and a notice about files left out."""

    root: Path
    paths: tuple[Path, ...]
    description: str
    left_out: str = ""

    def names(self) -> list[str]:
        return [path.relative_to(self.root).as_posix() for path in self.paths]

    def digest(self) -> str:
        """Hash the names and bytes of all files, but no dates (sha256, hex)."""
        total = hashlib.sha256()
        for name, path in zip(self.names(), self.paths, strict=True):
            with _readable(path), path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{content} {name}\n".encode("utf-8", "surrogateescape"))
        return total.hexdigest()

    def rows(self, config: DataConfig) -> Iterator[str]:
        """Yield the texts of all files in order; a text file is one. Raises DataError with file, place and cause."""
        for path in self.paths:
            with _readable(path):
                yield from READERS[path.suffix.lower()](path, config.text_column, config.text_encoding)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn an OSError about `path` into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}") from None


def find_files(where: str, key: str) -> Files:
    """Find all usable files at `where`, a file or folder, sorted by name, but hidden files and those of other formats.

    `key` is the setting for messages. Raises DataError if there is none, or the only one is empty.
    """
    path = Path(where).expanduser().absolute()
    if not path.exists():
        parent = next(parent for parent in path.parents if parent.is_dir())
        raise DataError(f"{key} '{path}' does not exist; the nearest existing folder is '{parent}'")
    if not path.is_dir():
        if path.suffix.lower() not in READERS or not path.is_file():
            raise DataError(f"{key} '{path}' has a format that posx does not read; it reads {FORMATS} files")
        if not path.stat().st_size:
            raise DataError(f"{key} '{path}' is empty (0 bytes); name a file with text in it")
        return Files(path.parent, (path,), str(path))
    shown = sorted(file for file in path.rglob("*") if not _is_hidden(file, path) and file.is_file())
    others = [file for file in shown if file.suffix.lower() not in READERS]
    empty = [file for file in shown if file.suffix.lower() in READERS and not file.stat().st_size]
    usable = tuple(file for file in shown if file not in {*others, *empty})
    if not usable and empty:
        raise DataError(f"{key} '{path}': all files are empty (0 bytes); name files with text in them")
    if not usable:
        raise DataError(f"{key} '{path}' is a folder without files that posx reads; it reads {FORMATS} files")
    left = [_named(files, why) for files, why in ((empty, "empty"), (others, f"not of {FORMATS}")) if files]
    return Files(path, usable, str(path), "; ".join(left))


def find_splits(where: str) -> tuple[Files, Files | None]:
    """Find the training files at `where`, and the validation files if names or top folders tell the split.

    A number may follow, as in train-0.txt; other words make another name, as in "train to somewhere.txt".
    """
    files = find_files(where, "data.source")
    splits: dict[str, list[Path]] = {}
    for name, path in zip(files.names(), files.paths, strict=True):
        found = _SPLIT.search(path.stem.lower()) or _SPLIT.match(name.lower() if "/" in name else "")
        if found and len(files.paths) > 1:
            splits.setdefault(_OTHER_NAMES.get(found[1], found[1]), []).append(path)
    unused = len(files.paths) - sum(map(len, splits.values()))
    if "train" not in splits:
        if splits and not unused:
            raise DataError(
                f"data.source '{files.root}' has only files of the splits {', '.join(sorted(splits))} and none whose "
                "name starts with 'train'; name the training file itself as data.source"
            )
        return files, None
    named = f"{counted(unused, 'file')} left out: others are named train, and these by no split"
    notice = "; ".join(filter(None, [named if unused else "", files.left_out]))
    held_out = Files(files.root, tuple(splits.get("validation", ())), files.description)
    return Files(files.root, tuple(splits["train"]), files.description, notice), held_out if held_out.paths else None


def _named(files: list[Path], why: str) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return f"left out as {why}: {', '.join(file.name for file in files[:3])}{more}"


def _is_hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(root).parts)


def _read_text(path: Path, column: str, encoding: str) -> Iterator[str]:
    raw = path.read_bytes()
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        if not (encoding.lower().startswith("utf-8") and b"\0" in raw):
            raise DataError(
                f"'{path}' is not {encoding}: byte 0x{raw[error.start]:02X} at offset {error.start}; convert it, or "
                "set data.text_encoding (for example to 'latin-1')"
            ) from None
        text = "\0"
    if "\0" in text:
        raise DataError(f"'{path}' is a binary file (NUL at byte {raw.index(0)}); posx reads {FORMATS} files")
    yield text


def _read_json(path: Path, column: str, encoding: str) -> Iterator[str]:
    for place, record in _json_records(path, encoding):
        if not isinstance(record, dict):
            raise DataError(f"'{path}' {place} is a JSON {type(record).__name__}; an object with text is wanted")
        check_column(f"'{path}' {place}", column, record)
        value = checked_text(f"'{path}' {place}", column, record[column])
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f"'{path}' {place}, column '{column}': a lone surrogate, which is no text") from None
        yield value


def _json_records(path: Path, encoding: str) -> Iterator[tuple[str, object]]:
    """Yield (place, value) of the records of an array, or of an object a line."""
    text, number = next(_read_text(path, "", encoding)).removeprefix("\ufeff"), 0
    try:
        if text.lstrip()[:1] == "[":
            yield from ((f"record {n}", record) for n, record in enumerate(parsed(text)))
            return
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"line {number}", parsed(line)
    except ValueError as error:
        line = f" line {number}" if number else ""
        raise DataError(
            f"'{path}'{line} is not JSON ({error}); write an object a line, or one array of objects"
        ) from None


def _read_parquet(path: Path, column: str, encoding: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[object] = []
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check_column(f"'{path}'", column, file.schema_arrow.names)
            kind = file.schema_arrow.field(column).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise DataError(f"'{path}', column '{column}': {kind} instead of strings; set data.text_column")
            for batch in file.iter_batches(columns=[column]):
                rows += batch.column(0).to_pylist()
    except (pa.ArrowException, OSError) as error:
        first = (str(error).strip().splitlines() or ["no details"])[0]
        raise DataError(f"'{path}' cannot be read as parquet: {type(error).__name__}: {first}") from None
    for number, row in enumerate(rows):
        yield checked_text(f"'{path}' row {number}", column, row)


def check_column(where: str, column: str, names: Collection[object]) -> None:
    """Raise DataError unless `column` is among `names`, those of a table or record."""
    if column not in names:
        seen = ", ".join(map(repr, names)) or "none"
        raise DataError(f"{where} has no column '{column}' (columns there: {seen}); set data.text_column")


def checked_text(where: str, column: str, value: object) -> str:
    """Return `value`, that of `column`. Raises DataError if it is no string."""
    if not isinstance(value, str):
        raise DataError(f"{where}, column '{column}': {type(value).__name__} instead of text")
    return value


#: Readers by the suffix of a file: (path, column, encoding) to texts.
READERS: dict[str, Callable[[Path, str, str], Iterator[str]]] = {
    **dict.fromkeys((".txt", ".text", ".md", ".py", ".raw", ".tokens", ""), _read_text),
    ".parquet": _read_parquet,
    **dict.fromkeys((".json", ".jsonl"), _read_json),
}
FORMATS = " ".join(suffix for suffix in READERS if suffix)
