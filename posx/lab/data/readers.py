"""Readers of files: text, tables, JSON and token ids become rows, each a text or token ids."""

import functools
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posx.errors import DataError, nearest
from posx.lab.config.data import DataConfig
from posx.lab.data.chat import render_chat
from posx.lab.data.decoding import TextDecoder
from posx.lab.data.ids import Ids, read_bin, read_npy
from posx.lab.data.tokenizers import utf8
from posx.lab.files.lines import parse_json

if TYPE_CHECKING:
    import pyarrow as pa

#: A text, that of a chat, or token ids.
Item = str | Ids
Reader = Callable[[Path, DataConfig, TextDecoder], Iterator[Item]]


def _read_text(path: Path, config: DataConfig, decoder: TextDecoder) -> Iterator[Item]:
    text = decoder.text(path)
    if text is not None:
        yield text


def _read_npy(path: Path, config: DataConfig, decoder: TextDecoder) -> Iterator[Item]:
    yield read_npy(path)


def _read_bin(path: Path, config: DataConfig, decoder: TextDecoder) -> Iterator[Item]:
    yield read_bin(path, config.dtype)


def _read_json(path: Path, config: DataConfig, decoder: TextDecoder) -> Iterator[Item]:
    """Yield the values of an array of objects, or of an object a line."""
    decoded = decoder.text(path)
    if decoded is None:
        return
    text = decoded.removeprefix("\ufeff")
    if text.lstrip()[:1] == "[":
        records = (("record", n, record) for n, record in enumerate(_from_json(f"'{path}'", text)))
    else:
        lines = ((n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip())
        records = (("line", n, _from_json(f"'{path}' line {n}", line)) for n, line in lines)
    first = ""
    for name, n, record in records:
        where = f"'{path}' {name} {n}"
        if not isinstance(record, dict):
            raise DataError(f"{where} is a JSON {type(record).__name__}, but an object with text is expected.")
        check_column(where, config.text_column, record)
        kind, value = _read_value(record[config.text_column], config, f"'{path}'", name, n)
        if first and kind not in ("", first):
            raise DataError(
                f"{where}, column '{config.text_column}': {kind}, but {first} before. Keep one kind in a column."
            )
        first = first or kind
        yield value


def _from_json(where: str, text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}). Write one object a line, or one array of objects.") from None


def _read_value(value: Any, config: DataConfig, file: str, name: str, n: int) -> tuple[str, Item]:
    """Return the kind of a value of JSON, and the value as text or token ids. The kind of an empty list is "".

    Raises DataError if the value is neither.
    """
    place = f"{file} {name} {n}, column '{config.text_column}'"
    if isinstance(value, list) and (value or config.template) and all(isinstance(one, dict) for one in value):
        return "chat messages" if value else "", render_chat(value, config.template, place)
    if not isinstance(value, list):
        return "text", require_text(place, value)
    if any(isinstance(one, bool) or not isinstance(one, int) for one in value):
        wrong = next(one for one in value if isinstance(one, bool) or not isinstance(one, int))
        raise DataError(
            f"{place}: a list with {type(wrong).__name__} instead of token ids, which are whole numbers. Name text, "
            "token ids or chat messages with --config.data.text_column=COLUMN"
        )
    try:
        return "token ids" if value else "", Ids(np.array(value, np.int64), np.array([len(value)]), file, (name, n))
    except OverflowError:
        raise DataError(f"{place}: an id has more than 64 bits. It is none of a tokenizer.") from None


def _read_table(path: Path, config: DataConfig, decoder: TextDecoder) -> Iterator[Item]:
    """Yield the values of a parquet file, or of an Arrow file of `datasets`."""
    import pyarrow as pa

    column, row = config.text_column, 0
    for values in _batches(path, column):
        where, kind = f"'{path}'", values.type
        if values.null_count:
            null = row + values.is_null().index(pa.scalar(True)).as_py()
            raise DataError(f"{where} row {null}, column '{column}': NoneType instead of text. Drop such rows.")
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            for n, text in enumerate(values.to_pylist(), row):
                yield require_text(f"{where} row {n}, column '{column}'", text)
        elif _is_list(kind) and pa.types.is_integer(kind.value_type):
            yield _list_ids(values, where, column, row)
        elif _is_list(kind) and pa.types.is_struct(kind.value_type):
            for n, messages in enumerate(values.to_pylist(), row):
                yield render_chat(messages, config.template, f"{where} row {n}, column '{column}'")
        else:
            raise DataError(
                f"{where}, column '{column}': {kind} instead of strings, token ids or chat messages. Set "
                "data.text_column."
            )
        row += len(values)


def _batches(path: Path, column: str) -> Iterator["pa.Array"]:
    """Yield the values of a column in parts. Raises DataError if the file is damaged, or has no such column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    form = path.suffix.lower().removeprefix(".")
    try:
        if form == "parquet":
            file = pq.ParquetFile(path, page_checksum_verification=True)
            schema, batches = file.schema_arrow, functools.partial(file.iter_batches, columns=[column])
        else:
            stream = pa.ipc.open_stream(pa.memory_map(str(path)))
            schema, batches = stream.schema, functools.partial(iter, stream)
        check_column(f"'{path}'", column, schema.names)
        for batch in batches():
            values = batch.column(column)
            yield values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"'{path}' cannot be read as {form}: {reason(error)}") from None


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _list_ids(values: Any, where: str, column: str, row: int) -> Ids:
    """Return the lists of an Arrow array as token ids of the smallest type. row: the number of the first list."""
    import pyarrow.compute as pc

    flat, lengths = values.flatten(), pc.list_value_length(values).to_numpy(zero_copy_only=False)
    ids = Ids(flat.to_numpy(zero_copy_only=False), np.cumsum(lengths, dtype=np.int64), where, ("row", row))
    if flat.null_count:
        null = flat.is_null().to_numpy(zero_copy_only=False).argmax()
        raise DataError(f"{ids.place(int(null))}, column '{column}': NoneType instead of a token id. Drop it.")
    return ids


def check_column(where: str, column: str, names: Collection[object]) -> None:
    """Raise DataError unless `column` is among `names`, those of a table or record."""
    if column not in names:
        seen = ", ".join(map(repr, names)) or "none"
        raise DataError(
            f"{where} has no column '{column}' (columns there: {seen}). {nearest(column, map(str, names))}"
            "Name one with --config.data.text_column=COLUMN"
        )


def require_text(where: str, value: object) -> str:
    """Return `value`. Raises DataError if it is no text."""
    if not isinstance(value, str):
        raise DataError(f"{where}: {type(value).__name__} instead of text")
    try:
        utf8(value)
    except DataError:
        raise DataError(f"{where}: a lone surrogate, which is no text. Remove it.") from None
    return value


def reason(error: BaseException) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines() or ["no details"]
    return f"{type(error).__name__}: {lines[0]}"


#: Suffixes of files by content, and the readers of all.
TEXTS = (".txt", ".text", ".md", ".py", ".raw", ".tokens", "")
IDS = (".npy", ".bin")
READERS: dict[str, Reader] = {
    **dict.fromkeys(TEXTS, _read_text),
    **dict.fromkeys((".parquet", ".arrow"), _read_table),
    **dict.fromkeys((".json", ".jsonl"), _read_json),
    ".npy": _read_npy,
    ".bin": _read_bin,
}
FORMATS = " ".join(suffix for suffix in READERS if suffix)
