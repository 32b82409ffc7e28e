"""Measure a run on the items of its task, one row a length. A row that exists is not computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from posx.evaluation.answers import Answers
from posx.evaluation.protocols import run_protocols
from posx.evaluation.scoring import score_in_batches
from posx.lab import cross_entropy, interrupts
from posx.lab.config import EvalConfig, RunConfig, TrainConfig
from posx.lab.data import TaskDataset
from posx.lab.data.masking import mask_id
from posx.lab.files.checksums import with_checksum
from posx.lab.files.rows import result_text
from posx.lab.model import Model
from posx.lab.progress import Meter
from posx.lab.runs.environment import measuring_facts
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.mechanism import attention_facts
from posx.lab.runs.scores import Way, hidden_scores, model_scores
from posx.lab.runs.targets import is_answer, stored_rows
from posx.lab.tasks import Items
from posx.lab.tasks.base import PAD
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
    scores = _item_scores(run, config, model, params, dataset, layout)
    rows, done = list[dict[str, Any]](), 0
    asked = list(asked_answers(run, config, dataset, folder, facts))
    total = sum(one["eval_len"] for _, one, known in asked if not known)
    with Meter(f"{facts['run_id']} evaluating", total) as meter:
        for items, one, known in asked:
            length, count = one["eval_len"], one["num_items"]
            if known:
                rows.append(with_checksum(known | facts))
                continue
            meter.update(done, f"{count:,} items of up to {length} tokens")
            status, result = _score(scores, items, max(1, config.batch_tokens // length))
            hidden = run.train.objective == "masked"
            row = Answers(count).make_row(length, one["targets"], items, status, result, hidden)
            sizes = (np.asarray(items.tokens) != PAD).sum(axis=1) - 1
            row["item_lens"] = [int(sizes.min()), int(sizes.max())]
            if config.attention_items and status == "ok":
                some: Items = jax.tree.map(lambda x: x[: config.attention_items], items)
                pos = run.train.token_positions.measure(length)
                row |= attention_facts(model.at_length(length), params, some, config.precision, layout, pos)
            rows.append(folder.append(folder.eval_file, facts | row | measuring_facts(config)))
            done += length
            meter.update(done, meter.facts)
            say(f"{facts['run_id']}  answers at {length}: {result_text(rows[-1])}  ({count:,} items)")
    return rows


def exact_match(run: RunConfig, model: Model, dataset: TaskDataset, layout: Layout) -> Callable[[Any], float]:
    """Return a function of parameters: the share of the dataset's `stop_items` that they answer right."""
    config = run.train
    items = dataset.stop_items(config.length)

    def measure(params: Any) -> float:
        scores = _item_scores(run, config, model, params, dataset, layout)
        rows = config.batch_size // config.accumulation
        status, result = _score(scores, items, rows)
        right = result[1] | ~items.scored[:, 1:] if status == "ok" else np.zeros((1, 1), bool)
        return float(right.all(axis=1).mean())

    return measure


def asked_answers(
    run: RunConfig, config: EvalConfig, dataset: TaskDataset, folder: RunFolder, facts: dict[str, Any]
) -> Iterator[tuple[Items, dict[str, Any], dict[str, Any] | None]]:
    """Yield the items of each length that `config` asks for, their row without results, and the stored row or None."""
    stored = stored_rows(folder, facts)
    for protocol, lengths in run_protocols(config, run.train.length):
        assert isinstance(protocol, Answers)  # `posx.lab.runs.checks` refuses others for a task
        for length in lengths:
            items = dataset.items(length, run.train.length, protocol.num_targets)
            empty = protocol.make_row(length, dataset.targets(run.train.length), items)
            same = {name: empty[name] for name in ("protocol", "eval_len", "max_targets", "targets")}
            alike = (row for row in stored if same.items() <= row.items() and is_answer(row, config))
            known = next((row for row in alike if _has_weights(row, config)), None)
            yield items, empty, known


def _has_weights(row: dict[str, Any], config: EvalConfig) -> bool:
    """Tell whether a stored row has the attention weights that `config` asks for. Only a measured row can have some."""
    is_measured = row.get("status", "ok") == "ok"
    return not (config.attention_items and is_measured) or row.get("attention_items") == config.attention_items


def _item_scores(
    run: RunConfig, config: EvalConfig | TrainConfig, model: Model, params: Any, dataset: TaskDataset, layout: Layout
) -> Callable[..., Any]:
    """Return the model as a function of tokens and `scored` [b, t + 1] to the scores of the tokens after the first."""
    way = Way(config.executor, config.precision, cross_entropy.score_answers)
    scores = model_scores(model, params, way, layout, run.train.token_positions)
    if run.train.objective == "masked":
        return hidden_scores(scores, mask_id(dataset.tokenizer.vocab_size))
    return lambda tokens, _: scores(tokens)


def _score(scores: Callable[..., Any], items: Items, batch_size: int) -> tuple[str, Any]:
    """Return the status and the scores of items."""

    def score(batch_size: int) -> list[np.ndarray]:
        batches = []
        for start in range(0, len(items.tokens), batch_size):
            interrupts.raise_pending()
            some = [x[start : start + batch_size] for x in items[:2]]
            count = len(some[0])
            padded = (np.pad(x, ((0, batch_size - count), (0, 0))) for x in some)  # so that one program serves all
            batches.append([part[:count] for part in scores(*padded)])
        return [np.concatenate(parts) for parts in zip(*batches, strict=True)]

    status, result = score_in_batches(score, batch_size)
    return "nonfinite" if status == "ok" and not np.isfinite(result[0]).all() else status, result
