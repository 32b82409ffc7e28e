"""Choose learning rates from the tuning runs, by a rule that was written before any of them had ended.

    python -m experiments.tables collect runs/recipe_cpu tuning >> experiments/recipe/runs.jsonl
    python -m experiments.recipe.recipe choose recipe

`choose` prints Markdown. Runs of one seed take the noise from the runs of another study, which is named second:
`choose leaderboard recipe`. Only after the choice were runs at the chosen rate made again, measured on the validation
text at 8 L, and drawn:

    posx sweep --config configs/recipe_cpu.py:beyond --workdir runs/beyond --config.data.source=novels
    posx evaluate --workdir runs/beyond --lengths 64,512 --config.data.tuning_fraction=0
    python -m experiments.tables collect runs/beyond beyond >> experiments/recipe/runs.jsonl
    python -m experiments.recipe.recipe figure

The rule. Loss is the mean NLL at the training length on the tuning documents, averaged over seeds. Its noise is the
standard deviation between seeds of one setting, pooled over all settings. At each base rate every encoding takes its
best multiplier. The base rate for all is the one at which the encodings lose least on average against their best over
all rates. An encoding that loses more than twice the noise by it has its own rate, and the table names it. The
multiplier is the one nearest to 1 whose loss at that rate is within the noise of the best there: 1 if nothing is
gained. If the best is the largest multiplier tried, larger ones have to be tried first. (The rule read "the smallest"
until the leaderboard tried some multipliers below 1; from 1 up it is the same.)
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import posx
from experiments.tables import HERE, WINDOWS, Run, load

Record = dict[str, Any]


class Cell(NamedTuple):
    """The runs that differ only in their seed."""

    encoding: str
    rate: float
    multiplier: float  # 1 if nothing is learned


class Choice(NamedTuple):
    """The multiplier that an encoding takes at a base rate."""

    multiplier: float
    best: float  # multiplier of the lowest loss
    losses: dict[float, float]  # nats, by multiplier
    lost: float  # nats, against the best over all rates


def record(run: Run) -> Record:
    """Return what the rule reads of a run: its rates and its row at L on its own text.

    "r_8" is added if it was measured on another text at L and 8 L.
    """
    rows = [run | row for row in run["rows"] if row["status"] == "ok" and row["protocol"] == WINDOWS]
    text = rows[0]["data_digest"]  # `posx train` measures the run's own text first
    own = [row for row in rows if row["data_digest"] == text and row["eval_len"] == run["train_len"]]
    there = {row["eval_len"] / run["train_len"]: row["ppl"] for row in rows if row["data_digest"] != text}
    found = own[0] | {name: run["settings"][f"train.{name}"] for name in ("learning_rate", "position_lr_multiplier")}
    return found | ({"r_8": there[8] / there[1]} if {1, 8} <= there.keys() else {})


def records(study: str, part: str = "tuning") -> list[Record]:
    """Return the records of one part of a study."""
    return [record(run) for run in load(study, part)]


def cells_of(records: Sequence[Record]) -> dict[Cell, list[float]]:
    """Return the losses of the seeds of every cell, in nats. Raises ValueError for records of different targets.

    A cell that lacks a seed is left out: means over different seeds are not compared.
    """
    if len({(r["targets"], r["data_digest"], r["step"]) for r in records}) != 1:
        raise ValueError("these runs were not trained and scored alike")
    cells: dict[Cell, list[float]] = defaultdict(list)
    for r in sorted(records, key=lambda r: r["seed"]):
        cells[Cell(r["encoding"], r["learning_rate"], r["position_lr_multiplier"] or 1.0)].append(r["nll"])
    most = max(map(len, cells.values()))
    return {cell: losses for cell, losses in cells.items() if len(losses) == most}


def noise_of(cells: Mapping[Cell, Sequence[float]]) -> float:
    """Return the standard deviation between seeds, in nats, pooled over cells. Raises SystemExit if no cell has two."""
    several = [losses for losses in cells.values() if len(losses) > 1]
    if not several:
        raise SystemExit("one seed so far: nothing is chosen until a second seed shows the noise")
    squares = sum((len(losses) - 1) * statistics.variance(losses) for losses in several)
    return (squares / sum(len(losses) - 1 for losses in several)) ** 0.5


def choose(cells: Mapping[Cell, Sequence[float]], rate: float, noise: float) -> dict[str, Choice]:
    """Return the choice of every encoding at a base rate."""
    means = {cell: statistics.fmean(losses) for cell, losses in cells.items()}
    found = {}
    for encoding in dict.fromkeys(cell.encoding for cell in cells if cell.rate == rate):
        here = {c.multiplier: loss for c, loss in sorted(means.items()) if (c.encoding, c.rate) == (encoding, rate)}
        best = min(here, key=here.__getitem__)
        multiplier = min((m for m in here if here[m] <= here[best] + noise), key=lambda m: abs(math.log(m)))
        lost = here[best] - min(loss for cell, loss in means.items() if cell.encoding == encoding)
        found[encoding] = Choice(multiplier, best, here, lost)
    return found


def base_rate(cells: Mapping[Cell, Sequence[float]], noise: float) -> float:
    """Return the rate at which the encodings lose least, on average, against their own best."""
    rates = sorted({cell.rate for cell in cells})
    return min(rates, key=lambda rate: statistics.fmean(c.lost for c in choose(cells, rate, noise).values()))


def report(records: Sequence[Record], others: Sequence[Record] = ()) -> str:
    """Return Markdown. The noise is that of `others` if there are any, else that of `records`."""
    cells, seeded = cells_of(records), cells_of(others or records)
    noise, single = noise_of(seeded), [statistics.stdev(losses) for losses in seeded.values() if len(losses) > 1]
    rates, multipliers = (sorted({getattr(cell, name) for cell in cells}) for name in ("rate", "multiplier"))
    rate = base_rate(cells, noise)
    return "\n".join([
        f"{len(records)} runs of {records[0]['step']} steps, {records[0]['num_targets']:,} targets each. Noise between "
        f"seeds: {noise:.4f} nats, of the median setting {statistics.median(single):.4f}. Loss (nats a byte) at L, "
        "mean of the seeds; bold: the best of its encoding.",
        "", *_losses(cells, rates, multipliers), "",
        f"Base rate for all: {rate:g}{_edge(rate, rates)}. Gained: loss of the worst, and of the median multiplier "
        "there, less that of the chosen one.",
        "", *_choices(cells, rates, noise),
    ])  # fmt: skip


def _losses(cells: Mapping[Cell, Sequence[float]], rates: Sequence[float], multipliers: Sequence[float]) -> list[str]:
    table = [
        "| encoding | base rate |" + "".join(f" x {m:g} |" for m in multipliers),
        "|---|---:|" + "---:|" * len(multipliers),
    ]
    means = {cell: statistics.fmean(losses) for cell, losses in cells.items()}
    for encoding in dict.fromkeys(cell.encoding for cell in cells):
        best = min(loss for cell, loss in means.items() if cell.encoding == encoding)
        for rate in rates:
            row = [means.get(Cell(encoding, rate, m)) for m in multipliers]
            texts = ("" if x is None else f"**{x:.4f}**" if x == best else f"{x:.4f}" for x in row)
            table.append(f"| {encoding} | {rate:g} |" + "".join(f" {text} |" for text in texts))
    return table


def _choices(cells: Mapping[Cell, Sequence[float]], rates: Sequence[float], noise: float) -> list[str]:
    """Return a line for each encoding, and one more if it has a rate of its own."""
    table = [
        "| encoding | base rate | multiplier | lowest loss at | loss | lost by the rate | gained over worst | median |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    common, own = base_rate(cells, noise), {rate: choose(cells, rate, noise) for rate in rates}
    for encoding, choice in own[common].items():
        best = min((r for r in rates if encoding in own[r]), key=lambda r: own[r][encoding].lost)
        for rate in [common, best] if choice.lost > 2 * noise else [common]:
            found = own[rate][encoding]
            loss, others = found.losses[found.multiplier], sorted(found.losses.values())
            at = f"x {found.best:g}{_edge(found.best, list(found.losses))}"
            table.append(
                f"| {encoding} | {rate:g}{' (its own)' if rate != common else ''} | {found.multiplier:g} | {at} | "
                f"{loss:.4f} | {found.lost:.4f} | {others[-1] - loss:.4f} | {statistics.median(others) - loss:.4f} |"
            )
    return table


def _edge(value: float, tried: Sequence[float]) -> str:
    return " (at the edge)" if len(tried) > 1 and value in (min(tried), max(tried)) else ""


def figure(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw perplexity at L and R_8 against the multiplier. A ring marks the multiplier of a class."""
    from posx.lab.plots import look, palette

    multipliers = sorted({r["position_lr_multiplier"] for r in records})
    count = len({r["seed"] for r in records})
    seeds = "one seed" if count == 1 else f"lines: means over seeds, dots: {count} seeds"
    looks = palette.looks([(name, 0) for name in dict.fromkeys(r["encoding"] for r in records)])
    with look.style():
        made = look.figure(11, 4.2)
        axes = made.subplots(1, 2, gridspec_kw={"left": look.MARGIN, "right": 0.83, "top": 0.99, "wspace": 0.24})
        for ax, name, label in (
            (axes[0], "ppl", "perplexity at L, on the documents that choose"),
            (axes[1], "r_8", "R_8 on held-out novels"),
        ):
            for (encoding, _), drawn in looks.items():
                _against_multiplier(ax, [r for r in records if r["encoding"] == encoding], name, drawn)
            look.length_axis(ax, multipliers, anchor=1.0)
            look.log_axis(ax, [r[name] for r in records])
            ax.set_xlabel("learning rate of the position parameters / that of all others")
            ax.set_ylabel(label)
        handles, labels = axes[1].get_legend_handles_labels()
        look.legend(made, list(zip(handles, labels, strict=True)), 0.845, 0.985)
        look.headings(made, "What the multiplier decides, at the training length and eight times beyond it", [
            f"{records[0]['step']} steps at L = {records[0]['train_len']}, base rate {records[0]['learning_rate']:g} · "
            f"{seeds} · rings: what was chosen, by the left side alone",
        ])  # fmt: skip
        return look.save_figure(made, folder, "r_8")


