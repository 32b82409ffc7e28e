"""The tables of what was measured in the study of sizes: perplexity at L, R_k and their spread over seeds."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import stats

from configs.scaling import ENCODINGS, learning_rate
from experiments.scaling.cells import APART, CONTROLS, FACTORS, LEADERBOARD, NEAR, Cell, align, read_cells, score
from experiments.tables import Run, Seeds, by_part, by_setting, cell, markdown, training_tables
from posx.lab.plots.tables import as_markdown

#: The parts that try learning rates: widths 64 and 32, and widths 32 and 256 with the steps of width 64.
RATES = ("rates", "rates32", "rates32-steps", "rates256-steps")
#: {part: seed} of the cells with L = 256 that ran at half and twice their learning rate too, in the part PART-rates.
RATES_AT_256 = {"64x256-steps": 1, "128x256": 2}
#: The cell whose runs all have logs of their training.
LOGGED = "128x128"
#: The parts that were measured with windows of L too, by the name of their cells.
WINDOWED = {"64, L = 256, steps": "64x256-steps", "128, L = 128": "128x128", "128, L = 256": "128x256"}
#: By cell the parts with T5 at its multiple of the learning rate, 10, and at 1. The last is of the study of recipes.
T5_PARTS = {
    "64": ("64x64", "64x64-times1"), "64, 1,200 steps": ("64x64-steps", "64x64-steps-times1"),
    "128": (LEADERBOARD, "t5_times_1"),
}  # fmt: skip


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
            windowed = parts[f"{part}-window-size={parts[part][0]['train_len']}"]
            window = [run for run in windowed if run["encoding"] == name]
            seeds = {run["seed"] for run in window}
            whole = [run for run in parts[part] if run["encoding"] == name and run["seed"] in seeds]
            texts += [cell(Seeds(own).ratios(4)) for own in (whole, window)]
        body.append(texts)
    columns = [f"{title}: {what}" for title in WINDOWED for what in ("R_4", "with a window of L")]
    return markdown(["encoding", *columns], body)


def training(runs: Sequence[Run]) -> str:
    """Return the steps to a training loss of the cell `LOGGED` as Markdown."""
    return as_markdown(training_tables(run for run in runs if run["part"] == LOGGED))


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


def rate_tables(runs: Sequence[Run]) -> list[str]:
    """Return the table of `rates` of each part that tries learning rates."""
    parts = by_part(runs)
    made = [rates(parts[part]) for part in RATES]
    for part, seed in RATES_AT_256.items():
        tried = parts[f"{part}-rates"]
        names = {run["encoding"] for run in tried}
        usual = (run for run in parts[part] if run["seed"] == seed and run["encoding"] in names)
        made.append(rates([*tried, *usual]))
    return made
