"""The table of the leaderboard, and how published claims come out.

    python -m experiments.tables collect runs/leaderboard cells 4096 >> experiments/leaderboard/runs.jsonl
    python -m experiments.leaderboard.leaderboard table
    python -m experiments.leaderboard.leaderboard claims

The runs are those of the part `cells` of `runs.jsonl`. Two runs on the same targets are paired by the sums of their
losses over blocks of 4,096.

`table` prints Markdown: PPL at L and R_k = PPL(kL) / PPL(L), means and standard deviations over seeds; the last length
up to which PPL stays within 1 % of that at L, for the lowest and the highest seed, with ">=" if it is the longest
length measured; and the time of a step over NoPE's, median [quartiles] of turns (`steps.jsonl`, the reports of the
training bench; if several reports hold an encoding, the first counts).

A ratio to ALiBi or RoPE, at L and at 8 L, is exp of the difference of the mean losses, which is the ratio of geometric
means over seeds. It has a sign, - for better and + for worse, if that difference is more than the 95 % intervals over
text and over the seeds of each (unpaired) together, with their squares added. If nothing differed, at most five of a
hundred ratios would have a sign. With one seed there is none. A sign is no verdict on a method: `posx compare` asks for
five seeds of each, and corrects for the number of comparisons.

`claims` compares `claims.toml` with that difference and its interval. "below" and "above" are confirmed if the whole
interval lies on their side of 0, "level" if it lies within 1 %. They are contradicted if it lies on the other side, or
outside 1 %, and open if it reaches both. Perplexities of one encoding at two lengths are compared seed by seed.
"""

from __future__ import annotations

import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.tables import (
    HERE,
    Run,
    Seeds,
    by_setting,
    cell,
    length_name,
    load,
    markdown,
    multipliers_of,
    over_nope,
    ratio_text,
)
from posx.evaluation.differences import loss_difference

FACTORS = (2, 4, 8, 16)
RIVALS = ("alibi", "rope")
LEVEL = 0.01  # nats, so 1 % of perplexity
CLAIMS = HERE / "leaderboard" / "claims.toml"


class Entry(Seeds):
    """The rows of one encoding in non-overlapping windows, as cells of the table."""

    def is_defined(self, factor: int) -> bool:
        return len(self.values("nll", factor)) == len(self.runs)

    def ratio(self, factor: int) -> str:
        return cell(self.ratios(factor)) if self.is_defined(factor) else self.failed(factor)

    def horizon(self) -> str:
        """Return the 1 % horizon of the lowest and the highest seed, in training lengths."""
        factors = [length / self.train_len for length in self.rows]
        if any("undefined" in self.failed(k) for k in factors):
            return "undefined"
        found = self.horizons()
        ends = [f"{'>= ' * (k == max(factors))}{k:g}" for k in sorted({min(found), max(found)})]
        return " to ".join(ends) + " L"

    def against(self, other: Entry, factor: int) -> str:
        found = difference(self, factor, other, factor)
        if found is None:
            return "-"
        gap, half = found
        return f"{math.exp(gap):.3f}{('-' if gap < 0 else '+') if abs(gap) > half else ''}"


def difference(one: Entry, factor: int, other: Entry, other_factor: int) -> tuple[float, float] | None:
    """Return the mean loss of `one` less that of `other`, in nats a token, and half its 95 % interval.

    Each is measured at so many training lengths. The interval is over text and over seeds. None if one has no loss.
    """
    if not one.is_defined(factor) or not other.is_defined(other_factor):
        return None
    found = loss_difference(one.at(factor), other.at(other_factor), paired=one is other)
    return found.mean, math.inf if found.over_seeds is None else found.half


def multiplier(run: Run) -> str:
    """Return the multipliers of the position parameters' learning rate; encodings of several parts may have several."""
    return " and ".join(f"{one:g} x" for one in multipliers_of(run)) or "-"


def entries_of(cells: Sequence[Run]) -> dict[str, Entry]:
    return {name: Entry(found) for name, found in by_setting(cells).items()}


def table(cells: Sequence[Run], times: Mapping[str, str]) -> str:
    """Return Markdown. times: of a step, over NoPE's."""
    entries = entries_of(cells)
    order = sorted(entries, key=lambda name: fmean(entries[name].values("ppl")))
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
    head += [f"{rival}, {length_name(k)}" for rival in RIVALS for k in (1, 8)]
    body = []
    for name in order:
        entry = entries[name]
        line = [
            f"`{name}`", f"{entry.runs[0]['num_params']:,}", str(len(entry.runs)), multiplier(entry.runs[0]),
            f"{fmean(entry.values('bpb')):.3f}", cell(entry.values("ppl")),
            *map(entry.ratio, FACTORS), entry.horizon(), times.get(name, "-"),
        ]  # fmt: skip
        line += [entry.against(entries[r], k) if r in entries and r != name else "-" for r in RIVALS for k in (1, 8)]
        body.append(line)
    return markdown(head, body)


def claims(cells: Sequence[Run], published: Sequence[Mapping[str, Any]]) -> str:
    """Return a line of Markdown for each claim, with the measured ratio of perplexities and the verdict."""
    entries, lines = entries_of(cells), ["| claim | source | here | |", "|---|---|---:|---|"]
    for claim in published:
        name, at = claim["encoding"], claim["at"]
        rival, rival_at = claim.get("than", name), claim.get("than_at", at)
        what = f"`{name}` at {length_name(at)} {claim['is']} "
        what += f"`{rival}`" if rival != name else f"that at {length_name(rival_at)}"
        here, verdict, found = "-", "not run", None
        if name in entries and rival in entries:
            verdict, found = "no loss", difference(entries[name], at, entries[rival], rival_at)
        if found is not None:
            gap, half = found
            here = ratio_text(gap, half) if half < math.inf else f"{math.exp(gap):.3f} (one seed)"
            verdict = judged(claim["is"], gap - half, gap + half)
        lines.append(f"| {what} | {claim['source']} | {here} | {verdict} |")
    return "\n".join(lines)


def judged(claimed: str, low: float, high: float) -> str:
    """Return the verdict on a difference in nats that lies between `low` and `high`."""
    inside, outside = {
        "below": (high < 0, low > 0),
        "above": (low > 0, high < 0),
        "level": (-LEVEL < low and high < LEVEL, low > LEVEL or high < -LEVEL),
    }[claimed]
    return "confirmed" if inside else "contradicted" if outside else "open"


def main(words: Sequence[str]) -> None:
    """Run one of the two commands."""
    match words:
        case ["table"]:
            print(table(load("leaderboard", "cells"), over_nope(load("leaderboard", file="steps.jsonl"))))
        case ["claims"]:
            print(claims(load("leaderboard", "cells"), tomllib.loads(CLAIMS.read_text())["claim"]))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
