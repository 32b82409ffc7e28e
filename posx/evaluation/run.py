"""Evaluates a trained run and appends its rows; what is there already is not computed again."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from posx import interrupts
from posx.config import EvalConfig, RunConfig, sliding_lengths, sliding_stride
from posx.data import Dataset
from posx.encodings import encoding_name
from posx.errors import DataError, UndefinedLength
from posx.evaluation.protocols import (
    Nonoverlapping,
    PerPosition,
    Protocol,
    Sliding,
    evaluate,
    protocol_name,
    targets_of,
)
from posx.evaluation.statistics import BLOCK_LEN
from posx.model import Model
from posx.parallel import on_all_devices, over_devices
from posx.positions import sequential
from posx.progress import say
from posx.runs import RunFolder, append_row, read_rows

#: Of a row of `eval.jsonl`. 1: the first targets of the stream in one stretch, no `targets`, blocks of 1024 or 2048.
ROW_VERSION = 2


@functools.partial(jax.jit, static_argnums=(0, 1))
def _log_probs(model: Model, executor: str, params: Any, tokens: jax.Array) -> jax.Array:
    return model.log_probs(params, tokens, sequential(tokens.shape[1] - 1), None, executor)


def is_defined(model: Model, length: int) -> bool:
    """Whether the model serves windows of `length` tokens."""
    last = model.at_length(length).max_position
    return last is None or length - 1 <= last


def model_log_probs(model: Model, params: Any, executor: str = "auto"):
    """The model as `evaluate` wants it: tokens [b, t + 1] -> log-probabilities [b, t], undefined lengths refused."""
    params = on_all_devices(params)

    def log_probs(tokens: np.ndarray) -> np.ndarray:
        length = tokens.shape[1] - 1
        at_length = model.at_length(length)
        if not is_defined(model, length):
            raise UndefinedLength(f"defined up to position {at_length.max_position}, {length} tokens asked")
        rows = np.pad(tokens, ((0, -len(tokens) % jax.device_count()), (0, 0)))
        return np.asarray(_log_probs(at_length, executor, params, over_devices(rows)))[: len(tokens)]

    return log_probs


def held_out_stream(dataset: Dataset) -> np.ndarray:
    """The validation tokens behind one end-of-document token, the context of the very first target."""
    tokens = dataset.validation.tokens
    return np.concatenate([np.array([dataset.tokenizer.eos], tokens.dtype), tokens])


def check_stream(config: EvalConfig, train_len: int, dataset: Dataset) -> None:
    """Raises DataError if the validation text does not fill one window of the longest evaluation length."""
    have, need = len(dataset.validation.tokens), max(config.lengths)
    if have < need:
        raise DataError(
            f"the validation text has {have} tokens, eval.lengths needs {need}: "
            f"the largest usable length is {have}; use more held-out text or shorter lengths"
        )
    for protocol, _ in protocol_values(config, train_len):
        if isinstance(protocol, Sliding) and have < protocol.warm_up + protocol.stride:
            raise DataError(
                f"the validation text has {have} tokens, sliding windows of {protocol.warm_up} tokens with stride "
                f"{protocol.stride} need {protocol.warm_up + protocol.stride}: use more held-out text, shorter lengths"
            )


def documents_of(dataset: Dataset) -> np.ndarray:
    """Where the documents of `held_out_stream` start."""
    return 1 + dataset.validation.offsets[:-1]


def protocol_values(config: EvalConfig, train_len: int, longest: int = 0) -> list[tuple[Protocol, tuple[int, ...]]]:
    """Each protocol of the config with its lengths. The targets are those of windows of up to `longest` tokens, and
    at least of those of the config."""
    windows = sliding_lengths(config, train_len)
    longest = max(longest, *config.lengths, *windows)
    sliding = Sliding(sliding_stride(config, train_len), config.sliding_targets, warm_up=longest)
    values: dict[str, tuple[Protocol, tuple[int, ...]]] = {
        "nonoverlapping": (Nonoverlapping(config.num_targets, longest), config.lengths),
        "per_position": (PerPosition(config.num_targets, longest), config.lengths),
        "sliding": (sliding, windows),
    }
    return [values[protocol_name(name)] for name in config.protocols]


def evaluate_run(
    run: RunConfig, config: EvalConfig, model: Model, params: Any, dataset: Dataset, folder: RunFolder, step: int
) -> list[dict[str, Any]]:
    """All rows `config` asks for; those missing in `eval.jsonl` are computed and appended one by one.

    Raises DataError if the validation text is too short for the longest length.
    """
    check_stream(config, run.train.length, dataset)
    facts = {
        "schema_version": ROW_VERSION,
        "run_id": folder.path.name,
        "encoding": run.encoding["name"],
        "encoding_value": repr(model.encodings[0] if len(set(model.encodings)) == 1 else model.encodings),
        "layers": "+".join(encoding_name(encoding) for encoding in model.distinct),
        "train_len": run.train.length,
        "seed": run.train.seed,
        "step": step,
        "tokenizer": dataset.tokenizer.name,
        "data_source": dataset.source,
        "data_digest": dataset.digest,
        "dtype": run.model.dtype,
    }
    log_probs = model_log_probs(model, params, config.executor)
    stream, token_bytes, documents = held_out_stream(dataset), dataset.tokenizer.num_bytes, documents_of(dataset)
    stored = {_key(row): row for row in read_rows(folder.eval_file)}
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        interrupts.check()
        row = facts | row
        append_row(folder.eval_file, row)
        rows.append(row)
        value = f"ppl {row['ppl']:.3f}" if isinstance(row["ppl"], float) else row["status"]
        scored = f"{row['num_targets']:,} targets of {row['num_documents']} documents"
        say(f"{folder.path.name}  {row['protocol']} at {row['eval_len']}: {value}  ({scored})")

    missing: dict[tuple[int, ...], list[Protocol]] = {}
    # The run's own lengths count as well, so that a later look at fewer of them scores the same targets.
    for protocol, lengths in protocol_values(config, run.train.length, max(run.eval.lengths)):
        longest = tuple(n for n in lengths if is_defined(model, n))[-1:]
        wanted = longest if isinstance(protocol, PerPosition) else lengths
        targets = targets_of(protocol, stream, lengths, documents).digest
        found = {n: stored.get(_key(facts | _settings(protocol, n, targets))) for n in wanted}
        # Where memory ran out is tried again: it may be another machine.
        have = {n: row for n, row in found.items() if row and row["status"] != "oom"}
        rows += have.values()
        absent = tuple(n for n in wanted if n not in have)
        # Per-position loss is read off the pass that the non-overlapping protocol makes at the longest length.
        if absent:
            missing.setdefault(lengths if isinstance(protocol, PerPosition) else absent, []).append(protocol)
    for lengths, protocols in missing.items():
        evaluate(
            log_probs, stream, protocols, lengths,
            token_bytes=token_bytes, documents=documents, batch_tokens=config.batch_tokens, on_row=keep,
        )  # fmt: skip
    return rows


def _settings(protocol: Protocol, length: int, targets: str) -> dict[str, Any]:
    stride = protocol.stride if isinstance(protocol, Sliding) else length
    return {
        "protocol": protocol.name, "eval_len": length, "stride": stride, "targets": targets, "block_len": BLOCK_LEN,
    }  # fmt: skip


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two rows of one run the same measurement."""
    names = ("protocol", "eval_len", "stride", "targets", "block_len", "step", "data_digest")
    return tuple(row.get(name) for name in names)
