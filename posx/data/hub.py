"""Hugging Face hub data sets, with and without a network, and the manners of `datasets` (progress bars, errors)."""

import hashlib
import re
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posx.errors import DataError
from posx.files.atomic import disk_full

_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
PROBE_SECONDS = 1.5


@dataclass(frozen=True)
class HubSplit:
    """One split of a hub data set, already downloaded; `data` is a `datasets.Dataset`."""

    name: str
    split: str
    column: str
    data: Any = field(compare=False, repr=False)

    @property
    def description(self) -> str:
        return self.name

    def digest(self) -> str:
        """sha256 (hex) of the bytes of the data set's Arrow files, so the same on- and offline."""
        total = hashlib.sha256(f"{self.split} {self.data.num_rows}\n".encode())
        for entry in self.data.cache_files:
            with Path(entry["filename"]).open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()

    def rows(self) -> list[str]:
        rows = self.data[self.column][:]
        for number, row in enumerate(rows):
            if not isinstance(row, str):
                raise DataError(
                    f"hub data set '{self.name}' split '{self.split}' row {number}: "
                    f"column '{self.column}' holds {type(row).__name__} instead of text"
                )
        return rows


def is_hub_name(source: str) -> bool:
    """Whether `source` has the form "name" or "owner/name"."""
    return _NAME.fullmatch(source) is not None and ".." not in source


def load_hub(name: str, subset: str, splits: list[str], column: str) -> list[HubSplit]:
    """The wanted `splits` of a hub data set, from the network or from the local cache of `datasets`.

    Without a network (found out within `PROBE_SECONDS`) only the cache is tried. Raises `DataError` if the data set,
    a split or the column is not there.
    """
    import datasets

    online = not _offline() and _reachable()
    with quiet(offline=not online):
        try:
            found = datasets.load_dataset(name, subset or None)
        except Exception as error:  # `datasets` raises all kinds
            if online:
                raise DataError(f"hub data set '{name}' (subset '{subset}') cannot be loaded: {cause(error)}") from None
            wanted = f"'{name}' with subset '{subset}'" if subset else f"'{name}'"
            raise DataError(
                f"data.source {wanted} is not a local path, and as a hub data set it is neither cached here nor can "
                "the hub be reached; set data.source to a local text file or folder, or copy a filled cache here and "
                "point HF_HOME to it"
            ) from None
    parts = []
    for split in splits:
        if split not in found:
            known = ", ".join(map(repr, found))
            raise DataError(f"hub data set '{name}' has no split '{split}'; it has {known}")
        if column not in found[split].column_names:
            known = ", ".join(map(repr, found[split].column_names))
            raise DataError(f"hub data set '{name}' has no column '{column}' (columns: {known}); set data.text_column")
        parts.append(HubSplit(f"{name}:{subset}" if subset else name, split, column, found[split]))
    return parts


@contextmanager
def quiet(offline: bool) -> Iterator[None]:
    """Silence progress bars and notices of `datasets` for a while, and, if `offline`, keep it from the network."""
    import datasets
    import huggingface_hub.constants
    from datasets.utils import logging

    bars, verbosity = datasets.are_progress_bars_disabled(), logging.get_verbosity()
    switches = (datasets.config, huggingface_hub.constants)
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    datasets.disable_progress_bars()
    logging.set_verbosity_error()
    try:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value or offline  # type: ignore[attr-defined]
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value  # type: ignore[attr-defined]
        logging.set_verbosity(verbosity)
        if not bars:
            datasets.enable_progress_bars()


def is_disk_full(error: BaseException) -> bool:
    """Whether a disk without room is what `error` comes from."""
    error = _innermost(error)
    return isinstance(error, OSError) and disk_full(error)


def _innermost(error: BaseException) -> BaseException:
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error


def cause(error: BaseException) -> str:
    """The innermost cause of `error` in one line."""
    error = _innermost(error)
    lines = str(error).strip().splitlines() or ["no details"]
    return f"{type(error).__name__}: {lines[0]}"


def _offline() -> bool:
    import datasets
    import huggingface_hub.constants

    return bool(datasets.config.HF_HUB_OFFLINE or huggingface_hub.constants.HF_HUB_OFFLINE)


def _reachable() -> bool:
    """Whether the hub (or the proxy in front of it) accepts a connection; never takes longer than `PROBE_SECONDS`."""
    import huggingface_hub.constants

    url = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urllib.parse.urlsplit(proxy if "://" in proxy else f"//{proxy}")
    port = url.port or (80 if url.scheme == "http" else 443)
    answer: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection((url.hostname or "", port), PROBE_SECONDS).close()
            answer.append(True)
        except OSError:
            pass

    # In a thread, since looking up the name obeys no time limit.
    probe = threading.Thread(target=connect, daemon=True)
    probe.start()
    probe.join(PROBE_SECONDS)
    return bool(answer)
