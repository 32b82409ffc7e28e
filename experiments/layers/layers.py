"""RoPE in some layers, no position in others, windows in some: the config, the table and the figure of the study.

    posx sweep --config experiments/layers/layers.py --workdir runs/layers --config.data.source=PATH/TO/novels
    python -m experiments.tables collect runs/layers cells 4096 > experiments/layers/runs.jsonl
    python -m experiments.layers.layers table
    python -m experiments.layers.layers figure

The recipe is that of the quick sweep, with four layers, on the novels. Only the patterns of layers and masks differ.
"""

from __future__ import annotations

import sys
from typing import Any

from configs import quick

LOCAL, GLOBAL = "window(size=16)", "causal"
ROPE = "encoding"
#: {name: (layer_policy, mask_policy)}, both cycled over four layers.
PATTERNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "RoPE": ((ROPE,), (GLOBAL,)),
    "RoPE, every 2nd NoPE": ((ROPE, "nope"), (GLOBAL,)),
    "RoPE, last NoPE": ((ROPE, ROPE, ROPE, "nope"), (GLOBAL,)),
    "local RoPE, last global RoPE": ((ROPE,), (LOCAL, LOCAL, LOCAL, GLOBAL)),
    "local RoPE, last global NoPE": ((ROPE, ROPE, ROPE, "nope"), (LOCAL, LOCAL, LOCAL, GLOBAL)),
    "local RoPE": ((ROPE,), (LOCAL,)),
    "NoPE": (("nope",), (GLOBAL,)),
}


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


if __name__ == "__main__":
    print(get_config(*sys.argv[1:]))
