"""The tables, the claims and the figures of the study of sizes.

    python -m experiments.tables collect runs/scaling/rates rates > experiments/scaling/runs.jsonl
    python -m experiments.tables collect runs/scaling/64x64 64x64 4096 >> experiments/scaling/runs.jsonl
    python -m experiments.scaling.scaling failing
    python -m experiments.scaling.scaling fill
    python -m experiments.scaling.scaling figure

The first word is a name of `TABLES`, whose tables are printed. `fill` writes all of them into the README, each after
the line with its command. `figure` draws the two figures.

A part of the data file is a cell of the study, named WIDTHxL. A control is named WIDTHxL-WHAT and differs in one thing:
`heads`, `steps`, `offset`, `stdlib`, `bpe` or `times1`. `steps-times1` differs in two. `PART-window-size=256` has the
runs of a part with attention to the last 256 tokens. `128x256-again` has seed 0 of RoPE on another processor. The parts
of `RATES` try learning rates.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from configs.scaling import ENCODINGS, learning_rate
from experiments.anchors import Anchor, load_anchors, nearest
from experiments.scaling.cells import (
    APART,
    CONTROLS,
    EQUAL_STEPS,
    FACTORS,
    LEADERBOARD,
    NEAR,
    Cell,
    align,
    draws,
    groups,
    load_runs,
    named_cells,
    pairs_of,
    pick,
    read_cells,
    score,
    single_seeds,
    slope,
    swaps,
    tau,
    tau_of_single_seeds,
)
from experiments.tables import (
    HERE,
    Run,
    Seeds,
    by_part,
    by_setting,
    cell,
    load,
    markdown,
    row_tables,
    training_tables,
)
from posx.lab.plots import look, palette
from posx.lab.plots.heat import triangle
from posx.lab.plots.tables import RowTable, as_markdown

#: A table of Markdown.
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
#: An encoding is level if R_4 is below the first, and fails if it is above the second. Above the third the level rose.
LEVEL, FAILING, RISEN = 1.02, 1.5, 1.10
#: Tau holds if its whole interval is above this.
HOLDS = 0.6
#: The cell to compare with others of another text and of other tokens, and these.
TEXTS = ("64, L = 64", "64, stdlib", "64, bpe")
#: The parts that try learning rates: widths 64 and 32, and widths 32 and 256 with the steps of width 64.
RATES = ("rates", "rates32", "rates32-steps", "rates256-steps")
#: The seed of the cell 128x256 whose training is shown.
SEED = 1
#: The parts that were measured with windows of L too, by the name of their cells.
WINDOWED = {"64, L = 256, steps": "64x256-steps", "128, L = 256": "128x256"}
REFERENCE = "rope"
#: The encodings that fail at L = 64 at both widths.
SIX = ("sinusoidal", "rope", "rope(frequencies=whole_turns)", "darope", "cope", "nope")
#: The parts of the triangle of training length by evaluation length.
TRIANGLE = ("64x64", "64x128", "64x256")
#: By cell the parts with T5 at its multiple of the learning rate, 10, and at 1. The last is of the study of recipes.
T5_PARTS = {
    "64": ("64x64", "64x64-times1"), "64, 1,200 steps": ("64x64-steps", "64x64-steps-times1"),
    "128": (LEADERBOARD, "t5_times_1"),
}  # fmt: skip
#: The cells of the figure with their names there, in groups. Lines join the cells of a group.
FIGURE = {
    "width,\ndesign": {"64, L = 64": "64", "128, L = 64": "128"},
    "width,\n1,200 steps": {"64, steps": "64", "128, L = 64": "128", "256, steps": "256\nn = 1"},
    "width,\nL = 256": {"64, L = 256, steps": "64", "128, L = 256": "128"},
    "L at\nwidth 64": {"64, L = 64": "64", "64, L = 128": "128", "64, L = 256": "256"},
    "L at\nwidth 128": {"128, L = 64": "64", "128, L = 256": "256"},
    "text at\nwidth 64": {"64, stdlib": "code", "64, L = 64": "novels", "64, bpe": "BPE"},
}


def full_cells(runs: Sequence[Run]) -> list[Cell]:
    """Return the cells and controls that have three seeds."""
    return [one for one in read_cells(runs, CONTROLS) if one.values.shape[1] > 2]


def table(cells: Sequence[Cell]) -> str:
    """Return perplexity at L, R_4 and R_8 of each encoding and cell as Markdown, by the last cell's perplexity."""
    cells = align(*cells)
    head, columns = ["encoding"], dict[str, list[str]]()
    order = np.argsort(score(cells[-1].values, 1))
    for name in (cells[-1].encodings[place] for place in order):
        columns[name] = []
    for one in cells:
        head += [f"{one.name}: PPL at L", "R_4", "R_8"]
        for name, line in zip(one.encodings, one.values, strict=True):
            near = line[:, 0]
            columns[name] += [cell(near), *(cell(line[:, FACTORS.index(k)] / near) for k in (4, 8))]
    return markdown(head, ([f"`{name}`", *texts] for name, texts in columns.items()))


