"""Documents as token ids, and the bytes of text behind each id.

A chat is encoded part by part: the markers of its template are special tokens if the tokenizer has them. Token ids are
kept as they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from posx.lab.data.chat import Chat
from posx.lab.data.corpus import Document
from posx.lab.data.overlap import chunks
from posx.lab.data.tokenizers import Tokenizer, utf8


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the ids [n] of each document, of any integer type, without a separator."""
    for chunk in chunks(documents):
        texts = [document for document in chunk if isinstance(document, str)]
        of_texts = _map_parts(texts, tokenizer, lambda one, parts: one.encode_batch(parts), lambda number: number)
        for document in chunk:
            yield np.concatenate(next(of_texts)) if isinstance(document, str) else document


def text_bytes(documents: Sequence[Document], tokenizer: Tokenizer) -> np.ndarray | None:
    """Return the bytes of text behind each token of all documents and their separators, int64 [n].

    A separator gets the text that the tokenizer drops before it. The text of token ids is known if the tokenizer
    encodes that text to the same ids. The result is None if the tokenizer cannot tell.
    """
    counts: list[np.ndarray] = []
    markers = {number: len(utf8(marker)) for marker, number in tokenizer.special.items()}
    for chunk in chunks(documents):
        texts = [document if isinstance(document, str) else tokenizer.decode(document) for document in chunk]
        decoded = [n for n, document in enumerate(chunk) if not isinstance(document, str)]
        again = tokenizer.encode_batch([texts[n] for n in decoded])
        if not all(np.array_equal(ids, chunk[n]) for n, ids in zip(decoded, again, strict=True)):
            return None
        of_texts = _map_parts(texts, tokenizer, lambda one, parts: one.token_bytes(parts), markers.get)
        for text, sizes in zip(texts, of_texts, strict=True):
            if any(one is None for one in sizes):
                return None
            counts += [*sizes, np.array([len(utf8(text)) - sum(int(one.sum()) for one in sizes)])]
    return np.concatenate(counts)


def _map_parts(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    of_texts: Callable[[Tokenizer, list[str]], Sequence[Any]],
    of_marker: Callable[[int], Any],
) -> Iterator[list[Any]]:
    """Yield for each text the results of its parts: all texts in two calls, and [one] for the marker of a chat.

    A part after a marker is encoded by `tokenizer.inner`.
    """
    parts = [
        _strip_parts(text.parts(tokenizer.special), tokenizer.strips) if isinstance(text, Chat) else [text]
        for text in texts
    ]

    def results(one: Tokenizer, *, later: bool) -> Iterator[Any]:
        places = ((n, part) for text_parts in parts for n, part in enumerate(text_parts) if isinstance(part, str))
        return iter(of_texts(one, [part for n, part in places if later == (n > 0)]))

    firsts, others = results(tokenizer, later=False), results(tokenizer.inner, later=True)
    for text_parts in parts:
        yield [
            next(others if n else firsts) if isinstance(part, str) else np.array([of_marker(part)])
            for n, part in enumerate(text_parts)
        ]


def _strip_parts(parts: list[str | int], strips: Mapping[int, tuple[bool, bool]]) -> list[str | int]:
    """Return the parts of a chat without the white space that its markers drop: before them, and after them."""
    stripped = list(parts)
    for n, part in enumerate(parts):
        before, after = strips.get(part, (False, False)) if isinstance(part, int) else (False, False)
        for place, drops, strip in ((n - 1, before, str.rstrip), (n + 1, after, str.lstrip)):
            if drops and 0 <= place < len(stripped) and isinstance(text := stripped[place], str):
                stripped[place] = strip(text)
    return stripped
