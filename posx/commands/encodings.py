"""`posx encodings`: the catalogue; `posx encodings NAME`: one of it, with a picture."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pathlib
from typing import Any

import jax

from posx.attention import causal, refusal
from posx.commands import work_folder
from posx.encodings import ENCODINGS, Chain, Dims, Encoding, build, from_spec, spec_text
from posx.encodings.rates import rates_of, told


def main(values: dict[str, Any], _: None) -> None:
    sizes: dict[str, int] = {size: values[size] for size in _SIZES if values[size] or size != "num_kv_heads"}
    dims = Dims(head_dim=sizes["model_dim"] // max(sizes["num_heads"], 1), **sizes)
    if not values["operand"]:
        _print_table([_HEAD, *(_row(name, build(name, dims), dims) for name in ENCODINGS)])
        return
    encoding = build(values["operand"], dims)
    print(_page(values["operand"], encoding, dims))
    if values["dry_run"]:
        return
    for path in _picture(spec_text(values["operand"]), encoding, dims, work_folder(values, needed=False)):
        print(path)


#: Flags of this command; 0 key and value heads are as many as query heads.
_SIZES = ("model_dim", "num_heads", "num_layers", "train_len", "num_kv_heads")
_HEAD = (
    "name",
    "acts on",
    "learned",
    "rate",
    "shift-invariant",
    "prefix-consistent",
    "defined to",
    "kernels",
    "beyond L",
    "paper",
)


def _row(name: str, encoding: Encoding, dims: Dims) -> tuple[str, ...]:
    facts = _facts(encoding, dims)
    return (name, *(facts[column] for column in _HEAD[1:]))


def _facts(encoding: Encoding, dims: Dims) -> dict[str, str]:
    """What the class declares and `posx check` proves, a few words each, by column."""
    arrays = {name: math.prod(array.shape) for name, array in _arrays(encoding, dims).items()}
    once = sum(size for name, size in arrays.items() if name in encoding.shared)
    each = sum(arrays.values()) - once
    rate = told((rates_of(encoding, dims),))
    return {
        "acts on": ", ".join(encoding.sites) or "nothing",
        "learned": " + ".join(text for n, text in ((once, f"{once:,}"), (each, f"{each:,} a layer")) if n) or "nothing",
        "rate": "-" if rate is None else f"{rate:g} x" if isinstance(rate, float) else "by array",
        "shift-invariant": "yes" if encoding.shift_invariant else "no",
        "prefix-consistent": "yes" if encoding.prefix_consistent else "no",
        "defined to": "any position" if encoding.max_position is None else f"position {encoding.max_position:,}",
        "kernels": _kernels(encoding),
        "beyond L": encoding.extrapolates or "not said",
        "paper": encoding.paper,
    }


def _kernels(encoding: Encoding) -> str:
    """The executors that can serve it: any, or tiles of posx's own, or only whole rows of keys."""
    if encoding.tiling == "rows":
        return "whole rows"
    return "tiles" if refusal(encoding, causal(), in_order=True, segments=False) else "any"


def _arrays(encoding: Encoding, dims: Dims) -> dict[str, Any]:
    return jax.eval_shape(lambda: encoding.init(jax.random.key(0), dims))


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(
        "\nL: the training length. learned: numbers once and in each layer, at these sizes (--model_dim and others);"
        "\nrate: times that of the model; kernels: executors that can serve it. posx encodings NAME shows one."
    )


def _page(spec: str, encoding: Encoding, dims: Dims) -> str:
    """Formula, fields and references as the class states them, its facts, and the arrays it learns; of a chain the
    formula and the fields of each part."""
    lines, fields = [spec_text(spec)], []
    for n, (part, given) in enumerate(zip(_parts(encoding), _parts(from_spec(spec)), strict=True)):
        prefix, heading = (f"{n}.", [f"{n}. {spec_text(given)}"]) if isinstance(encoding, Chain) else ("", [])
        lines += ["", *heading, inspect.getdoc(type(part)) or ""]
        fields += [
            f"{prefix + field.name:18}{_shown(getattr(part, field.name))}{_said_of(field, getattr(given, field.name))}"
            for field in dataclasses.fields(part)
            if field.init
        ]
    lines += ["", *(f"{column:18}{text}" for column, text in _facts(encoding, dims).items())]
    arrays = [
        f"{array:18}{list(shape.shape)} {'once per model' if array in encoding.shared else 'in each layer'}"
        for array, shape in _arrays(encoding, dims).items()
    ]
    sizes = ", ".join(f"{size.name}={getattr(dims, size.name)}" for size in dataclasses.fields(dims))
    lines += ["", f"fields, for {sizes}", *(fields or ["none"]), "", "arrays", *(arrays or ["none"])]
    return "\n".join(lines)


def _parts(encoding: Encoding) -> tuple[Encoding, ...]:
    return encoding.parts if isinstance(encoding, Chain) else (encoding,)


def _shown(value: Any) -> str:
    """The value of a field, as it is typed."""
    return spec_text(value) if isinstance(value, Encoding) else str(value)


def _said_of(field: dataclasses.Field[Any], given: Any) -> str:
    if given is None:
        return " (set from the sizes)"
    if field.default is dataclasses.MISSING or given == field.default:
        return ""
    return f" (default: {_shown(field.default)})"


def _picture(name: str, encoding: Encoding, dims: Dims, folder: pathlib.Path) -> list[pathlib.Path]:
    from posx import plots  # Matplotlib, which the table does not need

    return plots.picture(name, encoding, dims, folder / "figures")
