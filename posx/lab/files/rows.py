"""The rows of `eval.jsonl` and `metrics.jsonl`, and the ways in which a row must agree with itself.

Files are edited, cut and damaged. A row that disagrees with itself, or with its checksum, counts as not measured, for
every reader. Units: lengths in tokens, `nll` in nats a token, `ppl` = exp(nll), `bpb` in bits per byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from posx.evaluation.base import Row
from posx.evaluation.statistics import LARGEST_NLL, perplexity
from posx.lab.files import lines
from posx.lab.files.checksums import CHECKSUM, checksum_problem

#: The version of a row of `eval.jsonl`. Rows of other versions count as not measured.
ROW_VERSION = 7
#: The results of a measurement. Only "ok" has numbers.
STATUSES = ("ok", "oom", "nonfinite", "undefined")
#: The fields of attention weights that hold numbers.
WEIGHTS = (
    "right_weight", "mean_right_weight", "zero_weights", "zero_weights_bfloat16", "attention_entropy", "far_weight"
)  # fmt: skip
#: The fields that hold numbers.
SCORES = (
    "nll", "ppl", "bpb", "nll_interval", "block_nll", "position_nll", "exact_match", "accuracy", "exact_match_interval",
    "block_wrong", "block_hidden", "accuracy_interval", "distance_accuracy", *WEIGHTS,
)  # fmt: skip
#: Stored sums are rounded: those of blocks by this many nats at most, means by position by this many.
BLOCK_ROUNDING, POSITION_ROUNDING = 0.006, 1e-5


def row_problem(row: Mapping[str, Any]) -> str:
    """Return the first way in which a row of `eval.jsonl` is not whole, "" if there is none."""
    if (version := row.get("schema_version")) != ROW_VERSION:
        return f"it is a row of version {version!r}, but this posx reads {ROW_VERSION}"
    if kinds := [name for name in row if name in _KINDS and not _KINDS[name](row[name])]:
        return f"{kinds[0]} is {str(row[kinds[0]])[:40]!r}"
    if missing := [name for name in REQUIRED if name not in row]:
        return f"it has no {missing[0]}"
    return next((why for test in _AGREEMENTS for why in test(row)), "") or checksum_problem(row)


def log_problem(row: Mapping[str, Any]) -> str:
    """Return the first way in which a row of `metrics.jsonl` is not whole, "" if there is none."""
    if missing := [name for name in ("step", "attempt", "attempt_start") if not _is_step(row.get(name))]:
        return f"it has no {missing[0]}"
    loss, ppl = number(row.get("loss")), number(row.get("ppl"))
    if loss is not None and ppl is not None and not _are_close(ppl, wanted := math.exp(min(loss, LARGEST_NLL))):
        return f"ppl is {ppl:.6g}, but exp(loss) is {wanted:.6g}"
    return checksum_problem(row)


def check_rows(path: Path, problem: Callable[[Row], str] = row_problem, run: str = "") -> list[tuple[int, Row, str]]:
    """Return (number of the line, row, its problem) of each line of a file. A whole row has the problem "".

    Args:
      path: a file of JSON lines. A missing one has no lines.
      problem: returns why a row is not whole.
      run: the hash of the run that all rows are of, "" if it is not known.

    Raises:
      WorkdirError: the file cannot be read.
    """
    checked_lines = []
    seen: dict[Any, int] = {}
    for line, row in lines.number_lines(path):
        if row is None:
            checked_lines.append((line, Row(), "it is cut, or no object of JSON"))
            continue
        why, first = problem(row), line
        if not why and run and row.get("hash", run) != run:
            why = f"it is of the run {row['hash']}, but config.json is of {run}"
        if not why and row.get("status", "ok") == "ok":  # a length that ran out of memory may do so again
            first = seen.setdefault(row[CHECKSUM], line)
        checked_lines.append((line, row, why or (f"it repeats line {first}" if first != line else "")))
    return checked_lines


def read_row_file(
    path: Path,
    notice: Callable[[str], object] = lambda words: None,
    problem: Callable[[Row], str] = row_problem,
    run: str = "",
) -> list[Row]:
    """Return the whole rows of a file in order. `notice` is called with a line of text for each other row.

    Args:
      path: `eval.jsonl`, or `metrics.jsonl` with `log_problem`. A missing file has no rows.
      notice: takes "PATH, line N: the problem".
      problem: returns why a row is not whole.
      run: the hash of the run that all rows are of, "" if it is not known.

    Raises:
      WorkdirError: the file cannot be read.
    """
    every = check_rows(path, problem, run)
    for line, _, why in every:
        if why:
            notice(f"{path}, line {line}: {why}")
    return [row for _, row, why in every if not why]


def ends_training(row: Mapping[str, Any]) -> bool:
    """Tell whether a row of `metrics.jsonl` says that a loss or gradient was not finite, which ends its attempt."""
    return any(name in row and number(row[name]) is None for name in ("loss", "grad_norm"))


def drop_repeated(logged: Iterable[Row]) -> list[Row]:
    """Return the rows of `metrics.jsonl`, given in the order of writing, whose steps no later attempt has repeated."""
    kept = list[Row]()
    for row in logged:
        while kept and kept[-1]["attempt"] != row["attempt"] and kept[-1]["step"] > row["attempt_start"]:
            kept.pop()
        kept.append(row)
    return kept


def row_name(row: Mapping[str, Any]) -> str:
    """Return a row's protocol and window, as "sliding at 128"."""
    return f"{row['protocol']} at {row['eval_len']}"


