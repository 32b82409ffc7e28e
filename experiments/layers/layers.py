"""RoPE in some layers, no position in others, windows in some: the config, the table and the figure of the study.

    posx sweep --config experiments/layers/layers.py --workdir runs/layers --config.data.source=PATH/TO/novels
    python -m experiments.tables collect runs/layers cells 1024 > experiments/layers/runs.jsonl
    python -m experiments.layers.layers table
    python -m experiments.layers.layers figure

The recipe is that of the quick sweep, with four layers, on the novels. Only the patterns of layers and masks differ.
`experiments/layers/layers.py:3` is the config of the third pattern alone, counted from 0.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from configs import quick
from experiments.tables import HERE, Run, Seeds, cell, load, markdown, ratio_text
from posx.evaluation.differences import loss_difference

LOCAL, GLOBAL = "window(size=16)", "causal"
ROPE, NOPE = "encoding", "nope"
#: {name: (layer_policy, mask_policy)}, both cycled over four layers.
PATTERNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "RoPE": ((ROPE,), (GLOBAL,)),
    "RoPE, every 2nd NoPE": ((ROPE, NOPE), (GLOBAL,)),
    "RoPE, last NoPE": ((ROPE, ROPE, ROPE, NOPE), (GLOBAL,)),
    "local RoPE, last global RoPE": ((ROPE,), (LOCAL, LOCAL, LOCAL, GLOBAL)),
    "local RoPE, last global NoPE": ((ROPE, ROPE, ROPE, NOPE), (LOCAL, LOCAL, LOCAL, GLOBAL)),
    "local RoPE": ((ROPE,), (LOCAL,)),
    "NoPE": ((NOPE,), (GLOBAL,)),
}
L, FACTORS = 64, (2, 4, 8, 16)


def get_config(arg: str = "") -> Any:
    """Return the sweep over all patterns, or over the one that `arg` numbers."""
    config = quick.get_config().copy_and_resolve_references()
    config.unlock()
    config.model.num_layers = 4
    config.eval.protocols = ("nonoverlapping",)
    config.sweep.seeds = (0, 1, 2)
    chosen = list(PATTERNS.values()) if not arg else [list(PATTERNS.values())[int(arg)]]
    config.sweep.encodings = ("rope",)
    config.sweep.axes = {
        "model.layer_policy": tuple(layers for layers, _ in chosen),
        "model.mask_policy": tuple(masks for _, masks in chosen),
    }
    config.sweep.zip = ("model.layer_policy+model.mask_policy",)
    return config.lock()


def by_pattern() -> dict[str, list[Run]]:
    """Return the runs of each pattern, in the order of their seeds."""
    names = {(layers, masks): name for name, (layers, masks) in PATTERNS.items()}
    found: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(load("layers"), key=lambda run: run["seed"]):
        layers = tuple("encoding" if layer.startswith("rope") else layer for layer in run["layers"])
        found[names[layers, tuple(run["settings"]["model.mask_policy"])]].append(run)
    return {name: found[name] for name in PATTERNS if name in found}


def against(ours: Seeds, theirs: Seeds, factor: int) -> str:
    """Return the perplexity over that of another pattern, with its 95 % interval over text and seeds."""
    found = loss_difference(ours.at(factor), theirs.at(factor))
    return ratio_text(found.mean, found.half)


def table(runs: dict[str, list[Run]]) -> str:
    """Return perplexities at L, R_k, and the perplexity over RoPE's at L and at 16 L."""
    seeds = {name: Seeds(members) for name, members in runs.items()}
    body = []
    for name, own in seeds.items():
        ratios = [cell(own.ratios(factor)) for factor in FACTORS]
        rivals = ["-" if name == "RoPE" else against(own, seeds["RoPE"], factor) for factor in (1, 16)]
        body.append([name, str(len(runs[name])), cell(own.values("ppl")), *ratios, *rivals])
    head = ["layers", "seeds", "PPL at L", *(f"R_{factor}" for factor in FACTORS), "over RoPE, L", "over RoPE, 16 L"]
    return markdown(head, body)


def figure(runs: dict[str, list[Run]], path: Path) -> None:
    """Draw perplexity against the window: the mean over seeds, and a band from the lowest to the highest."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    drawn, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    for number, (name, members) in enumerate(runs.items()):
        rows = Seeds(members).rows
        lengths = sorted(n for n in rows if n >= L)
        values = [[row["ppl"] for row in rows[n].values()] for n in lengths]
        color, marker = plt.get_cmap("tab10")(number), "osD^vP*"[number]
        axis.plot(lengths, [fmean(one) for one in values], label=name, color=color, marker=marker)
        axis.fill_between(lengths, [min(one) for one in values], [max(one) for one in values], color=color, alpha=0.2)
    axis.axvline(L, color="grey", linestyle="--")
    axis.set(xscale="log", yscale="log", xlabel="tokens in the window (dashed: trained at L = 64)")
    axis.set_ylabel("perplexity per byte (log scale)")
    axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axis.xaxis.set_minor_locator(plt.NullLocator())
    for set_format in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        set_format(FuncFormatter(lambda y, _: f"{y:g}"))
    axis.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5))
    axis.set_title("Four layers; lines: means over seeds, bands: lowest to highest")
    drawn.savefig(path, dpi=120)


def main(words: Sequence[str]) -> None:
    """Run the command that the first word names."""
    match words:
        case ["table"]:
            print(table(by_pattern()))
        case ["figure"]:
            figure(by_pattern(), HERE / "layers" / "layers.png")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
