"""Measure a run on the items of its task, one row a length. A row that exists is not computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from posx.errors import UndefinedLength
from posx.evaluation.answers import Answers
from posx.evaluation.protocols import run_protocols
from posx.evaluation.scoring import out_of_memory
from posx.lab import cross_entropy, interrupts
from posx.lab.config import EvalConfig, RunConfig
from posx.lab.data import TaskDataset
from posx.lab.files.checksums import with_checksum
from posx.lab.files.rows import result_text
from posx.lab.model import Model
from posx.lab.progress import Meter
from posx.lab.runs.environment import measuring_facts
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.mechanism import attention_facts
from posx.lab.runs.scores import Way, model_scores
from posx.lab.runs.targets import is_answer, stored_rows
from posx.lab.tasks import Items
from posx.lab.training.layout import Layout
from posx.notices import say


def answer_rows(
    run: RunConfig,
    config: EvalConfig,
    model: Model,
    params: Any,
    dataset: TaskDataset,
    folder: RunFolder,
    facts: dict[str, Any],
    layout: Layout,
) -> list[dict[str, Any]]:
    """Return a row for each length that `config` asks for. Missing ones are computed and appended one by one.

    Arguments are those of `evaluate_run`; `facts` are the fields that all rows of the run have.
    """
    way = Way(config.executor, config.precision, cross_entropy.score_answers)
    scores = model_scores(model, params, way, layout, run.train.token_positions)
    how = {"executor": config.executor, "precision": config.precision}
    asked, rows = asked_answers(run, config, dataset, folder, facts), list[dict[str, Any]]()
    with Meter(f"{facts['run_id']} evaluating", sum(one["eval_len"] for one, _ in asked)) as meter:
        for n, (one, known) in enumerate(asked):
            if known:
                rows.append(with_checksum(known | facts))
                continue
            length, count = one["eval_len"], one["num_items"]
            meter.update(sum(one["eval_len"] for one, _ in asked[:n]), f"{count:,} items of up to {length} tokens")
            items = dataset.items(length, run.train.length, count)
            status, result = _score(scores, items.tokens, max(1, config.batch_tokens // length))
            row = Answers(count).make_row(length, one["targets"], items, status, result)
            if config.attention_items and status == "ok":
                some: Items = jax.tree.map(lambda x: x[: config.attention_items], items)
                pos = run.train.token_positions.measure(length)
                row |= attention_facts(model.at_length(length), params, some, config.precision, layout, pos)
            rows.append(with_checksum(facts | row | how | {"env": measuring_facts()}))
            folder.append(folder.eval_file, rows[-1])
            say(f"{facts['run_id']}  answers at {length}: {result_text(rows[-1])}  ({count:,} items)")
    return rows


def exact_match(run: RunConfig, model: Model, dataset: TaskDataset, layout: Layout) -> Callable[[Any], float]:
    """Return a function of parameters: the share of the dataset's `stop_items` that they answer right."""
    config = run.train
    items = dataset.stop_items(config.length)
    way = Way(config.executor, config.precision, cross_entropy.score_answers)

    def measure(params: Any) -> float:
        scores = model_scores(model, params, way, layout, config.token_positions)
        rows = config.batch_size // config.accumulation
        status, result = _score(scores, items.tokens, rows)
        right = result[1] | ~items.scored[:, 1:] if status == "ok" else np.zeros((1, 1), bool)
        return float(right.all(axis=1).mean())

    return measure


def asked_answers(
    run: RunConfig, config: EvalConfig, dataset: TaskDataset, folder: RunFolder, facts: dict[str, Any]
) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Return the rows that `config` asks for, without results, each with the row that the folder holds, if it does."""
    stored, asked = stored_rows(folder, facts), list[tuple[dict[str, Any], dict[str, Any] | None]]()
    for protocol, lengths in run_protocols(config, run.train.length):
        assert isinstance(protocol, Answers)  # `posx.lab.runs.checks` refuses others for a task
        for length in lengths:
            items = dataset.items(length, run.train.length, protocol.num_targets)
            empty = protocol.make_row(length, dataset.held_out_digest[:16], items)
            same = {name: empty[name] for name in ("protocol", "eval_len", "max_targets", "targets")}
            alike = (row for row in stored if same.items() <= row.items() and is_answer(row, config))
            known = next((row for row in alike if _has_weights(row, config)), None)
            asked.append((empty, known))
    return asked


def _has_weights(row: dict[str, Any], config: EvalConfig) -> bool:
    """Tell whether a stored row has the attention weights that `config` asks for. Only a measured row can have some."""
    is_measured = row.get("status", "ok") == "ok"
    return not (config.attention_items and is_measured) or row.get("attention_items") == config.attention_items


def _score(scores: Callable[[np.ndarray], Any], tokens: Any, batch_size: int) -> tuple[str, Any]:
    """Return the status and the scores of tokens [n, t + 1]. The batch is halved as long as memory runs out."""
    while True:
        try:
            batches = []
            for start in range(0, len(tokens), batch_size):
                interrupts.raise_pending()
                some = tokens[start : start + batch_size]
                padded = np.pad(some, ((0, batch_size - len(some)), (0, 0)))  # so that one program serves all
                batches.append([part[: len(some)] for part in scores(padded)])
            log_probs, best = (np.concatenate(parts) for parts in zip(*batches, strict=True))
            return ("ok" if np.isfinite(log_probs).all() else "nonfinite"), (log_probs, best)
        except UndefinedLength:
            return "undefined", None
        except Exception as error:
            if not out_of_memory(error):
                raise
            if batch_size == 1:
                return "oom", None
            batch_size //= 2
