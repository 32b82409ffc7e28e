"""Token ids in place of text: read from files, checked against the vocabulary, cut into documents.

Large arrays are mapped, and documents are views of them: no array is copied before its tokens are written.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posx.errors import DataError
from posx.lab.config.data import DataConfig
from posx.lab.data.tokenizers import IdTokenizer, Tokenizer

MAPPED = 64 << 20  # bytes above which a file is mapped: one that is cut short under a mapping ends the process
PIECE = 1 << 22  # ids that are handled at a time
#: Numbers in the header of llm.c: int32 [magic, version 1, number of ids, zeros], then ids of 2 or 4 bytes.
_HEADER = 256


@dataclass(frozen=True)
class Ids:
    """Token ids as a file or the rows of a table hold them.

    Attributes:
      values: [n], of any integer type.
      ends: [rows], the end of each row in `values`.
      where: the file.
      row: the word for a row and the number of the first one; "" for a file of one row.
    """

    values: np.ndarray
    ends: np.ndarray
    where: str
    row: tuple[str, int] = ("", 0)

    def place(self, position: int) -> str:
        """Name the file, the row and the position in it of an id."""
        nth = int(np.searchsorted(self.ends, position, side="right"))
        start = int(self.ends[nth - 1]) if nth else 0
        name, first = self.row
        return f"{self.where}{f' {name} {first + nth}' if name else ''}, position {position - start}"

    def documents(self, tokenizer: Tokenizer) -> list[np.ndarray]:
        """Return the documents [k] as views: rows, split at each `eos`, which is left out. No document is empty.

        Raises DataError with the place of an id that is negative, or not one of the tokenizer's.
        """
        cuts = np.zeros(0, np.int64)
        for start, part in array_pieces(self.values):
            low, high = int(part.min()), int(part.max())
            if low < 0 or high >= tokenizer.num_ids:
                wrong = (part < 0) | (part >= tokenizer.num_ids)
                self._refuse(int(np.argmax(wrong)) + start, tokenizer)
            if low <= tokenizer.eos <= high:
                cuts = np.append(cuts, start + np.flatnonzero(part == tokenizer.eos))
        starts = np.sort(np.concatenate([[0], self.ends[:-1], cuts + 1]).astype(np.int64))
        stops = np.sort(np.concatenate([self.ends, cuts]).astype(np.int64))
        pairs = np.stack([starts, stops], axis=1)[stops > starts]
        return [self.values[start:stop] for start, stop in pairs.tolist()]

    def _refuse(self, position: int, tokenizer: Tokenizer) -> None:
        value = int(self.values[position])
        place, size = self.place(position), tokenizer.num_ids
        have = f"data.vocab_size={size}" if isinstance(tokenizer, IdTokenizer) else f"the {size:,} ids of the tokenizer"
        if value < 0:
            raise DataError(f"{place}: the id {value} is negative. Labels and padding are no tokens: remove them.")
        raise DataError(
            f"{place}: the id {value} is not below {have}. Raise data.vocab_size, or name the tokenizer that made "
            "the ids."
        )


def array_pieces(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield an array [n] in slices of at most PIECE entries, each with its start."""
    for start in range(0, len(values), PIECE):
        yield start, values[start : start + PIECE]


def need_tokenizer(what: str, config: DataConfig) -> DataError:
    """Return the error of token ids without the tokenizer that made them. `what` is "FILE holds token ids"."""
    return DataError(
        f"{what}, but data.tokenizer={config.tokenizer} reads text. To train on them, name the "
        "tokenizer that made them: --config.data.tokenizer=path/to/tokenizer.json. Without one, give the number of "
        "ids: --config.data.tokenizer=ids --config.data.vocab_size=50257"
    )


def read_npy(path: Path) -> Ids:
    """Return the ids of a .npy file: [n], or [rows, n]. Raises DataError."""
    try:
        array = np.load(path, mmap_mode="r" if path.stat().st_size > MAPPED else None, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"'{path}' does not have NumPy's format: {str(error).splitlines()[0]}") from None
    if not isinstance(array, np.ndarray):
        raise DataError(f"'{path}' holds several arrays. Write the ids as one: np.save('ids.npy', ids)")
    if array.dtype.kind not in "iu":
        raise DataError(f"'{path}' holds {array.dtype}, but token ids are whole numbers. Write them as np.uint32.")
    if array.ndim not in (1, 2):
        raise DataError(f"'{path}' has the shape {array.shape}. Token ids are [tokens], or [documents, tokens].")
    if not array.size:
        raise DataError(f"'{path}' holds no token ids: its shape is {array.shape}.")
    width = array.shape[-1]
    row = ("row", 0) if array.ndim == 2 else ("", 0)
    return Ids(array.reshape(-1), np.arange(width, array.size + 1, width), f"'{path}'", row)


def _are_halves(values: np.ndarray) -> bool:
    """Tell whether numbers are the low and high halves of others in turn: high halves of ids are almost all 0."""
    low, high = values[::2], values[1::2]
    return len(high) >= 32 and values.itemsize < 8 and bool((high >= 0).all()) and high.max() < 4 <= low.max()


def read_bin(path: Path, dtype: str) -> Ids:
    """Return the ids of a file that holds only numbers of the type `dtype`, or of one with llm.c's header.

    Raises DataError if the type is not known, or does not fit the size or the numbers.
    """
    size, start = path.stat().st_size, 0
    head = np.fromfile(path, "<i4", _HEADER)
    if len(head) == _HEADER and head[1] == 1 and head[2] > 0 and not head[3:].any():
        kinds = {2 * int(head[2]): "<u2", 4 * int(head[2]): "<u4"}
        start = head.nbytes
        if size - start not in kinds:
            raise DataError(
                f"'{path}' has a header of {head[2]:,} ids, but {size - start:,} bytes after it. Copy it anew."
            )
        dtype = kinds[size - start]
    elif not dtype:
        raise DataError(
            f"'{path}' holds numbers without a type. Name it, for example --config.data.dtype=uint16 (nanoGPT's)"
        )
    kind = np.dtype(dtype)
    if (size - start) % kind.itemsize:
        raise DataError(f"'{path}' has {size:,} bytes, no multiple of the {kind.itemsize} of data.dtype={dtype}.")
    if size > MAPPED:
        values: np.ndarray = np.memmap(path, kind, "r", start)
    else:
        values = np.fromfile(path, kind, offset=start)
    if not start and _are_halves(values[:PIECE]):
        wide = np.dtype(f"{kind.kind}{2 * kind.itemsize}").name
        raise DataError(
            f"'{path}' read as {dtype}: every second number is below 4, so these are halves of larger numbers. Name "
            f"their type, for example --config.data.dtype={wide}"
        )
    return Ids(values, np.array([len(values)]), f"'{path}'")
