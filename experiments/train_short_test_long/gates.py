"""Compare what was measured with the gates that were set for this study before it ran.

    python -m experiments.train_short_test_long.gates

Reads the runs of `runs.jsonl` and prints Markdown. R_k = PPL(kL) / PPL(L) is formed within a run. A value is the mean
over seeds, with the lowest and the highest in brackets. A gate is met by the mean; it is not met if a seed failed.
"""

import math
import statistics
from collections.abc import Sequence

from experiments.tables import SLIDING, WINDOWS, Run, Seeds, by_setting, load, markdown

RELATIVE = ("rope", "alibi", "t5", "shaw", "transformer_xl", "deberta")


def whole(seeds: Seeds, values: list[float], k: float) -> list[float]:
    """Return values at k L, NaN alone if a seed failed there."""
    return values if seeds.failed(k) == "-" else [math.nan]


def shown(values: Sequence[float], pattern: str = "{:.3f}") -> str:
    """Return the mean, and the lowest and the highest value in brackets if they differ from it."""
    if not values:
        return "not measured"
    mean, *ends = (pattern.format(x) for x in (statistics.fmean(values), min(values), max(values)))
    return mean if {mean} == set(ends) else f"{mean} ({ends[0]} to {ends[1]})"


def mean(values: Sequence[float]) -> float:
    """Return the mean, or NaN, which meets no gate, if there is no value or one failed."""
    return statistics.fmean(values) if values else math.nan


def gates(runs: Sequence[Run]) -> list[list[str]]:
    """Return for each gate its name, what was measured, and whether it is met."""
    windows, sliding = (
        {name: Seeds(members, protocol) for name, members in by_setting(runs).items()}
        for protocol in (WINDOWS, SLIDING)
    )

    def ppl(seeds: Seeds, k: float = 1) -> list[float]:
        return whole(seeds, seeds.values("ppl", k), k)

    def r(seeds: Seeds, k: float) -> list[float]:
        return whole(seeds, seeds.ratios(k), k)

    r8, at_train = (
        {name: of(seeds) for name, seeds in windows.items()} for of in (lambda s: r(s, 8), lambda s: mean(ppl(s)))
    )
    best, worst = (chosen(sorted(at_train), key=at_train.__getitem__) for chosen in (min, max))
    poorest = max((name for name in RELATIVE if name in at_train), key=at_train.__getitem__)
    excess = at_train[poorest] / at_train["sinusoidal"] - 1
    horizons = {name: windows[name].horizons() for name in ("sinusoidal", "rope", "alibi")}
    middle = [statistics.median(values) for values in horizons.values()]
    started, gained = windows["alibi"].gaps(8), sliding["alibi"].gaps(8)
    # Sliding windows show how much of the gain in non-overlapping windows comes from fewer tokens with little context.
    slid, share = r(sliding["alibi"], 8), [1 - gained[seed] / started[seed] for seed in started.keys() & gained.keys()]
    far, near = ppl(sliding["sinusoidal"], 2), ppl(windows["sinusoidal"], 2)
    r2 = {name: r(windows[name], 2) for name in ("nope", "rope")}
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
        ("NoPE finite at 2 L", shown(ppl(windows["nope"], 2)), math.isfinite(mean(ppl(windows["nope"], 2)))),
        ("NoPE at L worse than the best", f"{at_train['nope']:.2f}, best: {best} {at_train[best]:.2f}, worst: {worst}",
         at_train["nope"] > at_train[best]),
        ("NoPE R_2 below RoPE's (a warning)", f"{shown(r2['nope'])}, RoPE {shown(r2['rope'])}",
         mean(r2["nope"]) < mean(r2["rope"])),
        ("relative encodings at L at most 5 % worse than sinusoidal", f"the worst: {poorest} {excess:+.1%}",
         excess <= 0.05),
        ("sliding, ALiBi: 8 L within 4 % of L while non-overlapping falls",
         f"{shown(slid)}, non-overlapping {shown(r8['alibi'])}",
         abs(mean(slid) - 1) <= 0.04 and mean(r8["alibi"]) < 1),
        ("early-token share of ALiBi at 8 L >= 0.7, where non-overlapping falls (a warning)", shown(share, "{:.2f}"),
         mean(share) >= 0.7 and mean(r8["alibi"]) < 1),
        ("sinusoidal: sliding(2 L) >= non-overlapping(2 L)", f"{shown(far, '{:.2f}')}, {shown(near, '{:.2f}')}",
         mean(far) >= mean(near)),
    ]  # fmt: skip
    return [[name, value, "met" if met else "not met"] for name, value, met in checks]


if __name__ == "__main__":
    print(markdown(["gate", "measured", ""], gates(load("train_short_test_long", "study"))))
