"""The tables, the claims and the figures of the study of sizes.

    python -m experiments.tables collect runs/scaling/rates rates > experiments/scaling/runs.jsonl
    python -m experiments.tables collect runs/scaling/64x64 64x64 4096 >> experiments/scaling/runs.jsonl
    python -m experiments.scaling.scaling failing
    python -m experiments.scaling.scaling fill
    python -m experiments.scaling.scaling figure

The first word is a name of `TABLES`, whose tables are printed. `fill` writes all of them into the README, each after
the line with its command. `figure` draws the three figures.

A part of the data file is a cell of the study, named WIDTHxL. A control is named WIDTHxL-WHAT and differs in one thing:
`heads`, `steps`, `offset`, `stdlib`, `bpe`, `times1` or `rates`. `steps-times1` differs in two. `PART-window-size=L`
has the runs of a part with attention to the last L tokens. `128x256-again` has seed 0 of RoPE on another processor.
The parts of `RATES` try learning rates.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Sequence

from experiments.anchors import load_anchors
from experiments.scaling import figures
from experiments.scaling.cells import EQUAL_STEPS, Cell, load_runs, named_cells, pairs_of, read_cells
from experiments.scaling.measured import (
    controls,
    full_cells,
    lengths,
    multiples,
    power,
    rate_tables,
    table,
    training,
    windows,
)
from experiments.scaling.orders import claims, failing, orders, slopes, texts
from experiments.scaling.published import published
from experiments.tables import HERE, Run, load, markdown

#: A line of a page with a command, and its name.
COMMAND = re.compile(r"^(    python -m experiments\.scaling\.scaling (\w+)\n)", re.MULTILINE)
#: A table of Markdown.
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def equal(runs: Sequence[Run]) -> list[Cell]:
    """Return the cells of the design, and the controls with as many steps as width 128."""
    return read_cells(runs, EQUAL_STEPS)


#: {command: the function that makes its tables of the runs, in Markdown}.
TABLES: dict[str, Callable[[Sequence[Run]], list[str]]] = {
    "failing": lambda runs: [failing(pairs_of(equal(runs)))],
    "lengths": lambda runs: [lengths(equal(runs))],
    "windows": lambda runs: [windows(runs)],
    "multiples": lambda runs: [multiples([*runs, *load("recipe", "t5_times_1")])],
    "orders": lambda runs: [orders(pairs_of(equal(runs)))],
    "table": lambda runs: [table(read_cells(runs))],
    "slopes": lambda runs: [slopes(equal(runs))],
    "texts": texts,
    "published": lambda runs: [published(equal(runs), load_anchors())],
    "controls": lambda runs: [controls(runs)],
    "training": lambda runs: [training(runs)],
    "rates": rate_tables,
    "power": lambda runs: [power(full_cells(runs))],
    "claims": lambda runs: [markdown(["claim", "cells", "here", "verdict"], claims(read_cells(runs)))],
}


def filled(page: str, runs: Sequence[Run]) -> str:
    """Return a page with the tables of each command made anew. They are the first ones after the command.

    Raises SystemExit if fewer tables than the command prints stand between it and the next command.
    """
    text, *found = COMMAND.split(page)
    for line, name, section in zip(found[::3], found[1::3], found[2::3], strict=True):
        made = TABLE.findall("\n\n".join([*TABLES[name](runs), ""])) if name in TABLES else []
        text += line + with_tables(section, made)
    return text


def with_tables(section: str, made: Sequence[str]) -> str:
    """Return a text with these tables in place of its first ones. Raises SystemExit if it has fewer."""
    left = iter(made)
    text = TABLE.sub(lambda old: next(left, old[0]), section)
    if extra := next(left, ""):
        raise SystemExit(f"the page has no place for the table that begins with {extra.splitlines()[0]}")
    return text


def main(words: Sequence[str]) -> None:
    """Run the command that the first word names."""
    runs, folder = load_runs(), HERE / "scaling"
    match words:
        case [name] if name in TABLES:
            print(*TABLES[name](runs), sep="\n\n")
        case ["fill"]:
            page = folder / "README.md"
            page.write_text(filled(page.read_text(), runs))
        case ["figure"]:
            cells = named_cells(runs, itertools.chain(*figures.FIGURE.values()))
            figures.figure(cells, load_anchors(), folder / "scaling.png")
            figures.draw_triangle(runs, folder / "lengths.png")
            figures.draw_curves(runs, folder / "curves.png")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
