"""`posx plot`: figures from stored rows."""

from __future__ import annotations

from typing import Any

from posx import plots
from posx.commands import work_folder
from posx.errors import ConfigError, nearest


def main(values: dict[str, Any], _: None) -> None:
    if values["what"] not in ("all", *plots.WHAT):
        raise ConfigError(
            f"--what={values['what']!r} is unknown; {nearest(values['what'], plots.WHAT)}known: {', '.join(plots.WHAT)}"
        )
    if values["dry_run"]:
        print(f"would draw {values['what']} from {work_folder(values)}")
        return
    for path in plots.plot(work_folder(values), values["what"]):
        print(path)
