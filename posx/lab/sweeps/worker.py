"""The process of one task: `python -m posx.lab.sweeps.worker FOLDER` trains the run of a folder and evaluates it.

It starts from the resolved settings that the sweep has written there, and reads no command line of posx. With the file
of a request after the folder it evaluates the run of the folder, and prints the rows as JSON lines. The process that
started it has made the checks that depend on settings alone.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posx.errors import ConfigError, PartialFailure
from posx.lab import interrupts
from posx.lab.exits import exit_code, prepare_process
from posx.lab.files.lines import json_line
from posx.machine.guard import start_devices

if TYPE_CHECKING:
    from posx.lab.runs.folder import RunFolder


def run_worker(argv: Sequence[str]) -> int:
    """Run the task of [FOLDER] or [FOLDER, REQUEST] and return its exit code. --debug shows tracebacks."""
    interrupts.end_with_stdin()
    words = [word for word in argv if word != "--debug"]
    return exit_code(lambda: _run(*map(Path, words)), debug="--debug" in argv)


def _run(folder: Path, request: Path | None = None) -> int:
    prepare_process()
    from posx.lab.runs import environment  # JAX, after its options are set
    from posx.lab.runs.folder import RunFolder
    from posx.machine.devices import use_every_core

    use_every_core(1 if request else environment.started_devices(RunFolder(folder)) or 1)
    if request:
        _evaluate(request)
    else:
        _train(RunFolder(folder))
    return 0


def _train(folder: RunFolder) -> None:
    """Train and evaluate the run of a folder. Raises PosxError."""
    run = folder.read_config(folder.asked_file)
    if changes := run.code_changes():  # since then: a queue may have held this task for days
        raise ConfigError(f"{changes} since the sweep planned this run. Restore the code, or run the sweep again.")
    start_devices()
    from posx.lab.runs.runner import train_and_evaluate

    train_and_evaluate(run, folder)


def _evaluate(file: Path) -> None:
    """Evaluate as a request asks and print the rows. Raises PosxError, after the rows if some lengths failed."""
    from posx.lab.files.rows import failures
    from posx.lab.runs.requests import evaluate_request

    rows = evaluate_request(pickle.loads(file.read_bytes()))
    for row in rows:
        print(json_line(row))
    if problems := failures(rows):
        raise PartialFailure(f"{'; '.join(problems)} (docs/guides/troubleshooting.md)")


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1:]))
