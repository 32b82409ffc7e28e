"""Token files: written once for a given content of text and settings, memory-mapped and verified ever after.

A folder <cache>/tokens/<key> holds, for each split, the tokens and the documents' offsets, for the held-out split the
bytes of text behind each token, the tokenizer if it was trained here, and a header, which is written last: a folder
without a valid header counts as empty.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from posx.config.data import DataConfig, check_config
from posx.data import corpus
from posx.data.corpus import Corpus, Source
from posx.data.overlap import PASSAGE, SHORTEST, chunks, overlap
from posx.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer, token_dtype, train_bpe, utf8
from posx.errors import DataError, OutOfMemoryError
from posx.files.atomic import disk_full, replacing
from posx.files.caches import usable
from posx.files.locks import lock
from posx.files.parse import parsed
from posx.progress import counted

PIPELINE_VERSION = 2  # raise it when the same text would give other files; old folders are then left unused
SPLITS = ("train", "validation")
LITTLE_TEXT = 1 << 16  # bytes of held-out text below which a warning says so
MOST_OVERLAP = 0.02  # of the held-out text; the default text, Python's own library, has 0.006
_TOKEN_BYTES = "validation.bytes.npy"
_READ = 64 << 20  # bytes of a token file up to which it is read into memory
Log = Callable[[str], object]


@dataclass(frozen=True)
class TokenStore:
    """One split: documents one after the other, each followed by one eos."""

    tokens: np.ndarray  # read-only, a memory map where it is large; uint8, uint16 or uint32 by vocabulary
    num_documents: int
    num_bytes: int  # of the documents' UTF-8 text, separators not counted
    digest: str  # sha256 (hex) of the token file
    offsets: np.ndarray  # int64 [num_documents + 1]: where each document starts, in tokens, and the end
    token_bytes: np.ndarray | None = None  # [tokens] UTF-8 bytes behind each; of held-out text, if the tokenizer tells


@dataclass(frozen=True)
class Dataset:
    """Both splits and their tokenizer; `digest` identifies text, tokenizer and split by content."""

    train: TokenStore
    validation: TokenStore
    tokenizer: Tokenizer
    digest: str
    source: str
    warnings: tuple[str, ...] = ()  # what makes results on this text less meaningful; also logged at each start

    def summary(self) -> str:
        """One line: the source, how much text is read and held out, the tokenizer, and the digest."""
        train, held_out = (
            f"{counted(store.num_bytes, 'byte')} in {counted(store.num_documents, 'document')} "
            f"({counted(len(store.tokens), 'token')})"
            for store in (self.train, self.validation)
        )
        tokenizer = f"{self.tokenizer.name} tokenizer, {self.tokenizer.vocab_size:,} ids"
        return f"{self.source}: {train} to train on, {held_out} held out; {tokenizer}; digest {self.digest[:12]}"


def prepare(config: DataConfig, log: Log | None = None) -> Dataset:
    """The tokenised corpus that `config` names; the same text and settings are tokenised only once.

    Text is recognised by its content, never by its date; token files are verified on each call and rebuilt if damaged.
    `log` is called with lines for the user. Raises `ConfigError` for senseless settings, `DataError` for text, a
    tokenizer or a cache folder that cannot be used, `OutOfMemoryError` for a full disk.
    """
    check_config(config)
    say = log or (lambda line: None)
    source = corpus.find(config)
    tokenizer = _given_tokenizer(config)
    folder = cache_folder(config) / "tokens" / _key(config, source, tokenizer)
    found = _open_or_build(folder, config, source, tokenizer, say)
    for warning in found.warnings:
        say(warning)
    return found


def _open_or_build(folder: Path, config: DataConfig, source: Source, tokenizer: Tokenizer | None, say: Log) -> Dataset:
    if (folder / "header.json").exists():
        try:
            return _open(folder, source, tokenizer)
        except DataError:
            pass  # damaged, or being rebuilt by another process: decided under the lock
    with _storage_errors(folder), _held(folder, say):
        if (folder / "header.json").exists():
            try:
                return _open(folder, source, tokenizer)
            except DataError as error:
                say(f"building the token files again: {error}")
        _build(folder, config, source, tokenizer, say)
        return _open(folder, source, tokenizer)


def cache_folder(config: DataConfig) -> Path:
    """The cache folder: `cache_dir`, else "posx" in $XDG_CACHE_HOME or ~/.cache, or if neither can be written, a
    temporary folder."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return usable((Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "posx")


def _given_tokenizer(config: DataConfig) -> Tokenizer | None:
    """The tokenizer that needs no training, or None."""
    if config.tokenizer == "bpe":
        return None
    return ByteTokenizer() if config.tokenizer == "bytes" else load_tokenizer(config.tokenizer)


