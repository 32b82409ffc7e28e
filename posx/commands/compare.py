"""`posx compare` and `posx report`: several runs beside each other, out of stored rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from posx.commands import work_folders
from posx.errors import ConfigError, WorkdirError
from posx.machine.guard import start_devices
from posx.plots.groups import curves_of_runs
from posx.plots.rows import PER_POSITION, PROTOCOLS, read_several
from posx.plots.verdicts import Verdict, verdicts
from posx.progress import say


def run_compare(values: dict[str, Any], _: None) -> None:
    """Print which runs are better. Raises ConfigError if they cannot be compared, WorkdirError without results."""
    folders = work_folders(values)
    if values["dry_run"]:
        print(f"would compare the runs in {', '.join(map(str, folders))}")
        return
    stored = read_several(folders)
    if not stored:
        raise WorkdirError(f"{_listed(folders)}: no run has results. Measure them with posx evaluate.")
    curves = curves_of_runs(row.run for row in stored if row["protocol"] != PER_POSITION)
    if len(curves) < 2:
        why = f"{len(curves)} kind of run has results, and two are needed. Seeds of one kind count once."
        raise ConfigError(f"{_listed(folders)}: {why}")
    found, left_out = verdicts(stored, curves)
    if not found:
        how = "Evaluate all with one command, on one text, at the same lengths."
        raise ConfigError(f"{_listed(folders)}: {left_out[0]}. {how}")
    names = [curve.label for curve in curves]
    for line in _as_json(found, names) if values["json"] else _lines(found, names):
        print(line)
    for reason in left_out:
        say(f"not compared: {reason}")


def run_report(values: dict[str, Any], _: None) -> None:
    """Write a page on runs and print its path. Raises ConfigError, WorkdirError."""
    folders, out = work_folders(values), Path(values["out"]).expanduser().resolve()
    if out.suffix not in (".html", ".htm"):
        raise ConfigError(f"--out={values['out']}: the file's name must end with .html.")
    if values["dry_run"]:
        print(f"would write {out} on the runs in {', '.join(map(str, folders))}")
        return
    start_devices()
    from posx import report  # Matplotlib: once the words are known to be right

    runs = report.write(folders, out)
    print(f"{out}  {runs} runs, {out.stat().st_size:,} bytes")


def _listed(folders: Sequence[Path]) -> str:
    return ", ".join(folder.name for folder in folders)


def _as_json(found: Sequence[Verdict], names: Sequence[str]) -> Iterator[str]:
    for verdict in found:
        facts = verdict._asdict()
        one, other = (names[n] for n in facts.pop("pair"))
        yield json.dumps({"one": one, "other": other} | facts)


def _lines(found: Sequence[Verdict], names: Sequence[str]) -> Iterator[str]:
    """Yield a small table for each pair and protocol."""
    for _, group in itertools.groupby(found, key=lambda v: (v.pair, v.protocol, v.stride)):
        lines = list(group)
        first = lines[0]
        one, other = (names[n] for n in first.pair)
        trained = "" if len(set(first.train_lens)) == 1 else " (trained at {} and {} tokens)".format(*first.train_lens)
        seeds = "one seed each" if first.seeds == (1, 1) else "{} and {} seeds".format(*first.seeds)
        over = "text and seeds" if min(first.seeds) > 1 else "text, not over seeds"
        rule = PROTOCOLS.get(first.protocol, first.protocol) + (f", stride {first.stride}" if first.stride else "")
        yield f"{one} against {other}{trained}: {rule}, {first.num_targets:,} targets, {seeds}"
        yield f"{'tokens':>8}  {'ratio':>7}  {f'95 % over {over}':34}"
        for v in lines:
            ends = "too little text" if v.low is None else f"{v.low:.4f} to {v.high:.4f}"
            yield f"{v.eval_len:>8,}  {v.ratio:>7.4f}  {ends:34}  {v.word}{' (one seed)' if 1 in v.seeds else ''}"
        yield ""
