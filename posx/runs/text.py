"""The text of a run that exists: looked for where it was when the run was started, and known again by its digest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posx.config import DataConfig, RunConfig
from posx.data import Dataset, Tokenizer, load_tokenizer, places, prepare
from posx.errors import WorkdirError
from posx.progress import say
from posx.runs.environment import stored
from posx.runs.folder import RunFolder


def settings(folder: RunFolder, asked: DataConfig) -> DataConfig:
    """`asked`, but that what it names as the run in `folder` does is where it was found when that run was started."""
    if not folder.config_file.exists():
        return asked
    run = folder.read_config()
    before, now = vars(run.data), vars(asked)
    same = {name: place for name, place in _found(folder, run).items() if now.get(name) == before.get(name)}
    data = places.again(asked, same)
    if asked.tokenizer == run.data.tokenizer not in places.TOKENIZERS and folder.tokenizer_file.exists():
        return dataclasses.replace(data, tokenizer=str(folder.tokenizer_file))
    return data


def facts(folder: RunFolder, run: RunConfig, data: DataConfig, dataset: Dataset) -> dict[str, str]:
    """What config.json says of a run's text: where it was found by `data`, and its digest."""
    found = places.found(data)
    if data.tokenizer == str(folder.tokenizer_file):
        found["tokenizer"] = run.resolution.data.get("tokenizer", run.data.tokenizer)
    return found | {"digest": dataset.digest}


def digest_of(folder: RunFolder, run: RunConfig) -> str:
    """Of the text that a run was started on; "" where its folder does not say."""
    return _found(folder, run).get("digest", "")


def saved_tokenizer(folder: RunFolder) -> Tokenizer:
    """Return the tokenizer of a run, which its folder holds. Raises WorkdirError if it is missing."""
    if not folder.tokenizer_file.exists():
        if not any(folder.checkpoints.glob("*.json")):
            raise WorkdirError(f"{folder.path} holds no trained model yet: run `posx train` with this --workdir first")
        raise WorkdirError(
            f"{folder.tokenizer_file} is missing. `posx train` with this --workdir and the settings of the run writes "
            "it again."
        )
    return load_tokenizer(folder.tokenizer_file)


def _found(folder: RunFolder, run: RunConfig) -> dict[str, str]:
    """Where the text of a run was found, and its "digest". Older runs say it in `env.json` alone."""
    first = stored(folder)
    known = {"digest": str(first["data_digest"])} if "data_digest" in first else {}
    if Path(str(first.get("data_source", ""))).is_absolute():
        known["source"] = first["data_source"]
    return known | dict(run.resolution.data)


def text_of(folder: RunFolder, run: RunConfig, asked: Mapping[str, Any]) -> Dataset:
    """The text of a trained run, in its own tokens; or another, where `asked`, fields of DataConfig, names one.

    Raises WorkdirError where nobody asked for another text and it is one, DataError where it is not there any more.
    """
    tokenizer = saved_tokenizer(folder)
    named = set(asked) - {"cache_dir"}
    data = dataclasses.replace(settings(folder, run.data), **asked)
    if named:
        data = dataclasses.replace(data, tokenizer=str(folder.tokenizer_file))
    else:
        places.check_there(data, folder.path.name)
    dataset = prepare(data, log=say)
    own = digest_of(folder, run) or dataset.digest
    if dataset.digest == own and dataset.tokenizer.digest == tokenizer.digest:
        return dataset
    digests = f"digest {own[:12]}, now {dataset.digest[:12]}"
    if not named:
        raise WorkdirError(
            f"{folder.path} was trained on other text or tokens than {dataset.source} has now ({digests}). Restore the "
            "original text or pass --config.data.source=PATH. To evaluate on the changed text on purpose, pass "
            f"--config.data.source={data.source}"
        )
    say(f"notice: {folder.path.name} is measured on other text than in training ({digests}). Its rows are kept apart")
    return dataset