def _key(config: DataConfig, source: Source, tokenizer: Tokenizer | None) -> str:
    """Hash of all that decides the tokens: not of places, names of caches or dates."""
    settings = asdict(config)
    for unrelated in ("source", "subset", "train_split", "validation_split", "validation", "cache_dir"):
        del settings[unrelated]  # `source.digest` stands for what they name
    settings["tokenizer"] = tokenizer.digest if tokenizer else "bpe"
    if tokenizer:
        del settings["vocab_size"]
    if not config.tuning_fraction:
        del settings["tuning_fraction"]  # younger than the folders of most
    settings |= {"version": PIPELINE_VERSION, "text": source.digest}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def _build(folder: Path, config: DataConfig, source: Source, tokenizer: Tokenizer | None, say: Log) -> None:
    """Fill `folder`, whose lock is held; what an earlier attempt left there is deleted first."""
    for left in folder.iterdir():
        if left.name != "lock":
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    say(f"reading {source.description}")
    with tempfile.TemporaryDirectory(dir=folder) as work:
        texts = corpus.load(source, config, Path(work))
    if corpus.find(config).digest != source.digest:
        raise DataError(f"data.source '{source.description}' was changed while it was read; start again")
    for note in texts.notes:
        say(note)
    if tokenizer is None:
        say(f"training a BPE tokenizer of {config.vocab_size} tokens")
        tokenizer = train_bpe(texts.train, config.vocab_size)
        tokenizer.save(folder / "tokenizer.json")
    header: dict[str, Any] = {"version": PIPELINE_VERSION, "tokenizer": tokenizer.digest, "source": source.description}
    for split, documents in zip(SPLITS, (texts.train, texts.validation), strict=True):
        header[split] = _write(folder, split, documents, tokenizer)
    bytes_digest = header["validation"]["bytes_digest"] = _write_token_bytes(folder, texts.validation, tokenizer)
    warnings = [*_text_warnings(texts), *_tokenizer_warnings(texts.validation, tokenizer, bool(bytes_digest))]
    header["warnings"] = warnings
    header["header_digest"] = _header_digest(header)
    with replacing(folder / "header.json") as file:
        file.write(json.dumps(header, indent=1).encode())


