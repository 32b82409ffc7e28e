"""The checks of a run before anything starts: its settings, its text, its folder, its memory and its disk."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from posx.attention import kernel_refusal, refusal
from posx.contract import Composite, Encoding, abstract_params, parts
from posx.contract.shapes import tile_shapes
from posx.encodings import encoding_name, spec_text
from posx.errors import ConfigError, DataError, OutOfMemoryError, WorkdirError, join_problems
from posx.evaluation import protocols
from posx.lab.config import SECTIONS, EvalConfig, RunConfig
from posx.lab.config.mask_texts import mask_text
from posx.lab.data import Dataset, TaskDataset, TextDataset
from posx.lab.data.corpus import absolute, is_path
from posx.lab.positions import Offset, Randomised, Sequential
from posx.lab.progress import size
from posx.lab.runs.folder import RunFolder
from posx.machine.cores import own_memory
from posx.machine.platforms import is_on_cpu
from posx.notices import say


def check_run(run: RunConfig) -> RunConfig:
    """Return `run` with absolute paths. Raises ConfigError that lists every problem.

    `run_config` has checked each section. Data and evaluation are checked again, as `posx evaluate` replaces them.
    """
    problems = run.data.problems() + run.eval.problems() + protocols.problems(run.eval, run.train.length)
    problems = problems or list(_objective_problems(run)) or [*_protocol_problems(run), *_length_problems(run)]
    if problems := problems or list(_encoding_problems(run)):
        raise ConfigError(join_problems(problems))
    return dataclasses.replace(run, data=absolute(run.data))


def _objective_problems(run: RunConfig) -> Iterator[str]:
    task = run.data.task if run.data.is_task else None
    if task and task.objective != run.train.objective:
        made = {"masked": "hidden tokens", "next_token": "next tokens"}[task.objective]
        yield (
            f"train.objective={run.train.objective} does not fit data.source={run.data.source}, whose items have "
            f"{made} to predict. Use --config.train.objective={task.objective}, or another task or text."
        )
    masks = dict.fromkeys(mask_text(mask) for mask in run.model.masks)
    if run.train.objective == "next_token":
        if "full" in masks:
            yield (
                "model.mask_policy=full shows each token the next one, which train.objective=next_token predicts. "
                "Leave it out, or use --config.train.objective=masked."
            )
        return
    if list(masks) != ["full"]:
        yield (
            f"model.mask_policy={','.join(run.model.mask_policy)} hides later tokens, but train.objective=masked "
            "predicts from both sides. Leave it out."
        )
    for part in dict.fromkeys(part for layer in run.layers for part in parts(layer) if part.causal_only):
        if isinstance(part, Composite) and any(inner.causal_only for inner in part.named_parts().values()):
            continue
        name = encoding_name(part)
        hint = f"Write {name}({field}=true)." if (field := _two_sided_field(part)) else "Choose another encoding."
        yield (
            f"train.objective=masked shows keys after the query, but {name} is for causal masks: it cannot tell later "
            f"keys apart by distance, or favours distant ones. {hint}"
        )


def _two_sided_field(encoding: Encoding) -> str:
    """Return the field that makes an encoding two-sided if it is true, "" if it has none."""
    for field in dataclasses.fields(encoding):
        if getattr(encoding, field.name) is False:
            with contextlib.suppress(ConfigError):  # other fields may then need other values
                if not dataclasses.replace(encoding, **{field.name: True}).causal_only:
                    return field.name
    return ""


#: The targets of protocols, and the setting that gives a run such targets, in words.
_MEASURED = {
    "text": ("next tokens of a text", "data.source={data.source} is a text"),
    "task": ("the answers of a task", "data.source={data.source} is a task"),
    "hidden tokens": ("hidden tokens", "train.objective={train.objective} predicts hidden tokens"),
}


def _protocol_problems(run: RunConfig) -> Iterator[str]:
    if run.train.stop_check_steps and not run.data.is_task:
        yield (
            f"train.stop_check_steps={run.train.stop_check_steps} measures the answers of a task, but data.source="
            f"{run.data.source} is text. Leave it out."
        )
    if run.eval.attention_items and run.train.objective == "masked":
        yield (
            f"eval.attention_items={run.eval.attention_items} reads the attention weights of a model of next tokens, "
            "but train.objective=masked predicts hidden tokens. Leave it out."
        )
    classes = list(map(protocols.protocol_class, run.eval.protocols))
    fits = [cls.name for cls in protocols.PROTOCOLS.values() if cls.measures == run.target_kind]
    why = _MEASURED[run.target_kind][1].format(data=run.data, train=run.train)
    for kind in dict.fromkeys(cls.measures for cls in classes if cls.measures != run.target_kind):
        names = [cls.name for cls in classes if cls.measures == kind]
        verb = "measure" if names[1:] else "measures"
        yield f"eval.protocols={','.join(names)} {verb} {_MEASURED[kind][0]}, but {why}. Name {' or '.join(fits)}."


def _length_problems(run: RunConfig) -> Iterator[str]:
    most = run.train.token_positions.policy.most
    measured = protocols.run_protocols(run.eval, run.train.length)
    longest = max((length for _, lengths in measured for length in lengths), default=0)
    if most and longest > most:
        yield (
            f"train.positions={run.train.positions}: eval.lengths has {longest}, more tokens than it has positions. "
            "Train with a larger longest, or leave the length out."
        )
    for name, lengths in (("train.length", [run.train.length]), ("eval.lengths", run.eval.lengths)):
        if problem := next(filter(None, map(run.train.token_positions.policy.length_problem, lengths)), ""):
            yield f"{name}: train.positions={problem}"


_AXES_REMEDY = {
    1: "Put it on both axes by axial(inner=...), or leave train.positions out.",
    2: "Use --config.train.positions=grid.",
}


def _encoding_problems(run: RunConfig) -> Iterator[str]:
    layers, policy = dict.fromkeys(zip(run.layers, run.model.masks, strict=True)), run.train.token_positions.policy
    last = policy.last(run.train.length)
    for encoding in dict.fromkeys(run.layers):
        if encoding.axes not in (0, policy.axes):
            count = "1 axis" if encoding.axes == 1 else f"{encoding.axes} axes"
            yield (
                f"{spec_text(encoding)} reads positions with {count}, but train.positions={policy} gives "
                f"{policy.axes}. {_AXES_REMEDY.get(encoding.axes, 'Choose another encoding.')}"
            )
        if encoding.max_position is not None and encoding.max_position < last:
            given = f"windows of train.length={run.train.length} have"
            fix = "Leave its size out, or lower --config.train.length."
            if isinstance(policy, Offset | Randomised):
                given, fix = f"train.positions={policy} has", f"Give it a size of {last + 1}, or lower longest."
            yield (
                f"{spec_text(encoding)} is defined for positions 0 to {encoding.max_position}, but {given} positions 0 "
                f"to {last}. {fix}"
            )
    counts = {"train": policy == Sequential(), "eval": not policy.most}  # whether positions count up by one
    for section, executor in (("train", run.train.executor), ("eval", run.eval.executor)):
        for encoding, mask in layers if executor in ("fused", "kernel") else ():
            params = abstract_params(encoding, run.dims)
            if executor == "fused":
                why = refusal(encoding, params, mask, in_order=True, segments=False)
            else:
                offset = 0 if counts[section] else None
                why = kernel_refusal(encoding, params, mask, offset=offset, tile=tile_shapes(encoding, run.dims))
            if why:
                yield (
                    f"{section}.executor={executor!r} cannot serve {encoding}: {why}. Use "
                    f"--config.{section}.executor=blockwise or auto."
                )


def unused_settings(run: RunConfig) -> dict[str, str]:
    """Return {setting: why} of the settings that no part of `run` uses. `run` must be checked."""
    reasons = {}
    if "encoding" not in run.model.layer_policy:
        reasons["encoding"] = "no layer of model.layer_policy is 'encoding'"
    if not any(run.rates):
        reasons["train.position_lr_multiplier"] = "the encoding has no parameters"
    policy = run.train.token_positions.policy
    if policy != Sequential() and all(encoding.axes == 0 for encoding in run.layers):
        reasons["train.positions"] = "no encoding reads positions"
    elif isinstance(policy, Offset) and all(encoding.shift_invariant for encoding in run.layers):
        reasons["train.positions"] = "the encodings see distances alone, which offsets do not change"
    if run.data.tokenizer not in ("bpe", "ids"):
        reasons["data.vocab_size"] = f"data.tokenizer={run.data.tokenizer} has its own size; bpe and ids take one"
    if run.data.source == "stdlib" or is_path(run.data.source):
        why = f"data.source={run.data.source} is no data set of the hub"
        reasons |= dict.fromkeys(("data.subset", "data.train_split", "data.validation_split"), why)
    places = [place for place in (run.data.source, run.data.validation) if place]
    if not any(place.endswith(".bin") or Path(place).is_dir() for place in places):
        reasons["data.dtype"] = "it is the type of .bin files, and none is named"
    if run.data.validation:
        reasons["data.validation_fraction"] = "data.validation names the held-out text"
    read = {name for protocol in run.eval.protocols for name in protocols.protocol_class(protocol).reads}
    for name in sorted({name for cls in protocols.PROTOCOLS.values() for name in cls.reads} - read):
        readers = (cls.name for cls in protocols.PROTOCOLS.values() if name in cls.reads)
        reasons[f"eval.{name}"] = f"eval.protocols has no {' or '.join(readers)}"
    return reasons


def say_unused(runs: Iterable[RunConfig], words: Mapping[str, str]) -> None:
    """Say which of `words`, {word of the command: setting}, no run uses. A default is not worth a line."""
    reasons = [(run, unused_settings(run)) for run in runs]
    for word, setting in words.items():
        section, _, name = setting.partition(".")
        setting = "encoding" if section == "encoding" else setting
        idle = [run for run, why in reasons if setting in why]
        usual = section in SECTIONS and all(
            getattr(getattr(run, section), name) == getattr(SECTIONS[section](), name) for run in idle
        )
        if len(idle) == len(reasons) > 0 and not usual:
            say(f"notice: {word} is not used: {reasons[0][1][setting]}")


def check_stream(config: EvalConfig, train_len: int, dataset: Dataset) -> None:
    """Raise DataError if the validation text is too short for the longest length, or for a protocol.

    Or a task has no items to measure a length with.
    """
    if isinstance(dataset, TaskDataset):
        dataset.check_lengths(sorted({*config.lengths, train_len}), train_len)
        return
    assert isinstance(dataset, TextDataset)
    have, need = len(dataset.validation.tokens), max(config.lengths)
    if have < need:
        raise DataError(
            f"the validation text has {have} tokens, but eval.lengths needs {need}. The largest usable length "
            f"is {have}. Use more held-out text or shorter lengths."
        )
    for protocol, lengths in protocols.run_protocols(config, train_len):
        protocol.check_text(have, lengths, "the validation text")


def with_text(run: RunConfig, dataset: Dataset) -> RunConfig:
    """Return `run` with the digests of its text. Raises DataError if the text is too short for it."""
    dataset.check_length(run.train.length)
    check_stream(run.eval, run.train.length, dataset)
    return dataclasses.replace(run, text=dataset.digest, held_out=dataset.held_out_digest)


def check_writable(path: Path) -> None:
    """Raise WorkdirError if no file can be made at `path`. Access bits alone do not tell."""
    try:
        nearest_folder = next(p for p in (path, *path.parents) if p.exists())
        if not nearest_folder.is_dir():
            raise WorkdirError(
                f"work folder {path} cannot be made: {nearest_folder} is a file. Choose another --workdir."
            )
        with tempfile.TemporaryFile(dir=nearest_folder):
            pass
    except OSError as error:
        raise WorkdirError(
            f"work folder {path} cannot be written: {error.strerror}. Choose another --workdir."
        ) from None


def check_work_folder(path: Path, sweep: bool) -> None:
    """Raise WorkdirError if the folder holds something else: a run, a sweep, or sweeps.

    Figures, tables and evaluations of the folder would take one for the other.
    """
    config = RunFolder(path).config_file  # refuses a name that libraries cannot open
    try:
        single = config.exists()
        runs = [file.parent for file in path.glob(f"*/{config.name}")]
        sweeps = [file.parents[1] for file in path.glob(f"*/*/{config.name}") if file.parents[1] not in runs]
    except OSError:  # the first writer names the problem of the path
        return
    content = place = ""
    if single and sweep:
        content, place = "a run", f"{path}-sweep"
    elif runs and not single and not sweep:
        content, place = f"a sweep, and {runs[0].name} is one of its runs", f"{path}-train"
    elif sweeps and not single and not runs:
        content, place = f"sweeps, and {sweeps[0].name} is one of them", str(path / "new")
    if content:
        own = f"Give this {'sweep' if sweep else 'run'} a folder of its own: --workdir {shlex.quote(place)}"
        raise WorkdirError(f"work folder {path} holds {content}. {own}")


def check_memory(num_params: int) -> None:
    """Raise OutOfMemoryError if weights, gradients and two moments in float32 cannot fit into a CPU's memory.

    XLA would crash, or the system kill the process. Activations come on top and are not counted.
    """
    needed, have = 16 * num_params, own_memory()
    if is_on_cpu() and needed > have:
        raise OutOfMemoryError(
            f"weights, gradients and moments of this model take {size(needed)} of memory, but this process may "
            f"use {size(have)}. Lower the model's sizes."
        )


def check_disk(path: Path, needed: int, advice: str) -> None:
    """Raise OutOfMemoryError, with `advice` beside freeing space, if `needed` bytes of checkpoints cannot fit."""
    free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
    if free < needed:
        raise OutOfMemoryError(
            f"{path} has {size(free)} free, but its checkpoints need {size(needed)}. Free space, or {advice}."
        )
