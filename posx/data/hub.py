"""Hugging Face hub data sets, with and without a network, without the progress bars and notices of `datasets`."""

import hashlib
import re
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posx.config.sections import DataConfig
from posx.data.text_files import check_column, checked_text
from posx.errors import DataError

_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
PROBE_SECONDS = 1.5


@dataclass(frozen=True)
class HubSplit:
    """One split of a hub data set, already downloaded; `data` is a `datasets.Dataset`."""

    description: str
    split: str
    data: Any = field(compare=False, repr=False)
    left_out = ""

    def digest(self) -> str:
        """Hash the bytes of the data set's Arrow files, the same on- and offline (sha256, hex)."""
        total = hashlib.sha256(f"{self.split} {self.data.num_rows}\n".encode())
        for entry in self.data.cache_files:
            with Path(entry["filename"]).open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()

    def rows(self, config: DataConfig) -> Iterator[str]:
        """Yield the texts of all rows. Raises DataError for a row without text."""
        for number, row in enumerate(self.data[config.text_column][:]):
            where = f"hub data set '{self.description}' split '{self.split}' row {number}"
            yield checked_text(where, config.text_column, row)


def is_hub_name(source: str) -> bool:
    """Tell whether `source` has the form "name" or "owner/name"."""
    return _NAME.fullmatch(source) is not None and ".." not in source


def load_hub(config: DataConfig, splits: list[str]) -> list[HubSplit]:
    """Load the wanted `splits` of a hub data set, from the network or from the local cache of `datasets`.

    Without a network (found out within PROBE_SECONDS) only the cache is tried. Raises DataError if the data set, a
    split or the column is not there.
    """
    import datasets
    from huggingface_hub import constants

    name, subset = config.source, config.subset
    online = not (datasets.config.HF_HUB_OFFLINE or constants.HF_HUB_OFFLINE) and _reachable()
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
    for split in splits:
        if split not in found:
            raise DataError(f"hub data set '{name}' has no split '{split}'; it has {', '.join(map(repr, found))}")
        check_column(f"hub data set '{name}'", config.text_column, found[split].column_names)
    return [HubSplit(f"{name}:{subset}" if subset else name, split, found[split]) for split in splits]


@contextmanager
def quiet(offline: bool) -> Iterator[None]:
    """Hide progress bars and notices of `datasets` for a while, and, if `offline`, keep it from the network."""
    import datasets
    from datasets.utils import logging
    from huggingface_hub import constants

    bars, verbosity = datasets.are_progress_bars_disabled(), logging.get_verbosity()
    switches = (datasets.config, constants)
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


def cause(error: BaseException) -> str:
    """Return the innermost cause of `error` in one line."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
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
