"""The evaluation of a stored run, as a value that a command makes and any process carries out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from posx.lab.config import RunConfig
from posx.lab.data.store import cache_folder
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
    dataset = text.run_text(folder, run, request.text)
    check_stream(config, run.train.length, dataset)
    layout = asked_layout(mesh, 0, run.model.kv_heads)
    facts = {
        "settings": repr((run, config)), "text": dataset.digest, "--mesh": str(layout), "--workdir": workdir,
    }  # fmt: skip
    with folder.hold(facts):
        model, params, _, step = load_model(folder, layout)
        return evaluate_run(run, config, model, layout.put(params), dataset, folder, step, layout)
