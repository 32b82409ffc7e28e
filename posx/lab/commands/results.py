"""`posx plot`, `table`, `export`, `import` and `generate`: figures, tables, files and text of trained runs."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from posx.contract import Dims, Encoding, abstract_params
from posx.encodings import build, spec_text
from posx.errors import ConfigError, WorkdirError, nearest
from posx.lab.commands import COMMANDS, COMMON, FIGURES, SNIPPETS, work_folder
from posx.lab.commands.encodings import check_no_sizes, model_dims
from posx.lab.data import Tokenizer
from posx.lab.data.store import cache_folder
from posx.lab.files.atomic import disk_errors, write_bytes
from posx.lab.generate import Sampling, generate
from posx.lab.machine.compile_cache import use_compile_cache
from posx.lab.runs.exported import SUFFIX, export, unpack
from posx.lab.runs.finding import find_run, run_folders
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.load import load_model
from posx.machine.guard import start_devices

#: The sign in a decoded text for bytes that are no character, or not yet.
BROKEN = "\ufffd"


def run_plot(values: dict[str, Any], _: None) -> None:
    """Draw figures and print their paths. Raises ConfigError, WorkdirError."""
    if values["what"] not in FIGURES:
        raise ConfigError(
            f"--what={values['what']!r} is unknown. {nearest(values['what'], FIGURES)}The figures are: "
            f"{', '.join(FIGURES)}."
        )
    folder = work_folder(values)
    if values["dry_run"]:
        run_folders(folder, "config.json")
        print(f"would draw {values['what']} from {folder}")
        return
    if values["what"] == "encodings":  # other figures are drawn from files
        start_devices()
    from posx.lab import plots  # Matplotlib: once the settings are known to be right

    for path in plots.plot(folder, values["what"]):
        print(path)


def run_table(values: dict[str, Any], _: None) -> None:
    """Print the table of stored rows. Raises ConfigError, WorkdirError."""
    folder = work_folder(values)
    if values["dry_run"]:
        run_folders(folder, "config.json")
        print(f"would print the table of {folder} as {values['format']}")
        return
    from posx.lab import plots  # Matplotlib: once the settings are known to be right

    print(plots.format_table(folder, values["format"]), end="")


def run_export(values: dict[str, Any], _: None) -> None:
    """Write a trained run to one file, or print an encoding as code.

    Raises:
      ConfigError: for a wrong name or flag, or an encoding that cannot be written.
      WorkdirError: there is no such run, or the target holds something.
    """
    if values["as"]:
        _export_snippet(values)
        return
    flags = COMMANDS["export"].flags
    usual = {flag: None if isinstance(flags[flag][0], type) else flags[flag][0] for flag in flags}
    if extra := [flag for flag in flags if flag not in (*COMMON, "to") and values[flag] != usual[flag]]:
        raise ConfigError(f"--{extra[0]} goes with --as alone. Add --as=FORM, one of {', '.join(SNIPPETS)}.")
    if not values["to"]:
        raise ConfigError(
            "--to is missing. Name a file, as --to model.safetensors, or a folder for transformers. For the code of an "
            "encoding, give --as."
        )
    target = Path(values["to"]).expanduser()
    if target.suffix not in (SUFFIX, ""):
        raise ConfigError(f"--to={values['to']}: the file's name must end with {SUFFIX}. A folder's has no end.")
    folder = find_run(work_folder(values))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WorkdirError(f"--to={target} exists and is not overwritten. Remove it, or name a new file or folder.")
    if values["dry_run"]:
        print(f"would write {folder.path.name} to {target}")
        return
    if not target.suffix:
        from posx.lab.runs.exchange import export_model

        print(f"{target}  {folder.path.name} at step {export_model(folder, target)}, as transformers reads it")
        return
    _model, params, _tokenizer, step = load_model(folder)
    export(folder, params, step, target)
    print(f"{target}  {folder.path.name} at step {step}, {target.stat().st_size:,} bytes")


def _export_snippet(values: dict[str, Any]) -> None:
    """Print an encoding in one of the forms SNIPPETS, or write it to a file. Raises ConfigError, WorkdirError."""
    form, spec, length = values["as"], values["encoding"], values["length"]
    if form not in SNIPPETS:
        raise ConfigError(f"--as={form!r} is unknown. {nearest(form, SNIPPETS)}The forms are: {', '.join(SNIPPETS)}.")
    if values["to"]:
        raise ConfigError(f"--to={values['to']} is for a run. For the code of an encoding, give --out={values['to']}.")
    folder = find_run(unpack(work_folder(values))) if values["workdir"] else None
    if not (spec or folder):
        raise ConfigError("--encoding is missing. Give a spec, such as --encoding=rope, or a run by --workdir.")
    if values["layer"] is not None and not folder:
        raise ConfigError(f"--layer={values['layer']}: there is no run with layers. Name it by --workdir.")
    start_devices()
    from posx.lab.runs import snippets

    if folder:
        check_no_sizes(values, folder)
        encoding, params, dims, arrays = _read_layer(folder, spec, values["layer"])
    else:
        dims = model_dims(values)
        encoding = build(spec, dims)
        params = encoding.init(jax.random.key(0), dims)
        arrays = "as drawn for the start of training, from seed 0. For trained ones, export with --workdir."
    if form == "latex":
        text = snippets.latex_text(encoding)
    else:
        text = snippets.write_snippet(encoding, params, dims, form=form, length=length, arrays=arrays)
    if not values["out"]:
        print(f"would print {spec_text(encoding)} as {form}\n" if values["dry_run"] else text, end="")
        return
    out = Path(values["out"]).expanduser()
    if values["dry_run"]:
        print(f"would write {spec_text(encoding)} as {form} to {out}")
        return
    with disk_errors(out):
        write_bytes(out, text.encode())
    print(f"{out}  {spec_text(encoding)} as {form}, {out.stat().st_size:,} bytes")


def _read_layer(folder: RunFolder, spec: str, layer: int | None) -> tuple[Encoding, dict[str, Any], Dims, str]:
    """Return the encoding of a run's layer, its arrays there, the sizes of the run, and a text on their origin.

    Args:
      folder: of the run.
      spec: the encoding as it was given, "" if the layer alone decides.
      layer: its number from 1, None if all layers with the encoding are equal.

    Raises:
      ConfigError: no layer fits, or several that differ.
    """
    run, wanted = folder.read_config(), spec_text(spec) if spec else ""
    texts = run.layer_texts
    fitting = [n for n, text in enumerate(texts) if wanted in ("", text) and layer in (None, n + 1)]
    numbers = ", ".join(str(n + 1) for n in fitting)
    if not fitting:
        what = ("layer" if layer is None else f"layer {layer}") + f" with {wanted}" * bool(wanted)
        layers = ", ".join(f"{n}: {text}" for n, text in enumerate(texts, 1))
        raise ConfigError(f"{folder.path} has no {what}. Its layers are {layers}.")
    encoding, dims = run.layers[fitting[0]], run.dims
    params, where = [dict[str, Any]()] * len(fitting), ""
    if any(abstract_params(run.layers[n], dims) for n in fitting):
        model, trained, _, step = load_model(folder)
        params = [model.layer_arrays(trained, n) for n in fitting]
        where = f"of {folder.path.name} at step {step}, "
    same = all(run.layers[n] == encoding and _are_equal(own, params[0]) for n, own in zip(fitting, params, strict=True))
    if not same:
        raise ConfigError(f"{folder.path}: layers {numbers} differ in encoding or learned arrays. Name one by --layer.")
    return encoding, params[0], dims, f"{where}layer {numbers} of {len(texts)}."


def _are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def run_import(values: dict[str, Any], _: None) -> None:
    """Make a run out of a model. Raises ConfigError if it does not fit, WorkdirError for a damaged file."""
    for flag in ("from", "to"):
        if not values[flag]:
            raise ConfigError(f"--{flag} is missing. Give the model and the run: --from FOLDER --to runs/NAME")
    start_devices()
    from posx.lab.runs.exchange import import_model, read_run  # Flax, Orbax: once the flags are known to be right
    from posx.lab.runs.foreign import read_model

    path, target = Path(values["from"]).expanduser().resolve(), Path(values["to"]).expanduser().resolve()
    source, folder = read_model(path), RunFolder(target)
    if values["dry_run"]:
        run = read_run(source, path.name, folder)
        print(f"would make {target} of {path.name}: {run.model}, {run.encoding}")
        return
    run = import_model(source, path.name, folder)
    print(
        f"{target}  {path.name}: {run.encoding}, {run.model.num_layers} layers of {run.model.model_dim}, "
        f"{run.train.length:,} positions\n"
        f"next: posx evaluate --workdir {shlex.quote(values['to'])} --config.data.validation=TEXT"
    )


def run_generate(values: dict[str, Any], _: None) -> None:
    """Print the prompt and its continuation. Raises ConfigError for wrong flags."""
    sampling = Sampling(values["temperature"], values["top_k"])
    folder = find_run(unpack(work_folder(values)))
    run = folder.read_config()
    run.model.require_causal("posx generate")
    if values["num_tokens"] < 1:
        raise ConfigError(f"--num_tokens={values['num_tokens']} must be at least 1.")
    if not 0 <= values["seed"] < 2**32:
        raise ConfigError(f"--seed={values['seed']} must be at least 0 and below 2**32.")
    if values["dry_run"]:
        print(f"would sample {values['num_tokens']} tokens from {folder.path} with {sampling}")
        return
    use_compile_cache(cache_folder(run.data))
    model, params, tokenizer, _step = load_model(folder)
    prompt, added = with_begin(tokenizer, tokenizer.encode(values["prompt"]), run.data.is_task)
    sampling = dataclasses.replace(sampling, vocab_size=tokenizer.vocab_size)
    steps = generate(
        model, params, [prompt], values["num_tokens"], sampling=sampling, seed=values["seed"],
        positions=run.train.token_positions,
    )  # fmt: skip
    try:
        first = next(steps)
    except ConfigError as error:
        counted = " The token before the prompt counts as one of its tokens." if added else ""
        raise ConfigError(f"{error}{counted}") from None
    print(values["prompt"], end="", flush=True)
    new = (int(step[0]) for step in itertools.chain([first], steps))
    for piece in text_pieces(tokenizer, prompt, itertools.takewhile(lambda one: one not in tokenizer.ends, new)):
        print(piece, end="", flush=True)
    print()


def with_begin(tokenizer: Tokenizer, ids: np.ndarray, is_task: bool) -> tuple[np.ndarray, bool]:
    """Return a prompt's ids with the begin token before them, and whether it was added.

    The words of a task's row name that token, so a prompt may begin with it. In a text its spelling stays text.
    """
    if is_task and ids[:1].tolist() == [tokenizer.begin]:
        return ids, False
    return np.concatenate([[tokenizer.begin], ids]), True


def text_pieces(tokenizer: Tokenizer, prompt: Iterable[int], new: Iterable[int]) -> Iterator[str]:
    """Yield the text that `new` ids add to the text of `prompt`, in pieces that later ids do not change.

    The ids are decoded together: a decoder may join, strip or replace at the border of two tokens.
    """
    ids = [int(one) for one in prompt]
    shown = text = tokenizer.decode(ids)
    broken = next(([n] for n in range(tokenizer.vocab_size) if tokenizer.decode([n]) == BROKEN), [])
    for one in new:
        ids.append(one)
        text = tokenizer.decode(ids)
        # With byte fallback one byte too many breaks all characters of the bytes before it.
        if not text.endswith(BROKEN) and tokenizer.decode(ids + broken).startswith(text):
            yield text[len(shown) :]
            shown = text
    yield text[len(shown) :]
