"""What posx is to reach on a quiet CPU in float32: ratios within one run, None where nothing is asked."""

from __future__ import annotations

#: Tokens/s over those of the best rival, and over those of the baseline, by (layers, width, length) and cores.
RIVAL = {(6, 256, 512, 4): 2.3, (4, 128, 128, 4): 1.8}
BASELINE = {(6, 256, 512, 2): 1.12, (4, 128, 128, 2): 1.08}
#: Tokens/s over what as many pinned processes as cores reach together.
PINNED = 0.93
#: At most: seconds a step takes above NoPE's, over NoPE's step at the baseline; by (layers, width, length).
ABOVE_NOPE = {
    (4, 128, 2048): {
        "t5": 0.1, "alibi": 0.1, "tupe": 0.25, "shaw": 0.6, "transformer_xl": 0.6, "deberta": 1.0,
    }
}  # fmt: skip
#: The best rival's seconds over those of one call of posx, by kind, length and encoding.
ATTENTION = {
    ("forward", 4096): {"nope": 0.9, "rope": 0.9},
    ("forward", 1024): {"nope": 0.7, "rope": 0.7},
    ("gradient", 4096): {"nope": 1.3, "rope": 1.3, "t5": 10.0, "alibi": 2.0},
    ("gradient", 1024): {"nope": 1.0, "rope": 1.0},
}
#: The baseline's seconds with its best number of jobs over those of a sweep without --jobs, by cores.
SWEEP = {4: 1.4, 2: 1.1}


def shown(target: float | None, relation: str = ">=") -> str:
    """A table's cell."""
    return "-" if target is None else f"{relation} {target:g}"
