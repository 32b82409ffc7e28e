"""Reasons to doubt results on the held-out text. The first is text that is also in the training text.

The held-out text is sampled in passages of PASSAGE bytes. Their first 8 bytes decide which passages are sampled, so
that equal passages are sampled in both texts at any place. Documents of SHORTEST to PASSAGE bytes are one passage each.
Text is compared in lower case without white space, so that another indentation, wrapping or trailing blank hides
nothing. Token ids are compared as numbers of 4 bytes.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from posx.lab.data.corpus import Document
from posx.lab.data.ids import array_pieces
from posx.lab.data.tokenizers import IdTokenizer, Tokenizer, utf8
from posx.lab.progress import quantity

#: Bytes of a passage, white space not counted. Any two texts of a kind share shorter passages. In Python's library
#: 3.5 % of the passages of 32 bytes are in other modules too, and 0.6 % of those of 128.
PASSAGE, SHORTEST = 128, 32
LITTLE_TEXT = 1 << 16  # bytes of held-out text below which a warning says so
MOST_OVERLAP = 0.02  # a share of the held-out text; the default text, Python's own library, has 0.006
_CHUNK = 4 << 20  # characters that are handled at a time
_ID_BYTES = 4  # of an id, about as many as of the text behind it
_BLOCK = 1 << 18  # hashes that are computed at a time, so that they stay in the processor's cache
_MIX = np.uint64(0x9E3779B97F4A7C15)


def warnings(train: list[Document], held_out: list[Document], tokenizer: Tokenizer, knows_bytes: bool) -> Iterator[str]:
    """Yield a line for each reason that makes results on the held-out text less meaningful."""
    texts = [document for document in held_out if isinstance(document, str)]
    ids = sum(len(document) for document in held_out if not isinstance(document, str))
    size = sum(len(utf8(text)) for text in texts)
    if size + _ID_BYTES * ids < LITTLE_TEXT or len(held_out) == 1 < len(train):
        amount = f"{ids:,} token ids" if ids else f"{size:,} bytes of text"
        yield (
            f"warning: only {amount} in {quantity(len(held_out), 'document')} are held out, so "
            "results say little about other text. Give more text, a larger data.validation_fraction, or "
            "data.validation=PATH."
        )
    if (share := overlap(train, held_out)) > MOST_OVERLAP:
        least = (
            f"whole documents of {SHORTEST // _ID_BYTES} ids or more"
            if ids
            else (f"whole documents of {SHORTEST} bytes or more, without white space and case")
        )
        passages = f"{PASSAGE // _ID_BYTES} ids" if ids else f"{PASSAGE} bytes"
        yield (
            f"warning: {share:.0%} of the held-out text is in the training text too, so results will flatter. "
            f"Compared are passages of {passages}, and {least}."
        )
    some = [text[:4096] for text in texts[:64]]
    if not knows_bytes:
        yield f"warning: {_why_no_bytes(tokenizer, bool(ids))}, so there are no bits per byte"
    elif [tokenizer.decode(ids) for ids in tokenizer.encode_batch(some)] != some:
        yield (
            "warning: decoding the tokens does not give the text back. The lost text costs no bits, so compare "
            "bits per byte with care."
        )


def _why_no_bytes(tokenizer: Tokenizer, is_ids: bool) -> str:
    if isinstance(tokenizer, IdTokenizer):
        return "the text of token ids is not known without their tokenizer"
    if is_ids:
        return (
            "the held-out ids are not those of their decoded text: they are of another tokenizer, or some are special"
        )
    return "the tokenizer drops letters and does not say which text its tokens stand for"


def overlap(train: Sequence[Document], held_out: Sequence[Document]) -> float:
    """Return the share of the held-out text, in bytes, that is also in the training text, from 0 to 1.

    Documents shorter than SHORTEST are part of the held-out text, but are not compared.
    """
    train, held_out = _split_rows(train), _split_rows(held_out)
    size = sum(map(len, held_out))
    bits = max(2, (size >> 15).bit_length())  # one passage in 2^bits is compared: some ten thousand of a long text
    parts = [_passages(chunk, bits) for chunk in chunks(held_out)]
    hashes, weights = (np.concatenate(arrays) for arrays in zip(*(part[:2] for part in parts), strict=True))
    total = weights.sum() + sum(part[2] for part in parts)
    known = np.unique(hashes)
    if not known.size:
        return 0.0
    seen = np.zeros(len(known), bool)
    for chunk in chunks(train):
        present, *_ = _passages(chunk, bits)
        place = np.minimum(np.searchsorted(known, present), len(known) - 1)
        seen[place[known[place] == present]] = True
    return float(weights[seen[np.searchsorted(known, hashes)]].sum() / total)


def _split_rows(documents: Sequence[Document]) -> list[Document]:
    """Return documents with long rows of ids in several pieces."""
    return [
        piece
        for document in documents
        for piece in ([document] if isinstance(document, str) else (part for _, part in array_pieces(document)))
    ]


def chunks(documents: Sequence[Document]) -> Iterator[Sequence[Document]]:
    """Yield the documents in lists of some megabytes each."""
    start = size = 0
    for n, text in enumerate(documents, 1):
        size += len(text)
        if size >= _CHUNK or n == len(documents):
            yield documents[start:n]
            start, size = n, 0


def _passages(documents: Sequence[Document], bits: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return a hash of each chosen passage, uint64 [n], and the bytes of text that each stands for, float64 [n].

    The third value is the bytes of documents that are too short to be compared.
    """
    plain = [_plain(document) for document in documents]
    gap = b"\n" * PASSAGE  # no passage goes from one document into the next
    text = gap.join([*plain, b""])
    eights = np.ndarray(len(text) - 7, "<u8", text, strides=(1,))  # the 8 bytes from each place on
    last = np.uint64(1 << (64 - bits))
    blocks = range(0, len(text) - PASSAGE, _BLOCK)
    chosen = [at + np.flatnonzero(eights[at : at + _BLOCK] * _MIX < last) for at in blocks]
    long = np.concatenate([np.zeros(0, np.int64), *chosen])
    sizes = np.array([len(one) for one in plain], np.int64)
    starts = np.cumsum(sizes + PASSAGE) - sizes - PASSAGE
    of_document = np.searchsorted(starts, long, side="right") - 1
    whole = long - starts[of_document] <= sizes[of_document] - PASSAGE
    long, of_document = long[whole], sizes[of_document[whole]]
    short = (sizes >= SHORTEST) & (sizes < PASSAGE)
    places = np.concatenate([long, starts[short]])
    hashes = np.zeros(len(places), np.uint64)
    for step in range(0, PASSAGE, 8):
        hashes = (hashes ^ eights[places + step]) * _MIX
        hashes ^= hashes >> np.uint64(29)
    all_passages = of_document - PASSAGE + 1  # of the document: together they stand for all of its bytes
    weights = np.concatenate([(1 << bits) * of_document / all_passages, sizes[short]])
    return hashes, weights, int(sizes[sizes < SHORTEST].sum())


def _plain(document: Document) -> bytes:
    if isinstance(document, str):
        return document.lower().encode().translate(None, b" \t\n\r\v\f")
    return document.astype("<u4").tobytes()
