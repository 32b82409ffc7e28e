"""The tables of the study of cost, one for each question, from the reports of the benches in `measurements.jsonl`.

    python -m experiments.cost.cost

A cell "median [lower quartile, upper quartile]" is over rounds. Ratios are formed within a round.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import attention, memory, train
from benchmarks.compiling import summarise
from benchmarks.profiling import Share
from benchmarks.report import cell
from experiments.tables import load, markdown, over_nope

Report = dict[str, Any]
REPORTS: dict[str, Report] = {report["name"]: report for report in load("cost", file="measurements.jsonl")}
KINDS = ("forward", "gradient")
#: A group of the profile is in the table if it takes this share of the step.
SHOWN = 0.005


def profile(shape: str, encoding: str = "rope") -> str:
    """Return the milliseconds of each kind of work in a step: at the start of the work on speed, and now."""
    both = [_shares(f"profile_{shape}{when}", encoding) for when in ("_before", "")]
    steps = [sum(share.milliseconds for share in shares.values()) for shares in both]
    body = [["the whole step", *(f"{step:.0f}" for step in steps), "100 %", "-"]]
    for group in dict.fromkeys([*both[1], *both[0]]):
        shares = [found.get(group) for found in both]
        if max(share.milliseconds / step if share else 0 for share, step in zip(shares, steps, strict=True)) < SHOWN:
            continue
        now = shares[1]
        body.append([
            group, *(f"{share.milliseconds:.1f}" if share else "-" for share in shares),
            f"{now.milliseconds / steps[1]:.1%}" if now else "-",
            f"{now.flops_per_second / 1e9:.0f}" if now and now.flops_per_second else "-",
        ])  # fmt: skip
    return markdown(["kind of work", "before, ms", "now, ms", "share", "GFLOP/s"], body)


def _shares(name: str, encoding: str) -> dict[str, Share]:
    (result,) = (one for one in REPORTS[name]["results"] if one["encoding"] == encoding)
    return {row[0]: Share._make(row) for row in result["shares"]}


def turns(*names: str) -> str:
    """Return the training speed over that before the work on speed, in turns."""
    found = [
        {row["encoding"]: row["others"][train.BASELINE]["ratio"] for row in train.summarise(REPORTS[name])}
        for name in names
    ]
    body = [[name, *(cell(one[name], ".2f") for one in found)] for name in found[0]]
    return markdown(["encoding", *(f"L = {REPORTS[name]['shape']['length']}" for name in names)], body)


def quickstart() -> str:
    """Return the seconds of the quickstart's sweep, before and now, in turns."""
    seconds = REPORTS["quick"]["seconds"]
    body = [[when, *(f"{took:.0f}" for took in seconds[when])] for when in ("before", "now")]
    body.append(["ratio", *(f"{b / a:.2f}" for a, b in zip(seconds["before"], seconds["now"], strict=True))])
    return markdown(["posx sweep --config quick", "first turn, s", "second turn, s"], body)


def compiling() -> str:
    """Return the seconds to compile a training step, before and now."""
    before, now = ({row["encoding"]: row["cold"] for row in summarise(REPORTS[name])} for name in
                   ("compile_before", "compile"))  # fmt: skip
    body = [[name, cell(before[name], ".1f"), cell(now[name], ".1f"), f"{now[name][0] / before[name][0]:.2f}"]
            for name in before]  # fmt: skip
    return markdown(["encoding", "before, s", "now, s", "ratio"], body)


def rivals(shape: str) -> str:
    """Return tokens/s of posx and of the fastest form of x-transformers."""
    body = []
    for row in itertools.chain(*map(train.summarise, _parts(f"rivals_{shape}"))):
        best = row["others"][row["best"]]
        form = row["best"].removeprefix(train.PEER).removeprefix(", ") or "eager"
        cells = [cell(row["rate"], ",.0f"), f"{row['share']:.2f}", form, cell(best["rate"], ",.0f")]
        body.append([row["encoding"], *cells, cell(best["ratio"], ".2f")])
    return markdown(["encoding", "posx", "of the ceiling", "best rival", "its tokens/s", "posx over it"], body)


