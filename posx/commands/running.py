"""A command whose words are understood: its settings, then what `--print_config` shows of them or the command itself.

From here on JAX is imported.
"""

from __future__ import annotations

from typing import Any

from posx.commands import COMMANDS, COMMON, function
from posx.commands.folders import run_folders, work_folder
from posx.config import flags
from posx.config.overrides import printed
from posx.errors import ConfigError
from posx.words import Words


def run(name: str, given: Words) -> None:
    """Runs the command. Raises PosxError for every foreseen failure."""
    command, values = COMMANDS[name], given.values
    config = flags.config_of(given) if command.takes_config else None
    if given.stray:
        meant = flags.meant(given.stray[0], config, {**COMMON, **command.flags})
        raise ConfigError(f"stray word {given.stray[0]!r}; {meant}")
    if values["print_config"]:
        print(printed(config) if config is not None else _stored_config(values))
    else:
        function(name)(values, config)


def _stored_config(values: dict[str, Any]) -> str:
    if not values["workdir"]:
        return "this command has no settings but its flags"
    return printed(flags.asked_before(run_folders(work_folder(values))[0].read_config()))
