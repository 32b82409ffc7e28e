"""`posx plot`: figures from stored rows."""

from __future__ import annotations

from typing import Any

from posx.commands import FIGURES, work_folder
from posx.errors import ConfigError, nearest
from posx.machine.guard import start_devices
from posx.runs.folder import run_folders


def main(values: dict[str, Any], _: None) -> None:
    """Draw figures and print their paths. Raises ConfigError, WorkdirError."""
    if values["what"] not in FIGURES:
        raise ConfigError(
            f"--what={values['what']!r} is unknown; {nearest(values['what'], FIGURES)}known: {', '.join(FIGURES)}"
        )
    folder = work_folder(values)
    if values["dry_run"]:
        run_folders(folder, "config.json")
        print(f"would draw {values['what']} from {folder}")
        return
    if values["what"] == "encodings":  # other figures are drawn from files
        start_devices()
    from posx import plots  # Matplotlib: once the settings are known to be right

    for path in plots.plot(folder, values["what"]):
        print(path)
