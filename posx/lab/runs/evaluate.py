"""Evaluate a trained run and append its rows. A row that exists is not computed again."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from posx.encodings import code_of
from posx.errors import ConfigError
from posx.evaluation.probe import ROUGH, check_log_probs
from posx.evaluation.protocols import BeginEveryWindow, Nonoverlapping
from posx.evaluation.scoring import Measured, Scored
from posx.lab import interrupts
from posx.lab.config import EvalConfig, RunConfig
from posx.lab.config.data import PLACES
from posx.lab.config.sections import shortest_cycle
from posx.lab.data import Dataset, TaskDataset, TextDataset, Tokenizer
from posx.lab.data.masking import mask_id
from posx.lab.files.checksums import with_checksum
from posx.lab.files.rows import ROW_VERSION, result_text
from posx.lab.machine import processes
from posx.lab.model import Model
from posx.lab.progress import Meter, quantity
from posx.lab.runs import damage
from posx.lab.runs.answers import answer_rows
from posx.lab.runs.cost import Pass, evaluation_speed, pass_cost
from posx.lab.runs.describe import slower
from posx.lab.runs.environment import measuring_facts
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.mechanism import attention_facts, window_items
from posx.lab.runs.scores import Way, hidden_scores, model_scores
from posx.lab.runs.targets import Asked, EvaluationPlan, asked_rows, few_documents, run_stream, stored_rows
from posx.lab.training.layout import Layout
from posx.notices import say

#: Windows on which a model with the user's own code is checked.
_CHECKED = 2
#: Changes of a log-probability x of a float32 model that may be rounding: up to this and this times |x|, in nats.
FLOAT32_ROUGH = 1e-3
#: Tokens of training text that are counted at a time.
_COUNTED = 1 << 24


def evaluate_run(
    run: RunConfig,
    config: EvalConfig,
    model: Model,
    params: Any,
    dataset: Dataset,
    folder: RunFolder,
    step: int,
    layout: Layout = Layout(),
) -> list[dict[str, Any]]:
    """Return all rows that `config` asks for. Missing rows are computed and appended to `eval.jsonl` one by one.

    A window longer than all before changes which tokens are scored. The lengths measured before are then measured
    again. The validation text must be long enough: see `posx.lab.runs.checks.check_stream`.
    """
    processes.on_first(lambda: damage.mend_rows(folder))
    facts = row_facts(run, model, dataset, folder, step)
    of_next = run.train.objective == "next_token" and not layout.is_global
    if "code" in facts and of_next and not stored_rows(folder, facts):  # rows of this code mean that it was checked
        check_own_code(run, model, params, dataset)
    if isinstance(dataset, TaskDataset):
        rows = answer_rows(run, config, model, params, dataset, folder, facts, layout)
    elif isinstance(dataset, TextDataset):
        rows = text_rows(run, config, model, params, dataset, folder, facts, layout)
    folder.list_rows(config == run.eval and facts["own_text"])
    return rows


def check_own_code(run: RunConfig, model: Model, params: Any, dataset: Dataset) -> None:
    """Raise ConfigError if a model with encodings of the user's own sees later tokens: its numbers would mean nothing.

    Arguments are those of `evaluate_run`.
    """
    length, pos = run.train.length, run.train.token_positions.measure(run.train.length)
    if isinstance(dataset, TaskDataset):
        windows = dataset.items(length, length, _CHECKED).tokens
    else:
        assert isinstance(dataset, TextDataset)
        stream = run_stream(dataset)[0]
        windows = stream[np.minimum(length * np.arange(_CHECKED)[:, None] + np.arange(length + 1), len(stream) - 1)]
    whole = jax.jit(lambda tokens: jax.nn.log_softmax(model.at_length(length)(params, tokens[:, :-1], pos)))
    try:
        check_log_probs(whole, windows, FLOAT32_ROUGH if run.model.dtype == "float32" else ROUGH)
    except ConfigError as error:
        what = str(error).replace("log_probs sees", "it sees").partition(" Entry (b, i)")[0]
        names = ", ".join(code_of(model.encodings))
        raise ConfigError(f"the model has code of your own, {names}, and {what} posx check finds the hook.") from None


def text_rows(
    run: RunConfig,
    config: EvalConfig,
    model: Model,
    params: Any,
    dataset: TextDataset,
    folder: RunFolder,
    facts: dict[str, Any],
    layout: Layout,
) -> list[dict[str, Any]]:
    """Return the rows of a text, see `evaluate_run`. `facts` are the fields that all of them have."""
    asked = asked_rows(run, config, model, dataset, folder, facts)
    missing = [one for one in asked if not one.stored]
    way = Way(config.executor, config.precision)
    log_probs = model_scores(model, params, way, layout, run.train.token_positions)
    if run.train.objective == "masked":
        log_probs = hidden_scores(log_probs, mask_id(dataset.tokenizer.vocab_size))
    work = _Work(model, config, slower(model) / evaluation_speed(run) if missing else 0.0)
    (stream, documents), token_bytes = run_stream(dataset), dataset.validation.token_bytes
    attention = functools.partial(_window_attention, run, config, model, params, layout, stream)
    rows = []
    for one, row in ((one, one.stored) for one in asked if one.stored):
        weights = attention(one, row)
        row = row | facts | weights
        rows.append(folder.append(folder.eval_file, row) if weights else with_checksum(row))
    token_bytes = None if token_bytes is None else np.insert(token_bytes, 0, 0)
    # One for all protocols: per-position loss is read off a pass that the non-overlapping protocol makes.
    measured = Measured(
        log_probs, stream, token_bytes, (dataset.tokenizer.eos,), documents, config.batch_tokens, work.report
    )
    for few in filter(None, dict.fromkeys(few_documents(one, len(documents.starts)) for one in missing)):
        say(f"notice: {facts['run_id']}: {few}")
    for _, (one, *_) in itertools.groupby(missing, key=lambda one: one.plan.protocol.name):
        _say_why(one.plan, facts["run_id"])
    _say_without_begin(missing, stream, dataset.tokenizer, facts["run_id"])
    work.add(missing)
    # The training split of any other text is not what the run was trained on.
    losses = frequency_losses(dataset) if missing and dataset.digest == run.text else None
    with work.show(f"{facts['run_id']} evaluating") if missing else contextlib.nullcontext():
        for one in missing:
            for row in one.plan.protocol.measure(measured, [one.length]):
                interrupts.raise_pending()
                floor = {"unigram_ppl": _unigram_perplexity(one, measured, losses)}
                more = {"anchor": one.plan.anchor, **floor, **measuring_facts(config), **attention(one, row)}
                rows.append(folder.append(folder.eval_file, facts | row | more))
                work.finish(_line(rows[-1]))
    return rows


def frequency_losses(dataset: TextDataset) -> np.ndarray | None:
    """Return the loss of each token id [v] in nats if it is predicted by its frequency in the training text alone.

    Each count is one more than the text has, so that no loss is infinite. None without training text.
    """
    tokens, size = dataset.train.tokens, dataset.tokenizer.vocab_size
    counts = np.ones(size)
    for start in range(0, len(tokens), _COUNTED):
        counts += np.bincount(tokens[start : start + _COUNTED], minlength=size)
    return np.log(counts.sum() / counts) if len(tokens) else None


def _window_attention(
    run: RunConfig, config: EvalConfig, model: Model, params: Any, layout: Layout, stream: np.ndarray, one: Asked,
    row: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of attention weights that `config` asks of a row and that it does not have.

    Windows of `nonoverlapping` alone are read.

    row: the losses of the asked row, with the weights that were read before.
    """
    count, length, is_measured = config.attention_items, one.length, row.get("status", "ok") == "ok"
    if not count or not is_measured or one.windows is None or one.plan.protocol.name != Nonoverlapping.name:
        return {}
    items = window_items(stream, one.windows, length, count)
    if items is None or row.get("attention_items") == len(items.tokens):
        return {}
    pos = run.train.token_positions.measure(length)
    return attention_facts(model.at_length(length), params, items, config.precision, layout, pos, padding=None)


