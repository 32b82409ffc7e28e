"""The leaderboard's cells, its table, and what the cells say to published claims.

    python experiments/leaderboard/leaderboard.py collect runs/leaderboard > experiments/leaderboard/cells.jsonl
    python experiments/leaderboard/leaderboard.py table experiments/leaderboard/cells.jsonl
    python experiments/leaderboard/leaderboard.py claims experiments/leaderboard/cells.jsonl

`collect` prints one line of JSON a finished run: `encoding` as it is typed and its resolved `encoding_value`, `seed`,
`digest` of all settings, resolved `position_lr_multiplier`, `num_params`, `machine`, `git` (the commit where it ended),
and in `rows`, by length in tokens, `nll` and `ppl` a token, `bpb`, `status` and the sums of NLL over blocks of 4,096
targets, by which two cells of the same targets are paired.

`table` prints Markdown: PPL at L and R_k = PPL(kL) / PPL(L), means and standard deviations over seeds; how far PPL
stays within 1 % of that at L, the lowest and the highest seed's, ">=" where that is the longest length measured; and
the time of a step over NoPE's, median [quartiles] of turns (`steps*.json`, of `python -m benchmarks train`; where
several hold an encoding, the first).

A verdict against ALiBi or RoPE, at L and at 8 L, is exp of the difference of the mean losses, so the ratio of geometric
means over seeds. It has a sign, - for better and + for worse, where that difference is more than the 95 % intervals
over text and over seeds (Welch's, unpaired) together, their squares added: of a hundred verdicts where nothing differs
about five have a sign. With one seed there is none, and three seeds are too few to say that one beats another.

`claims` holds `claims.toml` against that difference and its interval. "below" and "above" are confirmed where the whole
interval lies on their side of 0, "level" where it lies within 1 %; contradicted where it lies on the other side, or
outside 1 %; open where it reaches both. An encoding's own perplexity at two lengths is compared seed by seed.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

from posx.evaluation.statistics import half_width, horizon, perplexity, row_blocks
from posx.plots import read_rows
from posx.runs.folder import RunFolder

Cell = dict[str, Any]
BLOCK = 4096
FACTORS = (2, 4, 8, 16)
RIVALS = ("alibi", "rope")
LEVEL = 0.01  # nats, so 1 % of perplexity
CLAIMS = Path(__file__).parent / "claims.toml"
#: What the seeds of one entry have in common.
SETTING = (
    "encoding_value", "train_len", "step", "data_digest", "position_lr_multiplier", "learning_rate", "num_params",
)  # fmt: skip


def collect(folder: Path) -> list[Cell]:
    cells = []
    for done in sorted(folder.glob("*/DONE")):
        run, rows = RunFolder(done.parent), read_rows(done.parent)
        stored, env = json.loads(run.config_file.read_text()), json.loads(run.env_file.read_text())
        facts = rows[0] | {"num_params": stored.get("resolved", {}).get("num_params")}
        cells.append({
            **{name: facts.get(name) for name in ("encoding", "seed", "digest", *SETTING)},
            "machine": machine(env), "git": env["git"],
            "rows": {str(row["eval_len"]): measured(row) for row in rows if row["protocol"] == "nonoverlapping"},
        })  # fmt: skip
    return cells


def machine(env: Mapping[str, Any]) -> str:
    return f"{env['cpu']}, {env['num_devices']} x {env['device']}, jaxlib {env['versions']['jaxlib']}"


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
        unlike = [name for name in SETTING if len({json.dumps(cell[name]) for cell in self.cells}) > 1]
        if unlike or len({cell["seed"] for cell in self.cells}) < len(self.cells):
            what = f"differ in {', '.join(unlike)}" if unlike else "repeat a seed"
            raise SystemExit(f"{self.cells[0]['encoding']}: these cells are not seeds of one setting, they {what}")
        shared = set.intersection(*(set(cell["rows"]) for cell in self.cells))
        self.rows = {int(length): [cell["rows"][length] for cell in self.cells] for length in sorted(shared, key=int)}
        self.defined = [n for n, rows in self.rows.items() if all(row["status"] == "ok" for row in rows)]

    def nll(self, length: int) -> list[float]:
        """Nats a token, of each seed."""
        return [row["nll"] for row in self.rows[length]]

    def ppl(self, length: int) -> float:
        return statistics.fmean(map(perplexity, self.nll(length)))

    def failed(self, length: int) -> str:
        """Why there is no mean over all seeds; "-" where it was not measured."""
        return " and ".join(sorted({row["status"] for row in self.rows.get(length, [])} - {"ok"})) or "-"

    def ratios(self, length: int) -> list[float]:
        """R_k of each seed, NaN where it failed."""
        pairs = zip(self.rows[length], self.rows[self.train_len], strict=True)
        return [math.exp(far["nll"] - near["nll"]) if far["status"] == "ok" else math.nan for far, near in pairs]

    def ratio(self, factor: int) -> str:
        length = factor * self.train_len
        return with_spread(self.ratios(length)) if length in self.defined else self.failed(length)

    def horizon(self) -> str:
        """In training lengths."""
        beyond = [length for length in self.rows if length > self.train_len]
        if not self.defined or any(row["status"] == "undefined" for n in beyond for row in self.rows[n]):
            return "undefined"
        by_seed = zip(*(self.ratios(n) for n in beyond), strict=True)
        found = [horizon(dict(zip((n / self.train_len for n in beyond), one, strict=True))) for one in by_seed]
        ends = [f"{'>= ' * (k * self.train_len == max(beyond))}{k:g}" for k in sorted({min(found), max(found)})]
        return " to ".join(ends) + " L"

    def against(self, other: Entry, factor: int) -> str:
        found = difference(self, factor, other, factor)
        if found is None:
            return "-"
        gap, half = found
        return f"{math.exp(gap):.3f}{('-' if gap < 0 else '+') if abs(gap) > half else ''}"


def difference(one: Entry, factor: int, other: Entry, other_factor: int) -> tuple[float, float] | None:
    """Mean loss of `one` less that of `other`, nats a token, each at so many training lengths, and half its 95 %
    interval over text and over seeds; None where one of them has no loss."""
    length, other_length = factor * one.train_len, other_factor * other.train_len
    if length not in one.defined or other_length not in other.defined:
        return None
    ours, theirs = one.rows[length], other.rows[other_length]
    if len({row["targets"] for row in ours + theirs}) > 1:
        raise SystemExit(f"{one.cells[0]['encoding']} and {other.cells[0]['encoding']} scored different targets")
    mine, its = (np.mean([row_blocks(row)[0] for row in rows], axis=0) for rows in (ours, theirs))
    counts = row_blocks(ours[0])[1]
    over_text = half_width(mine - its, counts)
    seeds: list[list[float]] = [one.nll(length), other.nll(other_length)]
    if one is other:
        seeds = [[a - b for a, b in zip(*seeds, strict=True)]]
    half = math.inf if over_text is None else math.hypot(over_text, half_width_over_seeds(*seeds))
    return float((mine - its).sum() / counts.sum()), half


def half_width_over_seeds(*groups: Sequence[float]) -> float:
    """Half the 95 % interval of a mean over seeds, or Welch's of the difference of two; infinite of a single seed."""
    if min(map(len, groups)) < 2:
        return math.inf
    parts = [statistics.variance(values) / len(values) for values in groups]
    if sum(parts) == 0:
        return 0.0
    freedom = sum(parts) ** 2 / sum(part**2 / (len(v) - 1) for part, v in zip(parts, groups, strict=True))
    return float(scipy.stats.t.ppf(0.975, freedom)) * math.sqrt(sum(parts))


