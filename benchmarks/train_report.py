"""The training bench's tables and figure, from its stored numbers."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure, targets
from benchmarks.measure import cell, quartiles
from benchmarks.train_parts import BASELINE, FORMS, ONE_DEVICE, OURS, PEER, PINNED, Shape
from posx.plots import look

Row = dict[str, Any]


def summarise(report: dict[str, Any]) -> list[Row]:
    """One row per encoding from a report's stored numbers.

    `others` holds who else was there, by library; `best` the library of the fastest rival, None without one.
    `above_nope` is the time a step takes above NoPE's, over NoPE's step at the baseline: {library: ...}.
    """
    results = {(row["library"], row["encoding"]): row for row in report["results"]}
    rates = {key: row["tokens_per_second"] for key, row in results.items()}
    ceiling = statistics.median(report["ceiling"])
    rows = []
    for (library, encoding), ours in results.items():
        if library != OURS:
            continue
        rate = quartiles(ours["tokens_per_second"])
        others = {
            name: {
                **row, "rate": quartiles(rates[name, encoding]),
                "ratio": measure.ratios(rates[OURS, encoding], rates[name, encoding]),
            }
            for (name, what), row in results.items() if what == encoding and name != OURS
        }  # fmt: skip
        rivals = [name for name in others if name.startswith(PEER)]
        rows.append({
            "encoding": encoding, "ours": ours, "rate": rate, "others": others,
            "best": max(rivals, key=lambda name: others[name]["rate"][0], default=None),
            "share": rate[0] * ours["flops_per_token"] / ceiling,
            "step_time_to_nope": measure.ratios(rates.get((OURS, "nope")), rates[OURS, encoding]),
            "above_nope": {name: _above_nope(rates, name, encoding) for name in (OURS, BASELINE)},
        })  # fmt: skip
    return rows


def _above_nope(rates: dict[tuple[str, str], list[float]], library: str, encoding: str) -> measure.Spread | None:
    """Step times are formed per round, as inverse rates."""
    needed = [rates.get(key) for key in ((library, encoding), (library, "nope"), (BASELINE, "nope"))]
    if any(part is None for part in needed):
        return None
    return quartiles(base / own - base / nope for own, nope, base in zip(*needed, strict=True))


def table(report: dict[str, Any]) -> str:
    """Markdown: posx and its best rival, posx in other arrangements, all forms of the rival, and that all is fair."""
    shape, rows = Shape(**report["shape"]), summarise(report)
    ceiling = cell(quartiles(flops / 1e9 for flops in report["ceiling"]), ",.0f")
    baseline = f"; baseline {report['baseline']}" if report.get("baseline") else ""
    lines = [
        f"{shape}, {shape.tokens} tokens a step, {shape.dtype}; {measure.place(report)}; float32 matmul ceiling "
        f"{ceiling} GFLOP/s; {len(report['ceiling'])} rounds of {report['steps']} steps: median [quartiles]{baseline}"
    ]
    tables = [_speed(report, rows), _arrangements(report, rows), _forms(rows), _fairness(rows, report["steps"])]
    for head, body in filter(None, tables):
        lines += ["", *measure.rows(head, body)]
    lines += [f"failed: {row['library']}, {row['encoding']}: {row['why']}" for row in report.get("failed", ())]
    return "\n".join(lines)


def _sizes(report: dict[str, Any]) -> tuple[int, int, int]:
    return tuple(report["shape"][name] for name in ("layers", "width", "length"))  # type: ignore[return-value]


def _of(row: Row, library: str | None, what: str, form: str) -> str:
    return cell(row["others"][library][what] if library in row["others"] else None, form)


def _speed(report: dict[str, Any], rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    target = targets.shown(targets.RIVAL.get((*_sizes(report), report["cores"])))
    body = [
        [
            row["encoding"], cell(row["rate"], ",.0f"), f"{row['share']:.2f}", cell(row["step_time_to_nope"], ".2f"),
            (row["best"] or "-").removeprefix(f"{PEER}, "), _of(row, row["best"], "rate", ",.0f"),
            _of(row, row["best"], "ratio", ".2f"), target if row["best"] else "-",
        ]
        for row in rows
    ]  # fmt: skip
    head = ["encoding", f"{OURS} tokens/s", "share of float32 ceiling", "step time / NoPE's", "best rival",
            "its tokens/s", f"{OURS} / best rival", "target"]  # fmt: skip
    return head, body


def _arrangements(report: dict[str, Any], rows: list[Row]) -> tuple[list[str], list[list[str]]] | None:
    """Posx with one device, as pinned processes and before; none where none took part."""
    there = [name for name in (ONE_DEVICE, PINNED, BASELINE) if any(name in row["others"] for row in rows)]
    asked = {PINNED: targets.PINNED, BASELINE: targets.BASELINE.get((*_sizes(report), report["cores"]))}
    above = targets.ABOVE_NOPE.get(_sizes(report), {}) if BASELINE in there else {}
    head, body = ["encoding"], [[row["encoding"]] for row in rows]
    for name in there:
        head += [f"{name} tokens/s", f"{OURS} / it", "target"][: 2 if name == ONE_DEVICE else 3]
        for row, line in zip(rows, body, strict=True):
            line += [_of(row, name, "rate", ",.0f"), _of(row, name, "ratio", ".2f")]
            line += [targets.shown(asked[name])] if name in asked else []
    if BASELINE in there:
        head += ["step above NoPE's / baseline's NoPE", "target", "the same, baseline"]
        for row, line in zip(rows, body, strict=True):
            found = row["above_nope"]
            line += [cell(found[OURS], ".2f"), targets.shown(above.get(row["encoding"]), "<=")]
            line += [cell(found[BASELINE], ".2f")]
    return (head, body) if there else None


def _forms(rows: list[Row]) -> tuple[list[str], list[list[str]]] | None:
    there = [name for name in FORMS.values() if any(name in row["others"] for row in rows)]
    body = [[row["encoding"], *(_of(row, name, "rate", ",.0f") for name in there)] for row in rows]
    return (["encoding", *(f"{name} tokens/s" for name in there)], body) if there else None


def _fairness(rows: list[Row], steps: int) -> tuple[list[str], list[list[str]]]:
    """Parameters and losses of posx and of the best rival."""
    body = []
    for row in rows:
        both = [row["ours"], row["others"].get(row["best"])]
        sizes = [f"{side['parameters']:,}" if side else "-" for side in both]
        losses = [f"{s['losses'][0]:.2f} to {np.mean(s['losses'][-steps:]):.2f}" if s else "-" for s in both]
        body.append([row["encoding"], *sizes, *losses])
    names = (OURS, "best rival")
    columns = (*(f"parameters: {name}" for name in names), *(f"loss, first to last {steps}: {name}" for name in names))
    return ["encoding", *columns], body


def draw(report: dict[str, Any], path: Path) -> None:
    """A bar for posx and one for its best rival per encoding, tokens/s, with quartiles; the ratio at posx's bar."""
    rows, shape = summarise(report)[::-1], Shape(**report["shape"])
    with look.style():
        made = look.figure(7.5, 1.2 + 0.4 * len(rows))
        ax = made.add_subplot()
        made.subplots_adjust(top=0.99)
        for place, row in enumerate(rows):
            best = row["others"].get(row["best"])
            bars = [(row["rate"], look.look(row["encoding"]).color), *([(best["rate"], "#C4C4C4")] if best else [])]
            thick = 0.76 / len(bars)
            for n, (rate, color) in enumerate(bars):
                spread = [[rate[0] - rate[1]], [rate[2] - rate[0]]]
                height = place + 0.38 - thick * (n + 0.5)
                ax.barh(height, rate[0], thick * 0.95, color=color, xerr=spread, ecolor="#555555", capsize=2)
            if best:
                form = row["best"].removeprefix(PEER).removeprefix(", ") or "eager"
                label = (f" {best['ratio'][0]:.2f}x {form}", (row["rate"][2], place + 0.38 - thick / 2))
                ax.annotate(*label, xytext=(3, 0), textcoords="offset points", va="center", size=9, color="#333333")
        ax.set_yticks(range(len(rows)), [look.look(row["encoding"]).name for row in rows])
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.2, y=0.02)
        ax.set_xlabel("training tokens/s (median; whiskers: quartiles)")
        lines = [f"{shape} tokens, {shape.dtype}, {report['cores']} cores"]
        if any(row["best"] for row in rows):
            lines += [f"colour: {OURS}; grey: {PEER} in its best form; the number: median of {OURS} / it, by rounds"]
        look.headings(made, f"Training speed of {OURS}", lines)
        look.save(made, path.parent, path.stem)
