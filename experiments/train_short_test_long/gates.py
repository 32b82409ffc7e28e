"""What the sweep showed, next to the trial numbers and the gates it was to be held against.

    python experiments/train_short_test_long/gates.py experiments/train_short_test_long/results

Reads the stored rows only and prints Markdown: perplexity at L and the ratios R_k = PPL(kL) / PPL(L), means over seeds
with their standard deviation and, in brackets, 95 % intervals of the mean over text (paired: the same targets at both
lengths); then every gate with its value, the mean over seeds.
"""

import sys
from pathlib import Path

import numpy as np

from posx.plots import read_rows
from posx.plots.groups import panels
from posx.plots.points import Point, perplexity_curves, ratio_curves

L = 64
#: PPL at L, then R_2, R_4, R_8, R_16 of two earlier throw-away trials (a JAX one / x-transformers).
TRIALS = {
    "sinusoidal": ["4.55 / 4.58", "2.94 / 2.95", "4.77 / 4.74", "5.78 / 6.04", "6.03 / 7.09"],
    "rope": ["4.35 / 4.38", "1.27 / 1.33", "2.30 / 2.58", "3.94 / 4.47", "5.86 / 6.50"],
    "alibi": ["4.54 / 4.63", "0.98 / 0.98", "0.98 / 0.97", "0.97 / 0.97", "0.97 / 0.97"],
    "t5": ["4.59", "1.10", "1.59", "2.38", "3.18"],
    "nope": ["5.12", "1.11", "1.67", "2.42", "3.15"],
}


class Runs:
    """Points over seeds by (encoding, protocol, k), k being the length in training lengths."""

    def __init__(self, folder: Path):
        self.points: dict[tuple[str, str, float], Point] = {}
        self.ratios: dict[tuple[str, float], Point] = {}
        for panel in panels(row for row in read_rows(folder) if row["train_len"] == L):
            if panel.protocol == "nonoverlapping":
                self.ratios |= {(c.label, p.x): p for c in ratio_curves(panel) for p in c.points if p.values}
            for curve in perplexity_curves(panel):
                self.points |= {(curve.label, panel.protocol, p.x / L): p for p in curve.points if p.values}
        self.names = sorted({name for name, _, _ in self.points})

    def ppl(self, name: str, k: float = 1, protocol: str = "nonoverlapping") -> float:
        point = self.points.get((name, protocol, k))
        return point.mean if point else float("nan")

    def horizon(self, name: str, factor: float = 1.01) -> float:
        """Largest k up to which every PPL(kL) stays within `factor` of PPL(L)."""
        held = 1.0
        for k in sorted(k for encoding, protocol, k in self.points if (encoding, protocol) == (name, "nonoverlapping")):
            if self.ppl(name, k) > factor * self.ppl(name):
                break
            held = k
        return held

    def early_share(self, name: str, k: float) -> float:
        """1 - [P2(L) - P2(kL)] / [P1(L) - P1(kL)], nats: how much of P1's gain is fewer tokens with little context."""
        p1, p2 = (
            np.log(self.ppl(name, 1, protocol)) - np.log(self.ppl(name, k, protocol))
            for protocol in ("nonoverlapping", "sliding")
        )
        return 1 - p2 / p1


def cell(point: Point | None) -> str:
    if point is None:
        return "undefined"
    spread = "" if point.sd is None else f" ± {point.sd:.3f}"
    return f"{point.mean:.3f}{spread}" + (
        f" ({point.interval[0]:.3f}-{point.interval[1]:.3f})" if point.interval else ""
    )


