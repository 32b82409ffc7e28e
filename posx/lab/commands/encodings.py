"""`posx encodings`: the catalogue; `posx encodings NAME`: one encoding, with its picture."""

from __future__ import annotations

import dataclasses
import inspect
import math
import shlex
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posx.attention import causal, refusal
from posx.contract import Value, abstract_params, acting_hooks, walk_values
from posx.contract.fields import type_hints
from posx.encodings import ENCODINGS, Chain, Dims, Encoding, build, encoding_name, field_text, from_spec, spec_text
from posx.encodings.frequencies import FrequencyRule, Geometric
from posx.encodings.rates import encoding_rates, multipliers_in_rows
from posx.errors import ConfigError, join_problems
from posx.lab.commands import SIZES, work_folder
from posx.lab.config.sections import ModelConfig
from posx.lab.runs.finding import run_folders
from posx.lab.runs.folder import RunFolder
from posx.machine.guard import start_devices

#: The columns of the catalogue after the name.
_COLUMNS = ("acts on", "learned", "rate", "shift-invariant", "both sides", "defined to", "kernels", "paper", "beyond L")
#: The least width of the wrapped last column in characters.
_LAST = 40
_LEGEND = (
    "L: the training length. learned: numbers once and in each layer, at these sizes (--model_dim and others).",
    "rate: learning rate of these numbers, in times that of the model.",
    "shift-invariant: adding one constant to all positions changes nothing.",
    "both sides: keys after the query have terms too, so it can be trained with train.objective=masked.",
    "kernels: attention that can compute it. any: fused kernels of the device too; tiles: posx's own, in memory "
    "that grows linearly with length; whole rows: posx's own, each query with all of its keys at once.",
    "posx encodings NAME shows one.",
)


def run_encodings(values: dict[str, Any], _: None) -> None:
    """Print the catalogue, or the page of one encoding and the paths of its pictures."""
    dims = model_dims(values)
    start_devices()
    spec = values["operand"]
    if values["html"]:
        _write_gallery(values, dims)
        return
    if not spec:
        print("\n".join(_catalogue(dims)))
        return
    folder = work_folder(values) if values["workdir"] else None
    run = _find_run(folder) if folder else None
    encoding, dims = _trained_encoding(values, run) if run else (build(spec, dims), dims)
    print(_page(spec, encoding, dims))
    if values["dry_run"]:
        return
    if folder is None:
        print("\nTo draw a picture of it, add --workdir FOLDER: the files go to FOLDER/figures.")
        return
    sys.stdout.flush()  # the text must appear even if the folder cannot be written
    from posx.lab import plots  # Matplotlib, which the text does not need

    for path in plots.picture(spec_text(spec), encoding, dims, folder / "figures", run):
        print(path)


def _write_gallery(values: dict[str, Any], dims: Dims) -> None:
    """Write the catalogue as a page. Raises ConfigError for wrong words, WorkdirError."""
    out = Path(values["html"]).expanduser().resolve()
    if values["operand"] or out.suffix not in (".html", ".htm"):
        raise ConfigError(f"--html={values['html']} needs a file that ends with .html, and no name of an encoding.")
    if values["dry_run"]:
        print(f"would write {out}")
        return
    from posx.lab.report import gallery

    print(f"{out}  {gallery.write_gallery(dims, out)} encodings, {out.stat().st_size:,} bytes")


def model_dims(values: dict[str, Any]) -> Dims:
    """Return the sizes of a model. Raises ConfigError for sizes that no model can have."""
    model = ModelConfig(**{size: values[size] for size in SIZES if size != "train_len"})
    if problems := model.problems():
        raise ConfigError(join_problems(problem.replace("model.", "--", 1) for problem in problems))
    return model.dims(values["train_len"])


