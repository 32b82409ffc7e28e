"""The files of a text: local ones, or those that a Hugging Face hub data set is stored in.

The network is used for hub data sets alone, without the progress bars and notices of `datasets`.
"""

import dataclasses
import hashlib
import os
import re
import shlex
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posx.errors import DataError
from posx.lab.config.data import DataConfig
from posx.lab.data.decoding import TextDecoder
from posx.lab.data.ids import need_tokenizer
from posx.lab.data.readers import FORMATS, IDS, READERS, TEXTS, Item, check_column, reason
from posx.lab.files.checksums import file_checksum
from posx.lab.progress import quantity

_SPLIT = re.compile(r"(?:^|\.)(train|validation|valid|val|dev|test)(?=$|[./]|[-_]?\d)")
_OTHER_NAMES = {"valid": "validation", "val": "validation", "dev": "validation"}
#: The names of files about a data set. Beside rows or ids they are none of its texts.
_NOTES = ("readme", "license", "licence")
#: The form of a hub data set's name: "name" or "owner/name".
HUB_NAME = re.compile(r"(?!.*\.\.)\w[\w.-]*(/\w[\w.-]*)?")
PROBE_SECONDS = 1.5


@dataclass(frozen=True)
class Files:
    """The files of one split.

    Attributes:
      root: the folder that holds them.
      paths: of the files, below `root`.
      description: their name in messages.
      left_out: a notice about files that are left out, or not held out, "" without any.
    """

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
                total.update(f"{file_checksum(path)} {name}\n".encode("utf-8", "surrogateescape"))
        return total.hexdigest()

    def rows(self, config: DataConfig, decoder: TextDecoder) -> Iterator[Item]:
        """Yield texts and token ids; a text file is one. Files that cannot be decoded are left to the decoder.

        Raises DataError with file, place and cause.
        """
        for path in self.paths:
            with _readable(path):
                yield from READERS[path.suffix.lower()](path, config, decoder)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn an OSError about `path` into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}") from None


def find_files(config: DataConfig, setting: str) -> Files:
    """Find all usable files at the place that `setting` names, a file or folder.

    Files are sorted by name. Hidden files are left out, and those of formats that do not go with the tokenizer. So are
    a README and a license, if other files are not plain text.
    Raises DataError if there is no file, or the only one is empty.
    """
    key, path = f"data.{setting}", Path(getattr(config, setting)).expanduser().absolute()
    if not path.exists():
        parent = next(parent for parent in path.parents if parent.is_dir())
        raise DataError(f"{key} '{path}' does not exist. The nearest existing folder is '{parent}'.")
    reads_text = config.tokenizer in ("bytes", "bpe")
    if not path.is_dir():
        if path.suffix.lower() not in READERS or not path.is_file():
            raise DataError(f"{key} '{path}' has a format that posx does not read. {_conversion_hint(path)}")
        if path.suffix.lower() in IDS and reads_text:
            raise need_tokenizer(f"{key} '{path}' has a format of token ids", config)
        if not path.stat().st_size:
            raise DataError(f"{key} '{path}' is empty (0 bytes). Name a file with text in it.")
        return Files(path.parent, (path,), str(path))
    unread = {*(IDS if reads_text else ()), *(TEXTS if config.tokenizer == "ids" else ()), *_untyped_suffix(config)}
    formats = [suffix for suffix in READERS if suffix and suffix not in unread]
    usable, empty, others, broken = list[Path](), list[Path](), list[Path](), list[Path]()
    for file in sorted(_walk(path)):
        if not file.exists():
            broken.append(file)
        elif file.is_file():
            is_other = file.suffix.lower() not in READERS.keys() - unread
            kind = others if is_other else usable if file.stat().st_size else empty
            kind.append(file)
    if not usable and broken:
        raise DataError(f"{key} '{path}': '{broken[0].name}' is a broken link, and no other file can be read.")
    if not usable and empty:
        raise DataError(f"{key} '{path}': all files are empty (0 bytes). Name files with text in them.")
    if not usable:
        raise _without_files(f"{key} '{path}'", others, config)
    plain = [file for file in usable if file.suffix.lower() in TEXTS]
    notes = [file for file in plain if file.stem.lower() in _NOTES and len(plain) < len(usable)]
    usable = [file for file in usable if file not in notes]
    reasons = {"broken links": broken, "empty": empty, f"not of {' '.join(formats)}": others, "notes on data": notes}
    left = [_left_out_text(files, why) for why, files in reasons.items() if files]
    return Files(path, tuple(usable), str(path), "; ".join(left))


