"""`posx export`: a trained run as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posx.commands import work_folder
from posx.errors import ConfigError
from posx.runs.export import SUFFIX
from posx.runs.folder import run_in


def main(values: dict[str, Any], _: None) -> None:
    """Write a trained run to one file. Raises ConfigError for a wrong name, WorkdirError if there is no such run."""
    if not values["to"]:
        raise ConfigError("--to is missing: name the file, for example --to model.safetensors")
    target = Path(values["to"]).expanduser()
    if target.suffix != SUFFIX:
        raise ConfigError(f"--to={values['to']}: the file's name must end with {SUFFIX}")
    folder = run_in(work_folder(values))
    if values["dry_run"]:
        print(f"would write {folder.path.name} to {target}")
        return
    from posx.runs.export import export  # Flax and Orbax: once the words are known to be right

    step = export(folder, target)
    print(f"{target}  {folder.path.name} at step {step}, {target.stat().st_size:,} bytes")