def table(runs: Runs) -> list[str]:
    factors = (2, 4, 8, 16, 32)
    head = "| encoding | seeds | PPL at L | " + " | ".join(f"R_{k}" for k in factors) + " |"
    lines = [head, "|---|---:|" + "---:|" * 6]
    for name in runs.names:
        at_train = runs.points[name, "nonoverlapping", 1]
        spread = "" if at_train.sd is None else f" ± {at_train.sd:.3f}"
        cells = [f"{at_train.mean:.3f}{spread}", *(cell(runs.ratios.get((name, k))) for k in factors)]
        lines.append(f"| {name} | {len(at_train.values)} | " + " | ".join(cells) + " |")
        if name in TRIALS:
            lines.append("| trials | | " + " | ".join(TRIALS[name]) + " | |")
    return lines


def gates(runs: Runs) -> list[str]:
    def r(name: str, k: float) -> float:
        return runs.ratios[name, k].mean

    best = min(runs.ppl(name) for name in runs.names)
    relative = [n for n in ("rope", "alibi", "t5", "shaw", "transformer_xl", "deberta") if n in runs.names]
    worst = max(relative, key=runs.ppl)
    sliding = runs.ppl("alibi", 8, "sliding") / runs.ppl("alibi", 1, "sliding")
    horizons = [runs.horizon(name) for name in ("sinusoidal", "rope", "alibi")]
    p1, p2 = (runs.ppl("sinusoidal", 2, protocol) for protocol in ("nonoverlapping", "sliding"))
    order = r("alibi", 8) < r("rope", 8) < r("sinusoidal", 8)
    nope, sinusoidal, share = runs.ppl("nope"), runs.ppl("sinusoidal"), runs.early_share("alibi", 8)
    checks = [
        ("order at 8 L: ALiBi < RoPE < sinusoidal",
         f"{r('alibi', 8):.3f} < {r('rope', 8):.2f} < {r('sinusoidal', 8):.2f}", order),
        ("R_8 ALiBi <= 1.00", f"{r('alibi', 8):.3f}", r("alibi", 8) <= 1.0),
        ("R_8 T5 <= 1.30 (a warning)", f"{r('t5', 8):.3f}", r("t5", 8) <= 1.3),
        ("R_8 RoPE > R_8 ALiBi + 0.05", f"{r('rope', 8):.3f}", r("rope", 8) > r("alibi", 8) + 0.05),
        ("R_8 sinusoidal >= 1.3", f"{r('sinusoidal', 8):.3f}", r("sinusoidal", 8) >= 1.3),
        ("1 % horizons: sinusoidal <= RoPE <= ALiBi",
         " <= ".join(f"{h:g} L" for h in horizons), sorted(horizons) == horizons),
        ("NoPE finite at 2 L, at L worse than the best", f"{runs.ppl('nope', 2):.2f}; {nope:.2f} > {best:.2f}",
         bool(np.isfinite(runs.ppl("nope", 2))) and nope > best),
        ("NoPE R_2 below RoPE's (a warning)", f"{r('nope', 2):.3f}, RoPE {r('rope', 2):.3f}",
         r("nope", 2) < r("rope", 2)),
        ("relative encodings at L within 5 % of sinusoidal",
         f"worst: {worst} {runs.ppl(worst) / sinusoidal - 1:+.1%}", runs.ppl(worst) <= 1.05 * sinusoidal),
        ("sliding, ALiBi: 8 L within 4 % of L while P1 falls", f"{sliding - 1:+.1%}, P1 {r('alibi', 8) - 1:+.1%}",
         abs(sliding - 1) <= 0.04 and r("alibi", 8) < 1),
        ("early-token share of ALiBi at 8 L >= 0.7 (a warning)", f"{share:.2f}", share >= 0.7),
        ("sinusoidal: sliding(2 L) >= non-overlapping(2 L)", f"{p2:.2f}, {p1:.2f}", p2 >= p1),
    ]  # fmt: skip
    return ["| gate | measured | |", "|---|---|---|"] + [
        f"| {name} | {value} | {'met' if met else 'not met'} |" for name, value, met in checks
    ]


def main(folder: str) -> None:
    runs = Runs(Path(folder))
    print("\n".join([*table(runs), "", *gates(runs)]))


if __name__ == "__main__":
    main(sys.argv[1])