def result_text(row: Mapping[str, Any]) -> str:
    """Return the result of a measurement in words."""
    ppl, exact = row.get("ppl"), row.get("exact_match")
    if exact is not None:
        return f"{exact:.1%} right"
    return f"ppl {ppl:.3f}" if isinstance(ppl, float) else f"ppl {ppl}" if ppl == "inf" else row.get("status", "ok")


def failures(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the rows that failed, in words."""
    failed = [row for row in rows if row.get("status") in ("oom", "nonfinite")]
    return [f"{row['run_id']} {row_name(row)}: {row['status']}" for row in failed]


def number(value: Any) -> float | None:
    """Return a finite float, None for anything else (null, "inf", NaN, a word, a bool)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def _status(row: Mapping[str, Any]) -> Iterator[str]:
    status, scores = row.get("status", "ok"), [name for name in SCORES if row.get(name) is not None]
    if status not in STATUSES:
        yield f"status is {str(status)[:40]!r}, not one of {', '.join(STATUSES)}"
    elif status != "ok" and scores:
        yield f"status is {status!r}, but it has {scores[0]}"
    elif status == "ok" and number(row.get("nll")) is None:
        yield f"status is 'ok', but nll is {str(row.get('nll'))[:40]!r}"


def _perplexity(row: Mapping[str, Any]) -> Iterator[str]:
    nll, ppl = row.get("nll"), row.get("ppl")
    if nll is None:
        return
    wanted = perplexity(nll)
    agrees = ppl == "inf" if math.isinf(wanted) else number(ppl) is not None and _are_close(ppl, wanted)
    if not agrees:
        yield f"ppl is {_short(ppl)}, but exp(nll) is {_short(wanted)}"


def _bits(row: Mapping[str, Any]) -> Iterator[str]:
    """Compare `bpb` with `nll`. As `bpb` leaves out separators, it is at most the loss of all targets."""
    bpb, size, targets = row.get("bpb"), row.get("num_bytes"), row.get("num_targets")
    if bpb is None or not targets or "num_bytes" not in row:
        return
    if not size:
        yield "it has bpb, but no bytes"
        return
    most = row["nll"] * targets / math.log(2) / size
    if row.get("num_separators"):
        if not -1e-6 <= bpb <= most * (1 + 1e-6) + 1e-6:
            yield f"bpb is {bpb:.6g}, but nll over {size:,} bytes gives at most {most:.6g}"
    elif not _are_close(bpb, most):
        yield f"bpb is {bpb:.6g}, but nll over {size:,} bytes gives {most:.6g}"


def _blocks(row: Mapping[str, Any]) -> Iterator[str]:
    sums, size, targets = row.get("block_nll"), row.get("block_len"), row.get("num_targets")
    if sums is None:
        return
    if not size or not targets:
        yield "it has block_nll, but no block_len or num_targets"
    elif len(sums) != -(-targets // size):
        yield f"block_nll has {len(sums):,} sums, but {targets:,} targets are {-(-targets // size):,} blocks of {size}"
    elif abs(sum(sums) - row["nll"] * targets) > BLOCK_ROUNDING * len(sums) + 1e-6 * abs(sum(sums)):
        yield f"nll is {row['nll']:.6g}, but the mean of block_nll is {sum(sums) / targets:.6g}"


def _interval(row: Mapping[str, Any]) -> Iterator[str]:
    if (ends := row.get("nll_interval")) is not None:
        middle = sum(ends) / 2
        if ends[0] > ends[1] or abs(middle - row["nll"]) > 1e-6 * max(1.0, abs(middle)):
            yield f"nll is {row['nll']:.6g}, but the middle of nll_interval is {middle:.6g}"


def _positions(row: Mapping[str, Any]) -> Iterator[str]:
    edges, nll, counts = (row.get(f"position_{name}") or [] for name in ("edges", "nll", "targets"))
    if not nll:
        return
    if not len(edges) == len(nll) + 1 == len(counts) + 1:
        yield f"position_nll has {len(nll)} bins, position_edges {len(edges)}, position_targets {len(counts)}"
    elif sorted(set(edges)) != edges or edges[0] != 0 or edges[-1] != row["eval_len"]:
        yield f"position_edges go from {edges[0]} to {edges[-1]}, but the window is {row['eval_len']}"
    elif sum(counts) != row.get("num_targets"):
        yield f"position_targets are {sum(counts):,}, but num_targets is {row.get('num_targets')}"
    else:
        total = sum(
            number(loss) * n if number(loss) is not None else math.nan for loss, n in zip(nll, counts, strict=True) if n
        )
        if not abs(total / sum(counts) - row["nll"]) <= POSITION_ROUNDING + 1e-6 * abs(row["nll"]):
            yield f"nll is {row['nll']:.6g}, but the mean of position_nll is {total / sum(counts):.6g}"


def _counts_agree(row: Mapping[str, Any]) -> Iterator[str]:
    targets = row.get("num_targets")
    for name in ("num_separators", "num_stretches"):
        if targets and (row.get(name) or 0) > targets:
            yield f"{name} is {row[name]:,}, but num_targets is {targets:,}"


def _answers(row: Mapping[str, Any]) -> Iterator[str]:
    """Compare the shares of right items and tokens with their counts and intervals."""
    for name, count in (("exact_match", row.get("num_items")), ("accuracy", row.get("num_targets"))):
        share, ends = row.get(name), row.get(f"{name}_interval")
        if share is None:
            continue
        if not count or not 0 <= share <= 1 or abs(share * count - round(share * count)) > 1e-6 * count:
            yield f"{name} is {_short(share)}, but no part of {count} gives that"
        elif ends is not None and not ends[0] <= share <= ends[1]:
            yield f"{name} is {_short(share)}, outside its interval of {ends}"
    whole, items, targets = row.get("exact_match"), row.get("num_items"), row.get("num_targets")
    blocks, hidden = row.get("block_wrong"), row.get("block_hidden")
    if hidden is not None and sum(hidden) != targets:
        yield f"block_hidden has {sum(hidden)} tokens, but num_targets is {targets}"
    name, right, every = ("accuracy", row.get("accuracy"), targets) if hidden else ("exact_match", whole, items)
    if blocks is not None and every and right is not None and abs(sum(blocks) - (1 - right) * every) > 1e-6 * every:
        yield f"block_wrong has {sum(blocks)} wrong answers, but {name} leaves {(1 - right) * every:.0f} wrong"
    if whole is not None and row.get("accuracy") is not None and items and targets:
        wrong_items, wrong_targets = (1 - whole) * items, (1 - row["accuracy"]) * targets
        if wrong_targets < wrong_items - 1e-3:
            yield f"exact_match leaves {wrong_items:.0f} items wrong, but accuracy only {wrong_targets:.0f} tokens"


def _distances(row: Mapping[str, Any]) -> Iterator[str]:
    """Compare the bins of distances with each other and with the number of targets."""
    edges, shares, counts = (row.get(f"distance_{name}") or [] for name in ("edges", "accuracy", "targets"))
    if not shares:
        return
    if not len(edges) == len(shares) + 1 == len(counts) + 1:
        yield f"distance_accuracy has {len(shares)} bins, distance_edges {len(edges)}, distance_targets {len(counts)}"
    elif sorted(set(edges)) != edges:
        yield f"distance_edges are {_short(edges)}, which do not rise"
    elif sum(counts) > row.get("num_targets", 0):
        yield f"distance_targets are {sum(counts):,}, but num_targets is {row.get('num_targets')}"
    elif any(
        (share is None) != (count == 0) or not 0 <= (share or 0) <= 1
        for share, count in zip(shares, counts, strict=True)
    ):
        yield f"distance_accuracy is {_short(shares)}, but the targets are {_short(counts)}"


#: The ways in which a row agrees with itself: each test yields the disagreements that it finds.
_AGREEMENTS = (_status, _perplexity, _bits, _blocks, _interval, _positions, _counts_agree, _answers, _distances)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:40]


def _are_close(one: Any, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**60


def _is_step(value: Any) -> bool:
    return value == 0 or _is_count(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(number(one) is not None for one in value)


def _are_texts(values: Any) -> bool:
    return all(map(_is_text, values))


def _or_none(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or test(value)


#: The fields that every row has.
REQUIRED = ("settings", "train_len", "eval_len", "encoding", "protocol")
#: Tests of the fields of a row. Other fields are tested at their use.
_KINDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("train_len", "eval_len"), _is_count),
    **dict.fromkeys(("encoding", "protocol", "status", "run_id", "hash", "targets"), _is_text),
    **dict.fromkeys(("data_digest", "data_source", "tokenizer"), _is_text),
    **dict.fromkeys(("num_targets", "num_windows", "block_len", "num_stretches", "num_items"), _is_count),
    "attention_items": _is_count,
    "attention": lambda value: isinstance(value, dict),
    **dict.fromkeys(("max_targets", "stride", "anchor"), _is_step),
    **dict.fromkeys(("step", "seed", "num_documents", "num_separators", "num_bytes"), _or_none(_is_step)),
    **dict.fromkeys(
        ("nll", "bpb", "unigram_ppl", "own_context", "exact_match", "accuracy", *WEIGHTS),
        _or_none(lambda value: number(value) is not None),
    ),
    **dict.fromkeys(("block_nll", "block_wrong", "block_hidden"), _or_none(_are_numbers)),
    **dict.fromkeys(
        ("position_edges", "position_targets", "distance_edges", "distance_targets"), _or_none(_are_numbers)
    ),
    **dict.fromkeys(
        ("nll_interval", "exact_match_interval", "accuracy_interval", "item_lens"),
        _or_none(lambda value: _are_numbers(value) and len(value) == 2),
    ),
    "position_nll": _or_none(lambda value: isinstance(value, list)),
    "distance_accuracy": _or_none(
        lambda value: isinstance(value, list) and all(one is None or number(one) is not None for one in value)
    ),
    **dict.fromkeys(("own_text", "solved"), lambda value: isinstance(value, bool)),
    "layers": lambda value: isinstance(value, list) and _are_texts(value),
    "code": lambda value: isinstance(value, dict) and _are_texts(value.values()),
    **dict.fromkeys(("settings", "data_settings"), lambda value: isinstance(value, dict)),
}
