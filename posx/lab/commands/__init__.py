"""The commands of `posx`: the words that each takes, and its help.

A command is an entry here and a function `run_NAME(values, config)` in the file beside that FILES names. The file is
imported when the command runs, so that help and wrong words cost no start of JAX. The values of flags that the library
names too (protocols, figures, sizes) are repeated here; a test compares them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posx.errors import ConfigError, WorkdirError
from posx.lab.argv import Command, Flags
from posx.lab.files.locks import holder
from posx.lazy import module_getter

__getattr__ = module_getter(__name__)

#: The flags of every command.
COMMON: Flags = {
    "workdir": ("", "the work folder of a run or a sweep"),
    "print_config": (False, "print the settings this command would use, and stop"),
    "dry_run": (False, "print what the command would do, and stop"),
    "debug": (False, "show the traceback of an error"),
}


def work_folder(values: Mapping[str, Any], needed: bool = True) -> Path:
    """Return the folder that `--workdir` names, absolute. Raises ConfigError if it is needed and missing."""
    if not values["workdir"]:
        if needed:
            raise ConfigError("--workdir is missing. Name the folder of the run, for example --workdir runs/quick")
        return Path("runs")
    try:
        return Path(values["workdir"]).expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"--workdir={values['workdir'][:80]} is no path: {error}"[:200]) from None


def work_folders(values: Mapping[str, Any]) -> list[Path]:
    """Return the folders that the words after a command and `--workdir` name. Raises ConfigError if there is none."""
    folders = [work_folder({"workdir": name}) for name in values["operand"]]
    return folders + ([work_folder(values)] if values["workdir"] or not folders else [])


#: The figures of `posx plot`.
FIGURES = (
    "all", "extrapolation", "ratio", "per_position", "answers", "distance_map", "triangle", "training", "encodings"
)  # fmt: skip

#: The formats of `posx table`.
FORMS = ("markdown", "csv", "json", "latex")

#: The forms of `posx export --as`.
SNIPPETS = ("torch-flex", "torch", "numpy", "latex")

#: The flags of the sizes that an encoding is built for.
SIZES: Flags = {
    "model_dim": (64, "channels of the model that encodings are built for"),
    "num_heads": (4, "query heads"),
    "num_kv_heads": (0, "key and value heads; 0: as many"),
    "num_layers": (2, "layers"),
    "train_len": (64, "training length in tokens"),
}

#: The flags of `posx evaluate` that choose lengths, protocols and targets.
MEASURING: Flags = {
    "lengths": ("", "window lengths in tokens, for example 64,128"),
    "protocol": (
        "",
        "nonoverlapping, sliding, per_position, lm_eval_rolling, hf_strided, begin_every_window (each window after the "
        "begin token), answers (of a task), pseudo_perplexity (of masked tokens), or several with commas",
    ),
    "stride": (int, "stride of overlapping windows in tokens; 0: L/4 for sliding, half of a window for hf_strided"),
    "num_targets": (int, "targets to score; 0: all; left out: as in the run's config"),
    "executor": ("", "auto, dense, blockwise, kernel or fused"),
}
#: A flag of commands that run several processes.
_JOBS = (0, "runs at a time; 0: the number, and the cores of each, that are fastest on this machine")

#: Flags of commands that several processes may carry out together.
_TOGETHER: Flags = {
    "mesh": ("", "DATAxMODEL devices, as 4x2, over which weights and moments are sharded"),
    "coordinator": ("", "HOST:PORT of the first of several processes, or auto; srun and mpirun need none"),
    "processes": (int, "number of processes; 1: this process runs alone, whatever started it"),
    "process": (int, "number of this process, from 0"),
}

_OWN: dict[str, Command] = {
    "train": Command(
        "train one run and evaluate it; the same command resumes",
        ("Stopping and resuming", "docs/guides/resuming.md"),
        {
            "from": ("", "a run to start from: its weights where they fit, at step 0 of a new schedule"),
            **_TOGETHER,
        },
        takes_config=True,
    ),
    "sweep": Command(
        "all runs of a config, evaluated and plotted; the same command resumes",
        ("Sweeps", "docs/guides/sweeps.md"),
        {
            "jobs": _JOBS,
            "on": ("", "where runs are trained: ray, ray:ADDRESS or slurm; on this machine if left out"),
            "cpus": (1, "CPUs of a run, on Ray and SLURM"),
            "gpus": (0.0, "GPUs of a run, on Ray and SLURM"),
            "slurm.": ({}, "X=V: a setting of SLURM, as --slurm.partition=NAME, --slurm.time=MINUTES"),
            "copy_to": ("", "a folder or fsspec URL that finished runs are copied to"),
            "status": (False, "print the state of every run, and stop"),
        },
        takes_config=True,
    ),
    "evaluate": Command(
        "measure a trained run, or all runs of a sweep, at any lengths",
        ("Protocols and intervals", "docs/guides/protocols.md"),
        {
            **MEASURING,
            "encoding": (
                "",
                "fields to change in the trained encoding, 'frequencies=yarn(factor=4)', or others in its place",
            ),
            "masks": (
                "",
                "masks in place of the trained ones, as model.mask_policy: 'window(size=64, sinks=4)'; window: of L",
            ),
            "layers": ("", "layers that --encoding and --masks change: all, full (those without a window) or window"),
            **_TOGETHER,
            "jobs": _JOBS,
            "json": (False, "print the rows as JSON lines; draw nothing"),
        },
        sections=("data", "eval"),
    ),
    "plot": Command(
        "figures from stored rows", ("Sweeps", "docs/guides/sweeps.md"), {"what": ("all", ", ".join(FIGURES))}
    ),
    "table": Command(
        "the table of stored rows, for a paper or another program",
        ("Sweeps", "docs/guides/sweeps.md"),
        {"format": ("markdown", ", ".join(FORMS))},
    ),
    "autopsy": Command(
        "why a trained run fails beyond its training length",
        ("Why does it fail?", "docs/guides/autopsy.md"),
        {
            **{name: MEASURING[name] for name in ("lengths", "num_targets", "executor")},
            "json": (False, "print all numbers as one JSON object"),
        },
        operand="RUN",
        sections=("data", "eval"),
    ),
    "compare": Command(
        "which of several checkpoints is better, and which method, on the same targets",
        ("Protocols and intervals", "docs/guides/protocols.md"),
        {
            "lengths": ("", "window lengths in tokens to compare, for example 64,128; all if left out"),
            "protocol": ("", "protocols to compare, several with commas; all if left out"),
            "json": (False, "print the verdicts as JSON lines"),
        },
        operand="RUN ...",
    ),
    "report": Command(
        "one HTML page out of stored rows, with switches, tables and verdicts",
        ("Sweeps", "docs/guides/sweeps.md"),
        {"out": ("report.html", "the file to write")},
        operand="RUN_OR_SWEEP ...",
    ),
    "verify": Command(
        "whether the files of runs are whole: rows, settings, checkpoints, exports",
        ("Stopping and resuming", "docs/guides/resuming.md"),
        {"json": (False, "print the damage as JSON lines")},
        operand="RUN_OR_SWEEP ...",
    ),
    "export": Command(
        "a trained run as one file, or as a folder of Hugging Face's; an encoding as code for another library",
        ("Stretch a trained model", "docs/guides/models.md"),
        {
            "to": ("", "a file that ends with .safetensors, or a folder in Hugging Face's format"),
            "as": ("", f"print an encoding instead: {', '.join(SNIPPETS)}"),
            "encoding": ("", "with --as: its spec; left out: that of the run in --workdir"),
            "out": ("", "with --as: the file to write instead of printing"),
            "length": (2048, "with --as: the longest text in tokens that the code serves"),
            "layer": (int, "with --as and --workdir: the layer whose encoding and learned arrays are written, from 1"),
            **SIZES,
        },
    ),
    "import": Command(
        "a model of Hugging Face's format as a run",
        ("Stretch a trained model", "docs/guides/models.md"),
        {
            "from": ("", "a folder with config.json, safetensors and tokenizer.json, or a .gguf file"),
            "to": ("", "the new run's folder"),
        },
    ),
    "generate": Command(
        "continue a prompt with a trained run",
        ("Your own text and tokenizer", "docs/tutorials/own_text.md"),
        {
            "prompt": ("", "text to continue"),
            "num_tokens": (200, "tokens to generate"),
            "temperature": (0.8, "0 takes the most likely token"),
            "top_k": (0, "sample from the k most likely tokens; 0 from all"),
            "seed": (0, "seed of the sampling"),
        },
    ),
    "encodings": Command(
        "the catalogue; with a name, all about one, and its picture",
        ("Which encoding should I use?", "docs/guides/choose.md"),
        {
            **SIZES,
            "html": ("", "a file for the catalogue as a page, with a curve and sliders for each"),
        },
        operand="NAME",
    ),
    "doctor": Command(
        "versions and devices of this machine, and a self-test",
        ("Troubleshooting, by message", "docs/guides/troubleshooting.md"),
    ),
    "check": Command(
        "check whether an encoding keeps the contract",
        ("Your own encoding", "docs/tutorials/own_encoding.md"),
        {
            "only": ("", "checks to run, with commas between them; all if left out"),
            "params": ("large", "random parameters: large, or init for those of init moved by a tenth"),
            "model_dim": (12, "channels of the model that the encoding is built for"),
            "num_heads": (4, "query heads"),
            "num_kv_heads": (2, "key and value heads"),
            "head_dim": (6, "channels of a head"),
            "train_len": (32, "training length in tokens; at least 30 for tables of positions"),
        },
        operand="NAME",
    ),
}

#: The commands by name, in the order of the help, each with the flags of all.
COMMANDS = {name: command._replace(flags={**COMMON, **command.flags}) for name, command in _OWN.items()}

#: The files of commands that share one; that of another command has its name.
FILES = {
    **dict.fromkeys(("plot", "table", "export", "import", "generate"), "results"),
    **dict.fromkeys(("compare", "report"), "compare"),
    **dict.fromkeys(("check", "doctor"), "checks"),
}


def command_function(name: str) -> Callable[..., Callable[[], object] | None]:
    """Return the function of a command, whose result, if there is one, is called when all its work is done."""
    return getattr(importlib.import_module(f"posx.lab.commands.{FILES.get(name, name)}"), f"run_{name}")


def run(name: str, values: dict[str, Any], config: Any) -> None:
    """Run a command, with other processes if its flags or a launcher say so. Raises PosxError."""
    main = command_function(name)
    if "coordinator" not in values or values["dry_run"]:
        if rest := main(values, config):
            rest()
        return
    from posx.lab.machine import processes

    folder = work_folder(values, needed=False)
    if processes.are_asked(values) and (who := holder(folder / ".lock")):  # they would mix with the holder's processes
        raise WorkdirError(f"work folder {folder} is in use by {who}. Wait until it ends, or choose another --workdir.")
    processes.carry_out(lambda given: main(given, config), values)
