"""The project's measuring instrument: how fast posx trains each encoding, beside x-transformers on torch.

    python scripts/bench.py train --rounds=9 --steps=10 --out=bench.json --figure=bench.png
    python scripts/bench.py train --encodings=nope,rope --posx_only

Measures training tokens/s of the whole step (forward, backward, clipping, AdamW) on batches already in memory, float32,
no dropout, causal. Shape `small`: 4 layers, width 128, 4 heads, GELU MLP of 512, 257 byte tokens, 32 windows of
L = 128. `medium`: 6 layers, width 256, 8 heads, 8 windows of L = 512. Both 4096 tokens a step. `tiny` is for tests.

How to read it: a machine's speed drifts, so only ratios taken within one run mean something. In every round each
contestant takes a turn: one step untimed, then N timed steps, waited for at the end. The order rotates and flips from
round to round; posx and x-transformers with the same encoding stand side by side. Ratios are formed per round; shown
are the median and [lower, upper quartile] over rounds. The ceiling is the best float32 matrix product of each round,
its median the denominator of "share" = tokens/s x FLOPs per token (matmuls and causal-exact attention only) / ceiling.

The rival has posx's architecture: RMSNorm, no biases, embeddings tied or not as posx's default, full-width rotary, T5
with posx's buckets; `sinusoidal` is its scaled one, GELU its exact form where posx has the tanh form. Its attention
is at its default (flash off) or, with --flash, flash wherever it allows it. It runs eagerly on all cores with torch's
fused AdamW. Both see the same batches at the same constant learning rate: the second table shows that both learn, and
with how many parameters.

Run it on a quiet machine. Torch's OpenMP threads spin while they wait for each other; with other jobs on the cores that
costs torch up to ten times its speed, and every ratio is void (a warning says so). OMP_WAIT_POLICY=PASSIVE makes torch
sleep instead: robust on a busy machine, but not its best on a quiet one. The JSON records OMP_* and XLA_FLAGS.

All contestants live in one process: JAX's and torch's thread pools sleep when they have no work, and the untimed step
at the start of a turn outlasts the few milliseconds for which the other's threads still spin.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benches import measure, train

from posx.encodings import ENCODINGS

BENCHES = {"train": train}


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    bench, machine = BENCHES[options.bench], measure.environment()
    if warning := measure.busy(machine):
        print(warning)
    for path in filter(None, (options.out, options.figure)):
        path.parent.mkdir(parents=True, exist_ok=True)
    report = {"bench": options.bench, **machine, **bench.run(options)}
    report["load_average"].append(measure.load())
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(bench.table(report))
    if options.figure:
        bench.draw(report, options.figure)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    benches = parser.add_subparsers(dest="bench", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--encodings", type=encodings, default=list(ENCODINGS), help="names with commas; default: all")
    common.add_argument("--rounds", type=measure.positive, default=9)
    common.add_argument("--out", type=Path, help="JSON file for every number measured")
    common.add_argument("--figure", type=Path, help="picture; written as .png and .svg")
    for name, bench in BENCHES.items():
        bench.add_arguments(benches.add_parser(name, help=bench.__doc__, parents=[common]))
    return parser.parse_args(words)


def encodings(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in ENCODINGS:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; known: {', '.join(ENCODINGS)}")
    return names


if __name__ == "__main__":
    main()