def _find_run(folder: Path) -> RunFolder | None:
    """Return the run in `folder`, or None for a folder without runs. Raises ConfigError for one of several runs."""
    runs = run_folders(folder, "config.json") if folder.is_dir() else []
    if runs and runs != [folder]:
        raise ConfigError(f"--workdir={folder} holds {len(runs)} runs. Name one of them, for example {runs[0]}")
    return RunFolder(folder) if runs else None


def _trained_encoding(values: dict[str, Any], run: RunFolder) -> tuple[Encoding, Dims]:
    """Return the requested encoding as a run resolved it, and the run's sizes. Raises ConfigError."""
    check_no_sizes(values, run)
    config = run.read_config()
    texts, spec = config.layer_texts, spec_text(values["operand"])
    if spec in texts:
        return config.layers[texts.index(spec)], config.dims
    raise ConfigError(
        f"{spec}: {run.path} was trained with {' and '.join(dict.fromkeys(texts))}. For that, use: posx encodings "
        f"{shlex.quote(texts[0])} --workdir {shlex.quote(values['workdir'])}"
    )


def check_no_sizes(values: dict[str, Any], run: RunFolder) -> None:
    """Raise ConfigError if a flag gives a size beside a run."""
    for size, (default, _) in SIZES.items():
        if values[size] != default:
            raise ConfigError(f"--{size}={values[size]}: {run.path} is a run and has sizes of its own. Leave it out.")


def _catalogue(dims: Dims) -> Iterator[str]:
    """Yield the lines of the catalogue. On a narrow terminal the last columns become one, which is wrapped."""
    rows = {"name": _COLUMNS, **{name: _row(name, dims) for name in ENCODINGS}}
    widths = [max(map(len, column)) + 2 for column in zip(*(row for row in rows.values() if row[1:]), strict=True)]
    width, most = max(map(len, rows)) + 2, shutil.get_terminal_size((0, 0)).columns or sys.maxsize
    kept = len(_COLUMNS) - 1
    while kept and width + sum(widths[:kept]) + min(sum(widths[kept:]), _LAST) > most:
        kept -= 1
    for name, row in rows.items():
        own = kept if row[1:] else 0  # a reason instead of the cells widens no column
        start = name.ljust(width) + "".join(map(str.ljust, row[:own], widths))
        cells = list(row[own:])
        if row[1:] and row is not _COLUMNS and kept < len(_COLUMNS) - 1:
            cells = [f"{column}: {cell}" for column, cell in zip(_COLUMNS[own:], cells, strict=True)]
        wrapper = textwrap.TextWrapper(max(most, len(start) + 20), start, " " * len(start), break_on_hyphens=False)
        yield wrapper.fill("; ".join(cells))
    yield ""
    yield from (textwrap.fill(line, min(most, 120), break_on_hyphens=False) for line in _LEGEND)


def _row(name: str, dims: Dims) -> tuple[str, ...]:
    """Return the cells of an encoding, or one reason if it does not fit the sizes."""
    try:
        facts = column_texts(build(name, dims), dims)
    except ConfigError as error:
        return (f"not at these sizes: {str(error).removeprefix(f'{name}: ')}",)
    return tuple(facts[column] for column in _COLUMNS)


def column_texts(encoding: Encoding, dims: Dims) -> dict[str, str]:
    """Return the text of each column."""
    arrays = abstract_params(encoding, dims)
    once = sum(math.prod(array.shape) for name, array in arrays.items() if name in encoding.shared)
    each = sum(math.prod(array.shape) for array in arrays.values()) - once
    rate = multipliers_in_rows((encoding_rates(encoding, dims),))
    whole = encoding.tiling != "any"
    fused = not whole and not refusal(encoding, arrays, causal(), in_order=True, segments=False)
    ruled = any(isinstance(inner, FrequencyRule) and inner != Geometric() for inner in walk_values(encoding))
    beyond = "as far as its rule for frequencies reaches" if ruled else encoding.about.beyond
    return {
        "acts on": ", ".join(acting_hooks(encoding)) or "nothing",
        "learned": " + ".join(text for n, text in ((once, f"{once:,}"), (each, f"{each:,} a layer")) if n) or "nothing",
        "rate": "-" if rate is None else f"{rate:g} x" if isinstance(rate, float) else "by array",
        "shift-invariant": "yes" if encoding.shift_invariant else "no",
        "axes": str(encoding.axes or "any number"),
        "both sides": "no" if encoding.causal_only else "yes",
        "defined to": "any position" if encoding.max_position is None else f"position {encoding.max_position:,}",
        "kernels": "whole rows" if whole else "any" if fused else "tiles",
        "beyond L": beyond or "not said",
        "paper": encoding.about.paper,
    }


