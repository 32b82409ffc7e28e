"""Peak memory of one attention call per encoding, contestant and length, or (--model) of a model's evaluation window.

Each point is a fresh process that makes one call and reports the most it ever held (VmHWM); shown is what that is above
the same process at length 64. Inputs, outputs and gradients are part of it. "growth" is the slope of log memory over
log length from 4096 tokens on: 1 is linear, 2 quadratic. A point over --limit_gib is killed and shown as oom, one over
--limit_seconds as timeout, and longer ones of that row are not tried. Dense score matrices stop at --dense_limit.

With --model a window of N tokens goes through `posx.runs.evaluate.model_log_probs` of a model with random weights:
4 layers, 8 heads of 32, executor "auto" (of --contestants only posx's have a part). Points that --out holds already,
made with the same settings, stay; those that failed are tried again, those out of memory or time only under a higher
limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import fresh, measure
from benchmarks.attention import add_sizes, first_case
from benchmarks.attention_worker import KINDS
from benchmarks.calls import Case, contestants, in_attention, is_quadratic, separate
from benchmarks.memory_report import TINY, draw, growth, summarise, table
from posx.config.model import ModelConfig
from posx.model import make_model
from posx.runs.evaluate import model_log_probs

__all__ = ["add_arguments", "draw", "growth", "run", "summarise", "table"]
LADDER = [1024, 2048, 4096, 8192, 16384, 32768]
LAYERS = 4
Point = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser)
    parser.add_argument("--lengths", type=measure.lengths, help="default: 1k to 32k, with --model 32768")
    parser.add_argument("--model", action="store_true", help="evaluate a window through a model")
    parser.add_argument("--limit_gib", type=float, default=8.0)
    parser.add_argument("--limit_seconds", type=float, default=300.0)
    parser.set_defaults(head_dim=None)


def attention_peak(contestant: str, kind: str, case: dict[str, Any]) -> int:
    """Bytes this process held at most, the call being the one thing it does."""
    call = contestants()[contestant](Case(**case))
    if call is None:
        raise ValueError(f"{contestant} does not serve {case['encoding']}")
    getattr(call, kind)()
    return measure.peak_rss()


def model_peak(contestant: str, kind: str, case: dict[str, Any]) -> int:
    """As `attention_peak`, the call being the evaluation of one batch of windows."""
    sizes, executor = Case(**case), contestant.removeprefix("posx-")
    config = ModelConfig(LAYERS, sizes.dims.model_dim, sizes.heads, dtype=sizes.dtype)
    model = make_model(config, measure.at_any_length(sizes.encoding), 257, sizes.train_len)
    tokens = np.random.default_rng(0).integers(256, size=(sizes.batch, sizes.length + 1)).astype(np.int32)
    np.asarray(model_log_probs(model, model.init(jax.random.key(0)), executor)(tokens))
    return measure.peak_rss()


def sizes(options: argparse.Namespace) -> Case:
    """`first_case` with the width of a head filled in: 32 in a model, so that 8 of them make 256, else 64."""
    filled = {**vars(options), "head_dim": options.head_dim or (32 if options.model else 64)}
    return first_case(argparse.Namespace(**filled))


def series(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """(contestant, encoding, kind) of every row to measure."""
    if options.model:
        ours = [name for name in options.contestants or ["posx-auto"] if name.startswith("posx-")]
        yield from ((contestant, encoding, "model") for encoding in options.encodings for contestant in ours)
        return
    for encoding in in_attention(options.encodings):
        tiny = dataclasses.replace(sizes(options), encoding=encoding, length=TINY)
        for contestant in options.contestants or separate():
            if contestants()[contestant](tiny) is not None:
                yield from ((contestant, encoding, kind) for kind in KINDS)


def measure_point(contestant: str, encoding: str, kind: str, length: int, options: argparse.Namespace) -> Point:
    limits = {"limit_bytes": options.limit_gib * 2**30, "limit_seconds": options.limit_seconds}
    case = dataclasses.replace(sizes(options), encoding=encoding, length=length)
    what = model_peak if kind == "model" else attention_peak
    result = fresh.call(what, contestant, kind, dataclasses.asdict(case), **limits)
    key = {"contestant": contestant, "encoding": encoding, "kind": kind, "length": length}
    return key | result | {"limit_gib": options.limit_gib, "limit_seconds": options.limit_seconds}


def stays(point: Point, options: argparse.Namespace) -> bool:
    """Whether a stored point need not be measured again."""
    limit = {"oom": "limit_gib", "timeout": "limit_seconds"}.get(point["status"])
    return point["status"] == "ok" or (limit is not None and point[limit] >= getattr(options, limit))


def run(options: argparse.Namespace, save: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    lengths = options.lengths or ([32768] if options.model else LADDER)
    settings = {**dataclasses.asdict(sizes(options)), "model_layers": LAYERS if options.model else 0}
    earlier = measure.stored(options.out)
    had = earlier.get("points", []) if earlier.get("settings") == settings else []
    points = {_key(point): point for point in had if stays(point, options)}

    def report() -> dict[str, Any]:
        left_out = [] if options.model else [n for n in options.encodings if n not in in_attention(options.encodings)]
        return {"settings": settings, "left_out": left_out, "points": list(points.values())}

    for contestant, encoding, kind in series(options):
        for length in [TINY, *lengths]:
            key = (contestant, encoding, kind, length)
            if length > options.dense_limit and is_quadratic(contestant, encoding):
                break
            if key not in points:
                print(*key, file=sys.stderr)
                points[key] = measure_point(*key, options)
                save(report())
            if points[key]["status"] != "ok":
                break
    return report()


def _key(point: Point) -> tuple[Any, ...]:
    return point["contestant"], point["encoding"], point["kind"], point["length"]
