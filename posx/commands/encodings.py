"""`posx encodings`: the catalogue."""

from __future__ import annotations

from typing import Any

import jax

from posx import encodings


def main(values: dict[str, Any], _: None) -> None:
    rows = [("name", "acts on", "learned", "beyond the training length", "paper")]
    dims = encodings.Dims(model_dim=64, num_heads=4, head_dim=16, num_layers=2, train_len=64)
    for name in encodings.ENCODINGS:
        encoding = encodings.build(name, dims)
        learned = bool(jax.eval_shape(lambda rng, e=encoding: e.init(rng, dims), jax.random.key(0)))
        sites = ", ".join(encoding.sites) or "nothing"
        rows.append((name, sites, "yes" if learned else "no", encoding.extrapolates, encoding.paper))
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
