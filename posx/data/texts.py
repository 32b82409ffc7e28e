"""The files of a text: local ones, or those that a Hugging Face hub data set is stored in; and the place of a fault.

The network is used for hub data sets alone, without the progress bars and notices of `datasets`.
"""

import functools
import hashlib
import re
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posx.config.sections import DataConfig
from posx.errors import DataError
from posx.files.lines import parsed
from posx.progress import counted

_SPLIT = re.compile(r"(?:^|\.)(train|validation|valid|val|dev|test)(?=$|[./]|[-_]?\d)")
_OTHER_NAMES = {"valid": "validation", "val": "validation", "dev": "validation"}
#: The form of a hub data set's name: "name" or "owner/name".
HUB_NAME = re.compile(r"(?!.*\.\.)\w[\w.-]*(/\w[\w.-]*)?")
PROBE_SECONDS = 1.5


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
            with _readable(path):
                total.update(f"{file_digest(path)} {name}\n".encode("utf-8", "surrogateescape"))
        return total.hexdigest()

    def rows(self, config: DataConfig) -> Iterator[str]:
        """Yield the texts; a text file is one. Raises DataError with file, place and cause."""
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


def file_digest(path: Path) -> str:
    """Return the sha256 of the bytes of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_files(where: str, key: str) -> Files:
    """Find all usable files at `where`, a file or folder, sorted by name, but hidden files and those of other formats.

    `key` is the setting for messages. Raises DataError if there is none, or the only one is empty.
    """
    path = Path(where).expanduser().absolute()
    if not path.exists():
        parent = next(parent for parent in path.parents if parent.is_dir())
        raise DataError(f"{key} '{path}' does not exist. The nearest existing folder is '{parent}'.")
    if not path.is_dir():
        if path.suffix.lower() not in READERS or not path.is_file():
            raise DataError(f"{key} '{path}' has a format that posx does not read. It reads {FORMATS} files.")
        if not path.stat().st_size:
            raise DataError(f"{key} '{path}' is empty (0 bytes). Name a file with text in it.")
        return Files(path.parent, (path,), str(path))
    usable, empty, others = list[Path](), list[Path](), list[Path]()
    for file in sorted(path.rglob("*")):
        if not _is_hidden(file, path) and file.is_file():
            kind = others if file.suffix.lower() not in READERS else usable if file.stat().st_size else empty
            kind.append(file)
    if not usable and empty:
        raise DataError(f"{key} '{path}': all files are empty (0 bytes). Name files with text in them.")
    if not usable:
        raise DataError(f"{key} '{path}' is a folder without files that posx reads. It reads {FORMATS} files.")
    left = [_named(files, why) for files, why in ((empty, "empty"), (others, f"not of {FORMATS}")) if files]
    return Files(path, tuple(usable), str(path), "; ".join(left))


def find_splits(where: str) -> list[Files]:
    """Find the training files at `where`, then the validation files if names or top folders tell the split.

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
                f"data.source '{files.root}' has only files of the splits {', '.join(sorted(splits))} and none "
                "whose name starts with 'train'. Name the training file itself as data.source."
            )
        return [files]
    others = f"{counted(unused, 'file')} left out: other files are named train, and these name no split"
    notice = "; ".join(filter(None, [others if unused else "", files.left_out]))
    named = [(splits["train"], notice), (splits.get("validation"), "")]
    return [Files(files.root, tuple(paths), files.description, left_out) for paths, left_out in named if paths]


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
                f"'{path}' is not {encoding}: byte 0x{raw[error.start]:02X} at offset {error.start}. Convert it, or "
                "set data.text_encoding, for example to 'latin-1'."
            ) from None
        text = "\0"
    if "\0" in text:
        raise DataError(
            f"'{path}' is a binary file (NUL at byte {raw.index(0)}). Name text: posx reads {FORMATS} files."
        )
    yield text


def _read_json(path: Path, column: str, encoding: str) -> Iterator[str]:
    """Yield the texts of an array of objects, or of an object a line."""
    text = next(_read_text(path, "", encoding)).removeprefix("\ufeff")
    if text.lstrip()[:1] == "[":
        records = ((f"'{path}' record {n}", record) for n, record in enumerate(_from_json(f"'{path}'", text)))
    else:
        places = ((f"'{path}' line {n}", line) for n, line in enumerate(text.split("\n"), 1))
        records = ((where, _from_json(where, line)) for where, line in places if line.strip())
    for where, record in records:
        if not isinstance(record, dict):
            raise DataError(f"{where} is a JSON {type(record).__name__}, but an object with text is expected.")
        _check_column(where, column, record)
        yield _checked_text(where, column, record[column])


def _from_json(where: str, text: str) -> Any:
    try:
        return parsed(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}). Write one object a line, or one array of objects.") from None


