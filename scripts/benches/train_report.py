"""The training bench's table and figure, from its stored numbers."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benches import measure
from benches.measure import cell, quartiles
from benches.train_parts import OURS, PEER, PEER_AUTOCAST, Shape
from posx.plots import look

PEERS = (PEER, PEER_AUTOCAST)


def summarise(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per encoding from a report's stored numbers; `peers` holds the rivals that were there, by name."""
    results = {(row["library"], row["encoding"]): row for row in report["results"]}
    rates = {key: row["tokens_per_second"] for key, row in results.items()}
    ceiling = statistics.median(report["ceiling"])
    rows = []
    for (library, encoding), ours in results.items():
        if library == OURS:
            rate = quartiles(ours["tokens_per_second"])
            rows.append({
                "encoding": encoding, "ours": ours, "rate": rate,
                "share": rate[0] * ours["flops_per_token"] / ceiling,
                "step_time_to_nope": measure.ratios(rates.get((OURS, "nope")), rates[OURS, encoding]),
                "peers": {
                    name: {
                        **results[name, encoding],
                        "rate": quartiles(rates[name, encoding]),
                        "ratio": measure.ratios(rates[OURS, encoding], rates[name, encoding]),
                    }
                    for name in PEERS if (name, encoding) in results
                },
            })  # fmt: skip
    return rows


def table(report: dict[str, Any]) -> str:
    """Markdown: speed, then what shows that the comparison is fair."""
    shape, rows, steps = Shape(**report["shape"]), summarise(report), report["steps"]
    there = [name for name in PEERS if name == PEER or any(name in row["peers"] for row in rows)]
    ceiling = cell(quartiles(flops / 1e9 for flops in report["ceiling"]), ",.0f")
    speed = [
        [
            row["encoding"], cell(row["rate"], ",.0f"), f"{row['share']:.2f}", cell(row["step_time_to_nope"], ".2f"),
            *(
                cell(row["peers"][name][what] if name in row["peers"] else None, form)
                for name in there
                for what, form in (("rate", ",.0f"), ("ratio", ".2f"))
            ),
        ]
        for row in rows
    ]  # fmt: skip
    fair = []
    for row in rows:
        sides = [row["ours"], *(row["peers"].get(name) for name in there)]
        sizes = [f"{side['parameters']:,}" if side else "-" for side in sides]
        losses = [f"{s['losses'][0]:.2f} to {np.mean(s['losses'][-steps:]):.2f}" if s else "-" for s in sides]
        fair.append([row["encoding"], *sizes, *losses])
    pairs = [text for name in there for text in (f"{name} tokens/s", f"{OURS} / {name}")]
    names = [OURS, *there]
    return "\n".join([
        f"{shape}, {shape.tokens} tokens a step, {OURS} in {shape.dtype}; {measure.place(report)}; float32 matmul "
        f"ceiling {ceiling} GFLOP/s; {len(report['ceiling'])} rounds of {steps} steps: median [quartiles]",
        "",
        *measure.rows(
            ["encoding", f"{OURS} tokens/s", "share of float32 ceiling", "step time / NoPE's", *pairs], speed
        ),
        "",
        *measure.rows(
            ["encoding", *(f"parameters: {n}" for n in names), *(f"loss, first to last {steps}: {n}" for n in names)],
            fair,
        ),
    ])  # fmt: skip


def draw(report: dict[str, Any], path: Path) -> None:
    """A bar for posx and one per rival for each encoding, tokens/s, with quartiles; the ratio stands at posx's bar."""
    rows, shape = summarise(report)[::-1], Shape(**report["shape"])
    there = [name for name in PEERS if any(name in row["peers"] for row in rows)]
    greys = dict(zip(PEERS, ("#C4C4C4", "#989898"), strict=True))
    thick = 0.76 / (1 + len(there))
    with look.style():
        made = look.figure(7.5, 1.2 + (0.25 + 0.15 * len(there)) * len(rows))
        ax = made.add_subplot()
        made.subplots_adjust(top=0.99)
        for place, row in enumerate(rows):
            bars = [(row["rate"], look.look(row["encoding"]).color)]
            bars += [(row["peers"][name]["rate"], greys[name]) for name in there if name in row["peers"]]
            for n, (rate, color) in enumerate(bars):
                spread = [[rate[0] - rate[1]], [rate[2] - rate[0]]]
                height = place + 0.38 - thick * (n + 0.5)
                ax.barh(height, rate[0], thick * 0.95, color=color, xerr=spread, ecolor="#555555", capsize=2)
            if ratio := row["peers"].get(PEER, {}).get("ratio"):
                label = (f" {ratio[0]:.2f}x", (row["rate"][2], place + 0.38 - thick / 2))
                ax.annotate(*label, xytext=(3, 0), textcoords="offset points", va="center", size=9, color="#333333")
        ax.set_yticks(range(len(rows)), [look.look(row["encoding"]).name for row in rows])
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.1, y=0.02)
        ax.set_xlabel("training tokens/s (median; whiskers: quartiles)")
        lines = [f"{shape} tokens, {OURS} in {shape.dtype}, {report['cores']} cores"]
        if there:
            dark = f"; dark grey: {PEER_AUTOCAST} to bfloat16" if PEER_AUTOCAST in there else ""
            lines += [f"colour: {OURS}; grey: {PEER}{dark}", f"the number: median of {OURS} / {PEER}, round by round"]
        look.headings(made, f"Training speed of {OURS}", lines)
        look.save(made, path.parent, path.stem)
