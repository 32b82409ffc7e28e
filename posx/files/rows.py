"""The fields that a row of results must have. Files are edited, cut and damaged.

Units: lengths in tokens, `nll` in nats a token, `ppl` = exp(nll).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

#: The version of a row of `eval.jsonl`. Rows of other versions are left out.
ROW_VERSION = 4


def measurement(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a row of `eval.jsonl` without its fields of a wrong type or length.

    None if it is of another version, or does not say what was measured of what.
    """
    lengths = (row.get("train_len"), row.get("eval_len"))
    words = (row.get("encoding"), row.get("protocol"), row.get("status", "ok"))
    if row.get("schema_version") != ROW_VERSION or not isinstance(row.get("settings"), dict):
        return None
    if not (all(map(_counts, lengths)) and all(map(_is_text, words))):
        return None
    found = {name: value for name, value in row.items() if name not in _KINDS or _KINDS[name](value)}
    sums, size, targets = (found.get(name) for name in ("block_nll", "block_len", "num_targets"))
    if not (sums and size and targets and len(sums) == -(-targets // size)):
        found.pop("block_nll", None)
    edges, nll, counts = (found.get(f"position_{name}", []) for name in ("edges", "nll", "targets"))
    if not len(edges) == len(nll) + 1 == len(counts) + 1:
        found.pop("position_nll", None)
    return found


def result_of(row: Mapping[str, Any]) -> str:
    """Return the result of a measurement in words."""
    ppl = row.get("ppl")
    return f"ppl {ppl:.3f}" if isinstance(ppl, float) else f"ppl {ppl}" if ppl == "inf" else row.get("status", "ok")


def failures(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the rows that failed, in words."""
    failed = [row for row in rows if row.get("status") in ("oom", "nonfinite")]
    return [f"{row['run_id']} {row['protocol']} at {row['eval_len']}: {row['status']}" for row in failed]


def number(value: Any) -> float | None:
    """Return a finite float, None for anything else (null, "inf", NaN, a word, a bool)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**60


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(number(one) is not None for one in value)


def _are_texts(values: Any) -> bool:
    return all(map(_is_text, values))


#: Tests of the fields of a row. Other fields are tested at their use.
_KINDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("num_targets", "num_bytes", "num_documents", "num_stretches", "num_windows", "block_len"), _counts
    ),
    **dict.fromkeys(
        ("max_targets", "warm_up", "stride", "anchor", "num_separators"), lambda value: value == 0 or _counts(value)
    ),
    **dict.fromkeys(("step", "seed"), lambda value: value is None or value == 0 or _counts(value)),
    **dict.fromkeys(("run_id", "hash", "targets", "data_digest", "data_source", "tokenizer"), _is_text),
    **dict.fromkeys(("block_nll", "position_edges", "position_targets"), _are_numbers),
    "position_nll": lambda value: isinstance(value, list),
    "layers": lambda value: isinstance(value, list) and _are_texts(value),
    "code": lambda value: isinstance(value, dict) and _are_texts(value.values()),
    "data_settings": lambda value: isinstance(value, dict),
}