def with_spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


def multiplier(cell: Cell) -> str:
    """Of the position parameters' learning rate; those of an encoding built around another may have several."""
    rate = cell["position_lr_multiplier"]
    if rate is None:
        return "-"
    found = {one for layer in rate for one in layer.values()} if isinstance(rate, list) else {rate}
    return " and ".join(f"{one:g} x" for one in sorted(found))


def step_times(report: Mapping[str, Any]) -> dict[str, str]:
    """Of every encoding over NoPE's, from what `python -m benchmarks train` left: of the ratios within a turn, the
    median and [lower, upper quartile]."""
    speeds = {row["encoding"]: row["tokens_per_second"] for row in report["results"]}
    times = {}
    for name, rates in speeds.items():
        ratios = [nope / rate for nope, rate in zip(speeds["nope"], rates, strict=True)]
        low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        times[name] = f"{median:.2f} [{low:.2f}, {high:.2f}]"
    return times | {"nope": "1"}


def entries_of(cells: Sequence[Cell]) -> dict[str, Entry]:
    by_name: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_name[cell["encoding"]].append(cell)
    return {name: Entry(found) for name, found in by_name.items()}


def table(cells: Sequence[Cell], times: Mapping[str, str]) -> str:
    """Markdown; times: of a step, over NoPE's."""
    entries = entries_of(cells)
    order = sorted(entries, key=lambda name: entries[name].ppl(entries[name].train_len))
    head = [
        "encoding",
        "parameters",
        "seeds",
        "rate",
        "bits a byte at L",
        "PPL at L",
        *(f"R_{k}" for k in FACTORS),
        "1 % horizon",
        "step",
    ]
    head += [f"{rival}, {lengths(k)}" for rival in RIVALS for k in (1, 8)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for name in order:
        entry = entries[name]
        at_train = entry.rows[entry.train_len]
        line = [
            f"`{name}`", f"{entry.cells[0]['num_params']:,}", str(len(at_train)), multiplier(entry.cells[0]),
            f"{statistics.fmean(row['bpb'] for row in at_train):.3f}", with_spread([row["ppl"] for row in at_train]),
            *map(entry.ratio, FACTORS), entry.horizon(), times.get(name, "-"),
        ]  # fmt: skip
        line += [entry.against(entries[r], k) if r in entries and r != name else "-" for r in RIVALS for k in (1, 8)]
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines)