def steps() -> str:
    """Return the time of a training step over NoPE's, of all encodings."""
    found = [
        {row["encoding"]: row["step_time_to_nope"] for one in _parts(name) for row in train.summarise(one)}
        for name in ("train_128", "train_512")
    ]
    body = [[name, *(cell(one[name], ".2f") for one in found)] for name in found[1]]
    return markdown(["encoding", "L = 128", "L = 512"], body)


def kernels() -> str:
    """Return the seconds of the fastest form of torch's fused attention over those of posx."""
    rows = {
        (row["length"], row["kind"], row["encoding"]): row
        for row in attention.summarise(REPORTS["attention"])
        if row["contestant"] == "posx"
    }
    lengths = sorted({length for length, *_ in rows})
    body = [
        [name, *(_over_best(rows.get((length, kind, name))) for length in lengths for kind in KINDS)]
        for name in dict.fromkeys(name for *_, name in rows)
    ]
    head = [f"{kind}, L = {length}" for length in lengths for kind in ("forward", "with gradients")]
    return markdown(["encoding", *head], body)


def _over_best(row: Report | None) -> str:
    return cell(row["over"][row["best"]], ".2f") if row and row["best"] else "-"


def held() -> str:
    """Return the MiB that one attention holds above a call of 64 tokens, and how it grows."""
    rows = {(row["encoding"], row["kind"]): row for row in memory.summarise(REPORTS["memory"])}
    lengths = sorted({length for row in rows.values() for length in row["bytes"]})
    body = []
    for name in dict.fromkeys(name for name, _ in rows):
        cells = []
        for kind in KINDS:
            row = rows[name, kind]
            cells += [f"{row['bytes'][n] / 2**20:,.0f}" if n in row["bytes"] else row["failed"][n][0] for n in lengths]
            cells.append("-" if row["growth"] is None else f"{row['growth']:.2f}")
        body.append([name, *cells])
    head = [f"{kind}: {length}" if n == 0 else str(length) for kind in ("forward", "with gradients")
            for n, length in enumerate((*lengths, "growth"))]  # fmt: skip
    return markdown(["encoding", *head], body)


def decoding() -> str:
    """Return the milliseconds of a cached token, and its time over NoPE's."""
    rounds = {row["encoding"]: row["cached"] for report in _parts("decode") for row in report["results"]}
    over = over_nope(_parts("decode"), "cached")
    body = [[name, f"{1e3 / statistics.median(rates):.2f}", over[name]] for name, rates in rounds.items()]
    return markdown(["encoding", "ms a token", "over NoPE's"], body)


def _parts(name: str) -> list[Report]:
    """Return the reports of a bench that ran in several parts, each with NoPE in it."""
    return [report for key, report in REPORTS.items() if key.startswith(name)]


TABLES: dict[str, Callable[[], str]] = {
    "A step of 4 layers, width 128, L = 128": lambda: profile("small"),
    "A step of 6 layers, width 256, L = 512": lambda: profile("medium"),
    "Speed over that before": lambda: turns("turns_small", "turns_medium"),
    "Speed over that before at the leaderboard's shape": lambda: turns("turns_64"),
    "The quickstart": quickstart,
    "Compiling a training step": compiling,
    "Against x-transformers, 4 layers, width 128, L = 128": lambda: rivals("small"),
    "Against x-transformers, 6 layers, width 256, L = 512": lambda: rivals("medium"),
    "A training step over NoPE's": steps,
    "Attention against torch's fused kernels": kernels,
    "Memory of one attention": held,
    "A cached token": decoding,
}


def main(_: Sequence[str] = ()) -> None:
    """Print every table below its title."""
    for title, table in TABLES.items():
        print(f"## {title}\n\n{table()}\n")


if __name__ == "__main__":
    main()
