"""`posx encodings`: the catalogue; `posx encodings NAME`: one of it, with a picture."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pathlib
import shlex
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from posx.attention import causal, refusal
from posx.commands import COMMANDS, work_folder
from posx.config.model import ModelConfig
from posx.contract import abstract_params, acting
from posx.encodings import ENCODINGS, Chain, Dims, Encoding, build, from_spec, spec_text
from posx.encodings.grammar import value_text
from posx.encodings.rates import multipliers_in_rows, rates_of
from posx.errors import ConfigError
from posx.machine.backend import start_devices
from posx.runs.folder import RunFolder, is_run, run_folders


def main(values: dict[str, Any], _: None) -> None:
    dims = _dims({size: values[size] for size in _SIZES})
    start_devices()
    spec = values["operand"]
    if not spec:
        _print_table([_HEAD, *(_row(name, dims) for name in ENCODINGS)])
        return
    folder = work_folder(values) if values["workdir"] else None
    run = _run_in(folder) if folder else None
    encoding, dims = _trained(values, run) if run else (build(spec, dims), dims)
    print(_page(spec, encoding, dims))
    if values["dry_run"]:
        return
    if folder is None:
        print("\nTo draw a picture of it, add --workdir FOLDER: the files go to FOLDER/figures.")
        return
    sys.stdout.flush()  # a folder that cannot be written takes nothing from the text
    from posx import plots  # Matplotlib, which the text does not need

    for path in plots.picture(spec_text(spec), encoding, dims, folder / "figures", run):
        print(path)


def _run_in(folder: pathlib.Path) -> RunFolder | None:
    """Return the run in `folder`, or None for a folder without runs. Raises ConfigError for one of several runs."""
    runs = [path for path in run_folders(folder, "config.json") if is_run(path)] if folder.is_dir() else []
    if runs and runs != [folder]:
        raise ConfigError(f"--workdir={folder} holds {len(runs)} runs. Name one of them, for example {runs[0]}")
    return RunFolder(folder) if runs else None


def _trained(values: dict[str, Any], run: RunFolder) -> tuple[Encoding, Dims]:
    """Return the encoding of a run that was asked for, as it was resolved for that run, and the run's sizes."""
    usual = COMMANDS["encodings"].flags
    for size in _SIZES:
        if values[size] != usual[size][0]:
            raise ConfigError(f"--{size}={values[size]}: {run.path} is a run and has sizes of its own. Leave it out.")
    config = run.read_config()
    texts, spec = config.layer_texts, spec_text(values["operand"])
    if spec in texts:
        return config.layers[texts.index(spec)], config.dims
    known = " and ".join(dict.fromkeys(texts))
    raise ConfigError(
        f"{spec}: {run.path} was trained with {known}. For that, use: posx encodings "
        f"{shlex.quote(texts[0])} --workdir {shlex.quote(values['workdir'])}"
    )


#: The least width, in characters, of a last column that is wrapped.
_LAST = 40
#: Flags of this command; 0 key and value heads are as many as query heads.
_SIZES = ("model_dim", "num_heads", "num_layers", "train_len", "num_kv_heads")
_HEAD = (
    "name",
    "acts on",
    "learned",
    "rate",
    "shift-invariant",
    "defined to",
    "kernels",
    "paper",
    "beyond L",
)


