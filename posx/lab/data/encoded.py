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


def encoded(documents: Sequence[Document], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the ids [n] of each document, of any integer type, without a separator."""
    for chunk in chunks(documents):
        texts = [document for document in chunk if isinstance(document, str)]
        of_texts = _by_part(texts, tokenizer, lambda one, parts: one.encode_batch(parts), lambda number: number)
        for document in chunk:
            yield np.concatenate(next(of_texts)) if isinstance(document, str) else document


def text_bytes(documents: Sequence[Document], tokenizer: Tokenizer) -> np.ndarray | None:
    """Return the bytes of text behind each token of all documents and their separators, int64 [n].

    A separator gets the text that the tokenizer drops before it. The text of token ids is known if the tokenizer
    encodes that text to the same ids. The result is None if the tokenizer cannot tell.
    """
    found: list[np.ndarray] = []
    markers = {number: len(utf8(marker)) for marker, number in tokenizer.special.items()}
    for chunk in chunks(documents):
        texts = [document if isinstance(document, str) else tokenizer.decode(document) for document in chunk]
        decoded = [n for n, document in enumerate(chunk) if not isinstance(document, str)]
        again = tokenizer.encode_batch([texts[n] for n in decoded])
        if not all(np.array_equal(ids, chunk[n]) for n, ids in zip(decoded, again, strict=True)):
            return None
        of_texts = _by_part(texts, tokenizer, lambda one, parts: one.token_bytes(parts), markers.get)
        for text, sizes in zip(texts, of_texts, strict=True):
            if any(one is None for one in sizes):
                return None
            found += [*sizes, np.array([len(utf8(text)) - sum(int(one.sum()) for one in sizes)])]
    return np.concatenate(found)


def _by_part(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    of_texts: Callable[[Tokenizer, list[str]], Sequence[Any]],
    of_marker: Callable[[int], Any],
) -> Iterator[list[Any]]:
    """Yield for each text the results of its parts: all texts in two calls, and [one] for the marker of a chat.

    A part after a marker is encoded by `tokenizer.inner`.
    """
    parts = [
        _stripped(text.parts(tokenizer.special), tokenizer.strips) if isinstance(text, Chat) else [text]
        for text in texts
    ]

    def results(one: Tokenizer, *, later: bool) -> Iterator[Any]:
        places = ((n, part) for found in parts for n, part in enumerate(found) if isinstance(part, str))
        return iter(of_texts(one, [part for n, part in places if later == (n > 0)]))

    firsts, others = results(tokenizer, later=False), results(tokenizer.inner, later=True)
    for found in parts:
        yield [
            next(others if n else firsts) if isinstance(part, str) else np.array([of_marker(part)])
            for n, part in enumerate(found)
        ]


def _stripped(parts: list[str | int], strips: Mapping[int, tuple[bool, bool]]) -> list[str | int]:
    """Return the parts of a chat without the white space that its markers drop: before them, and after them."""
    found = list(parts)
    for n, part in enumerate(parts):
        before, after = strips.get(part, (False, False)) if isinstance(part, int) else (False, False)
        for place, drops, strip in ((n - 1, before, str.rstrip), (n + 1, after, str.lstrip)):
            if drops and 0 <= place < len(found) and isinstance(text := found[place], str):
                found[place] = strip(text)
    return found
