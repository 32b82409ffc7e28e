"""Token files: written once for each content of text and settings, then memory-mapped and verified.

A folder <cache>/tokens/<key> holds the tokens and the documents' offsets of each split. It also holds the bytes of text
behind each token of the held-out split, and the tokenizer if posx trained it. A header with the digest of each file is
written last: a folder without a valid header counts as empty.
"""

import functools
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posx.errors import ConfigError, DataError, OutOfMemoryError, join_problems
from posx.lab.config.data import DataConfig
from posx.lab.data import corpus
from posx.lab.data.batches import Dataset, batch, check_length
from posx.lab.data.corpus import Document, Source
from posx.lab.data.encoded import encode_documents, text_bytes
from posx.lab.data.ids import array_pieces
from posx.lab.data.overlap import warnings
from posx.lab.data.tasks import open_task
from posx.lab.data.tokenizers import ByteTokenizer, IdTokenizer, Tokenizer, load_tokenizer, token_dtype, train_bpe, utf8
from posx.lab.files.atomic import disk_full, replace_file, write_bytes
from posx.lab.files.checksums import file_checksum
from posx.lab.files.locks import lock
from posx.lab.progress import quantity
from posx.notices import say

PIPELINE_VERSION = 8  # raise it when the same text would give other files
SPLITS = ("train", "validation")
_HEADER, _TOKENIZER, _TOKEN_BYTES = "header.json", "tokenizer.json", "validation.bytes.npy"
_READ = 64 << 20  # bytes of a token file up to which it is read into memory
Log = Callable[[str], object]


@dataclass(frozen=True)
class TokenStore:
    """One split: documents one after the other, each followed by one eos."""

    tokens: np.ndarray  # read-only, a memory map if it is large; uint8, uint16 or uint32 by vocabulary
    num_bytes: int | None  # of the documents' UTF-8 text, separators not counted; None if token ids are not decoded
    digest: str  # sha256 (hex) of the token file
    offsets: np.ndarray  # int64 [num_documents + 1]: the start of each document, in tokens, and the end
    token_bytes: np.ndarray | None  # [tokens] UTF-8 bytes behind each token of held-out text, None if not known

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True)
class TextDataset(Dataset):
    """Both splits of a text and their tokenizer.

    Attributes:
      train: empty without training text.
      validation: the held-out split.
      tokenizer: of both splits.
      digest: identifies both splits and the tokenizer by content.
      source: a description of the text.
      warnings: reasons to doubt results on this text, also logged at each start.
    """

    train: TokenStore
    validation: TokenStore
    tokenizer: Tokenizer
    digest: str
    source: str
    warnings: tuple[str, ...]

    @property
    def held_out_digest(self) -> str:  # type: ignore[override]
        return _digest(f"{self.tokenizer.digest} {self.validation.digest}".encode())

    def check_length(self, length: int) -> None:
        """Raise DataError if the training text holds no window of `length` tokens."""
        check_length(len(self.train.tokens), length, "the training text")

    def batch(self, *, seed: int, step: int, batch_size: int, length: int, rows: slice = slice(None)) -> np.ndarray:
        """Return rows of batch number `step` of the training text, see `posx.lab.data.batch`."""
        return batch(
            self.train.tokens, digest=self.digest, seed=seed, step=step, batch_size=batch_size, length=length, rows=rows
        )

    def summary(self) -> str:
        """Describe in one line the source, the text read and held out, the tokenizer, and the digests."""
        train, held_out = (
            f"{'' if store.num_bytes is None else quantity(store.num_bytes, 'byte') + ' in '}"
            f"{quantity(store.num_documents, 'document')} ({quantity(len(store.tokens), 'token')})"
            for store in (self.train, self.validation)
        )
        tokenizer = f"{self.tokenizer.name} tokenizer, {self.tokenizer.vocab_size:,} ids"
        digests = f"digest {self.digest[:12]}, of the held-out text {self.held_out_digest[:12]}"
        return f"{self.source}: {train} to train on, {held_out} held out; {tokenizer}; {digests}"