def _unigram_perplexity(one: Asked, measured: Measured, losses: np.ndarray | None) -> float | None:
    """Return the perplexity of the targets of a row if each has its loss by token id; None if that is not known."""
    if losses is None or one.windows is None:
        return None
    protocol, stride = one.plan.protocol, one.plan.protocol.window_stride(one.length, [one.length])
    scored = Scored("ok", one.windows, losses[one.targets.tokens])  # a protocol may weigh targets
    return protocol.row(measured, one.length, stride, one.targets, scored)["ppl"]


def _say_why(one: EvaluationPlan, name: str) -> None:
    """Say which lengths are measured again, and which stored rows are not compared."""
    what = f"{name}  {one.protocol.name}"
    if one.moved:
        lengths = ", ".join(map(str, one.moved))
        say(
            f"notice: {what}: windows of {one.anchor} tokens change which tokens are scored. Measuring "
            f"{lengths} again (docs/guides/protocols.md)"
        )
    if one.apart:
        counts = sorted({(row["max_targets"], row["stride"]) for row in one.apart})
        before = "; ".join(f"{targets or 'all'} targets, stride {stride}" for targets, stride in counts)
        say(f"notice: {what}: rows with other targets or strides ({before}) are not compared with the new ones")


def row_facts(run: RunConfig, model: Model, dataset: Dataset, folder: RunFolder, step: int) -> dict[str, Any]:
    """Return the fields that all rows of a run have.

    `code` has the digests of the user's own encodings as they are now. `weights` is the digest of the parameters in
    their checkpoint. `solved` says that training ended at `step`, because all answers were right.
    """
    code, weights = code_of(model.encodings), processes.broadcast(lambda: folder.weights_by_step().get(step, ""))
    return {
        "schema_version": ROW_VERSION,
        "hash": run.hash,
        "run_id": folder.path.name,
        "settings": run.settings,
        "encoding": run.encoding,
        "layers": list(shortest_cycle(run.layer_texts)),
        "train_len": run.train.length,
        "seed": run.train.seed,
        "step": step,
        **({"solved": True} if run.train.stop_check_steps and folder.solved_step == step else {}),
        **({"weights": weights} if weights else {}),
        "tokenizer": dataset.tokenizer.name,
        "data_source": dataset.source,
        "data_digest": dataset.held_out_digest,
        "own_text": dataset.held_out_digest == run.held_out,
        "data_settings": {name: value for name, value in run.data.token_settings().items() if name not in PLACES},
        **({"code": code} if code else {}),
    }


