"""The text of a run that exists: at the place that is known for it, recognised by its digest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posx.errors import WorkdirError
from posx.lab.config import DataConfig, RunConfig
from posx.lab.data import Dataset, Tokenizer, corpus, load_tokenizer, prepare
from posx.lab.runs.folder import RunFolder
from posx.notices import say


def shared_places(run: RunConfig, held: RunConfig) -> list[str]:
    """Return the settings of `PLACES` that two runs give by the same words."""
    return [name for name in corpus.PLACES if getattr(run.asked.data, name) == getattr(held.asked.data, name)]


def may_be_the_same(run: RunConfig, held: RunConfig, anywhere: bool) -> bool:
    """Tell whether the settings name the text of the run `held`, at the same place, or with `anywhere` where it moved.

    A text that is still at its place has not moved. A task has no place: its name says which items it has.
    """
    anywhere = anywhere and not (run.data.is_task or held.data.is_task)
    moved = {name for name in corpus.PLACES if anywhere and corpus.is_gone(getattr(held.data, name))}
    names = run.data.token_settings().keys() - moved
    return all(getattr(run.data, name) == getattr(held.data, name) for name in names)


def with_known_places(run: RunConfig, held: RunConfig) -> RunConfig:
    """Return `run` with the paths of the run `held` that both name by the same words.

    A path is kept if only the earlier one is gone. So a command resumes its run from another directory.
    """
    kept = {name: getattr(held.data, name) for name in shared_places(run, held)}
    kept = {n: p for n, p in kept.items() if not (corpus.is_gone(p) and Path(getattr(run.data, n)).exists())}
    for name, place in kept.items():
        if (here := getattr(run.data, name)) != place and Path(here).is_absolute() and Path(here).exists():
            say(
                f"notice: data.{name}={getattr(run.asked.data, name)} is {place}, as for the runs of the work folder, "
                f"not {here}"
            )
    return dataclasses.replace(run, data=dataclasses.replace(run.data, **kept))


def with_saved_tokenizer(folder: RunFolder, run: RunConfig) -> RunConfig:
    """Return `run` with the tokenizer that its folder holds, if the file that the settings name is gone.

    Raises WorkdirError if the tokenizer in the folder is damaged.
    """
    if corpus.is_gone(run.data.tokenizer) and folder.tokenizer_file.exists():
        folder.check_tokenizer()
        return dataclasses.replace(run, data=dataclasses.replace(run.data, tokenizer=str(folder.tokenizer_file)))
    return run


def saved_tokenizer(folder: RunFolder) -> Tokenizer:
    """Return the tokenizer of a run, which its folder holds. Raises WorkdirError if it is missing or damaged."""
    if not folder.tokenizer_file.exists():
        if not any(folder.checkpoints.glob("*.json")):
            raise WorkdirError(f"{folder.path} holds no trained model yet. Run `posx train` with this --workdir first.")
        raise WorkdirError(
            f"{folder.tokenizer_file} is missing. `posx train` with this --workdir and the settings of the run writes "
            "it again."
        )
    folder.check_tokenizer()
    return load_tokenizer(folder.tokenizer_file)


def run_text(folder: RunFolder, run: RunConfig, asked: Mapping[str, Any]) -> Dataset:
    """Return the text of a trained run in its own tokens, or another text that `asked`, fields of DataConfig, names.

    An imported run has no training text, so none is read unless `asked` names it.

    Raises WorkdirError if the text has changed and no other text is asked for, DataError if it is gone.
    """
    named = set(asked) - {"cache_dir"}
    data = _named_text(folder, run, asked)
    tokenizer = saved_tokenizer(folder)
    if data.is_task:
        return _open_task(folder, run, data, tokenizer)
    if not named:
        corpus.check_there(data, folder.path.name)
    scores_only = "validation" in named and "source" not in named
    gone = scores_only and corpus.is_gone(data.source)
    if gone:
        say(f"notice: the training text of {folder.path.name} is no longer at '{data.source}' and is not read")
    training = not (gone or (scores_only and run.is_imported))
    known = tokenizer if named or Path(data.tokenizer).is_absolute() else None
    dataset = prepare(data, log=say, training=training, tokenizer=known)
    if not named and dataset.digest != run.text:
        raise WorkdirError(
            f"{folder.path} was trained on other text or tokens than {dataset.source} has now (digest "
            f"{run.text[:12]}, now {dataset.digest[:12]}). "
            "Restore the original text or pass --config.data.source=PATH. To evaluate on the changed text on "
            f"purpose, pass --config.data.source={data.source}"
        )
    if not run.is_imported and dataset.held_out_digest != run.held_out:
        say(
            f"notice: {folder.path.name} is measured on other text than in training (digest {run.held_out[:12]}, now "
            f"{dataset.held_out_digest[:12]}). Its rows are kept apart (docs/guides/resuming.md)."
            + " It may have been trained on some of this text. --config.data.validation=PATH scores all of a text. It "
            "warns if much of it is in the training text." * (not scores_only)
        )
    return dataset


def _open_task(folder: RunFolder, run: RunConfig, data: DataConfig, tokenizer: Tokenizer) -> Dataset:
    """Return the items of a task for a trained run. Raises WorkdirError if its words are not those of the tokenizer."""
    dataset = prepare(data, log=say)
    if dataset.tokenizer.digest != tokenizer.digest:
        raise WorkdirError(
            f"data.source={data.source}: its words are not those that {folder.path} was trained on, "
            f"{run.data.source}. Give a task of the same words, such as the same task with other probabilities."
        )
    if dataset.held_out_digest != run.held_out:
        trained = "as it was in training" if data.source == run.data.source else f"on {run.data.source}"
        say(f"notice: {folder.path.name} is measured on {data.source}, not {trained}. Its rows are kept apart.")
    return dataset


def _named_text(folder: RunFolder, run: RunConfig, asked: Mapping[str, Any]) -> DataConfig:
    """Return the settings of the text that is asked for. Raises WorkdirError if an imported run lacks one."""
    if run.is_imported and not {"source", "validation"} & set(asked):
        raise WorkdirError(
            f"{folder.path} was imported, so posx does not know its text. Name a text with "
            "--config.data.validation=PATH, all of which is scored"
        )
    from_here = dataclasses.replace(run, data=corpus.absolute(run.asked.data))
    whole = {"tuning_fraction": 0.0} if "validation" in asked else {}  # all of a named text is scored
    data = dataclasses.replace(with_known_places(from_here, run).data, **{**whole, **asked})
    if run.is_imported and "source" not in asked and data.tuning_fraction:
        raise WorkdirError(
            f"--config.data.tuning_fraction={data.tuning_fraction}: {folder.path} was imported, so it has no training "
            "text to take documents from. Leave this setting out."
        )
    return data