def prepare(
    config: DataConfig, log: Log = lambda line: None, training: bool = True, tokenizer: Tokenizer | None = None
) -> Dataset:
    """Return the tokenised corpus that `config` names. The same text and settings are tokenised only once.

    Text is recognised by its content, never by its date. Token files are verified on each call and rebuilt if damaged.

    Args:
      config: the settings.
      log: called with lines for the user.
      training: whether there is training text. Without it only `validation` is read, by a tokenizer that exists.
      tokenizer: of a trained run; None for that of the settings. `config.tokenizer` then only says what is read.

    Raises:
      ConfigError: for settings that make no sense.
      DataError: for text, a tokenizer or a cache folder that cannot be used.
      OutOfMemoryError: for a full disk.
    """
    if problems := config.problems():
        raise ConfigError(join_problems(problems))
    if config.is_task:
        return open_task(config)
    source, tokenizer = corpus.find_source(config, training), tokenizer or named_tokenizer(config)
    folder = cache_folder(config) / "tokens" / _key(config, source, tokenizer)
    try:
        dataset = _open(folder, source, tokenizer)
    except (OSError, ValueError):  # damaged, or being rebuilt by another process: decided under the lock
        dataset = _open_or_build(folder, config, source, tokenizer, log)
    for warning in dataset.warnings:
        log(warning)
    return dataset


def named_tokenizer(config: DataConfig) -> Tokenizer | None:
    """Return the tokenizer of the settings, None for one that is trained on the text."""
    if config.tokenizer == "ids":
        return IdTokenizer(config.num_ids)
    known = {"bytes": ByteTokenizer(), "bpe": None}
    return known[config.tokenizer] if config.tokenizer in known else load_tokenizer(config.tokenizer)


def _open_or_build(
    folder: Path, config: DataConfig, source: Source, tokenizer: Tokenizer | None, log: Log
) -> TextDataset:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder / "lock", lambda holder: log("waiting for another process that prepares the same data")):
            try:
                return _open(folder, source, tokenizer)
            except (OSError, ValueError) as error:
                if (folder / _HEADER).exists():
                    log(f"building the token files again: {error}")
            _build(folder, config, source, tokenizer, log)
            return _open(folder, source, tokenizer)
    except OSError as error:
        reason = error.strerror or str(error)
        if disk_full(error):
            raise OutOfMemoryError(
                f"no space is left for token files in '{folder}' ({reason}). Free space, or choose another folder "
                "with --config.data.cache_dir=FOLDER"
            ) from None
        raise DataError(
            f"token files cannot be kept in '{folder}' ({reason}). Choose another folder with "
            "--config.data.cache_dir=FOLDER"
        ) from None