def _against_multiplier(ax: Any, records: Sequence[Record], name: str, drawn: Any) -> None:
    values: dict[float, list[float]] = defaultdict(list)
    for r in sorted(records, key=lambda r: r["position_lr_multiplier"]):
        values[r["position_lr_multiplier"]].append(r[name])
    means = {multiplier: statistics.fmean(found) for multiplier, found in values.items()}
    encoding = records[0]["encoding"]
    style = {"color": drawn.color, "marker": drawn.marker, "linestyle": drawn.dashes, "label": encoding}
    ax.plot(list(means), list(means.values()), **style)
    dots = [(multiplier, value) for multiplier, found in values.items() for value in found]
    ax.plot(*zip(*dots, strict=True), ".", color=drawn.color, markersize=4.5, markeredgewidth=0)
    chosen = posx.ENCODINGS[encoding].about.lr_multiplier
    ax.plot([chosen], [means[chosen]], "o", markersize=12, markerfacecolor="none", markeredgecolor=drawn.color)


def main(words: Sequence[str]) -> None:
    """Run one of the two commands."""
    match words:
        case ["choose", study, *others]:
            print(report(records(study), [record for other in others for record in records(other)]))
        case ["figure"]:
            print(*figure(records("recipe", "beyond"), HERE / "recipe"), sep="\n")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
