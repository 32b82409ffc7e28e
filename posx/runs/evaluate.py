"""Evaluates a trained run and appends its rows; what is there already is not computed again."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from posx import interrupts
from posx.config import EvalConfig, RunConfig
from posx.data import Dataset
from posx.encodings import encoding_name
from posx.errors import UndefinedLength
from posx.evaluation.measured import Measured
from posx.evaluation.protocols import run_protocols
from posx.evaluation.statistics import BLOCK_LEN
from posx.files import lines
from posx.machine.devices import on_all_devices, over_devices
from posx.model import Model
from posx.positions import sequential
from posx.progress import say
from posx.runs.checks import check_stream
from posx.runs.folder import RunFolder

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


def documents_of(dataset: Dataset) -> np.ndarray:
    """Where the documents of `held_out_stream` start."""
    return 1 + dataset.validation.offsets[:-1]


def evaluate_run(
    run: RunConfig, config: EvalConfig, model: Model, params: Any, dataset: Dataset, folder: RunFolder, step: int
) -> list[dict[str, Any]]:
    """All rows `config` asks for; those missing in `eval.jsonl` are computed and appended one by one.

    Raises DataError if the validation text is too short for the longest length.
    """
    check_stream(config, run.train.length, dataset)
    facts = _facts(run, model, dataset, folder.path.name, step)
    log_probs = model_log_probs(model, params, config.executor)
    stream, documents = held_out_stream(dataset), documents_of(dataset)
    # One for all protocols: per-position loss is read off a pass that the non-overlapping protocol makes.
    measured = Measured(log_probs, stream, dataset.tokenizer.num_bytes, documents, config.batch_tokens)
    stored = {_key(row): row for row in lines.read(folder.eval_file)}
    rows: list[dict[str, Any]] = []
    # The run's own lengths count as well, so that a later look at fewer of them scores the same targets.
    for protocol, lengths in run_protocols(config, run.train.length, max(run.eval.lengths)):
        targets = protocol.targets(stream, lengths, documents).digest
        missing = []
        for length in protocol.owed(lengths, functools.partial(is_defined, model)):
            wanted = {
                "protocol": protocol.name, "eval_len": length, "stride": protocol.stride_at(length, lengths),
                "targets": targets, "block_len": BLOCK_LEN,
            }  # fmt: skip
            row = stored.get(_key(facts | wanted))
            # Where memory ran out is tried again: it may be another machine.
            if row and row["status"] != "oom":
                rows.append(row)
            else:
                missing.append(length)
        for row in protocol.measure(measured, missing) if missing else ():
            interrupts.check()
            rows.append(facts | row)
            lines.append(folder.eval_file, rows[-1])
            say(_line(rows[-1]))
    return rows


def _facts(run: RunConfig, model: Model, dataset: Dataset, name: str, step: int) -> dict[str, Any]:
    """What all rows of a run say."""
    return {
        "schema_version": ROW_VERSION,
        "run_id": name,
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


def _line(row: dict[str, Any]) -> str:
    """A row for a person."""
    value = f"ppl {row['ppl']:.3f}" if isinstance(row["ppl"], float) else row["status"]
    scored = f"{row['num_targets']:,} targets of {row['num_documents']} documents"
    return f"{row['run_id']}  {row['protocol']} at {row['eval_len']}: {value}  ({scored})"


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two rows of one run the same measurement."""
    names = ("protocol", "eval_len", "stride", "targets", "block_len", "step", "data_digest")
    return tuple(row.get(name) for name in names)
