"""Measure speed, memory and compile time of every encoding, beside the obvious rivals.

    python -m benchmarks train --rounds=9 --steps=10 --out=bench.json
    python -m benchmarks attention --lengths=512,1024,2048,4096 --out=attention.json
    python -m benchmarks memory --out=memory.json            # the same command resumes
    python -m benchmarks memory --model --out=model_memory.json
    python -m benchmarks decode --out=decode.json
    python -m benchmarks compile --out=compile.json
    python -m benchmarks profile --shape=medium --encodings=nope,rope --out=profile.json
    python -m benchmarks ceiling --out=ceiling.json
    python -m benchmarks cost --train=t128.json,t512.json --attention=a.json --memory=m.json --figure=cost.png

The help of each (`python -m benchmarks train --help`) says what it measures, and its rivals.

How to read it: a machine's speed drifts, so only ratios taken within one run mean something. In every round each
contestant takes a turn, first untimed, then timed. The order rotates and flips from round to round. Ratios are formed
per round; shown are the median and [lower, upper quartile] over rounds. The ceiling is the best float32 matrix product
of each round. Its median is the denominator of "share", for every type of the measured operands.

Run it on a quiet machine. Torch's OpenMP threads spin while they wait for each other. With other jobs on the cores that
costs torch up to ten times its speed, and every ratio is void (a warning says so). OMP_WAIT_POLICY=PASSIVE makes torch
sleep instead: robust on a busy machine, but not its best on a quiet one. The JSON records OMP_* and XLA_FLAGS.

The thread pools of JAX and torch sleep when they have no work. The untimed start of a turn outlasts the few
milliseconds for which the other pool still spins. Contestants live side by side, in processes of their own if devices,
cores or code differ. --cores=N runs all of them on the first N usable cores.

`benchmarks/accelerator.sh` runs all that a GPU is needed for, and collects the reports in one file.

Exit code 1: a contestant gave a wrong answer; the last lines say which.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import attention, ceiling, compiling, cost, decode, measure, memory, profiling, train
from posx.encodings import ENCODINGS, spec_text
from posx.errors import ConfigError
from posx.parsing import split

#: Each has add_arguments(parser), run(options, save) -> its part of the report, table(report).
#: `save` writes that part so far, for a benchmark that can resume. "problems" in it are wrong answers.
BENCHES = {
    "train": train, "attention": attention, "memory": memory, "decode": decode, "compile": compiling,
    "profile": profiling, "ceiling": ceiling,
}  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    if options.bench == "cost":
        cost.draw(options)
        return
    measure.use_cores(options.cores)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    bench, machine = BENCHES[options.bench], measure.environment()
    if warning := measure.busy(machine):
        print(warning)

    def save(part: dict[str, Any]) -> dict[str, Any]:
        loads = [*machine["load_average"], measure.load()]
        report = {"bench": options.bench, **machine, "load_average": loads, **part}
        if options.out:
            partial = options.out.with_name(f".{options.out.name}.partial")
            partial.write_text(json.dumps(report, indent=1) + "\n")
            partial.replace(options.out)
        return report

    report = save(bench.run(options, save))
    print(bench.table(report))
    if problems := report.get("problems"):
        raise SystemExit("\n".join(["", *problems]))


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=form)
    benches = parser.add_subparsers(dest="bench", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--encodings", type=encodings, default=[name for name, cls in ENCODINGS.items() if cls().axes <= 1],
        help="as posx takes them, with commas; default: all that serve texts",
    )  # fmt: skip
    common.add_argument("--cores", type=measure.positive, help="run on the first so many usable cores; default: all")
    common.add_argument("--out", type=Path, help="JSON file for every number measured")
    for name, bench in (BENCHES | {"cost": cost}).items():
        summary, parents = (bench.__doc__ or "").splitlines()[0], [common] if name in BENCHES else []
        bench.add_arguments(
            benches.add_parser(name, help=summary, description=bench.__doc__, formatter_class=form, parents=parents)
        )
    return parser.parse_args(words)


def encodings(text: str) -> list[str]:
    try:
        return list(dict.fromkeys(map(spec_text, split(text) or [text])))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    main()
