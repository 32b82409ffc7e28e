"""Local text, parquet and JSON files: finding them, digesting them, and reading them through Hugging Face `datasets`.

`datasets` reports an empty, binary or wrongly encoded file, or a bad JSON line, only as "an error occurred", and its
cache trusts dates. So faults are looked for here first, and its cache lives in a folder that is thrown away.
"""

import glob
import hashlib
import itertools
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posx.config.data import is_text_encoding
from posx.data import hub
from posx.errors import ConfigError, DataError, OutOfMemoryError
from posx.files.parse import parsed

BUILDERS = {
    **dict.fromkeys((".txt", ".text", ".md", ".py", ".raw", ".tokens", ""), "text"),
    ".parquet": "parquet",
    **dict.fromkeys((".json", ".jsonl"), "json"),
}
FORMATS = " ".join(suffix for suffix in BUILDERS if suffix)
_SPLIT = re.compile(r"(?:^|\.)(train|validation|valid|val|dev|test)(?=$|[./]|[-_]?\d)")


@dataclass(frozen=True)
class Files:
    """Files of one split: `paths` below `root`, what to call them in messages, and which of a folder are none."""

    root: Path
    paths: tuple[Path, ...]
    description: str
    left_out: str = ""

    def names(self) -> list[str]:
        return [path.relative_to(self.root).as_posix() for path in self.paths]

    def digest(self) -> str:
        """sha256 (hex) of the names and bytes of all files; dates play no part."""
        total = hashlib.sha256()
        for name, path in zip(self.names(), self.paths, strict=True):
            with _readable(path), path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{content} {name}\n".encode("utf-8", "surrogateescape"))
        return total.hexdigest()


def find_files(where: str, key: str) -> Files:
    """All usable files at `where`, a file or folder (hidden ones and other formats are left out), sorted by name.

    `key` is the config key for messages. Raises `DataError` if there is none, or the one named is empty or unreadable.
    """
    path = Path(where).expanduser().absolute()
    if not path.exists():
        parent = next(parent for parent in path.parents if parent.is_dir())
        raise DataError(f"{key} '{path}' does not exist; the nearest existing folder is '{parent}'")
    if not path.is_dir():
        if path.suffix.lower() not in BUILDERS or not path.is_file():
            raise DataError(f"{key} '{path}' has a format that posx does not read; it reads {FORMATS} files")
        if not path.stat().st_size:
            raise DataError(f"{key} '{path}' is empty (0 bytes); name a file with text in it")
        return Files(path.parent, (path,), str(path))
    shown = sorted(file for file in path.rglob("*") if not _is_hidden(file, path) and file.is_file())
    inside = [file for file in shown if file.suffix.lower() in BUILDERS]
    others = [file for file in shown if file.suffix.lower() not in BUILDERS]
    if not inside:
        raise DataError(f"{key} '{path}' is a folder without files that posx reads; it reads {FORMATS} files")
    usable = tuple(file for file in inside if file.stat().st_size)
    if not usable:
        raise DataError(f"{key} '{path}': all files are empty (0 bytes); name files with text in them")
    empty = sorted(set(inside).difference(usable))
    left = [_named(files, why) for files, why in ((empty, "empty"), (others, f"not of {FORMATS}")) if files]
    return Files(path, usable, str(path), "; ".join(left))


def _named(files: list[Path], why: str) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return f"left out as {why}: {', '.join(file.name for file in files[:3])}{more}"


def by_split(files: Files) -> dict[str, Files]:
    """Return `files` of a folder by the split that their name or top folder is, {} if none is "train".

    A number may follow, as in train-0.txt; other words make another name, as in "train to somewhere.txt".
    """
    splits: dict[str, list[Path]] = {}
    for name, path in zip(files.names(), files.paths, strict=True):
        found = _SPLIT.search(path.stem.lower()) or _SPLIT.match(name.lower() if "/" in name else "")
        if found:
            split = {"valid": "validation", "val": "validation", "dev": "validation"}.get(found[1], found[1])
            splits.setdefault(split, []).append(path)
    if "train" in splits:
        return {split: Files(files.root, tuple(paths), files.description) for split, paths in splits.items()}
    if len(files.paths) > 1 and sum(map(len, splits.values())) == len(files.paths):
        raise DataError(
            f"data.source '{files.root}' has only files of the splits {', '.join(sorted(splits))} and none whose name "
            "starts with 'train'; name the training file itself as data.source"
        )
    return {}


def read_texts(files: Files, column: str, encoding: str, work_dir: Path) -> list[str]:
    """The rows of `files` in order (a text file is one row); `work_dir` must be new, and may be deleted afterwards.

    Raises `DataError` naming file, position and cause for anything that is not text, and `ConfigError` for an unknown
    encoding.
    """
    for path in files.paths:
        with _readable(path):
            _CHECKS[_builder(path)](path, column, encoding)
    rows: list[str] = []
    for builder, group in itertools.groupby(files.paths, _builder):
        paths = list(group)
        # One call for all text files, which is fast; one for each other file, since `datasets` refuses files together
        # whose other columns differ.
        for batch in [paths] if builder == "text" else [[path] for path in paths]:
            name = str(batch[0]) if len(batch) == 1 else files.description
            rows += _load(builder, _links(batch, work_dir), name, column, encoding)
    return rows