def _dims(sizes: dict[str, int]) -> Dims:
    """Raises ConfigError for sizes that no model could have, in the words of the model's own config."""
    of_model: dict[str, Any] = {size: given for size, given in sizes.items() if size != "train_len"}
    model = ModelConfig(**of_model)
    if problems := model.problems():
        raise ConfigError("; ".join(problem.replace("model.", "--", 1) for problem in problems))
    given = {size: value for size, value in sizes.items() if value or size != "num_kv_heads"}
    return Dims(head_dim=model.model_dim // model.num_heads, **given)


def _row(name: str, dims: Dims) -> tuple[str, ...]:
    """Its cells, or its name and why it cannot be had at these sizes."""
    try:
        encoding = build(name, dims)
    except ConfigError as error:
        return name, f"not at these sizes: {str(error).removeprefix(f'{name}: ')}"
    facts = _facts(encoding, dims)
    return (name, *(facts[column] for column in _HEAD[1:]))


def _facts(encoding: Encoding, dims: Dims) -> dict[str, str]:
    """What the class declares and `posx check` proves, a few words each, by column."""
    arrays = {name: math.prod(array.shape) for name, array in _arrays(encoding, dims).items()}
    once = sum(size for name, size in arrays.items() if name in encoding.shared)
    each = sum(arrays.values()) - once
    rate = multipliers_in_rows((rates_of(encoding, dims),))
    return {
        "acts on": ", ".join(acting(encoding)) or "nothing",
        "learned": " + ".join(text for n, text in ((once, f"{once:,}"), (each, f"{each:,} a layer")) if n) or "nothing",
        "rate": "-" if rate is None else f"{rate:g} x" if isinstance(rate, float) else "by array",
        "shift-invariant": "yes" if encoding.shift_invariant else "no",
        "defined to": "any position" if encoding.max_position is None else f"position {encoding.max_position:,}",
        "kernels": _kernels(encoding, dims),
        "beyond L": encoding.about.beyond or "not said",
        "paper": encoding.about.paper,
    }


def _kernels(encoding: Encoding, dims: Dims) -> str:
    """The executors that can serve it: any, or tiles of posx's own, or only whole rows of keys."""
    if encoding.tiling != "any":
        return "whole rows"
    return "tiles" if refusal(encoding, _arrays(encoding, dims), causal(), in_order=True, segments=False) else "any"


def _arrays(encoding: Encoding, dims: Dims) -> dict[str, Any]:
    return abstract_params(encoding, dims)


def _print_table(rows: list[tuple[str, ...]]) -> None:
    """Print rows in columns. On a narrower terminal the last columns are one, which is wrapped under itself.

    A text in place of a row's cells widens no column.
    """
    widths = [max(len(row[n]) for row in rows if len(row) == len(_HEAD) or n == 0) + 2 for n in range(len(_HEAD))]
    columns, kept = shutil.get_terminal_size((0, 0)).columns or sys.maxsize, len(_HEAD) - 1
    while kept > 1 and sum(widths[:kept]) + min(sum(widths[kept:]), _LAST) > columns:
        kept -= 1
    for row in rows:
        own = kept if len(row) == len(_HEAD) else 1
        start = "".join(cell.ljust(width) for cell, width in zip(row[:own], widths, strict=False))
        named = own < len(_HEAD) - 1 and len(row) == len(_HEAD) and row is not _HEAD
        cells = [f"{head}: {cell}" for head, cell in zip(_HEAD[own:], row[own:], strict=True)] if named else row[own:]
        lines = textwrap.wrap("; ".join(cells), max(columns - len(start), 20), break_on_hyphens=False) or [""]
        print(f"\n{' ' * len(start)}".join([start + lines[0], *lines[1:]]).rstrip())
    said = (
        "L: the training length. learned: numbers once and in each layer, at these sizes (--model_dim and others).",
        "rate: learning rate of these numbers, in times that of the model.",
        "shift-invariant: adding one constant to all positions changes nothing.",
        "kernels: attention that can compute it. any: fused kernels of the device too; tiles: posx's own, in memory "
        "that grows linearly with length; whole rows: posx's own, each query with all of its keys at once.",
        "posx encodings NAME shows one.",
    )
    print()
    for line in said:
        print(textwrap.fill(line, min(columns, 120), break_on_hyphens=False))


def _page(spec: str, encoding: Encoding, dims: Dims) -> str:
    """Formula, references and facts as the class states them, its fields and the arrays it learns; of a chain the
    formula of each part."""
    asked = from_spec(spec)
    lines = [spec_text(asked)]
    for n, (part, given) in enumerate(zip(_parts(encoding), _parts(asked), strict=True)):
        heading = [f"{n}. {spec_text(given)}"] if isinstance(encoding, Chain) else []
        lines += ["", *heading, inspect.getdoc(type(part)) or ""]
    sizes = ", ".join(f"{size.name}={getattr(dims, size.name)}" for size in dataclasses.fields(dims))
    sections = {
        "": list(_facts(encoding, dims).items()),
        f"fields, for {sizes}": list(_fields(encoding, asked)) or [("none", "")],
        "arrays": list(_described(encoding, dims)) or [("none", "")],
    }
    width = max(len(name) for rows in sections.values() for name, _ in rows) + 2
    for title, rows in sections.items():
        lines += ["", *filter(None, [title]), *(f"{name:{width}}{text}".rstrip() for name, text in rows)]
    return "\n".join(lines)


def _parts(encoding: Encoding) -> tuple[Encoding, ...]:
    return encoding.parts if isinstance(encoding, Chain) else (encoding,)


def _fields(encoding: Encoding, asked: Encoding, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Name and value of every field, and below an encoding that stands in one its own: parts by their numbers and all
    names with the path before them, as those of arrays. `asked` is the value before it was resolved."""
    if isinstance(encoding, Chain):
        for n, (part, given) in enumerate(zip(encoding.parts, _parts(asked), strict=True)):
            yield f"{prefix}{n}", _shown(given)
            yield from _fields(part, given, f"{prefix}{n}.")
        return
    units = _units(type(encoding))
    for field in dataclasses.fields(encoding):
        if not field.init:
            continue
        value, given = getattr(encoding, field.name), getattr(asked, field.name)
        path = prefix + field.name
        if isinstance(value, Encoding):
            given = given if type(given) is type(value) else value  # an open one was set from the sizes
            yield path, f"{_shown(given)}{_said_of(field, given)}"
            yield from _fields(value, given, f"{path}.")
        else:
            yield path, f"{_shown(value)}{units[field.name]}{_said_of(field, given)}"


def _units(cls: type[Encoding]) -> dict[str, str]:
    """What the numbers of each field count, " tokens", as its type says it; "" where that says nothing."""
    found = {name: _unit(hint) for name, hint in typing.get_type_hints(cls, include_extras=True).items()}
    return {name: unit and f" {unit}" for name, unit in found.items()}


def _unit(hint: Any) -> str:
    """The text in Annotated[int, "tokens"], also within a tuple or beside None."""
    said = [text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)]
    return next(filter(None, (*said, *map(_unit, typing.get_args(hint)))), "")


def _described(encoding: Encoding, dims: Dims) -> Iterator[tuple[str, str]]:
    """Name of every array; its shape, whether layers share it, and how fast it is trained."""
    rates = dict(rates_of(encoding, dims))
    for name, array in _arrays(encoding, dims).items():
        scope = "once per model" if name in encoding.shared else "in each layer"
        yield name, f"{list(array.shape)} {scope}, {rates[name].lr_multiplier:g} x the model's learning rate"


def _shown(value: Any) -> str:
    """The value of a field, as it is typed."""
    if isinstance(value, Encoding):
        return spec_text(value)
    if isinstance(value, float) and not math.isfinite(value):  # a default of a user's own, which cannot be typed
        return str(value)
    return value_text(value)


def _said_of(field: dataclasses.Field[Any], given: Any) -> str:
    if given is None:
        return " (set from the sizes)"
    if field.default is dataclasses.MISSING or given == field.default:
        return ""
    return f" (default: {'set from the sizes' if field.default is None else _shown(field.default)})"
