"""The `posx` command: train, sweep, evaluate, plot, generate, encodings, check."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from posx import encodings, flags, interrupts, plots, sweep
from posx.compile_cache import use_compile_cache
from posx.config import EvalConfig, RunConfig, checked
from posx.data import prepare
from posx.data.store import cache_folder
from posx.doctor import doctor_command
from posx.errors import ConfigError, OutOfMemoryError, PartialFailure, PosxError, WorkdirError, nearest
from posx.evaluation.run import check_stream, evaluate_run
from posx.generate import Sampling, generate
from posx.plots.tables import table
from posx.progress import say
from posx.runner import check_writable, describe, listed, train_and_evaluate
from posx.runs import RunFolder, load_model, write_json
from posx.stored import like, to_stored
from posx.testing.command import FLAGS as CHECK_FLAGS
from posx.testing.command import check_command


class Command(NamedTuple):
    run: Any
    flags: Mapping[str, tuple[Any, str]]
    takes_config: bool
    text: str
    operand: str = ""  # what the word after the command's name is


def train_command(values: dict[str, Any], config: ConfigDict) -> None:
    run = like(RunConfig.from_json(config.to_dict()), _earlier(values))
    run = checked(RunFolder(_workdir(values)).as_started(run) if values["workdir"] else run)
    if values["dry_run"]:
        print(describe(run))
        return
    if values["stop_with_stdin"]:
        threading.Thread(target=_stop_with_stdin, daemon=True).start()
    folder = RunFolder(_workdir(values))
    use_compile_cache(cache_folder(run.data))
    try:
        train_and_evaluate(run, folder)
    except PosxError as error:
        if not isinstance(error, WorkdirError) and (folder.path / ".lock").exists():
            write_json(folder.path / "status.json", {"code": error.exit_code, "reason": str(error)})
        raise


def sweep_command(values: dict[str, Any], config: ConfigDict) -> None:
    workdir = _workdir(values, needed=not values["dry_run"])
    jobs = sweep.plan(config, workdir, _earlier(values))
    if values["jobs"] < 1:
        raise ConfigError(f"--jobs={values['jobs']} must be at least 1")
    if values["dry_run"]:
        for job in jobs:
            print(f"{job.name}: {describe(job.run)}")
        print(f"{len(jobs)} runs, {sum(job.finished() for job in jobs)} of them finished")
        return
    check_writable(workdir)
    todo = sweep.unfinished(jobs)
    with RunFolder(workdir).held():
        failed = sweep.run_all(jobs, todo, values["jobs"])
        try:
            made = plots.plot(workdir)
        except WorkdirError as error:
            say(f"no figures: {error}")
        else:
            text = table(plots.read_rows(workdir))
            (workdir / "table.md").write_text(text + "\n")
            print(text)
            for path in made:
                if path.suffix == ".png":
                    print(path)
    if failed:
        raise PartialFailure(
            f"{len(failed)} of {len(jobs)} runs failed ({'; '.join(f'{k}: {v}' for k, v in failed.items())}); "
            "the same command tries them again"
        )


def evaluate_command(values: dict[str, Any], _: None) -> None:
    folders = _run_folders(_workdir(values))
    rows, failed = [], []
    for folder in folders:
        try:
            rows += _evaluate_folder(values, folder)
        except PosxError as error:
            if len(folders) == 1 or isinstance(error, ConfigError):
                raise
            failed.append(f"{folder.path.name}: {error}")
            say(failed[-1])
    if rows:
        print(table(rows))
    failed += [listed([row]) for row in rows if row["status"] in ("oom", "nonfinite")]
    if failed:
        raise PartialFailure("; ".join(failed))


def _evaluate_folder(values: dict[str, Any], folder: RunFolder) -> list[dict[str, Any]]:
    run = folder.read_config()
    config = _eval_config(values, run)
    problems = dataclasses.replace(run, eval=config).problems()
    if problems:
        raise ConfigError("; ".join(problems))
    if values["dry_run"]:
        print(f"{folder.path.name}: {', '.join(config.protocols)} at {config.lengths}")
        return []
    use_compile_cache(cache_folder(run.data))
    dataset = prepare(run.data, log=say)
    check_stream(config, run.train.length, dataset)
    with folder.held():
        model, params, tokenizer, step = load_model(folder)
        if tokenizer.digest != dataset.tokenizer.digest:
            raise WorkdirError(
                f"{folder.path} was trained with another tokenizer than its data gives now (digest "
                f"{tokenizer.digest[:12]}, now {dataset.tokenizer.digest[:12]}): restore the text it was trained on"
            )
        return evaluate_run(run, config, model, params, dataset, folder, step)


def _eval_config(values: dict[str, Any], run: RunConfig) -> EvalConfig:
    asked: dict[str, Any] = {}
    if values["lengths"]:
        asked["lengths"] = asked["sliding_lengths"] = flags.tuple_of_ints(values["lengths"], "lengths")
    if values["protocol"]:
        asked["protocols"] = tuple(values["protocol"].split(","))
    if values["stride"]:
        asked["stride"] = values["stride"]
    if values["num_targets"]:
        asked["num_targets"] = asked["sliding_targets"] = values["num_targets"]
    if values["executor"]:
        asked["executor"] = values["executor"]
    return dataclasses.replace(run.eval, **asked)


def plot_command(values: dict[str, Any], _: None) -> None:
    if values["what"] not in ("all", *plots.WHAT):
        raise ConfigError(
            f"--what={values['what']!r} is unknown; {nearest(values['what'], plots.WHAT)}known: {', '.join(plots.WHAT)}"
        )
    if values["dry_run"]:
        print(f"would draw {values['what']} from {_workdir(values)}")
        return
    for path in plots.plot(_workdir(values), values["what"]):
        print(path)


def generate_command(values: dict[str, Any], _: None) -> None:
    sampling = Sampling(values["temperature"], values["top_k"])
    folder = RunFolder(_workdir(values))
    if values["num_tokens"] < 1:
        raise ConfigError(f"--num_tokens={values['num_tokens']} must be at least 1")
    if values["dry_run"]:
        print(f"would sample {values['num_tokens']} tokens from {folder.path} with {sampling}")
        return
    use_compile_cache(cache_folder(folder.read_config().data))
    model, params, tokenizer, _step = load_model(folder)
    prompt = np.concatenate([[tokenizer.eos], tokenizer.encode(values["prompt"])])
    made: list[int] = []
    shown = ""
    print(values["prompt"], end="", flush=True)
    steps = generate(model, params, [prompt], values["num_tokens"], sampling=sampling, seed=values["seed"])
    for new in steps:
        made.append(int(new[0]))
        text = tokenizer.decode(made)
        if not text.endswith("\ufffd"):  # a character whose last bytes are still to come
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(tokenizer.decode(made)[len(shown) :])


def encodings_command(values: dict[str, Any], _: None) -> None:
    rows = [("name", "acts on", "learned", "beyond the training length", "paper")]
    dims = encodings.Dims(model_dim=64, num_heads=4, head_dim=16, num_layers=2, train_len=64)
    for name in encodings.ENCODINGS:
        encoding = encodings.build(name, dims)
        learned = bool(jax.eval_shape(lambda rng, e=encoding: e.init(rng, dims), jax.random.key(0)))
        sites = ", ".join(encoding.sites) or "nothing"
        rows.append((name, sites, "yes" if learned else "no", encoding.extrapolates, encoding.paper))
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


COMMANDS = {
    "train": Command(
        train_command,
        {"stop_with_stdin": (False, "end when standard input closes: a sweep's runs end with it")},
        True, "train one run and evaluate it; the same command resumes",
    ),
    "sweep": Command(
        sweep_command, {"jobs": (1, "runs at a time")}, True,
        "all runs of a config, evaluated and plotted; the same command resumes",
    ),
    "evaluate": Command(
        evaluate_command,
        {
            "lengths": ("", "window lengths in tokens, for example 64,128"),
            "protocol": ("", "nonoverlapping, sliding, per_position, or several with commas"),
            "stride": (0, "of the sliding protocol, in tokens"),
            "num_targets": (0, "targets to score; 0 as in the run's config"),
            "executor": ("", "auto, dense or blockwise"),
        },
        False, "measure a trained run, or all runs of a sweep, at any lengths",
    ),
    "plot": Command(
        plot_command, {"what": ("all", f"all, {', '.join(plots.WHAT)}")}, False, "figures from stored rows",
    ),
    "generate": Command(
        generate_command,
        {
            "prompt": ("", "text to continue"),
            "num_tokens": (200, "tokens to make"),
            "temperature": (0.8, "0 takes the most likely token"),
            "top_k": (0, "sample from the k most likely tokens; 0 from all"),
            "seed": (0, "of the sampling"),
        },
        False, "continue a prompt with a trained run",
    ),
    "encodings": Command(encodings_command, {}, False, "the catalogue"),
    "doctor": Command(
        lambda values, _: doctor_command(values), {}, False, "is this machine right: versions, devices, a self-test",
    ),
    "check": Command(
        lambda values, _: check_command(values), CHECK_FLAGS, False, "does an encoding keep the contract", "NAME"
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; every foreseen failure is one line on standard error."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    debug = "--debug" in words
    interrupts.remember_interrupts()
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs every step of every save
    sys.path.append(str(Path.cwd()))  # so that "my_module:MyEncoding" finds a user's own file; last, to shadow nothing
    try:
        return _run(words)
    except PosxError as error:
        if debug:
            traceback.print_exc()
        say(f"posx: {' '.join(str(error).split())}")
        return error.exit_code
    except KeyboardInterrupt:
        say("posx: interrupted; the same command continues from the last checkpoint")
        return 130
    except MemoryError:
        say("posx: memory ran out; lower train.batch_size or eval.batch_tokens")
        return OutOfMemoryError.exit_code
    except BrokenPipeError:
        return 0


def _run(words: list[str]) -> int:
    command = COMMANDS.get(words[0])
    if command is None:
        raise ConfigError(
            f"unknown command {words[0]!r}; {nearest(words[0], list(COMMANDS))}known: {', '.join(COMMANDS)}"
        )
    if {"-h", "--help"} & set(words[1:]):
        print(usage(words[0]))
        return 0
    operand = [word for word in words[1:2] if command.operand and not word.startswith("-")]
    values, config = flags.parse(words[1 + len(operand) :], command.flags, command.takes_config)
    values |= {"operand": "".join(operand)}
    if values["print_config"]:
        print(config if config is not None else _stored_config(values))
        return 0
    command.run(values, config)
    return 0


def usage(name: str = "") -> str:
    if not name:
        lines = [f"  posx {word:10} {command.text}" for word, command in COMMANDS.items()]
        return "\n".join(["posx: position encodings, trained short and tested long", "", *lines, "",
                          "posx COMMAND --help shows its flags; start with", "",
                          "  posx sweep --config configs/quick.py --workdir runs/quick"])  # fmt: skip
    command = COMMANDS[name]
    lines = [
        f"  --{flag:16} {text} (default: {default!r})"
        for flag, (default, text) in {**flags.COMMON, **command.flags}.items()
    ]
    if command.takes_config:
        lines = [
            "  --config           a config file, with the encoding after a colon: configs/quick.py:rope",
            "  --config_json      the config.json of an earlier run instead",
            "  --config.A.B=V     overrides one setting; --print_config shows all",
            *lines,
        ]
    return "\n".join([f"posx {f'{name} {command.operand}'.strip()}: {command.text}", "", *lines])


def _stored_config(values: dict[str, Any]) -> Any:
    if not values["workdir"]:
        return "this command has no settings but its flags"
    return ConfigDict(to_stored(_run_folders(_workdir(values))[0].read_config()))


def _earlier(values: dict[str, Any]) -> RunConfig | None:
    """The run that this one repeats, if its settings were named by the config.json of one."""
    return flags.earlier_run(values["config_json"]) if "config_json" in values else None


def _workdir(values: dict[str, Any], needed: bool = True) -> Path:
    if not values["workdir"]:
        if needed:
            raise ConfigError("--workdir is missing: name the folder of the run, for example --workdir runs/quick")
        return Path("runs")
    return Path(values["workdir"]).expanduser().resolve()


def _run_folders(workdir: Path) -> list[RunFolder]:
    """The run in `workdir`, or the runs of the sweep in it."""
    if (workdir / "config.json").exists():
        return [RunFolder(workdir)]
    inside = sorted(path.parent for path in workdir.glob("*/config.json"))
    if not inside:
        raise WorkdirError(f"{workdir} holds no run: there is no config.json in it or in its folders")
    return [RunFolder(path) for path in inside]


def _stop_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(143)


if __name__ == "__main__":
    sys.exit(main())
