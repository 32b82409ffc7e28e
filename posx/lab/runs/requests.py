"""The evaluation of a stored run: as a value, as a file for another process, and carried out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from posx.fields import typed_fields
from posx.lab.config import DataConfig, EvalConfig, RunConfig
from posx.lab.data.store import cache_folder
from posx.lab.files import checksums
from posx.lab.files.atomic import write_json
from posx.lab.runs import text
from posx.lab.runs.checks import check_stream
from posx.lab.runs.folder import RunFolder
from posx.machine.guard import start_devices


class Request(NamedTuple):
    """A stored run with the settings of its evaluation.

    Attributes:
      folder: of the run.
      run: its stored settings.
      asked: its settings with the requested ones.
      text: the settings of its text that the request replaces.
      parent: the run whose weights it has under another encoding, if any.
    """

    folder: RunFolder
    run: RunConfig
    asked: RunConfig
    text: Mapping[str, Any]
    parent: RunFolder | None = None


def request_of(
    folder: RunFolder, run: RunConfig, config: EvalConfig, data: Mapping[str, Any], parent: RunFolder | None = None
) -> Request:
    """Return the request to evaluate a stored run with `config`, and with the fields `data` of its text replaced."""
    asked = dataclasses.replace(run, eval=config, data=dataclasses.replace(run.data, **data))
    return Request(folder, run, asked, data, parent)


def write_request(file: Path, config: EvalConfig, data: Mapping[str, Any]) -> None:
    """Write the settings of an evaluation for the process that carries it out. The run's own are in its folder."""
    write_json(file, checksums.with_checksum({"eval": vars(config), "data": dict(data)}))


def read_request(folder: RunFolder, file: Path) -> Request:
    """Return the request of `file` for the run in `folder`. Raises WorkdirError if one of the two cannot be read."""
    values = checksums.read_checked(file)
    config = EvalConfig(**typed_fields(EvalConfig, values["eval"], str(file), "eval."))
    data = typed_fields(DataConfig, values["data"], str(file), "data.")
    return request_of(folder, folder.read_config(), config, data)


def evaluate_request(request: Request, mesh: str = "", workdir: str = "") -> list[dict[str, Any]]:
    """Return the rows of one run, evaluated by this process or by all processes of the command together.

    The text is read and checked here, since it may have changed since the run was trained.

    Args:
      request: of the run.
      mesh: "DATAxMODEL" devices, "" for all as data.
      workdir: the folder as the command names it, which all processes must share.
    """
    from posx.lab.machine.compile_cache import use_compile_cache
    from posx.lab.runs.evaluate import evaluate_run  # Flax and Orbax: once the settings are known to be right
    from posx.lab.runs.load import load_model
    from posx.lab.training.layout import asked_layout

    folder, run, config = request.folder, request.run, request.asked.eval
    use_compile_cache(cache_folder(request.asked.data))
    start_devices()  # before the text is read
    dataset = text.text_of(folder, run, request.text)
    check_stream(config, run.train.length, dataset)
    layout = asked_layout(mesh, 0, run.model.kv_heads)
    facts = {
        "settings": repr((run, config)), "text": dataset.digest, "--mesh": str(layout), "--workdir": workdir,
    }  # fmt: skip
    with folder.held(facts):
        model, params, _, step = load_model(folder, layout)
        return evaluate_run(run, config, model, layout.put(params), dataset, folder, step, layout)