def _write(folder: Path, split: str, documents: list[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokenise `documents` into the files of `split`; the result is the split's entry in the header."""
    digest, dtype, num_bytes = hashlib.sha256(), token_dtype(tokenizer.vocab_size), 0
    eos, offsets = np.array([tokenizer.eos], dtype), [0]
    with replacing(folder / f"{split}.tokens") as file:
        for chunk in chunks(documents):
            for text, ids in zip(chunk, tokenizer.encode_batch(chunk), strict=True):
                # Ids out of range would not fail in JAX: indexing clamps them to the last row.
                if ids.size and int(ids.max()) >= tokenizer.vocab_size:
                    raise DataError(f"the tokenizer gave id {ids.max()}, outside its {tokenizer.vocab_size} ids")
                raw = np.append(ids.astype(dtype), eos).tobytes()
                file.write(raw)
                digest.update(raw)
                num_bytes += len(utf8(text))
                offsets.append(offsets[-1] + ids.size + 1)
    with replacing(folder / f"{split}.offsets.npy") as file:
        np.save(file, np.array(offsets, np.int64))
    return {
        "digest": digest.hexdigest(),
        "dtype": dtype.name,
        "num_tokens": offsets[-1],
        "num_documents": len(documents),
        "num_bytes": num_bytes,
        "offsets_digest": _file_digest(folder / f"{split}.offsets.npy"),
    }


def _write_token_bytes(folder: Path, documents: list[str], tokenizer: Tokenizer) -> str:
    """Write the bytes of text behind each token of the held-out split; return the file's digest, "" without a file."""
    found: list[Any] = []
    for chunk in chunks(documents):
        for text, sizes in zip(chunk, tokenizer.token_bytes(chunk), strict=True):
            if sizes is None:
                return ""
            found += [sizes, [len(utf8(text)) - sizes.sum()]]  # the separator gets what is dropped before it
    sizes = np.concatenate(found)
    with replacing(folder / _TOKEN_BYTES) as file:
        np.save(file, sizes.astype(np.min_scalar_type(sizes.max())))
    return _file_digest(folder / _TOKEN_BYTES)


def _text_warnings(texts: Corpus) -> Iterator[str]:
    """Yield what makes results on the held-out text less meaningful."""
    held_out, size = texts.validation, sum(len(utf8(text)) for text in texts.validation)
    if size < LITTLE_TEXT or len(held_out) == 1 < len(texts.train):
        yield (
            f"warning: only {size:,} bytes of text in {counted(len(held_out), 'document')} are held out, so results "
            "say little about other text. Give more text, a larger data.validation_fraction, or data.validation=PATH"
        )
    share = overlap(texts.train, held_out)
    if share > MOST_OVERLAP:
        yield (
            f"warning: {share:.0%} of the held-out text also stands in the training text, so results will flatter. "
            f"Compared are passages of {PASSAGE} bytes, and whole documents of {SHORTEST} bytes or more, without white "
            "space and case"
        )


def _tokenizer_warnings(held_out: list[str], tokenizer: Tokenizer, knows_bytes: bool) -> Iterator[str]:
    """Yield what the tokenizer does to bits per byte."""
    some = [text[:4096] for text in held_out[:64]]
    if not knows_bytes:
        yield (
            "warning: the tokenizer drops letters and does not say which text its tokens stand for, so there are no "
            "bits per byte"
        )
    elif [tokenizer.decode(ids) for ids in tokenizer.encode_batch(some)] != some:
        yield (
            "warning: decoding the tokens does not give the text back. Text that the tokenizer loses costs no bits: "
            "compare its bits per byte with care"
        )


def _open(folder: Path, source: Source, tokenizer: Tokenizer | None) -> Dataset:
    """Map and verify the files of `folder`; raises `DataError` naming the file that is missing or damaged."""
    try:
        header = parsed((folder / "header.json").read_bytes())
        if header.get("header_digest", _header_digest(header)) != _header_digest(header):  # older ones have none
            raise ValueError("header.json is damaged: its digest differs")
        stores = [_open_split(folder, split, header[split]) for split in SPLITS]
        if bytes_digest := header["validation"]["bytes_digest"]:
            sizes = _checked_array(folder / _TOKEN_BYTES, bytes_digest)
            stores[1] = replace(stores[1], token_bytes=sizes)
        expected, warnings = header["tokenizer"], tuple(header["warnings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"the token files in '{folder}' cannot be read ({error}); delete that folder") from None
    tokenizer = tokenizer or load_tokenizer(folder / "tokenizer.json")
    if tokenizer.digest != expected:
        raise DataError(f"'{folder / 'tokenizer.json'}' is damaged (its digest differs); delete that folder")
    parts = " ".join([tokenizer.digest, *(store.digest for store in stores)])
    digest = hashlib.sha256(parts.encode()).hexdigest()
    return Dataset(stores[0], stores[1], tokenizer, digest, source.description, warnings)


def _open_split(folder: Path, split: str, entry: dict[str, Any]) -> TokenStore:
    path, dtype = folder / f"{split}.tokens", np.dtype(entry["dtype"])
    size, wanted = path.stat().st_size, entry["num_tokens"] * dtype.itemsize
    if size != wanted:
        raise DataError(f"token file '{path}' is damaged: {size} bytes instead of {wanted}; delete that folder")
    _check_digest(path, entry["digest"])
    offsets = _checked_array(folder / f"{split}.offsets.npy", entry["offsets_digest"])
    return TokenStore(_mapped(path, dtype), entry["num_documents"], entry["num_bytes"], entry["digest"], offsets)


def _checked_array(path: Path, digest: str) -> np.ndarray:
    _check_digest(path, digest)
    return np.load(path, allow_pickle=False)


def _check_digest(path: Path, digest: str) -> None:
    if _file_digest(path) != digest:
        raise DataError(f"token file '{path}' is damaged: its digest differs from the header's; delete that folder")


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """The tokens, read-only. Small files are read: a mapped one that is cut short ends the process (SIGBUS)."""
    if path.stat().st_size > _READ:
        return np.memmap(path, dtype, mode="r")
    tokens = np.fromfile(path, dtype)
    tokens.flags.writeable = False
    return tokens


def _header_digest(header: dict[str, Any]) -> str:
    """Of all that the header says besides."""
    rest = {name: value for name, value in header.items() if name != "header_digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _held(folder: Path, say: Log) -> AbstractContextManager[object]:
    """The folder's lock; waits while another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    return lock(folder / "lock", lambda holder: say("waiting for another process that prepares the same data"))


@contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    """Turns an `OSError` of the cache into one of ours."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if disk_full(error):
            raise OutOfMemoryError(f"no space for token files in '{folder}' ({reason}); set data.cache_dir") from None
        raise DataError(f"cannot keep token files in '{folder}' ({reason}); set data.cache_dir") from None
