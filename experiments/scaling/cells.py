"""The cells of the study of sizes, and its statistic: Kendall's tau between the orders of two cells."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from configs.scaling import ENCODINGS, FACTORS, get_config
from experiments.tables import Run, Seeds, by_part, by_setting, load

DRAWS = 10_000
#: Two encodings differ if their perplexities at L, or their R_4, differ by this share at both sizes.
APART = {1: 0.02, 4: 0.10, 8: 0.10}
#: The ratio to the best at L up to which an encoding is near it, and the R_k up to which it is level, in `groups`.
NEAR, LASTING = 1.10, 1.05
#: The cell whose settings are those of the leaderboard.
LEADERBOARD = "128x64"
#: Cells of widths 64 and 256 with the steps of width 128.
EQUAL_STEPS = ("64x64-steps", "64x128-steps", "64x256-steps", "256x64-steps")
#: These, and width 64 on source code, and on novels in tokens of a BPE.
CONTROLS = (*EQUAL_STEPS, "64x64-stdlib", "64x64-bpe")

Array = np.ndarray


class Cell(NamedTuple):
    """One width and one training length.

    name: as the tables show it.
    is_control: whether it has other settings than the cells of the design.
    encodings: of the runs, in the order of the first dimension below.
    values: perplexity by [encoding, seed, factor], factors 1, 2, 4, 8; nan if there is no loss.
    params: the mean number of parameters.
    """

    width: int
    train_len: int
    encodings: tuple[str, ...]
    values: Array
    params: float
    name: str = ""
    is_control: bool = False

    @property
    def part(self) -> str:
        """The part of the data file that a cell of this width and length has in the design."""
        return f"{self.width}x{self.train_len}"


def load_runs() -> list[Run]:
    """Return the runs of all parts. The cell `LEADERBOARD` has the leaderboard's runs of its encodings and seeds."""
    cell = get_config(LEADERBOARD).sweep
    runs = load("leaderboard", "cells")
    shared = (run for run in runs if run["encoding"] in ENCODINGS and run["seed"] in cell.seeds)
    return [*(run | {"part": LEADERBOARD} for run in shared), *load("scaling")]


def read_cells(runs: Sequence[Run], controls: Sequence[str] = ()) -> list[Cell]:
    """Return the cells of the first text, by training length and width. A cell has the seeds that all encodings have.

    controls: parts that count as cells too.
    """
    cells = []
    for part, members in by_part(runs).items():
        found = re.fullmatch(r"(\d+)x(\d+)(?:-(\w+))?", part)
        if not found or (found[3] and part not in controls):
            continue
        width, length, control = int(found[1]), int(found[2]), found[3]
        by_name = {name: {run["seed"]: run for run in own} for name, own in by_setting(members).items()}
        common = sorted(set.intersection(*(set(by_name.get(name, ())) for name in ENCODINGS)))
        if not common:
            continue
        values = np.full((len(by_name), len(common), len(FACTORS)), np.nan)
        for line, own in enumerate(by_name.values()):
            seeds = Seeds([own[seed] for seed in common])
            for column, factor in enumerate(FACTORS):
                if len(found_here := seeds.values("ppl", factor)) == len(common):
                    values[line, :, column] = found_here
        params = fmean(run["num_params"] for own in by_name.values() for run in own.values())
        shown = f"L = {length}" if length > 64 or not control else None
        name = ", ".join(filter(None, (str(width), shown, control)))
        cells.append(Cell(width, length, tuple(by_name), values, params, name, bool(control)))
    return sorted(cells, key=lambda cell: (cell.train_len, cell.width, cell.name))


def named_cells(runs: Sequence[Run], names: Iterable[str]) -> list[Cell]:
    """Return the cells of these names, in this order."""
    found = {one.name: one for one in read_cells(runs, CONTROLS)}
    return [found[name] for name in names]


def pick(cell: Cell, names: Sequence[str]) -> Cell:
    """Return a cell with these encodings, in this order."""
    lines = [cell.encodings.index(name) for name in names]
    return cell._replace(encodings=tuple(names), values=cell.values[lines])


def align(*cells: Cell) -> list[Cell]:
    """Return cells with the encodings that all have, in one order."""
    names = [name for name in cells[0].encodings if all(name in one.encodings for one in cells)]
    return [pick(one, names) for one in cells]