def cache_folder(config: DataConfig) -> Path:
    """Return `cache_dir`, else "posx" in $XDG_CACHE_HOME or ~/.cache, or if that is read-only, a temporary folder."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return _usable((Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "posx")


@functools.cache
def _usable(folder: Path) -> Path:
    """Return `folder` if files can be written in it, else a temporary folder of this user, which a notice names."""
    try:
        with tempfile.TemporaryFile(dir=next(path for path in (folder, *folder.parents) if path.exists())):
            return folder
    except OSError as error:
        why = error.strerror
    try:
        instead = _temporary()
    except OSError:
        return folder  # nothing can be written anywhere: the writer will say so
    say(
        f"notice: {folder} cannot be written ({why}), so caches are kept in {instead}. Set "
        "XDG_CACHE_HOME=FOLDER to choose another folder."
    )
    return instead


def _temporary() -> Path:
    """Return one folder for all processes of this user, unless another user has made a folder of that name."""
    user = getattr(os, "getuid", lambda: "")()
    folder = Path(tempfile.gettempdir(), f"posx-{user}")
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or user not in ("", facts.st_uid):
        return Path(tempfile.mkdtemp(prefix="posx-"))
    return folder


def _key(config: DataConfig, source: Source, tokenizer: Tokenizer | None) -> str:
    """Hash all that decides the tokens, and no places, names of caches or dates."""
    places = ("source", "subset", "train_split", "validation_split", "validation")  # `source.digest` stands for them
    settings = {name: value for name, value in config.token_settings().items() if name not in places}
    settings |= {"version": PIPELINE_VERSION, "text": source.digest, "tokenizer": tokenizer and tokenizer.digest}
    return _digest(json.dumps(settings, sort_keys=True).encode())[:32]


def _build(folder: Path, config: DataConfig, source: Source, tokenizer: Tokenizer | None, log: Log) -> None:
    """Fill `folder`, whose lock is held, in place of the leftovers of an earlier attempt."""
    for left in folder.iterdir():
        if not left.name.startswith("lock"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    log(f"reading {source.description}")
    doubts: list[str] = []
    train, held_out = documents = corpus.load_documents(
        source, config, lambda line: (doubts.append if line.startswith("warning: ") else log)(line), tokenizer
    )
    if tokenizer is None:
        log(f"training a BPE tokenizer of {config.num_ids} tokens")
        tokenizer = train_bpe((text for text in train if isinstance(text, str)), config.num_ids)
        tokenizer.save(folder / _TOKENIZER)
    sizes = {split: _write(folder, split, texts, tokenizer) for split, texts in zip(SPLITS, documents, strict=True)}
    if (known := text_bytes(held_out, tokenizer)) is not None:
        sizes["validation"] = int(known.sum())
        with replace_file(folder / _TOKEN_BYTES) as file:
            np.save(file, known.astype(np.min_scalar_type(known.max())))
    if corpus.find_source(config, source.train is not None).digest != source.digest:  # mapped files are read until here
        raise DataError(f"'{source.description}' was changed while posx read it. Run the same command again.")
    header = {
        "key": folder.name,
        "num_bytes": sizes,
        "warnings": [*doubts, *warnings(train, held_out, tokenizer, known is not None)],
        "files": {path.name: file_checksum(path) for path in folder.iterdir() if not path.name.startswith("lock")},
    }
    text = json.dumps(header, indent=1).encode()
    write_bytes(folder / _HEADER, f"{_digest(text)}\n".encode() + text)


def _write(folder: Path, split: str, documents: list[Document], tokenizer: Tokenizer) -> int | None:
    """Write the tokens of `documents` to the files of `split`. Return the bytes of their text, None if not known."""
    offsets, dtype = [0], token_dtype(tokenizer.vocab_size)
    eos = np.array([tokenizer.eos], dtype).tobytes()
    with replace_file(folder / f"{split}.tokens") as file:
        for ids in encode_documents(documents, tokenizer):
            for _, piece in array_pieces(ids):
                # Ids out of range would not fail in JAX: indexing clamps them to the last row.
                if int(piece.max()) >= tokenizer.vocab_size:
                    raise DataError(
                        f"the tokenizer gave id {piece.max()}, outside its {tokenizer.vocab_size} ids. Repair its "
                        "file, or choose another data.tokenizer."
                    )
                file.write(piece.astype(dtype).tobytes())
            file.write(eos)
            offsets.append(offsets[-1] + len(ids) + 1)
    with replace_file(folder / f"{split}.offsets.npy") as file:
        np.save(file, np.array(offsets, np.int64))
    texts = [text for text in documents if isinstance(text, str)]
    return sum(len(utf8(text)) for text in texts) if len(texts) == len(documents) else None


def _open(folder: Path, source: Source, tokenizer: Tokenizer | None) -> TextDataset:
    """Map and verify the files of `folder`. Raises OSError or ValueError for a missing or damaged file."""
    wanted, _, text = (folder / _HEADER).read_bytes().partition(b"\n")
    if _digest(text).encode() != wanted:
        raise ValueError(f"{folder / _HEADER} is damaged")
    header = json.loads(text)
    if header.get("key") != folder.name:
        raise ValueError(f"{folder / _HEADER} is of other text or settings: {header.get('key')}")
    for name, digest in header["files"].items():
        if file_checksum(folder / name) != digest:
            raise ValueError(f"token file '{folder / name}' is damaged")
    tokenizer = tokenizer or load_tokenizer(folder / _TOKENIZER)
    dtype = token_dtype(tokenizer.vocab_size)
    train, held_out = (
        TokenStore(
            _map_tokens(folder / f"{split}.tokens", dtype),
            header["num_bytes"][split],
            header["files"][f"{split}.tokens"],
            np.load(folder / f"{split}.offsets.npy"),
            np.load(folder / f"{split}.bytes.npy") if f"{split}.bytes.npy" in header["files"] else None,
        )
        for split in SPLITS
    )
    digest = _digest(f"{tokenizer.digest} {train.digest} {held_out.digest}".encode())
    return TextDataset(train, held_out, tokenizer, digest, source.description, tuple(header["warnings"]))


def _map_tokens(path: Path, dtype: np.dtype) -> np.ndarray:
    """Return the tokens, read-only. Small files are read: a mapped one that is cut short ends the process (SIGBUS)."""
    if path.stat().st_size > _READ:
        return np.memmap(path, dtype, mode="r")
    tokens = np.fromfile(path, dtype)
    tokens.flags.writeable = False
    return tokens


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
