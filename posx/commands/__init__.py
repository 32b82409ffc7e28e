"""The commands of `posx`, one file each with its flags and its help: adding one is a file and a line here."""

from posx.commands import check, doctor, encodings, evaluate, generate, plot, sweep, train
from posx.commands.command import Command

#: The registry, in the order that the help lists them.
COMMANDS: dict[str, Command] = {
    "train": train.COMMAND,
    "sweep": sweep.COMMAND,
    "evaluate": evaluate.COMMAND,
    "plot": plot.COMMAND,
    "generate": generate.COMMAND,
    "encodings": encodings.COMMAND,
    "doctor": doctor.COMMAND,
    "check": check.COMMAND,
}