def claims(cells: Sequence[Cell], published: Sequence[Mapping[str, Any]]) -> str:
    """A line of Markdown each: what was claimed, what was measured (the ratio of perplexities), what that makes it."""
    entries, lines = entries_of(cells), ["| claim | source | here | |", "|---|---|---:|---|"]
    for claim in published:
        name, at = claim["encoding"], claim["at"]
        rival, rival_at = claim.get("than", name), claim.get("than_at", at)
        what = f"`{name}` at {lengths(at)} {claim['is']} "
        what += f"`{rival}`" if rival != name else f"that at {lengths(rival_at)}"
        here, verdict, found = "-", "not run", None
        if name in entries and rival in entries:
            verdict, found = "no loss", difference(entries[name], at, entries[rival], rival_at)
        if found is not None:
            gap, half = found
            ends = f"{math.exp(gap - half):.3f} to {math.exp(gap + half):.3f}" if half < math.inf else "one seed"
            here = f"{math.exp(gap):.3f} ({ends})"
            verdict = judged(claim["is"], gap - half, gap + half)
        lines.append(f"| {what} | {claim['source']} | {here} | {verdict} |")
    return "\n".join(lines)


def lengths(factor: int) -> str:
    return "L" if factor == 1 else f"{factor} L"


def judged(claimed: str, low: float, high: float) -> str:
    """Of a difference in nats that lies between `low` and `high`."""
    inside, outside = {
        "below": (high < 0, low > 0),
        "above": (low > 0, high < 0),
        "level": (-LEVEL < low and high < LEVEL, low > LEVEL or high < -LEVEL),
    }[claimed]
    return "confirmed" if inside else "contradicted" if outside else "open"


def main(words: Sequence[str]) -> None:
    what, path = words
    if what == "collect":
        for cell in collect(Path(path)):
            print(json.dumps(cell))
        return
    cells = [json.loads(line) for line in Path(path).read_text().splitlines()]
    if what == "claims":
        print(claims(cells, tomllib.loads(CLAIMS.read_text())["claim"]))
    else:
        times: dict[str, str] = {}
        for report in sorted(Path(__file__).parent.glob("steps*.json"), reverse=True):
            times |= step_times(json.loads(report.read_text()))
        print(table(cells, times))


if __name__ == "__main__":
    main(sys.argv[1:])
