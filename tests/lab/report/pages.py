"""Sweeps of made-up rows for reports."""

import json
import math
from pathlib import Path

import numpy as np

from posx.evaluation.statistics import BLOCK_LEN
from posx.lab.files.checksums import with_checksum
from tests.made_rows import UNDISTURBED, as_lines, position_row, row

BLOCKS = 40


def put(folder: Path, kind: str, /, seed: int = 0, name: str = "", lengths=(64, 128, 256), **changes) -> Path:
    """Write a run with rows, losses by position and a log of training."""
    path = folder / (name or f"{kind}-L64-s{seed}")
    path.mkdir(parents=True)
    count = BLOCKS * BLOCK_LEN
    rows = []
    for length in lengths:
        base = row(kind, length, seed, num_targets=count, max_targets=count, targets="abc", block_len=BLOCK_LEN)
        noise = 0.02 * np.random.default_rng([seed, len(kind), length]).standard_normal(BLOCKS)
        nll = [] if base["nll"] is None else ((base["nll"] + noise) * BLOCK_LEN).tolist()
        rows.append(base | {"block_nll": nll, "run_id": path.name} | changes)
    if kind != "learned":
        rows.append(position_row(kind, seed) | {"run_id": path.name} | changes)
    (path / "eval.jsonl").write_text(as_lines(rows))
    log = [
        {"step": n, "tokens": 4096 * n, "loss": 2 + math.exp(-n / 9), "tokens_per_second": 8192.0} | UNDISTURBED
        for n in range(10, 60, 10)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(with_checksum(one)) + "\n" for one in log))
    return path