def _line(row: dict[str, Any]) -> str:
    """Return a row as one line of text."""
    scored = f"{row['num_targets']:,} targets of {quantity(row['num_documents'], 'document')}"
    return f"{row['run_id']}  {row['protocol']} at {row['eval_len']}: {result_text(row)}  ({scored})"


def _say_without_begin(missing: Sequence[Asked], stream: np.ndarray, tokenizer: Tokenizer, name: str) -> None:
    """Say how many windows begin with the begin token of the tokenizer's template, unless all do."""
    begin, firsts = tokenizer.begin, dict[str, list[np.ndarray]]()
    for one in missing:
        if one.windows is not None and one.begins is not None:
            tokens = np.where(one.begins, stream[0], stream[one.windows[:, 0]])
            firsts.setdefault(one.plan.protocol.name, []).append(tokens == begin)
    has = {protocol: np.concatenate(counts) for protocol, counts in firsts.items()}
    counts = [f"{one.sum():,} of {len(one):,} of {protocol}" for protocol, one in has.items() if not one.all()]
    if counts and begin in tokenizer.template:
        say(
            f"notice: {name}: the tokenizer puts the begin token {begin} ({tokenizer.spell(begin)}) before every text, "
            f"but not every window begins with it: {', '.join(counts)}. --protocol {BeginEveryWindow.name} puts it "
            "before each"
        )


class _Work:
    """The work of an evaluation and the finished part of it, in expected seconds on this machine."""

    def __init__(self, model: Model, config: EvalConfig, per_flop: float):
        self.model, self.config, self.per_flop = model, config, per_flop
        self.passes: dict[tuple[int, str], Pass] = {}
        self.before = self.inside = 0.0  # done in the passes before this one, and in this one
        self.meter: Meter

    def add(self, missing: Sequence[Asked]) -> None:
        """Add rows. A pass that several of them share counts once."""
        for one in missing:
            if one.key and one.windows is not None:
                self.passes[one.key] = pass_cost(self.model, self.config, one.length, len(one.windows))

    @contextlib.contextmanager
    def show(self, title: str) -> Iterator[None]:
        """Show a bar of all that was added."""
        total = sum(one.seconds(self.per_flop) for one in self.passes.values())
        with Meter(title, total, pace=1.0) as self.meter:
            yield

    def report(self, length: int, done: int, windows: int) -> None:
        """Report the number of finished windows of a pass, out of all its windows. At 0 its program is compiled."""
        one = pass_cost(self.model, self.config, length, windows)
        self.inside = one.seconds(self.per_flop, done)
        what = f"{done:,} of {windows:,} windows" if done else "compiling for windows"
        self.meter.update(self.before + self.inside, f"{what} of {length} tokens")

    def finish(self, line: str) -> None:
        """End the pass and print its `line` above the bar."""
        self.before, self.inside = self.before + self.inside, 0.0
        say(line)