def _read_table(path: Path, column: str, encoding: str) -> Iterator[str]:
    """Yield the texts of a parquet file, or of an Arrow file of `datasets`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    form = path.suffix.lower().removeprefix(".")
    try:
        if form == "parquet":
            file = pq.ParquetFile(path, page_checksum_verification=True)
            schema, read = file.schema_arrow, functools.partial(file.read, columns=[column])
        else:
            stream = pa.ipc.open_stream(pa.memory_map(str(path)))
            schema, read = stream.schema, stream.read_all
        _check_column(f"'{path}'", column, schema.names)
        kind = schema.field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(f"'{path}', column '{column}': {kind} instead of strings. Set data.text_column.")
        rows = read().column(column).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"'{path}' cannot be read as {form}: {_reason(error)}") from None
    for number, row in enumerate(rows):
        yield _checked_text(f"'{path}' row {number}", column, row)


def _check_column(where: str, column: str, names: Collection[object]) -> None:
    """Raise DataError unless `column` is among `names`, those of a table or record."""
    if column not in names:
        seen = ", ".join(map(repr, names)) or "none"
        raise DataError(
            f"{where} has no column '{column}' (columns there: {seen}). Name one with --config.data.text_column=COLUMN"
        )


def _checked_text(where: str, column: str, value: object) -> str:
    """Return `value`, that of `column`. Raises DataError if it is no text."""
    if not isinstance(value, str):
        raise DataError(f"{where}, column '{column}': {type(value).__name__} instead of text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}, column '{column}': a lone surrogate, which is no text. Remove it.") from None
    return value


#: Readers by the suffix of a file: (path, column, encoding) to texts.
READERS: dict[str, Callable[[Path, str, str], Iterator[str]]] = {
    **dict.fromkeys((".txt", ".text", ".md", ".py", ".raw", ".tokens", ""), _read_text),
    **dict.fromkeys((".parquet", ".arrow"), _read_table),
    **dict.fromkeys((".json", ".jsonl"), _read_json),
}
FORMATS = " ".join(suffix for suffix in READERS if suffix)


def load_hub(config: DataConfig, splits: list[str]) -> list[Files]:
    """Find the files of the `splits` of a hub data set, from the network or in the local cache of `datasets`.

    Without a network (found out within PROBE_SECONDS) only the cache is tried. Raises DataError if the data set, a
    split or the column is not there.
    """
    import datasets
    from huggingface_hub import constants

    name, subset = config.source, config.subset
    online = not (datasets.config.HF_HUB_OFFLINE or constants.HF_HUB_OFFLINE) and _reachable()
    with _quiet(offline=not online):
        try:
            found = datasets.load_dataset(name, subset or None, keep_in_memory=False)
        except Exception as error:  # `datasets` raises all kinds
            if online:
                raise DataError(
                    f"hub data set '{name}' (subset '{subset}') cannot be loaded: {_cause(error)}"
                ) from None
            wanted = f"'{name}' with subset '{subset}'" if subset else f"'{name}'"
            raise DataError(
                f"data.source {wanted} is not a local path. As a hub data set it is not cached here, and the hub "
                "cannot be reached. Set data.source to a local text file or folder. Or copy a filled cache here "
                "and set HF_HOME to it."
            ) from None
    parts = []
    for split in splits:
        if split not in found:
            raise DataError(f"hub data set '{name}' has no split '{split}'. It has {', '.join(map(repr, found))}.")
        _check_column(f"hub data set '{name}'", config.text_column, found[split].column_names)
        paths = tuple(Path(entry["filename"]) for entry in found[split].cache_files)
        folder = paths[0].parent if paths else Path()
        parts.append(Files(folder, paths, f"{name}:{subset}" if subset else name))
    return parts


@contextmanager
def _quiet(offline: bool) -> Iterator[None]:
    """Hide progress bars and notices of `datasets` for a while, and, if `offline`, keep it from the network."""
    import datasets
    from datasets.utils import logging
    from huggingface_hub import constants

    with ExitStack() as after:
        switches: Any
        for switches in (datasets.config, constants):
            after.callback(setattr, switches, "HF_HUB_OFFLINE", switches.HF_HUB_OFFLINE)
            switches.HF_HUB_OFFLINE |= offline
        after.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        if not datasets.are_progress_bars_disabled():
            after.callback(datasets.enable_progress_bars)
            datasets.disable_progress_bars()
        yield


def _cause(error: BaseException) -> str:
    """Return the innermost cause of `error` in one line."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return _reason(error)


def _reason(error: BaseException) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines() or ["no details"]
    return f"{type(error).__name__}: {lines[0]}"


def _reachable() -> bool:
    """Return within PROBE_SECONDS whether the hub, or the proxy in front of it, accepts a connection."""
    from huggingface_hub import constants

    url = urllib.parse.urlsplit(constants.ENDPOINT)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urllib.parse.urlsplit(proxy if "://" in proxy else f"//{proxy}")
    port = url.port or (80 if url.scheme == "http" else 443)
    answer: list[bool] = []

    def connect() -> None:
        with suppress(OSError):
            socket.create_connection((url.hostname or "", port), PROBE_SECONDS).close()
            answer.append(True)

    # In a thread, since looking up the name obeys no time limit.
    probe = threading.Thread(target=connect, daemon=True)
    probe.start()
    probe.join(PROBE_SECONDS)
    return bool(answer)
