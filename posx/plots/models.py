"""The encodings of a folder's runs as they were trained: their values, their arrays and their sizes."""

import dataclasses
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from posx.config import RunConfig
from posx.encodings import Dims, Encoding, build, encoding_name
from posx.errors import PosxError, WorkdirError
from posx.model import layer_name, shared_name
from posx.plots.rows import Row, run_of_config
from posx.runs.folder import RunFolder, is_run, name_of, run_folders
from posx.runs.load import load_model

#: Drawn where there are no runs.
CATALOGUE = ("nope", "sinusoidal", "rope", "t5", "alibi")


@dataclasses.dataclass(frozen=True)
class Subject:
    """An encoding to draw, with the arrays that one layer sees."""

    name: str
    origin: str  # where the arrays are from, in words
    encoding: Encoding
    params: dict[str, Any]
    dims: Dims
    trained: bool = False


def catalogue(train_len: int) -> list[Subject]:
    """The encodings of the headline figure, as initialised for a small model."""
    dims = Dims(model_dim=64, num_heads=8, head_dim=8, num_layers=1, train_len=train_len)
    return [initial(name, build(name, dims), dims) for name in CATALOGUE]


def encodings_of(folder: pathlib.Path, stored: Sequence[Row]) -> list[Subject]:
    """The distinct encodings of the runs below `folder`, each of the first run that trained it, else as initialised."""
    if not folder.is_dir():
        return []
    texts = {row.run.path: row.run.text for row in stored}
    found: dict[tuple[str, Encoding, Dims], Subject] = {}
    for path in filter(is_run, run_folders(folder, "config.json")):
        name = name_of(path, folder)
        text = texts.get(name) or run_of_config(path, name).text
        try:
            run = RunFolder(path).read_config()
            for subject in of_run(RunFolder(path), run, name, text):
                key = (subject.name, subject.encoding, subject.dims)
                if key not in found or subject.trained > found[key].trained:
                    found[key] = subject
        except PosxError as error:
            logging.getLogger(__name__).warning("%s is not drawn: %s", name, error)
    return sorted(found.values(), key=lambda subject: (subject.name, subject.dims.train_len))


def of_run(folder: RunFolder, run: RunConfig, name: str, text: str) -> list[Subject]:
    """The distinct encodings of one run's layers, each as the first layer that has it sees it."""
    layers = run.layers
    several = len(set(layers)) > 1
    names = {encoding: encoding_name(encoding) if several else text for encoding in layers}
    try:
        model, params, _, step = load_model(folder)
    except WorkdirError:
        dims = run.dims
        return [initial(names[encoding], encoding, dims) for encoding in dict.fromkeys(layers)]
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