def _untyped_suffix(config: DataConfig) -> tuple[str, ...]:
    """Return the suffix of files of numbers whose type is not known, and which a folder of other files may hold."""
    return () if config.dtype or config.tokenizer == "ids" else (".bin",)


def _conversion_hint(path: Path) -> str:
    """Return how to get a file that posx reads."""
    tools = {".gz": "gunzip --keep", ".zst": "zstd --decompress", ".xz": "unxz --keep", ".bz2": "bunzip2 --keep"}
    if path.suffix.lower() in tools:
        return f"It is compressed. Unpack it: {tools[path.suffix.lower()]} {shlex.quote(str(path))}"
    if path.suffix.lower() == ".npz":
        return "It holds several arrays. Write the token ids as one: np.save('ids.npy', ids)"
    return f"It reads {FORMATS} files."


def _without_files(where: str, others: list[Path], config: DataConfig) -> DataError:
    """Return the error of a folder with no file to read. others: files of other formats there."""
    ids = [file for file in others if file.suffix.lower() in IDS]
    if ids and config.tokenizer in ("bytes", "bpe"):
        return need_tokenizer(f"{where} holds token ids, '{ids[0].name}'", config)
    if ids:
        return DataError(
            f"{where} holds '{ids[0].name}', numbers without a type. Name it, for example --config.data.dtype=uint16"
        )
    packed = f" {_conversion_hint(others[0])}" if others else f" It reads {FORMATS} files."
    return DataError(f"{where} is a folder without files that posx reads.{packed}")


def find_splits(config: DataConfig) -> list[Files]:
    """Find the training files of `config`, then the validation files if names or top folders tell the split.

    A top folder decides before the file's own name. A number may follow, as in train-0.txt. Other words make another
    name, as in "train to somewhere.txt".
    """
    files = find_files(config, "source")
    splits: dict[str, list[Path]] = {}
    for name, path in zip(files.names(), files.paths, strict=True):
        match = _SPLIT.match(name.lower() if "/" in name else "") or _SPLIT.search(path.stem.lower())
        if match and len(files.paths) > 1:
            splits.setdefault(_OTHER_NAMES.get(match[1], match[1]), []).append(path)
    unused = len(files.paths) - sum(map(len, splits.values()))
    if "train" not in splits:
        if splits and not unused:
            raise DataError(
                f"data.source '{files.root}' has only files of the splits {', '.join(sorted(splits))} and none "
                "whose name starts with 'train'. Name the training file itself as data.source."
            )
        held_out = [path for split in sorted(splits) for path in splits[split]]
        notice = f"not held out, as no file is named train: {_names(held_out)}" if held_out else ""
        return [dataclasses.replace(files, left_out="; ".join(filter(None, [notice, files.left_out])))]
    others = f"{quantity(unused, 'file')} left out: other files are named train, and these name no split"
    used = ["train"] if config.validation else ["train", "validation"]
    spare = [path for split in sorted(splits.keys() - used) for path in splits[split]]
    spared = _left_out_text(spare, "of an unused split") if spare else ""
    notice = "; ".join(filter(None, [others if unused else "", spared, files.left_out]))
    return [
        Files(files.root, tuple(splits[split]), files.description, notice if split == "train" else "")
        for split in used
        if split in splits
    ]


def _left_out_text(files: list[Path], why: str) -> str:
    return f"left out as {why}: {_names(files)}"


def _names(files: list[Path]) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return f"{', '.join(file.name for file in files[:3])}{more}"


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below `folder` that are not hidden. Links to folders are followed, each folder is read once."""
    seen = {str(parent) for parent in folder.resolve().parents}
    for at, inner, names in os.walk(folder, followlinks=True):
        inner[:] = sorted(filter(_is_shown, inner), key=lambda name: (os.path.islink(os.path.join(at, name)), name))
        if (real := os.path.realpath(at)) in seen:
            inner.clear()
        else:
            seen.add(real)
            yield from (Path(at, name) for name in names if _is_shown(name))


def _is_shown(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


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
            dataset = datasets.load_dataset(name, subset or None, keep_in_memory=False)
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
        if split not in dataset:
            raise DataError(f"hub data set '{name}' has no split '{split}'. It has {', '.join(map(repr, dataset))}.")
        check_column(f"hub data set '{name}'", config.text_column, dataset[split].column_names)
        paths = tuple(Path(entry["filename"]) for entry in dataset[split].cache_files)
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
    return reason(error)


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