def _builder(path: Path) -> str:
    return BUILDERS[path.suffix.lower()]


def _links(paths: list[Path], work_dir: Path) -> list[Path]:
    """Links to `paths` under plain names: `datasets` takes names for patterns, and skips some (`__future__.py`)."""
    folder = Path(tempfile.mkdtemp(dir=work_dir))
    links = [folder / f"{number}{path.suffix}" for number, path in enumerate(paths)]
    for link, path in zip(links, paths, strict=True):
        link.symlink_to(path)
    return links


def _load(builder: str, links: list[Path], name: str, column: str, encoding: str) -> list[str]:
    import datasets

    options: dict[str, object] = {}
    if builder == "text":
        column = "text"
        # large_string: a document may exceed the 2 GiB of an Arrow string column.
        features = datasets.Features({"text": datasets.Value("large_string")})
        options = {"sample_by": "document", "encoding": encoding, "features": features}
    elif builder == "parquet":
        options = {"columns": [column]}
    else:
        options = {"encoding": encoding}
    with hub.quiet(offline=True):
        try:
            loaded = datasets.load_dataset(
                builder,
                data_files={"train": [glob.escape(str(link)) for link in links]},
                split="train",
                cache_dir=str(links[0].parent / "cache"),
                **options,
            )
            rows = loaded[column][:]
        except Exception as error:  # `datasets` wraps all kinds
            if hub.is_disk_full(error):
                raise OutOfMemoryError(
                    f"no space to read '{name}' in '{links[0].parent}'; set data.cache_dir"
                ) from None
            raise DataError(f"'{name}' cannot be read as {builder}: {hub.cause(error)}") from None
    for number, row in enumerate(rows):
        if not isinstance(row, str):
            raise DataError(f"'{name}' row {number}, column '{column}': {type(row).__name__} instead of text")
    return rows


def _check_text(path: Path, column: str, encoding: str) -> None:
    raw = path.read_bytes()
    text = _decode(raw, path, encoding)
    if "\0" in text:
        raise DataError(f"'{path}' is a binary file (NUL at byte {raw.index(0)}); posx reads {FORMATS} files")


def _decode(raw: bytes, path: Path, encoding: str) -> str:
    if not is_text_encoding(encoding):
        raise ConfigError(f"data.text_encoding '{encoding}' is unknown; use a Python codec such as 'utf-8'")
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding.lower().startswith("utf-8") and b"\0" in raw:
            raise DataError(
                f"'{path}' is a binary file (NUL at byte {raw.index(0)}); posx reads {FORMATS} files"
            ) from None
        raise DataError(
            f"'{path}' is not {encoding}: byte 0x{raw[error.start]:02X} at offset {error.start}; convert it, or set "
            "data.text_encoding (for example to 'latin-1')"
        ) from None


def _check_json(path: Path, column: str, encoding: str) -> None:
    text = _decode(path.read_bytes(), path, encoding)
    for place, record in _json_records(text.removeprefix("\ufeff"), path):
        if not isinstance(record, dict):
            raise DataError(f"'{path}' {place} is a JSON {type(record).__name__}; an object with text is wanted")
        if column not in record:
            seen = ", ".join(map(repr, record)) or "none"
            raise DataError(f"'{path}' {place} has no column '{column}' (columns there: {seen}); set data.text_column")
        value = record[column]
        if not isinstance(value, str):
            raise DataError(f"'{path}' {place}, column '{column}': {type(value).__name__} instead of text")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f"'{path}' {place}, column '{column}': a lone surrogate, which is no text") from None


def _json_records(text: str, path: Path) -> Iterator[tuple[str, object]]:
    if text.lstrip()[:1] == "[":
        try:
            records = parsed(text)
        except ValueError as error:
            raise DataError(f"'{path}' is not JSON: {error}") from None
        yield from ((f"record {number}", record) for number, record in enumerate(records))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                record = parsed(line)
            except ValueError as error:
                raise DataError(
                    f"'{path}' line {number} is not JSON ({error}); write an object a line, or one array of objects"
                ) from None
            yield f"line {number}", record


def _check_parquet(path: Path, column: str, encoding: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_column(file.schema_arrow, path, column)
            for _ in file.iter_batches(columns=[column]):  # `datasets` does not look at the checksums of pages
                pass
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"'{path}' cannot be read as parquet: {hub.cause(error)}") from None


def _check_column(schema: Any, path: Path, column: str) -> None:
    import pyarrow as pa

    if column not in schema.names:
        seen = ", ".join(map(repr, schema.names)) or "none"
        raise DataError(f"'{path}' has no column '{column}' (columns there: {seen}); set data.text_column")
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"'{path}', column '{column}': {kind} instead of strings; set data.text_column")


_CHECKS: dict[str, Callable[[Path, str, str], None]] = {
    "text": _check_text,
    "json": _check_json,
    "parquet": _check_parquet,
}


def _is_hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(root).parts)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns an `OSError` about `path` into a `DataError`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}") from None
