"""`posx train`: one run, trained and evaluated."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from posx import interrupts
from posx.commands.command import STOP_WITH_STDIN, Command, work_folder
from posx.config import run_config
from posx.config.flags import repeated_run
from posx.config.stored import like
from posx.data.store import cache_folder
from posx.errors import PosxError, WorkdirError
from posx.files.atomic import write_json
from posx.machine.compile_cache import use_compile_cache
from posx.runs.checks import checked
from posx.runs.describe import describe
from posx.runs.folder import RunFolder
from posx.runs.runner import train_and_evaluate


def train_command(values: dict[str, Any], config: ConfigDict) -> None:
    run = like(run_config(config), repeated_run(values))
    run = checked(RunFolder(work_folder(values)).as_started(run) if values["workdir"] else run)
    if values["dry_run"]:
        print(describe(run))
        return
    if values["stop_with_stdin"]:
        interrupts.end_with_stdin()
    folder = RunFolder(work_folder(values))
    use_compile_cache(cache_folder(run.data))
    try:
        train_and_evaluate(run, folder)
    except PosxError as error:
        if not isinstance(error, WorkdirError) and (folder.path / ".lock").exists():
            write_json(folder.status_file, {"code": error.exit_code, "reason": str(error)})
        raise


COMMAND = Command(
    train_command, "train one run and evaluate it; the same command resumes",
    {"stop_with_stdin": STOP_WITH_STDIN}, takes_config=True,
)  # fmt: skip