def orders(pairs: Iterable[tuple[Cell, Cell]]) -> str:
    """Return tau between the orders of two cells at L, of R_4 and of R_8, as Markdown.

    Beside it are tau between single seeds, and tau within groups of encodings that are close.
    """
    body = []
    for one, other in pairs:
        for factor, what in ((1, "PPL at L"), (4, "R_4"), (8, "R_8")):
            own = (tau_of_single_seeds(each, each, factor) for each in (one, other))
            inside = [
                f"{title} ({len(names)}): {tau(pick(one, names), pick(other, names), factor)[0]:.2f}"
                for title, names in groups(one, other, factor).items() if len(names) > 2
            ]  # fmt: skip
            body.append([
                f"{one.name} and {other.name}", what, with_interval(tau(one, other, factor)),
                f"{tau_of_single_seeds(one, other, factor):.2f}",
                ", ".join("-" if math.isnan(each) else f"{each:.2f}" for each in own),
                ", ".join(inside) or "-", "; ".join(swaps(one, other, factor)) or "none",
            ])  # fmt: skip
    head = ["cells", "order of", "tau", "single seeds", "in each cell", "within groups", "change places"]
    return markdown(head, body)


def failing(pairs: Iterable[tuple[Cell, Cell]]) -> str:
    """Return tau between the orders that two cells have of the six at 2, 4 and 8 L, by R_k, as Markdown."""
    body = []
    for one, other in pairs:
        here, there = pick(one, SIX), pick(other, SIX)
        body.append([f"{one.name} and {other.name}", *(with_interval(tau(here, there, k)) for k in FACTORS[1:])])
    return markdown(["cells", *(f"R_{factor}" for factor in FACTORS[1:])], body)


