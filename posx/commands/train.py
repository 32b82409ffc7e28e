"""`posx train`: one run, trained and evaluated."""

from __future__ import annotations

import contextlib
from typing import Any

from ml_collections import ConfigDict

from posx import interrupts
from posx.commands import work_folder
from posx.config import run_config
from posx.config.flags import repeated_run
from posx.config.stored import like
from posx.data.store import cache_folder
from posx.errors import PosxError, Stopped, WorkdirError
from posx.files.atomic import write_json
from posx.machine.compile_cache import use_compile_cache
from posx.machine.devices import use_every_core
from posx.runs import environment
from posx.runs.checks import checked
from posx.runs.describe import describe
from posx.runs.folder import RunFolder


def main(values: dict[str, Any], config: ConfigDict) -> None:
    use_every_core(environment.devices_of(RunFolder(work_folder(values, needed=False))) or 1)
    run = like(run_config(config), repeated_run(values))
    run = checked(RunFolder(work_folder(values)).as_started(run) if values["workdir"] else run)
    if values["dry_run"]:
        print(describe(run))
        return
    if values["stop_with_stdin"]:
        interrupts.end_with_stdin()
    folder = RunFolder(work_folder(values))
    from posx.runs.runner import train_and_evaluate  # Flax, Optax, Orbax: once the settings are known to be right

    use_compile_cache(cache_folder(run.data))
    try:
        train_and_evaluate(run, folder)
    except PosxError as error:
        if not isinstance(error, WorkdirError | Stopped) and (folder.path / ".lock").exists():
            with contextlib.suppress(PosxError):  # what went wrong first is what is said
                write_json(folder.status_file, {"code": error.exit_code, "reason": str(error)})
        raise
