"""`posx encodings`: the catalogue."""

from __future__ import annotations

from typing import Any

from posx import encodings
from posx.encodings.rates import rates_of, told


def main(values: dict[str, Any], _: None) -> None:
    rows = [("name", "acts on", "learned", "beyond the training length", "paper")]
    dims = encodings.Dims(model_dim=64, num_heads=4, head_dim=16, num_layers=2, train_len=64)
    for name in encodings.ENCODINGS:
        encoding = encodings.build(name, dims)
        rate = told((rates_of(encoding, dims),))
        sites = ", ".join(encoding.sites) or "nothing"
        learned = "no" if rate is None else f"yes, at {rate:g} x"
        rows.append((name, sites, learned, encoding.extrapolates, encoding.paper))
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