def lengths(cells: Sequence[Cell], length: int = 256) -> str:
    """Return perplexity in windows of `length` tokens of models of several training lengths, as Markdown.

    cells: those of one width and number of steps stand together. A lone one is left out.
    """
    together = defaultdict[tuple[int, bool], list[Cell]](list)
    for one in align(*cells):
        together[one.width, one.is_control].append(one)
    shown = [one for _, own in sorted(together.items()) if len(own) > 1 for one in own]
    columns = [one.values[..., FACTORS.index(length // one.train_len)] for one in shown]
    body = ([f"`{name}`", *(cell(each[place]) for each in columns)] for place, name in enumerate(shown[0].encodings))
    return markdown(["encoding", *(one.name for one in shown)], body)


def windows(runs: Sequence[Run]) -> str:
    """Return R_4 and that with attention to the last L tokens, of the seeds that were measured so, as Markdown."""
    parts, body = by_part(runs), []
    for name in ENCODINGS:
        texts = [f"`{name}`"]
        for part in WINDOWED.values():
            trained = {run["seed"]: run for run in parts[part] if run["encoding"] == name}
            window = [run for run in parts[f"{part}-window-size=256"] if run["encoding"] == name]
            whole = [trained[run["seed"]] for run in window]
            at = Seeds(whole).values("ppl")
            texts += [cell(np.divide(Seeds(own).values("ppl", 4), at)) for own in (whole, window)]
        body.append(texts)
    columns = [f"{title}: {what}" for title in WINDOWED for what in ("R_4", "with a window of L")]
    return markdown(["encoding", *columns], body)


def training(runs: Sequence[Run]) -> list[RowTable]:
    """Return the table of the steps to a training loss of the cell 128x256, of one seed."""
    return training_tables(run for run in runs if run["part"] == "128x256" and run["seed"] == SEED)


def draw_triangle(runs: Sequence[Run], path: Path) -> None:
    """Draw perplexity by training length and evaluation length, a map for each encoding, of the parts `TRIANGLE`."""
    made = row_tables([run for run in runs if run["part"] in TRIANGLE])
    panels = {one.panel.train_len: one.panel for one in made if one.panel}  # the table of all lengths repeats one
    with look.style():
        triangle(list(panels.values())).savefig(path, dpi=110, bbox_inches="tight")


def with_interval(found: tuple[float, float, float]) -> str:
    """Return tau and its interval as text, or tau alone if a cell has a single seed."""
    middle, low, high = found
    return f"{middle:.2f}" + ("" if math.isnan(low) else f" ({low:.2f} to {high:.2f})")


def stated(anchor: Anchor, name: str, factor: int) -> float:
    """Return the published perplexity of an encoding at L, or its R_k at the k nearest to `factor`; nan if none is."""
    if factor == 1:
        return anchor.perplexity[name][anchor.lengths.index(anchor.train_len)]
    ratios = anchor.ratios(name)
    near = nearest(ratios, factor)
    return math.nan if near is None else ratios[near]


def published(cells: Sequence[Cell], anchors: Sequence[Anchor]) -> str:
    """Return published orders of the twelve at L and of R_4, and how many of their pairs have it here, as Markdown.

    R_k of an anchor is that of the k nearest to 4. Pairs that the source states as equal are left out. The last lines
    have the sums, and those of all orders of the encodings.
    """
    body, pairs_of_factor = [], dict[int, list[tuple[str, str]]]()
    for anchor in anchors:
        for factor, what in ((1, "PPL at L"), (4, "R_4")):
            found = {name: stated(anchor, name, factor) for name in anchor.perplexity if name in ENCODINGS}
            found = {name: value for name, value in found.items() if math.isfinite(value)}
            order = sorted(found, key=found.__getitem__)
            pairs = [pair for pair in itertools.combinations(order, 2) if found[pair[0]] < found[pair[1]]]
            if not pairs:
                continue
            pairs_of_factor.setdefault(factor, []).extend(pairs)
            never = [f"`{a}` < `{b}`" for a, b in pairs if not any(alike([(a, b)], one, factor) for one in cells)]
            body.append([
                anchor.name, what, ", ".join(f"`{name}` {found[name]:.4g}" for name in order),
                *(f"{alike(pairs, one, factor)} of {len(pairs)}" for one in cells), "; ".join(never) or "none",
                anchor.same,
            ])  # fmt: skip
    for (factor, every), without in itertools.product(pairs_of_factor.items(), ("", "alibi")):
        pairs = [pair for pair in every if without not in pair]
        names = sorted({name for pair in pairs for name in pair})
        chance = [sum(order.index(a) < order.index(b) for a, b in pairs) for order in itertools.permutations(names)]
        null = f"random orders: {np.mean(chance):.0f} ± {np.std(chance):.0f}, at most {max(chance)}"
        totals = [f"{alike(pairs, one, factor)} of {len(pairs)}" for one in cells]
        what = "PPL at L" if factor == 1 else f"R_{factor}"
        body.append([f"all without `{without}`" if without else "all", what, null, *totals, "", ""])
    head = ["source", "order of", "published", *(one.name for one in cells), "in no cell", "same protocol"]
    return markdown(head, body)


def alike(pairs: Iterable[tuple[str, str]], cell: Cell, factor: int) -> int:
    """Return how many pairs of encodings have this order in a cell, the lower first."""
    here = dict(zip(cell.encodings, score(cell.values, factor), strict=True))
    return sum(bool(here[a] < here[b]) for a, b in pairs)


def slopes(cells: Sequence[Cell]) -> str:
    """Return the slopes of ln R_4 over ln parameters of each encoding at L = 64, with intervals, as Markdown.

    The first is over the sizes of the design, and beside it that of ln R_8. The others are of R_4 from one width to the
    next at equal steps. A slope takes as many seeds as the cell that has fewest. That of a single seed has no interval.
    """
    cells = align(*(one for one in cells if one.train_len == 64))
    sizes = [one for one in cells if not one.is_control]
    equal = [one for one in cells if one.is_control or one.part == LEADERBOARD]
    head = ["encoding", *(f"R_4, {one.name}" for one in cells), "slope of ln R_4", "of ln R_8"]
    body = [
        [f"`{name}`", *(f"{math.exp(score(one.values, 4)[place]):.3f}" for one in cells)]
        for place, name in enumerate(cells[0].encodings)
    ]
    for chosen, factor in ((sizes, 4), (sizes, 8), *((pair, 4) for pair in itertools.pairwise(equal))):
        if chosen is not sizes:
            head.append(f"{chosen[0].width} to {chosen[1].width} at equal steps")
        count = min(one.values.shape[1] for one in chosen)
        chosen = [one._replace(values=one.values[:, :count]) for one in chosen]
        low, high = np.quantile(slope(chosen, [draws(one) for one in chosen], factor), [0.025, 0.975], axis=0)
        middle = slope(chosen, [one.values for one in chosen], factor)
        for line, *ends in zip(body, middle, low, high, strict=True):
            line.append("{:+.3f} ({:+.3f} to {:+.3f})".format(*ends) if count > 1 else f"{ends[0]:+.3f}")
    return markdown(head, body)


def power(cells: Iterable[Cell]) -> str:
    """Return the chance that a paired t test at 5 % over three or five seeds finds a difference of 2 %, as Markdown.

    The deviation is that over seeds of ln PPL at L of one encoding less that of another, as the root mean square over
    all pairs near the best. A cell needs three seeds.
    """
    body = []
    for one in cells:
        logs = np.log(one.values[..., 0])
        near = logs[logs.mean(axis=1) < logs.mean(axis=1).min() + math.log(NEAR)]
        gaps = np.stack([a - b for a, b in itertools.combinations(near, 2)])
        deviation = math.sqrt(gaps.var(axis=1, ddof=1).mean())
        found = []
        for count in (3, 5):
            limit = stats.f.isf(0.05, 1, count - 1)
            found.append(stats.ncf.sf(limit, 1, count - 1, count * (math.log1p(APART[1]) / deviation) ** 2))
        body.append([one.name, str(len(near)), f"{deviation:.2%}", *(f"{share:.0%}" for share in found)])
    return markdown(["cell", "encodings", "deviation", "three seeds", "five seeds"], body)


def controls(runs: Sequence[Run]) -> str:
    """Return perplexity at L and R_4 of the controls, beside two widths, as Markdown: means over their seeds.

    The control `heads` has twice the heads, of width 16. `steps` has the steps of width 128.
    """
    columns = {
        "width 64": "64x64", "64, four heads": "64x64-heads", "64, 1,200 steps": "64x64-steps",
        "width 128": LEADERBOARD, "128, eight heads": "128x64-heads", "256, 1,200 steps": "256x64-steps",
        "64, L = 256, 1,200 steps": "64x256-steps",
    }  # fmt: skip
    found = {part: by_setting(members) for part, members in by_part(runs).items() if part in columns.values()}
    body = []
    for name in ENCODINGS:
        every = (found[part].get(name) for part in columns.values())
        own = [Seeds(members) if members else None for members in every]
        body.append(
            [f"`{name}`", *(f"{cell(one.values('ppl'))}, {cell(one.ratios(4))}" if one else "-" for one in own)]
        )
    return markdown(["encoding", *columns], body)


def multiples(runs: Sequence[Run]) -> str:
    """Return T5's perplexity at L, R_4 and R_8 if its table learns at 10 times the rate or at it, as Markdown."""
    parts, body = by_part(runs), []
    for name, members in T5_PARTS.items():
        each = [Seeds(by_setting(parts[part])["t5"]) for part in members]
        numbers = ([one.values("ppl"), one.ratios(4), one.ratios(8)] for one in each)
        body.append([name, *map(cell, itertools.chain(*numbers))])
    return markdown(["cell", "10: PPL at L", "R_4", "R_8", "1: PPL at L", "R_4", "R_8"], body)


def rates(runs: Sequence[Run]) -> str:
    """Return perplexity at L by encoding and learning rate, over that at the rate of the rule, as Markdown."""
    found: dict[str, dict[float, float]] = {}
    for run in runs:
        (value,) = Seeds([run]).values("ppl")
        found.setdefault(run["encoding"], {})[run["settings"]["train.learning_rate"]] = value
    columns = sorted({rate for by_rate in found.values() for rate in by_rate})
    rule = learning_rate(runs[0]["settings"]["model.model_dim"])
    usual = min(columns, key=lambda rate: abs(rate - rule))
    body = []
    for name, by_rate in found.items():
        texts = (
            f"{by_rate[rate]:.3f} ({by_rate[rate] / by_rate[usual] - 1:+.1%})" if rate in by_rate else "-"
            for rate in columns
        )
        body.append([f"`{name}`", *texts])
    return markdown(["encoding", *(f"{rate:g}" for rate in columns)], body)


def claims(cells: Sequence[Cell]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the claims in the order of the page: the claim, the two cells, what was measured, and the verdict."""
    found = {(one.width, one.train_len): one for one in cells}

    def pair(text: str, one: tuple[int, int], other: tuple[int, int], factor: int) -> tuple[str, str, str, str]:
        places = f"{one[0]} x {one[1]}, {other[0]} x {other[1]}"
        if one not in found or other not in found:
            return (text, places, "-", "not run")
        changed = swaps(found[one], found[other], factor)
        here = (_, low, _) = tau(found[one], found[other], factor)
        verdict = "refuted" if changed else "confirmed" if low > HOLDS else "open"
        return (text, places, f"tau {with_interval(here)}", "too few seeds" if math.isnan(low) else verdict)

    for text, factor in (("the order at L holds", 1), ("the order beyond L holds", 4)):
        for one, other in ((64, 128), (128, 256), (64, 256)):
            yield pair(text, (one, 64), (other, 64), factor)
    for text, holds, is_refuted in (
        ("who is level stays level", lambda r: r < LEVEL, lambda r: r > RISEN),
        ("who fails stays failing", lambda r: r > FAILING, lambda r: r < RISEN),
    ):
        if (64, 64) not in found or (256, 64) not in found:
            yield (text, "64 x 64, 256 x 64", "-", "not run")
            continue
        small, large = (np.exp(score(one.values, 4)) for one in align(found[64, 64], found[256, 64]))
        meant = large[holds(small)]
        if not meant.size:
            yield (text, "64 x 64, 256 x 64", "no encoding", "open")
            continue
        verdict = "refuted" if is_refuted(meant).any() else "confirmed" if holds(meant).all() else "open"
        here = f"{len(meant)} encodings, R_4 {meant.min():.3f} to {meant.max():.3f}"
        yield (text, "64 x 64, 256 x 64", here, verdict)
    for width in (64, 128, 256):
        yield pair("longer training lengths keep the order", (width, 64), (width, 256), 1)


def figure(cells: Sequence[Cell], anchors: Sequence[Anchor], path: Path) -> None:
    """Draw perplexity at L over RoPE's, and R_4, of each cell, and published R_4 over those of `LEADERBOARD`.

    cells: those of `FIGURE`. Points are seeds, lines join the means of a group.
    """
    import matplotlib.pyplot as plt

    found = {one.name: one for one in cells}
    here = next(one for one in cells if one.part == LEADERBOARD)
    looks = {name: made for (name, _), made in palette.looks([(name, "") for name in here.encodings]).items()}
    with look.style():
        drawn, axes = plt.subplots(1, 3, figsize=(18, 5.2), layout="constrained", width_ratios=(1.5, 1.5, 0.7))
        for axis, factor in zip(axes, (1, 4), strict=False):
            ticks, right = dict[float, str](), -1.5
            for title, group in FIGURE.items():
                places = [right + 1.5 + number for number in range(len(group))]
                ticks |= zip(places, group.values(), strict=True)
                below = {"xycoords": ("data", "axes fraction"), "ha": "center", "fontsize": 8}
                axis.annotate(title, (sum(places) / len(places), -0.16), **below)
                right = places[-1]
                joined = align(*(found[name] for name in group))
                for place, name in enumerate(joined[0].encodings):
                    rows = [single_seeds(one, factor)[:, [place, one.encodings.index(REFERENCE)]] for one in joined]
                    each = [np.exp(row[:, 0] - (row[:, 1] if factor == 1 else 0)) for row in rows]
                    style = looks[name]
                    means = [values.mean() for values in each]
                    line = axis.plot(places, means, linestyle=style.dashes, marker=style.marker, color=style.color)
                    line[0].set_label(name if not places[0] else None)
                    for at, values in zip(places, each, strict=True):
                        axis.plot([at] * len(values), values, "o", markersize=1.8, color=style.color)
            axis.set_xticks(list(ticks), ticks.values(), size=7)
            look.log_axis(axis, [float(value) for line in axis.lines for value in line.get_ydata()])
        ours = dict(zip(here.encodings, np.exp(score(here.values, 4)), strict=True))
        for anchor in anchors:
            for name in anchor.perplexity:
                if name in ours and math.isfinite(value := stated(anchor, name, 4)):
                    axes[2].plot(ours[name], value, looks[name].marker, color=looks[name].color)
        look.log_axis(axes[2], [float(value) for line in axes[2].lines for value in line.get_ydata()])
        axes[2].axline((1, 1), (2, 2), color="grey", linewidth=0.7)
        axes[2].set_xscale("log")
        axes[2].set_xticks([1, 2, 3, 5], ["1", "2", "3", "5"])
        axes[2].set_xticks([], minor=True)
        axes[2].set(
            xlabel="R_4 here, at width 128",
            ylabel="published R_4, 44 M to 1.3 B",
            title="Published models (line: equal)",
        )
        axes[0].set(ylabel="perplexity / RoPE's", title="At L")
        axes[1].set(ylabel="R_4 = PPL(4 L) / PPL(L)", title="Beyond L")
        drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
        drawn.savefig(path, dpi=120)


def equal(runs: Sequence[Run]) -> list[Cell]:
    """Return the cells of the design, and the controls with as many steps as width 128."""
    return read_cells(runs, EQUAL_STEPS)


def texts(runs: Sequence[Run]) -> list[str]:
    """Return the orders and the numbers of other texts and tokens."""
    first, *others = found = named_cells(runs, TEXTS)
    return [orders((first, one) for one in others), table(found)]


#: What each command prints of the runs, in Markdown.
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
    "training": lambda runs: [as_markdown(training(runs))],
    "rates": lambda _: [rates(load("scaling", part)) for part in RATES],
    "power": lambda runs: [power(full_cells(runs))],
    "claims": lambda runs: [markdown(["claim", "cells", "here", "verdict"], claims(read_cells(runs)))],
}


def filled(page: str, runs: Sequence[Run]) -> str:
    """Return a page with the tables of each command made anew. They are the next ones after the command."""
    for name, made in TABLES.items():
        before, command, after = page.partition(f"    python -m experiments.scaling.scaling {name}\n")
        new = TABLE.findall("\n\n".join([*made(runs), ""]))
        page = before + command + TABLE.sub(lambda old: new.pop(0) if new else old[0], after)  # noqa: B023
    return page


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
            cells = named_cells(runs, itertools.chain(*FIGURE.values()))
            figure(cells, load_anchors(), folder / "scaling.png")
            draw_triangle(runs, folder / "lengths.png")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
