"""The tables, the claims and the figure of the study of encoders.

    python -m experiments.encoders.encoders collect runs/encoders_cpu cells > experiments/encoders/runs.jsonl
    python -m experiments.encoders.encoders collect runs/encoders_rates rates >> experiments/encoders/runs.jsonl
    python -m experiments.encoders.encoders collect runs/encoders_causal causal >> experiments/encoders/runs.jsonl
    python -m experiments.encoders.encoders table
    python -m experiments.encoders.encoders rates
    python -m experiments.encoders.encoders claims
    python -m experiments.encoders.encoders figure

A line of the data file is that of `experiments.tables`, with the losses of training as `losses`: {step: nats}, each the
mean of the 100 steps that end there.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from experiments import tables
from experiments.tables import (
    HERE,
    Row,
    Run,
    Seeds,
    by_setting,
    cell,
    cells_of,
    load,
    markdown,
    multipliers_of,
    row_tables,
)
from posx.evaluation.differences import BETTER, FEWEST_SEEDS, judge, loss_difference
from posx.lab.files.rows import log_problem, read_row_file

PPPL = "pseudo_perplexity"
FACTORS = (2, 4, 8)
#: The steps at which training losses are compared.
STEPS = (500, 1000, 2000)
WINDOW = 100
LEARNED, TUPE, ROPE, ALIBI = "learned", "tupe", "rope", "alibi"
T5 = "t5(bidirectional=True)"
TUPE_R, BERT_R = f"{TUPE}+{T5}", f"{LEARNED}+{T5}"


def collect(folder: Path, part: str) -> list[Run]:
    """Return the lines of the data file for the finished runs of a folder."""
    runs = tables.collect(folder, part)
    logs = {json.loads(path.read_text())["hash"]: path.parent for path in folder.rglob("config.json")}
    for run in runs:
        logged = read_row_file(logs[run["hash"]] / "metrics.jsonl", tables.refuse, log_problem)
        steps = {row["step"]: row["loss"] for row in logged if "loss" in row}
        ends = range(WINDOW, max(steps) + 1, WINDOW)
        run["losses"] = {str(end): round(fmean(steps[n] for n in steps if end - WINDOW < n <= end), 4) for end in ends}
    return runs


def loss_at(run: Run, step: int) -> float:
    return run["losses"][str(step)]


def losses(runs: Sequence[Run], step: int) -> list[float]:
    """Return the training loss of each seed at a step, in nats."""
    return [loss_at(run, step) for run in runs]


def table(cells: Sequence[Run]) -> str:
    """Return training losses, pseudo-perplexity at L and R_k of each encoding as Markdown."""
    found = by_setting(cells)
    body = []
    for name, seeds, *rest in cells_of(*row_tables(cells)):
        body.append([f"`{name}`", seeds, *(cell(losses(found[name], step)) for step in STEPS), *rest])
    head = ["encoding", "seeds", *(f"loss, step {step}" for step in STEPS), "pseudo-perplexity at L"]
    return markdown([*head, *(f"R_{k}" for k in FACTORS)], body)


def rates(runs: Sequence[Run]) -> str:
    """Return pseudo-perplexity at L and the last training loss of seed 0 by encoding and learning rate, as Markdown."""
    first = [run for run in runs if run["seed"] == 0]
    times = Counter(run["encoding"] for run in first)
    found: dict[tuple[str, tuple[float, ...]], dict[float, Run]] = {}
    for run in first:
        if times[run["encoding"]] > 1:
            by_rate = found.setdefault((run["encoding"], multipliers_of(run) or (1.0,)), {})
            by_rate[run["settings"]["train.learning_rate"]] = run
    columns = sorted({rate for by_rate in found.values() for rate in by_rate})
    body = []
    for (name, multipliers), by_rate in sorted(found.items(), key=lambda item: item[0]):
        each = (by_rate.get(rate) for rate in columns)
        cells = (f"{at_length(one):.3f}, {loss_at(one, STEPS[-1]):.3f}" if one else "-" for one in each)
        body.append([f"`{name}`, x {' and '.join(f'{one:g}' for one in multipliers)}", *cells])
    return markdown(["encoding, multiplier", *(f"{rate:g}" for rate in columns)], body)


def at_length(run: Run) -> float:
    """Return the pseudo-perplexity of a run at its training length."""
    return Seeds([run], PPPL).values("ppl")[0]


def word(confirmed: bool) -> str:
    return "confirmed" if confirmed else "not confirmed"


def methods(found: Mapping[str, Sequence[Run]]) -> list[tuple[str, str]]:
    """Return the loss of untied less that of tied positions at L, and the verdict, without and with buckets."""

    def rows(name: str) -> list[Row]:
        places = ((row, run["train_len"]) for run in found[name] for row in tables.rows_of([run]))
        return [row for row, length in places if (row["protocol"], row["eval_len"]) == (PPPL, length)]

    differences = [
        loss_difference(rows(untied), rows(tied), paired=True) for untied, tied in ((TUPE, LEARNED), (TUPE_R, BERT_R))
    ]
    verdicts = []
    for difference, (_, method) in zip(differences, judge(differences), strict=True):
        here = f"{difference.mean:+.4f} nats, {difference.num_seeds} seeds"
        is_judged = difference.num_seeds >= FEWEST_SEEDS
        verdicts.append((here, word(method.word == BETTER) if is_judged else f"open: {method.word}"))
    return verdicts


def claims(cells: Sequence[Run], causal: Sequence[Run]) -> list[tuple[str, str, str]]:
    """Return the claims in the order of the page: what was measured here, and whether it is confirmed."""
    found = by_setting(cells)
    seeds = {name: Seeds(runs, PPPL) for name, runs in found.items()}

    def ratios(name: str, factor: int) -> list[float]:
        return seeds[name].ratios(factor)

    pairs = [
        [(loss_at(one, step), loss_at(other, step)) for step in STEPS]
        for one, other in zip(found[ROPE], found[LEARNED], strict=False)
    ]
    lower = sum(one < other for seed in pairs for one, other in seed)
    without, with_buckets = methods(found)
    last = fmean(losses(found[LEARNED], STEPS[-1]))
    below = [step for step in map(int, found[TUPE][0]["losses"]) if fmean(losses(found[TUPE], step)) < last]
    undefined = all(seeds[name].failed(k) == "undefined" for name in (LEARNED, TUPE) for k in FACTORS)
    level = [*ratios(ALIBI, 8), *ratios(T5, 8)]
    both, one_side = ratios(ROPE, 2), Seeds(causal).ratios(2)
    far = ratios("deberta", 2)
    return [
        ("RoPE learns faster", f"lower in {lower} of {sum(map(len, pairs))} comparisons", word(
            lower == sum(map(len, pairs)))),
        ("untied beats tied", *without),
        ("also with buckets", *with_buckets),
        ("TUPE in half the steps", f"step {below[0]}" if below else "never", word(
            bool(below) and below[0] <= STEPS[-1] // 2)),
        ("tables end at L", "`undefined`" if undefined else "defined", word(undefined)),
        ("biases stay flat", f"R_8 {min(level):.3f} to {max(level):.3f}", word(max(level) <= 1.05)),
        ("RoPE rises more than causal", f"R_2 {cell(both)}, causal {cell(one_side)}", word(
            min(both) > max(one_side))),
        ("DeBERTa rises", f"R_2 {cell(far)}", word(min(far) > 1.05)),
    ]  # fmt: skip


def figure(cells: Sequence[Run], path: Path) -> None:
    """Draw training losses against steps, and R_k against the length, as means over seeds."""
    import matplotlib.pyplot as plt

    found = by_setting(cells)
    drawn, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for number, name in enumerate(sorted(found, key=lambda name: fmean(losses(found[name], STEPS[-1])))):
        style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--", "label": name}
        steps = list(map(int, found[name][0]["losses"]))
        left.plot(steps, [fmean(losses(found[name], step)) for step in steps], **style)
        ratios = {k: Seeds(found[name], PPPL).ratios(k) for k in (1, *FACTORS)}
        places = [k for k, values in ratios.items() if values]
        right.plot(places, [fmean(ratios[k]) for k in places], marker="o", markersize=3, **style)
    left.set(xlabel="step", ylabel="masked loss, nats", title="training loss, mean of 100 steps")
    right.set(xlabel="length / L", ylabel="R_k", title="pseudo-perplexity over that at L")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks((1, *FACTORS), [f"{k} L" for k in (1, *FACTORS)])
    for axis in (left, right):
        axis.grid(alpha=0.3)
    drawn.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    drawn.savefig(path, dpi=120)


def main(words: Sequence[str]) -> None:
    """Run the command that the first word names."""
    cells = load("encoders", "cells") if words[:1] != ["collect"] else []
    match words:
        case ["collect", folder, part]:
            for run in collect(Path(folder), part):
                print(json.dumps(run, separators=(",", ":")))
        case ["table"]:
            print(table(cells))
        case ["rates"]:
            print(rates([*cells, *load("encoders", "rates")]))
        case ["claims"]:
            found = claims(cells, load("encoders", "causal"))
            print(markdown(["claim", "here", "verdict"], found))
        case ["figure"]:
            figure(cells, HERE / "encoders" / "encoders.png")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
