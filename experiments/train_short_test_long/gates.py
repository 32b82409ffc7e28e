"""Compare what was measured with the gates that were set for this study before it ran.

    python -m experiments.train_short_test_long.gates

Reads the runs of `runs.jsonl` and prints Markdown. R_k = PPL(kL) / PPL(L) is formed within a run. A value is the mean
over seeds, with the lowest and the highest in brackets. A gate is met by the mean; it is not met if a seed failed.
"""

import math
import statistics
from collections.abc import Sequence

from experiments.tables import SLIDING, WINDOWS, Run, Seeds, by_setting, load, markdown
from posx.evaluation.statistics import horizon

RELATIVE = ("rope", "alibi", "t5", "shaw", "transformer_xl", "deberta")


class Study:
    """The losses of all runs at one training length, in nats a token."""

    def __init__(self, runs: Sequence[Run]):
        #: By encoding and protocol, then by length in training lengths, then by seed; NaN if a run failed.
        self.nll: dict[tuple[str, str], dict[float, dict[int, float]]] = {}
        for name, members in by_setting(runs).items():
            for protocol in (WINDOWS, SLIDING):
                seeds = Seeds(members, protocol)
                self.nll[name, protocol] = {
                    length / seeds.train_len: {
                        seed: row["nll"] if row["status"] == "ok" else math.nan for seed, row in rows.items()
                    }
                    for length, rows in seeds.rows.items()
                }
        self.names = sorted({name for name, _ in self.nll})

    def ppl(self, name: str, k: float = 1, protocol: str = WINDOWS) -> list[float]:
        """Return the perplexity at k L of each seed; empty if it was not measured."""
        return [math.exp(loss) for loss in self.nll[name, protocol].get(k, {}).values()]

    def gaps(self, name: str, k: float, protocol: str = WINDOWS) -> dict[int, float]:
        """Return ln R_k by seed: the loss at k L less that at L, in nats."""
        near, far = (self.nll[name, protocol].get(factor, {}) for factor in (1, k))
        return {seed: far[seed] - near[seed] for seed in near.keys() & far.keys()}

    def r(self, name: str, k: float, protocol: str = WINDOWS) -> list[float]:
        """Return R_k of each seed."""
        return [math.exp(gap) for gap in self.gaps(name, k, protocol).values()]

    def horizons(self, name: str) -> list[float]:
        """Return for each seed the last length, in L, up to which PPL stays within 1 % of that at L."""
        gaps = {k: self.gaps(name, k) for k in tuple(self.nll[name, WINDOWS])}
        return [horizon({k: math.exp(gaps[k][seed]) for k in gaps}) for seed in gaps[1]]

    def early_share(self, name: str, k: float) -> list[float]:
        """Return the share of the gain in windows (P1) that is due to fewer tokens with little context.

        1 - [P2(L) - P2(kL)] / [P1(L) - P1(kL)] of losses in nats, P2 with sliding windows.
        """
        started, slid = (self.gaps(name, k, protocol) for protocol in (WINDOWS, SLIDING))
        return [1 - slid[seed] / started[seed] for seed in started.keys() & slid.keys()]


def shown(values: Sequence[float], pattern: str = "{:.3f}") -> str:
    """Return the mean, and the lowest and the highest value in brackets if they differ from it."""
    if not values:
        return "not measured"
    mean, *ends = (pattern.format(x) for x in (statistics.fmean(values), min(values), max(values)))
    return mean if {mean} == set(ends) else f"{mean} ({ends[0]} to {ends[1]})"


def mean(values: Sequence[float]) -> float:
    """Return the mean, or NaN, which meets no gate, if there is no value or one failed."""
    return statistics.fmean(values) if values else math.nan


def gates(study: Study) -> list[list[str]]:
    """Return for each gate its name, what was measured, and whether it is met."""
    r8 = {name: study.r(name, 8) for name in study.names}
    at_train = {name: mean(study.ppl(name)) for name in study.names}
    best, worst = (chosen(at_train, key=at_train.__getitem__) for chosen in (min, max))
    poorest = max((name for name in RELATIVE if name in at_train), key=at_train.__getitem__)
    excess = at_train[poorest] / at_train["sinusoidal"] - 1
    horizons = {name: study.horizons(name) for name in ("sinusoidal", "rope", "alibi")}
    middle = [statistics.median(values) for values in horizons.values()]
    slid, share = study.r("alibi", 8, SLIDING), study.early_share("alibi", 8)
    far, near = study.ppl("sinusoidal", 2, SLIDING), study.ppl("sinusoidal", 2)
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
    return [[name, value, "met" if met else "not met"] for name, value, met in checks]


if __name__ == "__main__":
    print(markdown(["gate", "measured", ""], gates(Study(load("train_short_test_long", "study")))))
