"""The leaderboard's cells and its table.

    python experiments/leaderboard/leaderboard.py collect runs/leaderboard > experiments/leaderboard/cells.jsonl
    python experiments/leaderboard/leaderboard.py table experiments/leaderboard/cells.jsonl

`collect` prints one line of JSON a finished run: `encoding` as it is typed, `seed`, `digest` of all settings, resolved
`position_lr_multiplier`, `num_params`, `seconds_per_step`, and in `rows`, by length in tokens, `nll` and `ppl` a token,
`bpb`, `status` and the sums of NLL over blocks of 4,096 targets, by which two cells of the same targets are paired.

`table` prints Markdown: means over seeds, the standard deviation of PPL at L over seeds, R_k = PPL(kL) / PPL(L), how
far PPL stays within 1 % of that at L, and seconds a step over NoPE's (runs of one core each, of one sweep). A verdict
against ALiBi or RoPE, at L and at 8 L, is PPL over theirs. It has a sign, - for better and + for worse, where the
difference of the losses is more than the 95 % intervals over text and over seeds together (their squares added): of a
hundred verdicts where nothing differs, at most five have a sign. With one seed there is none.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

from posx.evaluation.statistics import half_width, perplexity, row_blocks
from posx.plots import read_rows
from posx.runs.folder import RunFolder

Cell = dict[str, Any]
BLOCK = 4096
FACTORS = (2, 4, 8, 16)
RIVALS = ("alibi", "rope")
FACTS = ("seed", "digest", "train_len", "step", "data_digest", "position_lr_multiplier", "learning_rate")


def collect(folder: Path) -> list[Cell]:
    cells = []
    for done in sorted(folder.glob("*/DONE")):
        run, rows = RunFolder(done.parent), read_rows(done.parent)
        speeds = [row["tokens_per_second"] for row in run.logged() if row.get("tokens_per_second")]
        train = run.read_config().train
        cells.append({
            "encoding": rows[0]["encoding"],
            **{name: rows[0].get(name) for name in FACTS},
            "num_params": json.loads(run.config_file.read_text()).get("resolved", {}).get("num_params"),
            "seconds_per_step": round(train.batch_size * train.length / statistics.median(speeds), 4),
            "rows": {str(row["eval_len"]): measured(row) for row in rows if row["protocol"] == "nonoverlapping"},
        })  # fmt: skip
    return cells


def measured(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a cell keeps of a row."""
    kept = {name: row[name] for name in ("status", "nll", "ppl", "bpb", "num_targets", "targets")}
    if row["status"] != "ok":
        return kept
    sums, _ = row_blocks(row)
    starts = np.arange(0, len(sums), BLOCK // row["block_len"])
    return kept | {"block_len": BLOCK, "block_nll": np.add.reduceat(sums, starts).round(2).tolist()}


class Entry:
    """An encoding's cells: its rows by length, over seeds."""

    def __init__(self, cells: Sequence[Cell]):
        self.cells = sorted(cells, key=lambda cell: cell["seed"])
        self.train_len = self.cells[0]["train_len"]
        if len({(c["train_len"], c["step"], c["data_digest"], c["learning_rate"]) for c in self.cells}) > 1:
            raise SystemExit(f"{self.cells[0]['encoding']}: these cells are not seeds of one setting")
        shared = set.intersection(*(set(cell["rows"]) for cell in self.cells))
        self.rows = {int(length): [cell["rows"][length] for cell in self.cells] for length in sorted(shared, key=int)}
        self.defined = [n for n, rows in self.rows.items() if all(row["status"] == "ok" for row in rows)]

    def nll(self, length: int) -> list[float]:
        """Nats a token, of each seed."""
        return [row["nll"] for row in self.rows[length]]

    def ppl(self, length: int) -> float:
        return statistics.fmean(map(perplexity, self.nll(length)))

    def ratio(self, factor: int) -> str:
        length = factor * self.train_len
        if length not in self.defined:
            return "undefined" if length in self.rows else "-"
        gaps = np.subtract(self.nll(length), self.nll(self.train_len))
        return f"{np.exp(gaps).mean():.3f}"

    def horizon(self) -> float:
        """In training lengths."""
        within = 1.0
        for length in self.defined:
            if length >= self.train_len and self.ppl(length) > 1.01 * self.ppl(self.train_len):
                break
            within = max(within, length / self.train_len)
        return within

    def seconds(self) -> float:
        return statistics.median(cell["seconds_per_step"] for cell in self.cells)

    def against(self, other: Entry, factor: int) -> str:
        length = factor * self.train_len
        if length not in self.defined or length not in other.defined:
            return "-"
        if len({row["targets"] for row in self.rows[length] + other.rows[length]}) > 1:
            raise SystemExit(f"{self.cells[0]['encoding']} and a rival scored different targets")
        mine, theirs = (np.mean([row_blocks(row)[0] for row in entry.rows[length]], axis=0) for entry in (self, other))
        counts = row_blocks(self.rows[length][0])[1]
        gap, over_text = float((mine - theirs).sum() / counts.sum()), half_width(mine - theirs, counts)
        over_seeds = half_width_over_seeds(self.nll(length), other.nll(length))
        certain = over_text is not None and abs(gap) > math.hypot(over_text, over_seeds)
        return f"{math.exp(gap):.3f}{('-' if gap < 0 else '+') if certain else ''}"


def half_width_over_seeds(a: Sequence[float], b: Sequence[float]) -> float:
    """Half the 95 % interval of the difference of two means over seeds; infinite where one has a single seed."""
    if min(len(a), len(b)) < 2:
        return math.inf
    error = math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
    return float(scipy.stats.t.ppf(0.975, len(a) + len(b) - 2)) * error


def table(cells: Sequence[Cell]) -> str:
    by_name: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_name[cell["encoding"]].append(cell)
    entries = {name: Entry(found) for name, found in by_name.items()}
    order = sorted(entries, key=lambda name: entries[name].ppl(entries[name].train_len))
    head = [
        "encoding",
        "seeds",
        "rate",
        "bits a byte at L",
        "PPL at L",
        *(f"R_{k}" for k in FACTORS),
        "1 % horizon",
        "step",
    ]
    head += [f"{rival}, {'L' if k == 1 else f'{k} L'}" for rival in RIVALS for k in (1, 8)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for name in order:
        entry = entries[name]
        at_train = [row["ppl"] for row in entry.rows[entry.train_len]]
        spread = f" ± {statistics.stdev(at_train):.3f}" if len(at_train) > 1 else ""
        rate = entry.cells[0]["position_lr_multiplier"]
        line = [
            f"`{name}`", str(len(at_train)), "-" if rate is None else f"{rate:g} x",
            f"{statistics.fmean(row['bpb'] for row in entry.rows[entry.train_len]):.3f}",
            f"{entry.ppl(entry.train_len):.3f}{spread}", *map(entry.ratio, FACTORS), f"{entry.horizon():g} L",
            f"{entry.seconds() / entries['nope'].seconds():.2f}" if "nope" in entries else "-",
        ]  # fmt: skip
        line += [entry.against(entries[r], k) if r in entries and r != name else "-" for r in RIVALS for k in (1, 8)]
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines)


def main(words: Sequence[str]) -> None:
    what, path = words
    if what == "collect":
        for cell in collect(Path(path)):
            print(json.dumps(cell))
    else:
        print(table([json.loads(line) for line in Path(path).read_text().splitlines()]))


if __name__ == "__main__":
    main(sys.argv[1:])
