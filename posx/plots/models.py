"""The encodings of a folder's runs as they were trained: their values, their arrays and their sizes."""

import dataclasses
import logging
import pathlib
from typing import Any

import jax

from posx.encodings import Dims, Encoding, build, encoding_name
from posx.errors import PosxError, WorkdirError
from posx.model import layer_name, shared_name
from posx.runs.folder import RunFolder, is_run, name_of, run_folders
from posx.runs.load import load_model


@dataclasses.dataclass(frozen=True)
class Subject:
    """An encoding to draw, with the arrays that one layer sees."""

    name: str
    origin: str  # where the arrays are from, in words
    encoding: Encoding
    params: dict[str, Any]
    dims: Dims
    trained: bool = False


def catalogue() -> list[Subject]:
    """Return the encodings of the headline figure, as initialised for a small model."""
    dims = Dims(model_dim=64, num_heads=8, head_dim=8, num_layers=1, train_len=64)
    return [initial(name, build(name, dims), dims) for name in ("nope", "sinusoidal", "rope", "t5", "alibi")]


def encodings_of(folder: pathlib.Path) -> list[Subject]:
    """Return the distinct encodings of the runs below `folder`, as the first run trained each, else as initialised."""
    found: dict[tuple[str, Encoding, Dims], Subject] = {}
    for path in filter(is_run, run_folders(folder, "config.json")) if folder.is_dir() else ():
        name = name_of(path, folder)
        try:
            for subject in of_run(RunFolder(path), name):
                key = (subject.name, subject.encoding, subject.dims)
                if key not in found or subject.trained > found[key].trained:
                    found[key] = subject
        except PosxError as error:
            logging.getLogger(__name__).warning("%s is not drawn: %s", name, error)
    return sorted(found.values(), key=lambda subject: (subject.name, subject.dims.train_len))


def of_run(folder: RunFolder, name: str) -> list[Subject]:
    """Return the distinct encodings of one run's layers, each with the arrays of its first layer."""
    run = folder.read_config()
    several = len(set(run.layers)) > 1
    names = {encoding: encoding_name(encoding) if several else run.encoding for encoding in run.layers}
    try:
        model, params, _, step = load_model(folder)
    except WorkdirError:
        return [initial(title, encoding, run.dims) for encoding, title in names.items()]
    found = []
    for number, encoding in enumerate(model.distinct):
        first = model.encodings.index(encoding)
        own = params["layers"][layer_name(first)]["attention"].get("position", {})
        arrays = params.get("shared", {}).get(shared_name(number), {}) | own
        where = f"trained in {name}, step {step}" + (f", layer {first + 1}" if own else "")
        origin = where if arrays else f"of {name}, nothing learned"
        found.append(Subject(names[encoding], origin, encoding, arrays, model.dims, trained=True))
    return found


def initial(name: str, encoding: Encoding, dims: Dims) -> Subject:
    arrays = encoding.init(jax.random.key(0), dims)
    return Subject(name, "as initialised" if arrays else "nothing learned", encoding, arrays, dims)
