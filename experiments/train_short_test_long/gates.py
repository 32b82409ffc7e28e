"""The gates that this study was to be held against, each with what was measured.

    python experiments/train_short_test_long/gates.py experiments/train_short_test_long/results

Reads the stored rows alone and prints Markdown. R_k = PPL(kL) / PPL(L) is taken within a run; a value is the mean over
seeds, its lowest and highest in brackets. A gate holds for the mean, and not at all where a seed failed. Runs that
cannot be compared (other targets, other text, fewer steps) end the program instead of entering a mean.
"""

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from posx.evaluation.statistics import horizon
from posx.plots import captions, read_rows
from posx.plots.groups import panels

P1, P2 = "nonoverlapping", "sliding"
RELATIVE = ("rope", "alibi", "t5", "shaw", "transformer_xl", "deberta")


class Study:
    """The losses of all runs at one training length, nats a token."""

    def __init__(self, folder: Path):
        #: By encoding and protocol, then by length in training lengths, then by seed; NaN where a run failed.
        self.nll: dict[tuple[str, str], dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for panel in panels(read_rows(folder)):
            said = [captions.mixture(panel.rows), *captions.apart(panel.rows), *captions.before_the_end(panel.rows)]
            if any(said := [*said, *captions.left_out(panel.runs, panel.protocol)]):
                raise SystemExit("; ".join(filter(None, said)))
            for group in panel.groups:
                for row in group.rows:
                    loss = row["nll"] if row["status"] == "ok" else math.nan
                    self.nll[group.label, panel.protocol][row["eval_len"] / panel.train_len][row["seed"]] = loss
        self.names = sorted({name for name, _ in self.nll})

    def ppl(self, name: str, k: float = 1, protocol: str = P1) -> list[float]:
        """Perplexity at k L, of each seed; empty where it was not measured."""
        return [math.exp(loss) for loss in self.nll[name, protocol][k].values()]

    def gaps(self, name: str, k: float, protocol: str = P1) -> dict[int, float]:
        """ln R_k by seed: the loss at k L less that at L, nats."""
        losses = self.nll[name, protocol]
        return {seed: losses[k][seed] - losses[1][seed] for seed in losses[k].keys() & losses[1].keys()}

    def r(self, name: str, k: float, protocol: str = P1) -> list[float]:
        return [math.exp(gap) for gap in self.gaps(name, k, protocol).values()]

    def horizons(self, name: str) -> list[float]:
        """Of each seed: the last length, in L, up to which PPL stays within 1 % of that at L."""
        gaps = {k: self.gaps(name, k) for k in tuple(self.nll[name, P1])}
        return [horizon({k: math.exp(gaps[k][seed]) for k in gaps}) for seed in gaps[1]]

    def early_share(self, name: str, k: float) -> list[float]:
        """1 - [P2(L) - P2(kL)] / [P1(L) - P1(kL)], nats: how much of P1's gain is fewer tokens with little context."""
        started, slid = (self.gaps(name, k, protocol) for protocol in (P1, P2))
        return [1 - slid[seed] / started[seed] for seed in started.keys() & slid.keys()]


def shown(values: Sequence[float], pattern: str = "{:.3f}") -> str:
    """The mean, and the lowest and the highest of several."""
    if not values:
        return "not measured"
    mean, *ends = (pattern.format(x) for x in (statistics.fmean(values), min(values), max(values)))
    return mean if {mean} == set(ends) else f"{mean} ({ends[0]} to {ends[1]})"


def mean(values: Sequence[float]) -> float:
    """NaN, which meets no gate, of nothing and of anything that failed."""
    return statistics.fmean(values) if values else math.nan


def gates(study: Study) -> list[str]:
    r8 = {name: study.r(name, 8) for name in study.names}
    at_train = {name: mean(study.ppl(name)) for name in study.names}
    best, worst = (chosen(at_train, key=at_train.__getitem__) for chosen in (min, max))
    poorest = max((name for name in RELATIVE if name in at_train), key=at_train.__getitem__)
    excess = at_train[poorest] / at_train["sinusoidal"] - 1
    horizons = {name: study.horizons(name) for name in ("sinusoidal", "rope", "alibi")}
    middle = [statistics.median(values) for values in horizons.values()]
    slid, share = study.r("alibi", 8, P2), study.early_share("alibi", 8)
    far, near = study.ppl("sinusoidal", 2, P2), study.ppl("sinusoidal", 2)
    r2 = {name: study.r(name, 2) for name in ("nope", "rope")}
    checks = [
        ("order at 8 L: ALiBi < RoPE < sinusoidal",
         " < ".join(shown(r8[name]) for name in ("alibi", "rope", "sinusoidal")),
         mean(r8["alibi"]) < mean(r8["rope"]) < mean(r8["sinusoidal"])),
        ("R_8 ALiBi <= 1.00", shown(r8["alibi"]), mean(r8["alibi"]) <= 1),
        ("R_8 T5 <= 1.30", shown(r8["t5"]), mean(r8["t5"]) <= 1.3),
        ("R_8 RoPE > R_8 ALiBi + 0.05", shown(r8["rope"]), mean(r8["rope"]) > mean(r8["alibi"]) + 0.05),
        ("R_8 sinusoidal >= 1.3", shown(r8["sinusoidal"]), mean(r8["sinusoidal"]) >= 1.3),
        ("1 % horizons, median over seeds: sinusoidal <= RoPE <= ALiBi",
         "; ".join(f"{name} {shown(values, '{:.3g} L')}" for name, values in horizons.items()),
         middle == sorted(middle)),
        ("NoPE finite at 2 L", shown(study.ppl("nope", 2)), math.isfinite(mean(study.ppl("nope", 2)))),
        ("NoPE at L worse than the best", f"{at_train['nope']:.2f}, best: {best} {at_train[best]:.2f}, worst: {worst}",
         at_train["nope"] > at_train[best]),
        ("NoPE R_2 below RoPE's (a warning)", f"{shown(r2['nope'])}, RoPE {shown(r2['rope'])}",
         mean(r2["nope"]) < mean(r2["rope"])),
        ("relative encodings at L at most 5 % worse than sinusoidal", f"the worst: {poorest} {excess:+.1%}",
         excess <= 0.05),
        ("sliding, ALiBi: 8 L within 4 % of L while P1 falls", f"{shown(slid)}, P1 {shown(r8['alibi'])}",
         abs(mean(slid) - 1) <= 0.04 and mean(r8["alibi"]) < 1),
        ("early-token share of ALiBi at 8 L >= 0.7, where P1 falls (a warning)", shown(share, "{:.2f}"),
         mean(share) >= 0.7 and mean(r8["alibi"]) < 1),
        ("sinusoidal: sliding(2 L) >= non-overlapping(2 L)", f"{shown(far, '{:.2f}')}, {shown(near, '{:.2f}')}",
         mean(far) >= mean(near)),
    ]  # fmt: skip
    return ["| gate | measured | |", "|---|---|---|"] + [
        f"| {name} | {value} | {'met' if met else 'not met'} |" for name, value, met in checks
    ]


if __name__ == "__main__":
    print("\n".join(gates(Study(Path(sys.argv[1])))))