def _page(spec: str, encoding: Encoding, dims: Dims) -> str:
    """Return the formula of each part of an encoding, its facts, its fields and the arrays that it learns."""
    asked = from_spec(spec)
    lines = [spec_text(asked)]
    for n, (part, given) in enumerate(zip(_parts(encoding), _parts(asked), strict=True)):
        heading = [f"{n}. {spec_text(given)}"] if isinstance(encoding, Chain) else []
        lines += ["", *heading, inspect.getdoc(type(part)) or ""]
        for inner in walk_values(part):
            if not isinstance(inner, Encoding | Geometric):
                lines += ["", f"{encoding_name(inner)}: {inspect.getdoc(type(inner)) or ''}"]
    rates, arrays = dict(encoding_rates(encoding, dims)), {}
    for name, array in abstract_params(encoding, dims).items():
        scope = "once per model" if name in encoding.shared else "in each layer"
        arrays[name] = f"{list(array.shape)} {scope}, {rates[name].lr_multiplier:g} x the model's learning rate"
    sizes = ", ".join(f"{size.name}={getattr(dims, size.name)}" for size in dataclasses.fields(dims))
    sections = {
        "": column_texts(encoding, dims),
        f"fields, for {sizes}": dict(walk_fields(encoding, asked)),
        "arrays": arrays,
    }
    width = max(len(name) for rows in sections.values() for name in rows) + 2
    for title, rows in sections.items():
        lines += ["", *filter(None, [title]), *(f"{name:{width}}{text}" for name, text in rows.items())]
        lines += [] if rows else ["none"]
    return "\n".join(lines)


def _parts(encoding: Encoding) -> tuple[Encoding, ...]:
    return encoding.parts if isinstance(encoding, Chain) else (encoding,)


def walk_fields(encoding: Encoding, asked: Encoding, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, value) of every field, also of the encodings in fields. `asked` is the unresolved value."""
    if isinstance(encoding, Chain):
        for n, (part, given) in enumerate(zip(encoding.parts, _parts(asked), strict=True)):
            yield f"{prefix}{n}", field_text(given)
            yield from walk_fields(part, given, f"{prefix}{n}.")
        return
    cls: Any = type(encoding)
    for field in dataclasses.fields(encoding):
        if not field.init:
            continue
        value, given, path = getattr(encoding, field.name), getattr(asked, field.name), prefix + field.name
        nested = isinstance(value, Value)
        if nested and type(given) is not type(value):  # it was set from the sizes
            given = value
        note = ""
        if given is None:
            note = " (set from the sizes)"
        elif field.default is not dataclasses.MISSING and given != field.default:
            note = f" (default: {'set from the sizes' if field.default is None else field_text(field.default)})"
        if nested:
            yield path, f"{field_text(given)}{note}"
            yield from walk_fields(value, given, f"{path}.")
        else:
            unit = _unit(type_hints(cls).get(field.name))
            yield path, f"{field_text(value)}{unit and f' {unit}'}{note}"


def _unit(hint: Any) -> str:
    """Return the text in Annotated[int, "tokens"], also within a tuple or beside None, or "" if there is none."""
    texts = [text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)]
    return next(filter(None, (*texts, *map(_unit, typing.get_args(hint)))), "")