def score(values: Array, factor: int) -> Array:
    """Return the number that orders encodings at `factor` L: ln PPL at L, or ln R_k beyond it, as means over seeds.

    Args:
      values: perplexities [..., encoding, seed, factor].
      factor: 1, 2, 4 or 8.
    """
    logs = np.log(values)
    return (logs[..., 0] if factor == 1 else logs[..., FACTORS.index(factor)] - logs[..., 0]).mean(axis=-1)


def kendall(one: Array, other: Array) -> Array:
    """Return Kendall's tau of two lists [..., encoding] of numbers without ties; what is nan in one is left out."""
    first, second = np.triu_indices(one.shape[-1], 1)
    agree = np.sign(one[..., first] - one[..., second]) * np.sign(other[..., first] - other[..., second])
    return np.nanmean(agree, axis=-1)


def draws(cell: Cell) -> Array:
    """Return a cell's perplexities [draw, encoding, seed, factor]. A draw is of seeds, the same for all encodings.

    Two cells draw independently.
    """
    random = np.random.default_rng(list(cell.name.encode()))
    count = cell.values.shape[1]
    return cell.values[:, random.integers(count, size=(DRAWS, count))].swapaxes(0, 1)


def single_seeds(cell: Cell, factor: int) -> Array:
    """Return the scores [seed, encoding] of each seed alone."""
    return score(cell.values[:, :, None].swapaxes(0, 1), factor)


def tau(one: Cell, other: Cell, factor: int) -> tuple[float, float, float]:
    """Return tau between the orders of two cells, and the ends of its 95 % interval over seeds, nan for single ones."""
    one, other = align(one, other)
    middle = float(kendall(score(one.values, factor), score(other.values, factor)))
    if min(one.values.shape[1], other.values.shape[1]) < 2:
        return middle, math.nan, math.nan
    low, high = np.quantile(kendall(score(draws(one), factor), score(draws(other), factor)), [0.025, 0.975])
    return middle, float(low), float(high)


def tau_of_single_seeds(one: Cell, other: Cell, factor: int) -> float:
    """Return the mean tau between the order of one seed of each cell, over all pairs of different runs."""
    one, other = align(one, other)
    first, second = single_seeds(one, factor), single_seeds(other, factor)
    pairs = itertools.product(first, second) if one.name != other.name else itertools.combinations(first, 2)
    each = [float(kendall(a, b)) for a, b in pairs]
    return fmean(each) if each else math.nan


def groups(one: Cell, other: Cell, factor: int) -> dict[str, list[str]]:
    """Return the encodings that are close at both cells: near the best at L, or level, or failing, beyond L."""
    first, second = (np.exp(score(cell.values, factor)) for cell in align(one, other))
    if factor == 1:
        near = (first < NEAR * first.min()) & (second < NEAR * second.min())
        chosen = {"near the best": near}
    else:
        chosen = {
            "level": (first < LASTING) & (second < LASTING),
            "failing": (first > LASTING) & (second > LASTING),
        }
    names = align(one, other)[0].encodings
    return {title: [names[place] for place in np.flatnonzero(inside)] for title, inside in chosen.items()}


def swaps(one: Cell, other: Cell, factor: int) -> list[str]:
    """Return the pairs of encodings that differ by more than `APART` at both cells and change places."""
    one, other = align(one, other)
    first, second, least = score(one.values, factor), score(other.values, factor), math.log1p(APART[factor])
    found = []
    for a, b in itertools.combinations(range(len(one.encodings)), 2):
        here, there = first[a] - first[b], second[a] - second[b]
        if here * there < 0 and min(abs(here), abs(there)) > least:
            found.append(f"`{one.encodings[a]}` and `{one.encodings[b]}`")
    return found


def pairs_of(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Cell]]:
    """Yield the pairs of cells that differ in the width or in the training length alone.

    A control differs in its steps too, but not from a control of the same width.
    """
    for one, other in itertools.combinations(cells, 2):
        same_width = one.width == other.width and one.is_control == other.is_control
        if one.train_len == other.train_len or same_width:
            yield one, other


def slope(cells: Sequence[Cell], values: Sequence[Array], factor: int) -> Array:
    """Return the slope of ln R_k at k = `factor` over ln parameters of each encoding, by least squares.

    values: of each cell, perplexities [..., encoding, seed, factor].
    """
    sizes = np.log([one.params for one in cells])
    sizes -= sizes.mean()
    return np.tensordot(sizes / (sizes**2).sum(), np.stack([score(each, factor) for each in values]), axes=1)
