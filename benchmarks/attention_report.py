"""The attention bench's table and figure, from its stored numbers."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from benchmarks import measure, targets
from benchmarks.measure import cell, quartiles
from posx.plots import look

KIND_NAMES = {"forward": "forward", "gradient": "forward + backward"}
OURS = ("posx", "posx-blockwise")  # what is shown where there is one place
RIVALS = {"jax.nn": ("#555555", (0.0, (4.0, 2.0))), "torch-sdpa": ("#999999", (0.0, (1.5, 1.5)))}


def summarise(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per length, kind, encoding and contestant; ratios formed per round, None without a counterpart.

    `over` holds each form of torch's time over the row's, `best` the fastest form.
    """
    rows = []
    for group in report["groups"]:
        times = {(r["kind"], r["encoding"], r["contestant"]): r["seconds"] for r in group["results"]}
        ceiling = statistics.median(group["ceiling"])
        for result in group["results"]:
            kind, encoding, name = result["kind"], result["encoding"], result["contestant"]
            dense = next(
                (found for who in ("jax.nn", "posx-dense") if (found := times.get((kind, encoding, who)))), None
            )
            middle = statistics.median(result["seconds"])
            rivals = {
                who: theirs for (what, of, who), theirs in times.items()
                if (what, of) == (kind, encoding) and who.startswith("torch-")
            }  # fmt: skip
            rows.append({
                "length": group["length"], "kind": kind, "encoding": encoding, "contestant": name,
                "seconds": quartiles(result["seconds"]),
                "flops": result["useful_flops"] / middle,
                "share": result["useful_flops"] / middle / ceiling,
                "over_dense": measure.ratios(dense, result["seconds"]),
                "to_nope": measure.ratios(result["seconds"], times.get((kind, "nope", name))),
                "best": min(rivals, key=lambda who: statistics.median(rivals[who]), default=None),
                "over": {who: measure.ratios(theirs, result["seconds"]) for who, theirs in rivals.items()},
            })  # fmt: skip
    return sorted(rows, key=lambda row: (row["length"], row["kind"]))  # sorting keeps the contestants' order


def table(report: dict[str, Any]) -> str:
    """Markdown: a table per length and kind, then the check of the answers and who did not take part."""
    case, rows = report["case"], summarise(report)
    ceiling = quartiles(flops / 1e9 for group in report["groups"] for flops in group["ceiling"])
    lines = [
        f"one causal attention call, batch {case['batch']}, {case['heads']} heads of {case['head_dim']}, "
        f"{case['dtype']}, encodings of training length {case['train_len']}; {measure.place(report)}; float32 matmul "
        f"ceiling {cell(ceiling, ',.0f')} GFLOP/s; {len(report['groups'][0]['ceiling'])} rounds: median [quartiles]"
    ]
    for length, kind in dict.fromkeys((row["length"], row["kind"]) for row in rows):
        body = [
            [
                row["encoding"], row["contestant"], cell(tuple(1e3 * s for s in row["seconds"]), ".2f"),
                f"{row['flops'] / 1e9:.0f}", f"{row['share']:.2f}", cell(row["over_dense"], ".2f"),
                cell(row["to_nope"], ".2f"),
            ]
            for row in rows if (row["length"], row["kind"]) == (length, kind)
        ]  # fmt: skip
        head = ["encoding", "contestant", "ms", "useful GFLOP/s", "share", "faster than dense XLA", "time / its NoPE's"]
        lines += ["", f"L = {length}, {KIND_NAMES[kind]}", "", *measure.rows(head, body)]
    lines += against_torch(rows)
    worst = max(report["checks"], key=lambda row: row["error"])
    lines += [
        "",
        f"{len(report['checks'])} pairs of contestant and encoding checked against float64 at length "
        f"{report['check_length']}; largest deviation {worst['error']:.1e} of the largest entry "
        f"({worst['contestant']}, {worst['encoding']}, {worst['answer']})",
    ]
    if report["left_out"]:
        lines.append(f"NoPE's attention serves {', '.join(report['left_out'])}, which act on the embeddings alone")
    for row in report["skipped"]:
        kind = f", {KIND_NAMES[row['kind']]}" if "kind" in row else ""
        lines.append(f"not measured: {row['contestant']}, {row['encoding']}, {row['length']}{kind}: {row['why']}")
    return "\n".join(lines)


def against_torch(rows: list[dict[str, Any]]) -> list[str]:
    """Posx against every form of torch; the best form of a call is marked and has the target."""
    ours = next((name for name in OURS if any(row["contestant"] == name for row in rows)), None)
    body = []
    for row in rows:
        for who, ratio in sorted(row["over"].items()) if row["contestant"] == ours else ():
            asked = targets.ATTENTION.get((row["kind"], row["length"]), {}).get(row["encoding"])
            best = who == row["best"]
            body.append([
                str(row["length"]), KIND_NAMES[row["kind"]], row["encoding"], f"{who}{', best' if best else ''}",
                cell(ratio, ".2f"), targets.shown(asked if best else None),
            ])  # fmt: skip
    head = ["length", "kind", "encoding", "rival", f"{ours} is faster by", "target"]
    return ["", f"{ours} against torch", "", *measure.rows(head, body)] if body else []


def linear_executor(report: dict[str, Any]) -> str:
    """The contestant of posx that figures show: over all devices where it was measured, else blockwise, else any."""
    found = [row["contestant"] for group in report["groups"] for row in group["results"]]
    return next(name for name in (*OURS, *found) if name in found and name.startswith("posx"))


def draw(report: dict[str, Any], path: Path) -> None:
    """Useful FLOP/s against length, forward and with gradients: posx in colour, NoPE by others in grey."""
    rows, executor, handles = summarise(report), linear_executor(report), dict[str, Line2D]()
    lengths = sorted({row["length"] for row in rows})
    ceiling = statistics.median(flops for group in report["groups"] for flops in group["ceiling"]) / 1e9
    with look.style():
        made = look.figure(11.0, 4.2)
        for place, (kind, name) in enumerate(KIND_NAMES.items()):
            ax = made.add_subplot(1, 2, place + 1)
            ax.set_title(name)
            for who in [*RIVALS, executor]:
                for encoding in dict.fromkeys(row["encoding"] for row in rows):
                    if who in RIVALS and encoding != "nope":
                        continue
                    line = [r for r in rows if (r["contestant"], r["encoding"], r["kind"]) == (who, encoding, kind)]
                    drawn = look.look(encoding)
                    color, dashes = RIVALS.get(who, (drawn.color, drawn.dashes))
                    points = ([row["length"] for row in line], [row["flops"] / 1e9 for row in line])
                    marker = "" if who in RIVALS else drawn.marker
                    (handle,) = ax.plot(*points, color=color, linestyle=dashes, marker=marker)
                    if line:
                        handles[f"{who}, NoPE" if who in RIVALS else drawn.name] = handle
            handles["float32 matmul ceiling"] = ax.axhline(ceiling, color="#BBBBBB", linewidth=1.0)
            look.length_axis(ax, lengths, lengths[0])
            ax.set_ylim(bottom=0)
            ax.set_xlabel("length (tokens)")
            ax.set_ylabel("useful GFLOP/s (median)")
        case = report["case"]
        sizes = (
            f"one causal call, {case['heads']} heads of {case['head_dim']}, {case['dtype']}, {report['cores']} cores"
        )
        look.legend(made, list(handles.values()), list(handles), 0.92, 0.88)
        look.headings(made, f"Attention with {executor.replace('-', ' ')}", [sizes], lift=-0.04)
        look.save(made, path.parent, path.stem)
