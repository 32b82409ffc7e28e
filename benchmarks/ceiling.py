"""FLOP/s of large matrix products, by the type of their operands: what no training step can exceed.

`float32` are products at JAX's default precision, which accelerators round; `float32, highest` are not rounded. The
number is the best of several in each round.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks import measure, report
from posx.lab.machine.ceiling import machine_ceiling

KINDS = {"float32": ("float32", None), "float32, highest": ("float32", "highest"), "bfloat16": ("bfloat16", None)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_rounds(parser, 5)


def ceiling(dtype: str, precision: str | None) -> float:
    with jax.default_matmul_precision(precision), tempfile.TemporaryDirectory() as empty:
        return machine_ceiling(Path(empty), dtype)


def run(options: argparse.Namespace, save: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    turns = [functools.partial(ceiling, *kind) for kind in KINDS.values()]
    return {"flops": dict(zip(KINDS, measure.interleave(turns, options.rounds), strict=True))}


def table(stored: dict[str, Any]) -> str:
    """Format one row per type of operands."""
    body = [
        [kind, report.cell(report.quartiles(x / 1e9 for x in found), ",.0f")]
        for kind, found in stored["flops"].items()
    ]  # fmt: skip
    head = f"matrix products on {stored['device']}; {report.place(stored)}"
    return "\n".join([head, "", *report.rows(["operands", "GFLOP/s"], body)])
