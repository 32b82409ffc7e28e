"""Tables of stored rows for other programs: CSV and JSON with every digit, LaTeX with those of the Markdown."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd

from posx.lab.files.atomic import finite_json
from posx.lab.plots import captions, look
from posx.lab.plots.groups import Point
from posx.lab.plots.tables import RowTable, seed_count

#: The fields of a number, one line of CSV each. Lengths are in tokens; the mean and its spreads in `unit`.
FIELDS = (
    "train_len", "protocol", "stride", "eval_len", "encoding", "column", "unit", "mean", "std_over_seeds", "seeds",
    "text_low", "text_high", "no_interval", "failed", "num_targets", "num_documents", "num_items",
    "source", "tokenizer", "text", "warning",
)  # fmt: skip
#: The unit of a column by the start of its title; ratios and shares have none.
_UNITS = {
    "perplexity": "per token", "pseudo-perplexity": "per token", "bits": "bits per byte", "entropy": "nats",
    "smoothed training loss": "nats per token", "steps": "steps", "seconds": "s",
}  # fmt: skip
#: The columns that they are from, of what was scored.
_SCORED = {name: name for name in ("stride", "num_targets", "num_documents", "num_items", "tokenizer")} | {
    "source": "data_source", "text": "data_digest"
}  # fmt: skip


def table_numbers(tables: Sequence[RowTable]) -> Iterator[dict[str, Any]]:
    """Yield each number of the tables with its spread over seeds, its 95 % interval over text, and what was scored."""
    for made in tables:
        protocol = made.panel.protocol if made.panel else None
        for curve, points in made.lines:
            rows = curve.rows[["run", "settings", "status", "step", "eval_len", *_SCORED.values()]]
            by_length = dict(iter(rows.groupby("eval_len")))
            for title, point in points.items():
                ratio = title.startswith("R_")
                train_len = int(curve.runs.train_len.iloc[0])
                length = round(point.x * (train_len if ratio else 1))
                own = by_length.get(length, rows[:0])
                facts = {name: _one(own[key]) for name, key in _SCORED.items()}
                if not made.panel:  # of training: its runs share the text and the tokenizer
                    trained = curve.runs.settings.iloc[0]
                    facts |= {name: trained.get(f"data.{name}") for name in ("source", "tokenizer", "text")}
                warning = "; ".join([*made.warnings, *captions.unfinished_lines(own)])
                unit = next((unit for start, unit in _UNITS.items() if title.startswith(start)), "1")
                row = {
                    "train_len": train_len, "protocol": protocol,
                    "eval_len": length if protocol else None,
                    "encoding": curve.label, "column": title, "unit": unit, "warning": warning or None,
                    **_spread(point), **facts,
                }  # fmt: skip
                yield {name: row[name] for name in FIELDS}


def _spread(point: Point) -> dict[str, Any]:
    low, high = point.interval or (None, None)
    return {
        "mean": point.mean if point.values else None,
        "std_over_seeds": statistics.stdev(point.values) if point.values[1:] else None,
        "seeds": len(point.values), "text_low": low, "text_high": high, "no_interval": point.no_interval or None,
        "failed": " ".join(sorted(set(point.failures))) or None,
    }  # fmt: skip


def _one(values: pd.Series) -> Any:
    """Return the value that all rows have; None if they differ, which the warning says, or if there is none."""
    several = values.unique().tolist()
    return several[0] if len(several) == 1 and pd.notna(several[0]) and several[0] != "" else None


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def as_csv(tables: Sequence[RowTable]) -> str:
    """Return a line for each number, under one line of names. A missing value is empty."""
    file = io.StringIO()
    writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
    writer.writeheader()
    for number in table_numbers(tables):
        # A spreadsheet would read such a name as a formula.
        name = number["encoding"]
        writer.writerow(number | {"encoding": f"'{name}" if name.startswith(_FORMULA) else name})
    return file.getvalue()


def as_json(tables: Sequence[RowTable]) -> str:
    """Return the numbers, and for each table what was scored, warnings and notes."""
    said = [{"facts": made.facts, "warnings": made.warnings, "notes": made.notes} for made in tables]
    return json.dumps(finite_json({"numbers": list(table_numbers(tables)), "tables": said}), indent=1) + "\n"


def as_latex(tables: Sequence[RowTable]) -> str:
    """Return a `tabular` for each table, with booktabs' lines. Comments before it say what was scored."""
    return "\n".join(map(_latex, tables))


def _latex(made: RowTable) -> str:
    lines = [f"% {text}" for text in (*made.facts, *made.warnings, *made.notes)]
    lines += [r"\begin{tabular}{lr" + "r" * len(made.columns) + "}", r"\toprule"]
    lines += [_row(["encoding", "seeds", *map(_title, made.columns)]), r"\midrule"]
    for curve, points in made.lines:
        cells = [_number(made.write(point)) for point in points.values()]
        lines.append(_row([rf"\texttt{{{_escape(curve.label)}}}", seed_count(curve), *cells]))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _title(text: str) -> str:
    return re.sub(r"R\\_(\S+)", r"$R_{\1}$", re.sub(r"\bL\b", "$L$", _escape(text)))


def _number(text: str) -> str:
    """Return a cell as LaTeX has it: a minus between two numbers is a dash."""
    return re.sub(r"(?<=\d)-(?=\d)", "--", re.sub(r" ?± ?", r" $\\pm$ ", _escape(text)))


def _escape(text: str) -> str:
    """Return text that LaTeX shows literally, a character beyond ASCII as its escape."""
    signs = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    plain = "".join(c if c.isascii() or c == "±" else ascii(c)[1:-1] for c in look.one_line(text))
    return re.sub(r"[\\~^&%$#_{}]", lambda sign: signs.get(sign[0], "\\" + sign[0]), plain)


#: {name of a format: the tables in it}. Markdown is `posx.lab.plots.tables.as_markdown`.
FORMATS: dict[str, Callable[[Sequence[RowTable]], str]] = {"csv": as_csv, "json": as_json, "latex": as_latex}
