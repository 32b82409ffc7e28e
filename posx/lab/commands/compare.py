"""`posx compare` and `posx report`: comparisons of runs from their stored rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from posx.errors import ConfigError, WorkdirError
from posx.evaluation.answers import Answers
from posx.evaluation.differences import SIGNIFICANCE
from posx.evaluation.protocols import protocol_class
from posx.lab.commands import work_folders
from posx.lab.files.atomic import finite_json
from posx.lab.plots.captions import (
    TITLES,
    omission_lines,
    precisions,
    shared_settings_line,
    unfinished_lines,
    without_results,
)
from posx.lab.plots.groups import curves_of_runs
from posx.lab.plots.verdicts import (
    BY_SEED,
    HOLDS_FOR,
    NOT_SEPARATED,
    ONE_SEED,
    UNPAIRED,
    Place,
    Verdict,
    p_text,
    verdicts,
)
from posx.lab.results.columns import FAILED
from posx.lab.results.table import PER_POSITION, list_runs, missing_runs, read_results
from posx.machine.guard import start_devices
from posx.notices import say
from posx.parsing import split_items, to_type


def run_compare(values: dict[str, Any], _: None) -> None:
    """Print which runs are better. Raises ConfigError if they cannot be compared, WorkdirError without results."""
    folders = work_folders(values)
    if values["dry_run"]:
        print(f"would compare the runs in {', '.join(map(str, folders))}")
        return
    table = read_results(folders)
    stored = table[(table.left_out == "") & (table.protocol != PER_POSITION)]
    if (stored.status == "diverged").all():
        raise WorkdirError(f"{_join(folders)}: no run has results. Measure them with posx evaluate.")
    if (stored.protocol == Answers.name).all():
        raise ConfigError(
            f"{_join(folders)}: posx compare judges losses on text, but these runs answer a task. Use posx table: it "
            "shows right answers with intervals."
        )
    curves = curves_of_runs(list_runs(stored))
    names = [curve.label for curve in curves]
    if len(curves) < 2:
        raise ConfigError(
            f"{_join(folders)}: all runs with results have the same settings but for the seed ({', '.join(names)}), "
            "so there is nothing to compare. Name runs of two settings or more: posx compare RUN RUN"
        )
    judged, reasons = verdicts(stored, curves, _place_filter(values))
    if not judged:
        others, reasons = verdicts(stored, curves)
        if others:
            flags = " ".join(f"--{name}={values[name]}" for name in ("lengths", "protocol") if values[name])
            raise ConfigError(f"{flags}: no two runs were measured there. Leave it out to see what they measured.")
    if all(verdict.ratio is None for verdict in judged):
        why = reasons[0] if reasons else judged[0].reason
        how = "Evaluate all with one command, on one text, at the same lengths."
        if why.endswith(FAILED["diverged"]):
            how = "Train this seed again, or name the runs to compare: posx compare RUN RUN"
        raise ConfigError(f"{_join(folders)}: {why}. {how}")
    for line in (json.dumps(finite_json(v.facts(names))) for v in judged) if values["json"] else _lines(judged, names):
        print(line)
    for reason in reasons:
        say(f"not compared: {reason}")
    omitted = table[(table.left_out != "") & table.run.isin(stored.run)]
    protocols = {verdict.place.protocol for verdict in judged}
    shown, omitted = (rows[rows.protocol.isin(protocols)] for rows in (stored, omitted))
    notes = [
        *shared_settings_line(curves),
        *omission_lines(omitted),
        *unfinished_lines(shown[shown.status != "diverged"]),
        *precisions(shown),
        *without_results({name: why for folder in folders for name, why in missing_runs(folder).items()}),
    ]
    for line in notes:
        say(f"notice: {line}")


def _place_filter(values: dict[str, Any]) -> Callable[[Place], bool]:
    """Return whether a place is of the protocols and lengths that the flags name, all if they name none."""
    protocols = {protocol_class(name).name for name in split_items(values["protocol"])}
    lengths = set(to_type(values["lengths"], tuple[int, ...], "--lengths"))
    return lambda place: (not protocols or place.protocol in protocols) and (not lengths or place.eval_len in lengths)


def run_report(values: dict[str, Any], _: None) -> None:
    """Write a page on runs and print its path. Raises ConfigError, WorkdirError."""
    folders, out = work_folders(values), Path(values["out"]).expanduser().resolve()
    if out.suffix not in (".html", ".htm"):
        raise ConfigError(f"--out={values['out']}: the file's name must end with .html.")
    if values["dry_run"]:
        print(f"would write {out} on the runs in {', '.join(map(str, folders))}")
        return
    start_devices()
    from posx.lab import report  # Matplotlib: once the words are known to be right

    runs = report.write_report(folders, out)
    print(f"{out}  {runs} runs, {out.stat().st_size:,} bytes")


def _join(folders: Sequence[Path]) -> str:
    return ", ".join(folder.name for folder in folders)


def _lines(judged: Sequence[Verdict], names: Sequence[str]) -> Iterator[str]:
    """Yield a small table for each pair and protocol, and how to read them."""
    for _, group in itertools.groupby(judged, key=lambda v: (v.pair, v.place[:2], v.pairing, v.num_targets, v.text)):
        yield from _table(list(group), names)
    yield from _footer(judged)


def _footer(judged: Sequence[Verdict]) -> Iterator[str]:
    """Yield how to read the tables."""
    kinds, family = {verdict.pairing == ONE_SEED for verdict in judged}, judged[0].family
    yield "Ratios below 1 favour the first. Each 95 % interval is of one comparison alone."
    if False in kinds:
        yield f"It is for {HOLDS_FOR[BY_SEED]}. Its parts: new seeds on this text, and these runs on other text."
    if True in kinds:
        yield f"{'With one seed it' if False in kinds else 'It'} is for {HOLDS_FOR[ONE_SEED]}: not for the encodings."
    if family:
        yield f"Verdicts follow from p, which Holm's correction makes right for all {family} comparisons together."
    if lost := sum(v.word == NOT_SEPARATED and v.p is not None and v.p < SIGNIFICANCE for v in judged):
        yield (
            f"{lost} of them would count alone. Name fewer runs, --lengths or --protocol before you look, "
            "or train more seeds."
        )


def _table(lines: Sequence[Verdict], names: Sequence[str]) -> Iterator[str]:
    """Yield the lines of one pair and protocol."""
    first = lines[0]
    one, other = (names[n] for n in first.pair)
    trained = "" if len(set(first.train_lens)) == 1 else " (trained at {} and {} tokens)".format(*first.train_lens)
    place, seeds = first.place, "{} and {} seeds".format(*first.seeds)
    rule = TITLES.get(place.protocol, place.protocol) + (f", stride {place.stride}" if place.stride else "")
    targets = f"{first.num_targets:,} targets, " if first.num_targets else ""
    targets += f"text {first.text[:12]}, " if first.text else ""
    compared = {
        BY_SEED: f"{first.seeds[0]} pairs of equal seeds",
        UNPAIRED: f"{seeds}, unpaired",
        ONE_SEED: "one seed each" if first.seeds == (1, 1) else seeds,
    }[first.pairing]
    parts = ("over seeds", "over text") if first.pairing != ONE_SEED else ()
    yield f"{one} against {other}{trained}: {rule}, {targets}{compared}"
    cells = [["tokens", "ratio", "95 %", *parts, "p, Holm", ""], *(_cells(v, len(parts)) for v in lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for *numbers, said in cells:
        yield f"  {'  '.join(cell.rjust(width) for cell, width in zip(numbers, widths, strict=False))}  {said}".rstrip()
    yield ""


def _cells(verdict: Verdict, parts: int) -> list[str]:
    """Return the cells of a verdict: of the parts of its interval, those over seeds and over text, or none."""
    whole = (verdict.low, verdict.high) if verdict.low is not None and verdict.high is not None else None
    ends = (whole, verdict.over_seeds, verdict.over_text)[: 1 + parts]
    digits = _digits([verdict.ratio, *itertools.chain(*filter(None, ends))])
    return [
        f"{verdict.place.eval_len:,}" if verdict.place.k is None else f"R_{verdict.place.k:g}",
        "-" if verdict.ratio is None else _ratio_text(verdict.ratio, digits),
        *("-".join(_ratio_text(end, digits) for end in pair) if pair else "-" for pair in ends),
        "-" if verdict.adjusted_p is None else p_text(verdict.adjusted_p),
        verdict.words,
    ]


def _ratio_text(ratio: float, digits: int) -> str:
    return f"{ratio:.{digits}f}" if ratio >= 0.001 else f"{ratio:.3e}"


def _digits(values: Iterable[float | None]) -> int:
    """Return the decimals, 4 or more, at which no value that is not 1 is shown as 1."""
    gaps = [abs(value - 1) for value in values if value is not None and value != 1]
    return next((n for n in range(4, 9) if all(gap > 0.5 * 10**-n for gap in gaps)), 9)
