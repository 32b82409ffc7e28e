"""Documents packed into a row are separate sequences, and `vmap` over rows with parameters of their own is a loop."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from posx.testing.findings import Findings
from posx.testing.subject import ROWS, STEP, Floats, Subject, Where

#: Lengths of the documents of each row, in tokens.
PACKS = ((3, 4, 6), (8, 5))
VECTORS = ("x", "q", "k", "v")


class Document(NamedTuple):
    row: int
    start: int
    size: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.size)


DOCUMENTS = [Document(row, sum(sizes[:n]), size) for row, sizes in enumerate(PACKS) for n, size in enumerate(sizes)]


def check_packing(subject: Subject, findings: Findings) -> None:
    """Rows of documents, in tiles each with its own params, against every document alone; under a window."""
    params = [subject.params(seed) for seed in range(len(PACKS))]
    own = jax.tree.map(lambda *a: np.stack([a[min(row, len(PACKS) - 1)] for row in range(ROWS)]), *params)
    packed, tiles = _packed(subject), subject.tiles(_packed(subject), params=own)
    where, apart = _alone(subject)
    vectors = {name: apart(getattr(subject.floats, name)) for name in VECTORS}
    for row, theirs in enumerate(params):
        floats = Floats(theirs, **vectors)
        of_row = np.array([document.row == row for document in DOCUMENTS] + [False] * (ROWS - len(DOCUMENTS)))
        cotangent = apart(subject.cotangent) * of_row[:, None, None, None]
        alone = subject.dense(where, floats, cotangent)
        rows = subject.cotangent * (np.arange(ROWS) == row)[:, None, None, None]
        dense = subject.dense(packed, subject.floats._replace(params=theirs), rows)
        of_tiles = jax.tree.map(lambda a, row=row: a[row], tiles[1].params)
        for name, found in (("dense", dense), ("tiles", (tiles[0], tiles[1]._replace(params=of_tiles)))):
            _compare(subject, findings, f"{name}, row {row}", row, found, alone)


def _compare(subject: Subject, findings: Findings, name: str, row: int, packed: Any, alone: Any) -> None:
    exact, (o, grads), (wanted, wanted_grads) = subject.exact, packed, alone
    for n, document in enumerate(DOCUMENTS):
        if document.row != row:
            continue
        findings.equal(f"{name}: outputs of document {n}", o[row, document.span], wanted[n, : document.size], exact)
        for vector in VECTORS:
            given = getattr(grads, vector)
            if given is not None:
                due = getattr(wanted_grads, vector)[n, : document.size]
                findings.equal(f"{name}: gradient of {vector}", given[row, document.span], due, exact, exact)
    findings.equal(f"{name}: gradients of params", grads.params, wanted_grads.params, exact, exact)


def _packed(subject: Subject) -> Where:
    """The packs in the first rows; the last one again in all others."""
    rows = [PACKS[min(row, len(PACKS) - 1)] for row in range(ROWS)]
    pos = np.stack([np.concatenate([np.arange(n, dtype=np.int32) for n in sizes]) for sizes in rows])
    segment = np.stack([np.repeat(np.arange(len(sizes), dtype=np.int32), sizes) for sizes in rows])
    return Where(pos, subject.in_order * np.int32(STEP), segment)


def _alone(subject: Subject) -> tuple[Where, Any]:
    """Every document at the start of a row of its own, empty slots behind it; and what cuts arrays [b, t, ...] so."""

    def apart(a: Any) -> Any:
        if a is None:
            return None
        cut = np.zeros((ROWS, *a.shape[1:]), a.dtype)
        for n, document in enumerate(DOCUMENTS):
            cut[n, : document.size] = a[document.row, document.span]
        return cut

    sizes = np.array([document.size for document in DOCUMENTS] + [0] * (ROWS - len(DOCUMENTS)))[:, None]
    order = subject.in_order
    pos, idx = np.where(order < sizes, order, 0), np.where(order < sizes, order * STEP, -1)
    return Where(pos.astype(np.int32), idx.astype(np.int32), 0 * order), apart
