"""Which learning rates the tuning runs chose, by a rule that was written before any of them had ended.

    python experiments/recipe/recipe.py collect runs/recipe_cpu > experiments/recipe/tuning.jsonl
    python experiments/recipe/recipe.py choose experiments/recipe/tuning.jsonl

`collect` prints one line of JSON a run, from the rows that `configs/recipe_cpu.py` has left; `choose` prints Markdown.
Runs of one seed borrow the noise of others: their file follows (`choose few.jsonl experiments/recipe/tuning.jsonl`).
After the choice stands, and not before, runs at the chosen rate are made again, measured on the validation text at 8 L
and drawn:

    posx sweep --config configs/recipe_cpu.py:beyond --workdir runs/beyond --config.data.source=novels
    posx evaluate --workdir runs/beyond --lengths 64,512 --config.data.tuning_fraction=0
    python experiments/recipe/recipe.py collect runs/beyond > experiments/recipe/beyond.jsonl
    python experiments/recipe/recipe.py figure experiments/recipe/beyond.jsonl

The rule. Loss is the mean NLL at the training length on the tuning documents, averaged over seeds. Its noise is the
standard deviation between seeds of one setting, pooled over all settings. At each base rate every encoding takes its
best multiplier. The base rate for all is the one at which the encodings lose least on average against their best over
all rates; an encoding that loses more than twice the noise by it has its own rate, and that is said. The multiplier is
the one nearest to 1 whose loss at that rate is within the noise of the best there: 1 where nothing is gained. Where the
best is the largest multiplier tried, larger ones have to be tried first. (It read "the smallest", until the leaderboard
tried some below 1; of those from 1 up it is the same.)
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import posx
from posx.files import lines

Record = dict[str, Any]
FACTS = (
    "encoding", "learning_rate", "position_lr_multiplier", "seed", "train_len", "nll", "ppl", "num_targets", "targets",
    "step", "data_digest", "digest",
)  # fmt: skip


class Cell(NamedTuple):
    """Runs that differ by their seed alone."""

    encoding: str
    rate: float
    multiplier: float  # 1 where nothing is learned


class Choice(NamedTuple):
    multiplier: float
    best: float  # multiplier of the lowest loss
    losses: dict[float, float]  # nats, by multiplier
    lost: float  # nats, against the best over all rates


def collect(folder: Path) -> list[Record]:
    """One record a finished run: its row at L on the tuning documents, and R_8 on other text if that was measured."""
    records = []
    for path in sorted(folder.glob("*/DONE")):
        own = json.loads(path.read_text())["data_digest"]
        rows = [row for row in lines.read(path.parent / "eval.jsonl") if row["status"] == "ok"]
        here = [row for row in rows if row["data_digest"] == own and row["eval_len"] == row["train_len"]]
        there = {row["eval_len"] / row["train_len"]: row["ppl"] for row in rows if row["data_digest"] != own}
        record = {name: here[0][name] for name in FACTS}
        records.append(record | ({"r_8": there[8] / there[1]} if {1, 8} <= there.keys() else {}))
    return records


def cells_of(records: Sequence[Record]) -> dict[Cell, list[float]]:
    """Losses of the seeds of every cell, nats. Raises ValueError for records of different targets or lengths.

    A cell that lacks a seed which others have is left out: means over other seeds are not compared.
    """
    if len({(r["targets"], r["data_digest"], r["step"]) for r in records}) != 1:
        raise ValueError("these runs were not trained and scored alike")
    cells: dict[Cell, list[float]] = defaultdict(list)
    for r in sorted(records, key=lambda r: r["seed"]):
        cells[Cell(r["encoding"], r["learning_rate"], r["position_lr_multiplier"] or 1.0)].append(r["nll"])
    most = max(map(len, cells.values()))
    return {cell: losses for cell, losses in cells.items() if len(losses) == most}


def noise_of(cells: Mapping[Cell, Sequence[float]]) -> float:
    """Standard deviation between seeds, nats, pooled over cells. Ends the program where no cell has two."""
    several = [losses for losses in cells.values() if len(losses) > 1]
    if not several:
        raise SystemExit("one seed so far: nothing is chosen until a second tells what noise is")
    squares = sum((len(losses) - 1) * statistics.variance(losses) for losses in several)
    return (squares / sum(len(losses) - 1 for losses in several)) ** 0.5


def choose(cells: Mapping[Cell, Sequence[float]], rate: float, noise: float) -> dict[str, Choice]:
    """What every encoding takes at a base rate."""
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
    """The rate at which the encodings lose least, on average, against their own best."""
    rates = sorted({cell.rate for cell in cells})
    return min(rates, key=lambda rate: statistics.fmean(c.lost for c in choose(cells, rate, noise).values()))


def report(records: Sequence[Record], others: Sequence[Record] = ()) -> str:
    """Markdown; the noise is that of `records`, or of `others` where those are given."""
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
    """A line an encoding, and one more where it has a rate of its own."""
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
    """Perplexity at L, which chose, and R_8, which did not, against the multiplier; a ring at what a class states."""
    from posx.plots import look, palette

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
        look.legend(made, handles, labels, 0.845, 0.985)
        look.headings(made, "What the multiplier decides, at the training length and eight times beyond it", [
            f"{records[0]['step']} steps at L = {records[0]['train_len']}, base rate {records[0]['learning_rate']:g} · "
            f"{seeds} · rings: what was chosen, by the left side alone",
        ])  # fmt: skip
        return look.save(made, folder, "r_8")


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
    match words:
        case ["collect", folder]:
            print("\n".join(json.dumps(record) for record in collect(Path(folder))))
        case ["choose", tuning, *others]:
            print(report(lines.read(Path(tuning)), [record for other in others for record in lines.read(Path(other))]))
        case ["figure", beyond]:
            print(*figure(lines.read(Path(beyond)), Path(beyond).parent), sep="\n")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
