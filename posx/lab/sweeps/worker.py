"""The process of one task: `python -m posx.lab.sweeps.worker FOLDER` trains the run of a folder and evaluates it.

It starts from the resolved settings that the sweep has written there, and reads no command line of posx. With the file
of a request after the folder it evaluates the trained run of the folder, and prints the rows as JSON lines.
Checks that depend on settings alone were made by the process that started it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from posx.errors import ConfigError, PartialFailure
from posx.lab import interrupts
from posx.lab.exits import exit_code, prepare_process


def main(argv: Sequence[str]) -> int:
    """Run the task of [FOLDER] or [FOLDER, REQUEST] and return its exit code. --debug shows tracebacks."""
    interrupts.end_with_stdin()
    words = [word for word in argv if word != "--debug"]
    return exit_code(lambda: _run(*map(Path, words)), debug="--debug" in argv)


def _run(folder: Path, request: Path | None = None) -> int:
    prepare_process()
    if request:
        _evaluate(folder, request)
    else:
        _train(folder)
    return 0


def _train(path: Path) -> None:
    """Train and evaluate the run of a folder. Raises PosxError."""
    from posx.lab.runs import environment  # JAX: after the options are set
    from posx.lab.runs.folder import RunFolder
    from posx.machine.devices import use_every_core
    from posx.machine.guard import start_devices

    folder = RunFolder(path)
    use_every_core(environment.devices_of(folder) or 1)
    start_devices()
    run = folder.read_asked()
    if changes := run.code_changes():  # since then: a queue may have held this task for days
        raise ConfigError(f"{changes} since the sweep planned this run. Restore the code, or run the sweep again.")
    from posx.lab.runs.runner import train_and_evaluate

    train_and_evaluate(run, folder)


def _evaluate(path: Path, request: Path) -> None:
    """Evaluate the run of a folder and print its rows. Raises PosxError, after the rows if some lengths failed."""
    from posx.lab.files.atomic import finite  # JAX: after the options are set
    from posx.lab.files.rows import failures
    from posx.lab.runs.folder import RunFolder
    from posx.lab.runs.requests import evaluate_request, read_request
    from posx.machine.devices import use_every_core

    use_every_core()
    rows = evaluate_request(read_request(RunFolder(path), request), workdir=str(path))
    for row in rows:
        print(json.dumps(finite(row)))
    if problems := failures(rows):
        raise PartialFailure(f"{'; '.join(problems)} (docs/guides/troubleshooting.md)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
