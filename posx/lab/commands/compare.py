"""`posx compare` and `posx report`: comparisons of runs from their stored rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from posx.errors import ConfigError, WorkdirError
from posx.evaluation.differences import FEWEST_SEEDS, NOT_SEPARATED, SIGNIFICANCE, Verdict
from posx.evaluation.protocols import protocol_class
from posx.lab.commands import work_folders
from posx.lab.files.lines import json_line
from posx.lab.plots.captions import (
    TITLES,
    omission_lines,
    precisions,
    shared_settings_line,
    unfinished_lines,
    without_results,
)
from posx.lab.plots.groups import curves_of_runs
from posx.lab.plots.verdicts import BY_SEED, Comparison, Place, comparisons, p_text
from posx.lab.results.table import PER_POSITION, list_runs, missing_runs, read_results
from posx.lab.sweeps.plan import align_columns
from posx.machine.guard import start_devices
from posx.notices import say
from posx.parsing import split_items, to_type

#: The columns of a table of verdicts, and whether they have words.
HEAD = ("tokens", "ratio", "over text", "p, Holm", "these checkpoints", "text and seeds", "p, Holm", "the method", "")
HEAD_OF_ANSWERS = tuple({"ratio": "right"}.get(word, word.replace("text", "items")) for word in HEAD)
WORDS = (False, False, False, False, True, False, False, True, True)


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
    curves = curves_of_runs(list_runs(stored))
    names = [curve.label for curve in curves]
    if len(curves) < 2:
        raise ConfigError(
            f"{_join(folders)}: all runs with results have the same settings but for the seed ({', '.join(names)}), "
            "so there is nothing to compare. Name runs of two settings or more: posx compare RUN RUN"
        )
    judged, reasons = comparisons(stored, curves, _place_filter(values))
    if not judged:
        others, reasons = comparisons(stored, curves)
        if others:
            flags = " ".join(f"--{name}={values[name]}" for name in ("lengths", "protocol") if values[name])
            raise ConfigError(f"{flags}: no two runs were measured there. Leave it out to see what they measured.")
    if all(one.effect is None for one in judged):
        why = reasons[0] if reasons else judged[0].reason
        how = "Evaluate all with one command, on one text, at the same lengths."
        if stored.tokenizer[stored.tokenizer != ""].nunique() > 1:
            how = "Compare their bits per byte in `posx table`, of one text: evaluate each with --num_targets=0."
        elif not reasons and (stored.status == "diverged").any():
            how = "Train this seed again, or name the runs to compare: posx compare RUN RUN"
        raise ConfigError(f"{_join(folders)}: {why}. {how}")
    plain = (json_line(one.facts(names)) for one in judged)
    for line in plain if values["json"] else _lines(judged, names):
        print(line)
    for reason in reasons:
        say(f"not compared: {reason}")
    omitted = table[(table.left_out != "") & table.run.isin(stored.run)]
    protocols = {one.place.protocol for one in judged}
    shown, omitted = (rows[rows.protocol.isin(protocols)] for rows in (stored, omitted))
    notes = [
        *shared_settings_line(curves),
        *omission_lines(omitted),
        *unfinished_lines(shown[shown.status != "diverged"]),
        *precisions(shown),
        *without_results(missing_runs(folders)),
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


def _lines(judged: Sequence[Comparison], names: Sequence[str]) -> Iterator[str]:
    """Yield a small table for each pair and protocol, and how to read them."""
    for _, group in itertools.groupby(judged, key=lambda one: (one.pair, one.place[:2], one.num_targets, one.text)):
        yield from _table(list(group), names)
    yield from _footer(judged)


def _footer(judged: Sequence[Comparison]) -> Iterator[str]:
    """Yield how to read the tables."""
    families = [verdict.family for verdict in _verdicts(judged[0])]
    for of_answers in sorted({one.place.of_answers for one in judged}):
        favoured = "Differences of right answers above 0" if of_answers else "Ratios below 1"
        sample = "items of the task" if of_answers else "text of this kind"
        yield f"{favoured} favour the first. Each 95 % interval is of one comparison alone."
        yield (
            f"These checkpoints: these trained weights on other {sample}. The method: new seeds on other "
            f"{sample.partition(' ')[0]}."
        )
    if any(families):
        counts = "{} of these checkpoints, {} of the method".format(*families)
        yield f"Verdicts follow from p after Holm's correction for all comparisons of the column: {counts}."
    if any(one.method.word.startswith("too few seeds") for one in judged):
        seeds = ",".join(map(str, range(FEWEST_SEEDS)))
        yield f"A verdict on the method needs {FEWEST_SEEDS} seeds of each: --config.sweep.seeds={seeds}"
    every = itertools.chain(*map(_verdicts, judged))
    if lost := sum(v.word == NOT_SEPARATED and v.p is not None and v.p < SIGNIFICANCE for v in every):
        yield (
            f'Alone, {lost} of the "not separated" would have p below {SIGNIFICANCE}. Name fewer runs, --lengths or '
            "--protocol before you look, or train more seeds."
        )


def _verdicts(one: Comparison) -> tuple[Verdict, Verdict]:
    return one.checkpoints, one.method


def _table(lines: Sequence[Comparison], names: Sequence[str]) -> Iterator[str]:
    """Yield the lines of one pair and protocol."""
    first = lines[0]
    one, other = (names[n] for n in first.pair)
    trained = "" if len(set(first.train_lens)) == 1 else " (trained at {} and {} tokens)".format(*first.train_lens)
    place, compared = first.place, "{} and {} runs, unpaired".format(*first.seeds)
    rule = TITLES.get(place.protocol, place.protocol) + (f", stride {place.stride}" if place.stride else "")
    unit = "items" if place.of_answers else "targets"
    targets = f"{first.num_targets:,} {unit}, " if first.num_targets else ""
    targets += f"{'task' if place.of_answers else 'text'} {first.text[:12]}, " if first.text else ""
    if first.pairing == BY_SEED:
        compared = f"{first.seeds[0]} pair{'s' * (first.seeds[0] > 1)} of equal seeds"
    yield f"{one} against {other}{trained}: {rule}, {targets}{compared}"
    head = HEAD_OF_ANSWERS if place.of_answers else HEAD
    yield from (f"  {line}" for line in align_columns([head, *map(_cells, lines)], WORDS))
    yield ""


def _cells(one: Comparison) -> list[str]:
    """Return the cells of a comparison: its effect, each verdict with its interval and p, and why there is none."""
    ends = [end for verdict in _verdicts(one) for end in (verdict.low, verdict.high)]
    digits = _digits([one.effect, *ends])
    text, dash = (_share_text, " to ") if one.place.of_answers else (_ratio_text, "-")
    cells = [f"{one.place.eval_len:,}" if one.place.k is None else f"R_{one.place.k:g}", text(one.effect, digits)]
    for verdict in _verdicts(one):
        low, high = (text(end, digits) for end in (verdict.low, verdict.high))
        cells += [
            "-" if verdict.low is None else f"{low}{dash}{high}",
            "-" if verdict.adjusted_p is None else p_text(verdict.adjusted_p),
            verdict.word,
        ]
    return [*cells, one.reason]


def _ratio_text(ratio: float | None, digits: int) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.{digits}f}" if ratio >= 0.001 else f"{ratio:.3e}"


def _share_text(difference: float | None, _: int) -> str:
    """Return a difference of shares with four decimals, which hold one item of 2,000."""
    return "-" if difference is None else f"{difference + 0.0:+.4f}"  # -0.0 is a tie


def _digits(values: Iterable[float | None]) -> int:
    """Return the decimals, 4 or more, at which no value that is not 1 is shown as 1."""
    gaps = [abs(value - 1) for value in values if value is not None and value != 1]
    return next((n for n in range(4, 9) if all(gap > 0.5 * 10**-n for gap in gaps)), 9)
